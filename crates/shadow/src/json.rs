//! JSON with numbers as they were written.
//!
//! `serde_json` makes an `f64` of what does not fit 64 bits, and of every fraction; its feature `arbitrary_precision` would
//! change numbers for every crate of the build. A document is read and written again with each update, so a number that loses
//! a digit each time would wander. Therefore the grammar is here, and only strings are left to `serde_json`.

use std::collections::BTreeMap;

/// An object: keys in their order as text. Of a key that comes twice the last value counts.
pub type Object = BTreeMap<Box<str>, Json>;

/// A value.
#[derive(Debug, Clone)]
pub enum Json {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A number as it was written.
    Number(Box<str>),
    /// Text.
    Text(Box<str>),
    /// An array.
    Array(Vec<Self>),
    /// An object.
    Object(Object),
}

/// Why text is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JsonError {
    /// The text is not JSON.
    Invalid,
    /// Objects and arrays lie in each other more levels deep than allowed.
    TooDeep,
}

impl Json {
    /// Reads `text`, in which objects and arrays may lie `depth` levels deep in each other: a number has none, `{"a":1}`
    /// one. Takes time in proportion to the text.
    pub fn parse(text: &str, depth: usize) -> Result<Self, JsonError> {
        let mut reader = JsonReader { text, at: 0 };
        let value = reader.value(depth)?;
        reader.space();
        if reader.at == text.len() { Ok(value) } else { Err(JsonError::Invalid) }
    }

    /// Appends it, without white space.
    pub fn write(&self, out: &mut String) {
        match self {
            Self::Null => out.push_str("null"),
            Self::Bool(true) => out.push_str("true"),
            Self::Bool(false) => out.push_str("false"),
            Self::Number(number) => out.push_str(number),
            Self::Text(text) => write_text(text, out),
            Self::Array(items) => {
                write_all(out, ['[', ']'], items, |item, out| item.write(out));
            }
            Self::Object(object) => write_object(object, out),
        }
    }
}

/// As in JSON's data model: numbers that are the same number are equal, however they are written.
impl PartialEq for Json {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Null, Self::Null) => true,
            (Self::Bool(a), Self::Bool(b)) => a == b,
            (Self::Number(a), Self::Number(b)) => a == b || decimal(a) == decimal(b),
            (Self::Text(a), Self::Text(b)) => a == b,
            (Self::Array(a), Self::Array(b)) => a == b,
            (Self::Object(a), Self::Object(b)) => a == b,
            _ => false,
        }
    }
}

/// Appends text in quotes.
pub(crate) fn write_text(text: &str, out: &mut String) {
    // Text always has a form in JSON.
    out.push_str(&serde_json::to_string(text).unwrap_or_default());
}

/// Appends an object.
pub(crate) fn write_object(object: &Object, out: &mut String) {
    write_all(out, ['{', '}'], object, |(key, value), out| {
        write_text(key, out);
        out.push(':');
        value.write(out);
    });
}

/// Appends items between brackets, with commas.
pub(crate) fn write_all<T>(
    out: &mut String,
    [open, close]: [char; 2],
    items: impl IntoIterator<Item = T>,
    mut write: impl FnMut(T, &mut String),
) {
    out.push(open);
    for (place, item) in items.into_iter().enumerate() {
        if place > 0 {
            out.push(',');
        }
        write(item, out);
    }
    out.push(close);
}

/// A number as sign, digits without zeros around them, and the power of ten of the last: one form for each number.
fn decimal(number: &str) -> (bool, String, i64) {
    let (negative, rest) = number.strip_prefix('-').map_or((false, number), |rest| (true, rest));
    let (mantissa, exponent) = rest.split_once(['e', 'E']).unwrap_or((rest, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = [whole, fraction].concat();
    let significant = digits.trim_start_matches('0').trim_end_matches('0');
    if significant.is_empty() {
        return (false, String::new(), 0);
    }
    let zeros = digits.len() - digits.trim_end_matches('0').len();
    // One beyond 64 bits is farther than any other that a document has room for to spell out.
    let beyond = if exponent.starts_with('-') { i64::MIN } else { i64::MAX };
    let exponent = exponent.parse().unwrap_or(beyond);
    let exponent =
        exponent.saturating_sub_unsigned(fraction.len() as u64).saturating_add_unsigned(zeros as u64);
    (negative, significant.to_owned(), exponent)
}

struct JsonReader<'t> {
    text: &'t str,
    at: usize,
}

impl JsonReader<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\r' | b'\n')) {
            self.at += 1;
        }
    }

    /// Takes `byte` if it is next, and returns whether it was.
    fn take(&mut self, byte: u8) -> bool {
        let is_next = self.peek() == Some(byte);
        self.at += usize::from(is_next);
        is_next
    }

    fn word(&mut self, word: &str, value: Json) -> Result<Json, JsonError> {
        let rest = self.text.get(self.at..).ok_or(JsonError::Invalid)?;
        if !rest.starts_with(word) {
            return Err(JsonError::Invalid);
        }
        self.at += word.len();
        Ok(value)
    }

    fn value(&mut self, depth: usize) -> Result<Json, JsonError> {
        self.space();
        match self.peek() {
            Some(b'{') => Ok(Json::Object(self.object(depth.checked_sub(1).ok_or(JsonError::TooDeep)?)?)),
            Some(b'[') => Ok(Json::Array(self.array(depth.checked_sub(1).ok_or(JsonError::TooDeep)?)?)),
            Some(b'"') => self.text().map(Json::Text),
            Some(b'-' | b'0'..=b'9') => self.number().map(Json::Number),
            Some(b'n') => self.word("null", Json::Null),
            Some(b't') => self.word("true", Json::Bool(true)),
            Some(b'f') => self.word("false", Json::Bool(false)),
            _ => Err(JsonError::Invalid),
        }
    }

    fn object(&mut self, depth: usize) -> Result<Object, JsonError> {
        let mut object = Object::new();
        self.at += 1;
        self.space();
        if self.take(b'}') {
            return Ok(object);
        }
        loop {
            self.space();
            if self.peek() != Some(b'"') {
                return Err(JsonError::Invalid);
            }
            let key = self.text()?;
            self.space();
            if !self.take(b':') {
                return Err(JsonError::Invalid);
            }
            object.insert(key, self.value(depth)?);
            self.space();
            if self.take(b'}') {
                return Ok(object);
            }
            if !self.take(b',') {
                return Err(JsonError::Invalid);
            }
        }
    }

    fn array(&mut self, depth: usize) -> Result<Vec<Json>, JsonError> {
        let mut items = Vec::new();
        self.at += 1;
        self.space();
        if self.take(b']') {
            return Ok(items);
        }
        loop {
            items.push(self.value(depth)?);
            self.space();
            if self.take(b']') {
                return Ok(items);
            }
            if !self.take(b',') {
                return Err(JsonError::Invalid);
            }
        }
    }

    /// Text from its quote on.
    fn text(&mut self) -> Result<Box<str>, JsonError> {
        let begin = self.at;
        self.at += 1;
        loop {
            match self.peek() {
                Some(b'"') => break,
                Some(b'\\') => self.at += 2,
                Some(_) => self.at += 1,
                None => return Err(JsonError::Invalid),
            }
        }
        self.at += 1;
        let quoted = self.text.get(begin..self.at).ok_or(JsonError::Invalid)?;
        serde_json::from_str(quoted).map_err(|_| JsonError::Invalid)
    }

    fn digits(&mut self) -> Result<(), JsonError> {
        let begin = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        if self.at > begin { Ok(()) } else { Err(JsonError::Invalid) }
    }

    fn number(&mut self) -> Result<Box<str>, JsonError> {
        let begin = self.at;
        self.take(b'-');
        if !self.take(b'0') {
            self.digits()?;
        }
        if self.take(b'.') {
            self.digits()?;
        }
        if self.take(b'e') || self.take(b'E') {
            if !self.take(b'+') {
                self.take(b'-');
            }
            self.digits()?;
        }
        self.text.get(begin..self.at).map(Box::from).ok_or(JsonError::Invalid)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn written(text: &str) -> Result<String, JsonError> {
        let mut out = String::new();
        Json::parse(text, 3)?.write(&mut out);
        Ok(out)
    }

    #[test]
    fn numbers_keep_every_digit_they_came_with() {
        for number in
            ["9007199254740993", "123456789012345678901234567890", "0.1000", "-1e+400", "1.0E-7", "-0"]
        {
            assert_eq!(written(number).as_deref(), Ok(number));
        }
    }

    #[test]
    fn a_number_is_equal_to_itself_however_it_is_written() {
        let same = |a: &str, b: &str| Json::parse(a, 0) == Json::parse(b, 0);
        for (a, b) in [
            ("1", "1.0"),
            ("100", "1e2"),
            ("0.001", "1E-3"),
            ("-0", "0.000"),
            ("120", "1.2e+2"),
            ("0e99999999999999999999", "0"),
        ] {
            assert!(same(a, b), "{a} {b}");
        }
        for (a, b) in [
            ("1", "-1"),
            ("9007199254740993", "9007199254740992"),
            ("1e400", "1e401"),
            ("0.1", "0.01"),
            ("10", "1"),
            ("1e99999999999999999999", "1e-99999999999999999999"),
        ] {
            assert!(!same(a, b), "{a} {b}");
        }
    }

    #[test]
    fn what_is_not_json_or_too_deep_is_refused() {
        for wrong in [
            "",
            " ",
            "{",
            "}",
            "[1,]",
            "[1 2]",
            "{\"a\"}",
            "{\"a\":}",
            "{a:1}",
            "{\"a\":1,}",
            "01",
            "1.",
            ".5",
            "+1",
            "1e",
            "-",
            "nul",
            "tru",
            "\"",
            "\"\\",
            "\"\\x\"",
            "\"\n\"",
            "\"\\ud800\"",
            "1 1",
            "[1]]",
            "NaN",
            "'a'",
            "\u{feff}1",
        ] {
            assert_eq!(Json::parse(wrong, 9).err(), Some(JsonError::Invalid), "{wrong}");
        }
        assert_eq!(written("[[[]]]").as_deref(), Ok("[[[]]]"));
        assert_eq!(written("[{\"a\":[[]]}]"), Err(JsonError::TooDeep));
        assert_eq!(written(&"[".repeat(1_000_000)), Err(JsonError::TooDeep), "and no stack is used up");
    }

    #[test]
    fn escapes_and_repeated_keys_are_read_as_elsewhere() {
        assert_eq!(
            written(" { \"b\" : 1 , \"a\":\"\\u00e9\\ud83d\\ude00\\n\" } ").unwrap(),
            "{\"a\":\"é😀\\n\",\"b\":1}"
        );
        assert_eq!(written("{\"a\":1,\"a\":2}").unwrap(), "{\"a\":2}");
    }

    proptest! {
        /// A device could otherwise store what nobody can read.
        #[test]
        fn exactly_that_is_taken_which_serde_json_takes(text in "[\\[\\]{}\",:0-9eE+\\-. a-cntrufls\\\\é]{0,24}") {
            let theirs = serde_json::from_str::<serde_json::Value>(&text);
            match (Json::parse(&text, 64), theirs) {
                (Ok(ours), Ok(theirs)) => {
                    let mut out = String::new();
                    ours.write(&mut out);
                    prop_assert_eq!(serde_json::from_str::<serde_json::Value>(&out).unwrap(), theirs);
                }
                // Beyond f64.
                (Ok(_), Err(error)) => prop_assert!(error.to_string().contains("number out of range"), "{}", text),
                (Err(_), theirs) => prop_assert!(theirs.is_err(), "{}", text),
            }
        }
    }
}
