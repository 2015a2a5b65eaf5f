//! File, environment and flags into one table, checked key by key, so that all mistakes show at once.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use toml::{Table, Value};

use super::{
    Bridge, Config, ConfigError, Flags, KafkaBridge, Listener, MqttBridge, Problem, WebhookBridge,
    environment::{DEFAULT_PREFIX, PREFIX, of_kubernetes},
    secret::{HIDDEN, is_secret},
};

/// The variable that names the file; see [`Flags::config_file`].
pub(super) const CONFIG_VARIABLE: &str = "MQTT_SERVER_CONFIG";
/// Tables whose keys the user chooses.
const OPEN_TABLES: [&str; 3] = ["bridges", "limits.shared_groups", "tenants"];

impl Config {
    /// Defaults, the file's text over them, `MQTT_SERVER_*` over that, flags over all; then validated. `MQTT_SERVER_DEFAULT__*`
    /// are below the file.
    ///
    /// # Errors
    /// Every unknown key, every value of the wrong form and every rule broken, in one error.
    pub fn load(
        flags: &Flags,
        file: Option<&str>,
        env: &BTreeMap<String, String>,
    ) -> Result<Self, ConfigError> {
        let mut loader = Loader { schema: Arc::new(schema()), ..Loader::default() };
        if let Some(text) = file {
            loader.file(text);
        }
        loader.environment(env);
        for (flag, key, value) in flags.settings() {
            loader.set(key, value, flag);
        }
        loader.drop_bad_values();
        let mut config: Self = match Value::Table(loader.table.clone()).try_into() {
            Ok(config) => config,
            Err(error) => {
                loader.problems.push(Problem::new("configuration", "", error.to_string(), ""));
                return Err(ConfigError(loader.problems));
            }
        };
        if config.dev {
            config.take_dev_certificates(&loader.table);
        }
        config.go_without_certificate(&loader.table);
        if let Err(ConfigError(problems)) = config.validate() {
            loader.problems.extend(problems);
        }
        // In development mode nothing but loopback is right anyway.
        if !config.dev
            && let Err(ConfigError(problems)) = config.check_devices()
        {
            loader.problems.extend(problems);
        }
        if loader.problems.is_empty() {
            return Ok(config);
        }
        for problem in &mut loader.problems {
            if is_secret(&problem.key) && !problem.value.is_empty() {
                problem.value = HIDDEN.to_owned();
            }
            if let Some(origin) = loader.origins.get(&problem.key) {
                problem.origin.clone_from(origin);
            }
        }
        Err(ConfigError(loader.problems))
    }

    /// In development mode a certificate that nobody named is the one made at start.
    fn take_dev_certificates(&mut self, given: &Table) {
        if !given.contains_key("cert") && !given.contains_key("key") {
            self.cert = Path::new(super::DEV_CERTS_DIR).join("server.crt");
            self.key = Path::new(super::DEV_CERTS_DIR).join("server.key");
        }
    }

    /// `non_tls` is enough by itself: if nobody named a certificate and no other listener needs one, gRPC on loopback
    /// is plaintext too.
    fn go_without_certificate(&mut self, given: &Table) {
        let named = ["cert", "key"].iter().any(|key| given.contains_key(*key));
        let grpc = given.get("grpc").and_then(Value::as_table);
        let asked = grpc.is_some_and(|grpc| ["tls", "cert", "key"].iter().any(|key| grpc.contains_key(*key)));
        let needed = self.effective_listeners().iter().any(|(_, listener)| listener.kind.is_tls());
        let local = self.grpc_addr.ip().to_canonical().is_loopback();
        if self.non_tls && !self.dev && !named && !asked && !needed && local {
            self.grpc.tls = false;
        }
    }
}

/// All keys with their default values.
pub(super) fn schema() -> Table {
    Table::try_from(Config::default()).expect("the defaults are a table")
}

/// All keys of a bridge with their default values.
pub(super) fn bridge_schema() -> Table {
    let every = Bridge {
        kafka: Some(KafkaBridge::default()),
        mqtt: Some(MqttBridge::default()),
        webhook: Some(WebhookBridge::default()),
        ..Bridge::default()
    };
    Table::try_from(every).expect("the defaults are a table")
}

#[derive(Default)]
struct Loader {
    schema: Arc<Table>,
    table: Table,
    /// Key to flag or variable.
    origins: BTreeMap<String, String>,
    problems: Vec<Problem>,
}

impl Loader {
    fn file(&mut self, text: &str) {
        match text.parse::<Table>() {
            Ok(mut table) => {
                let schema = Arc::clone(&self.schema);
                self.drop_unknown("", &mut table, &schema);
                self.table = table;
            }
            Err(error) => {
                let at = error.span().map_or(0, |span| span.start.min(text.len()));
                let line = text.as_bytes()[..at].iter().filter(|b| **b == b'\n').count() + 1;
                let content = match text.lines().nth(line - 1).unwrap_or_default().trim() {
                    secret if is_secret(secret) => HIDDEN,
                    line => line,
                };
                self.problems.push(Problem::new(
                    format!("line {line}"),
                    "",
                    format!("not TOML: {}", error.message()),
                    format!("correct the line '{content}'"),
                ));
            }
        }
    }

    fn drop_unknown(&mut self, path: &str, table: &mut Table, schema: &Table) {
        let names: Vec<String> = table.keys().cloned().collect();
        for name in names {
            let full = join(path, &name);
            let Some(known) = schema.get(&name) else {
                let value = table.remove(&name).map(|v| show(&v)).unwrap_or_default();
                let near = match path.starts_with("listeners[") {
                    true => nearest(&name, schema),
                    false => nearest(&full, &self.schema),
                };
                let fix = suggest(near.map(|known| format!("'{known}'")));
                self.problems.push(Problem::new(full, value, "unknown key", fix));
                continue;
            };
            let Some(value) = table.get_mut(&name) else { continue };
            match (value, known) {
                (Value::Table(inner), Value::Table(known)) if !OPEN_TABLES.contains(&full.as_str()) => {
                    self.drop_unknown(&full, inner, known);
                }
                (Value::Array(entries), _) if full == "listeners" => {
                    let known = Table::try_from(Listener::default()).expect("the defaults are a table");
                    for (number, entry) in entries.iter_mut().enumerate() {
                        if let Value::Table(entry) = entry {
                            self.drop_unknown(&format!("listeners[{number}]"), entry, &known);
                        }
                    }
                }
                _ => {}
            }
        }
    }

    fn environment(&mut self, env: &BTreeMap<String, String>) {
        for (variable, text) in env {
            let Some(name) = variable.strip_prefix(PREFIX) else { continue };
            if variable == CONFIG_VARIABLE {
                continue;
            }
            let default = name.strip_prefix(DEFAULT_PREFIX);
            let key = default.unwrap_or(name).to_lowercase().replace("__", ".");
            if default.is_some() && self.has(&key) {
                continue;
            }
            match find(&self.schema, &key) {
                Some(known) => match parse_as(known, text) {
                    Ok(value) => self.set(&key, value, variable),
                    Err(problem) => {
                        let mut problem = Problem::new(key, text, problem, "write it as in the sample file");
                        problem.origin.clone_from(variable);
                        self.problems.push(problem);
                    }
                },
                None if of_kubernetes(variable, text) => {}
                None => {
                    let fix = suggest(nearest(&key, &self.schema).map(|known| as_variable(&known)));
                    let mut problem = Problem::new(key, text, "unknown key", fix);
                    problem.origin.clone_from(variable);
                    self.problems.push(problem);
                }
            }
        }
    }

    /// Returns whether the file, or a source before it, sets the key.
    fn has(&self, key: &str) -> bool {
        let path: Vec<String> = key.split('.').map(str::to_owned).collect();
        lookup(&self.table, &path).is_some()
    }

    fn set(&mut self, key: &str, value: Value, origin: &str) {
        let mut table = &mut self.table;
        let mut parts = key.split('.').peekable();
        while let Some(part) = parts.next() {
            if parts.peek().is_none() {
                table.insert(part.to_owned(), value);
                break;
            }
            let inner = table.entry(part).or_insert_with(|| Value::Table(Table::new()));
            if !inner.is_table() {
                // The file gave a value of the wrong form; it is reported with the variable or flag unset.
                return;
            }
            let Value::Table(inner) = inner else { return };
            table = inner;
        }
        self.origins.insert(key.to_owned(), origin.to_owned());
    }

    /// Tries each value alone over the defaults: a wrong one is reported and left out.
    fn drop_bad_values(&mut self) {
        let mut leaves = Vec::new();
        collect(&self.table, &self.schema, &mut Vec::new(), &mut leaves);
        for (path, value) in leaves {
            if path == ["listeners"] {
                self.drop_bad_listeners(&value);
                continue;
            }
            if path == ["bridges"] {
                self.drop_bad_bridges(&value);
                continue;
            }
            let wrapped = path
                .iter()
                .rev()
                .fold(value.clone(), |inner, name| Value::Table(Table::from_iter([(name.clone(), inner)])));
            if let Err(error) = wrapped.try_into::<Config>() {
                let fix = match lookup(&self.schema, &path) {
                    Some(default) if show(default) != "\"\"" => {
                        format!("write it as the default is: {}", show(default))
                    }
                    _ => "write it as in the sample file".to_owned(),
                };
                let name = path.join(".");
                // The parser's message would quote the value.
                let problem = if is_secret(&name) { "not text".to_owned() } else { first_line(&error) };
                self.problems.push(with_its_own_fix(name, &value, problem, fix));
                remove(&mut self.table, &path);
            }
        }
    }

    /// The same for the values of each bridge.
    fn drop_bad_bridges(&mut self, value: &Value) {
        let before = self.problems.len();
        let Value::Table(bridges) = value else {
            let fix = "write one [bridges.NAME] table for each bridge";
            self.problems.push(Problem::new("bridges", show(value), "not a table", fix));
            self.table.remove("bridges");
            return;
        };
        let known = bridge_schema();
        for (name, bridge) in bridges {
            let section = format!("bridges.{name}");
            let Value::Table(bridge) = bridge else {
                let fix = format!("write one [{section}] table");
                self.problems.push(Problem::new(section, show(bridge), "not a table", fix));
                continue;
            };
            self.bad_values(&section, bridge, &known, &|alone| alone.try_into::<Bridge>().map(drop));
        }
        // A bridge without its bad values is not what was meant, and would only be reported a second time.
        if self.problems.len() > before {
            self.table.remove("bridges");
        }
    }

    /// Reports each value of `table` that cannot be part of a `T`, and each unknown key.
    fn bad_values(
        &mut self,
        section: &str,
        table: &Table,
        known: &Table,
        parse: &dyn Fn(Value) -> Result<(), toml::de::Error>,
    ) {
        let mut told = Vec::new();
        for (name, value) in table {
            let key = format!("{section}.{name}");
            let alone = |value: Value| Value::Table(Table::from_iter([(name.clone(), value)]));
            match (known.get(name), value) {
                (None, _) => {
                    let fix = suggest(nearest(name, known).map(|known| format!("'{known}'")));
                    told.push(Problem::new(key, show(value), "unknown key", fix));
                }
                (Some(Value::Table(known)), Value::Table(inner)) => {
                    self.bad_values(&key, inner, known, &|inner| parse(alone(inner)));
                }
                (Some(default), _) => {
                    let Err(error) = parse(alone(value.clone())) else { continue };
                    let fix = match show(default) {
                        default if default == "\"\"" => "write it as docs/bridges.md has it".to_owned(),
                        default => format!("write it as the default is: {default}"),
                    };
                    told.push(with_its_own_fix(key, value, first_line(&error), fix));
                }
            }
        }
        self.problems.extend(told);
    }

    fn drop_bad_listeners(&mut self, value: &Value) {
        let Value::Array(entries) = value else {
            self.problems.push(Problem::new(
                "listeners",
                show(value),
                "not a list of tables",
                "write one [[listeners]] table for each listener",
            ));
            self.table.remove("listeners");
            return;
        };
        let defaults = Table::try_from(Listener::default()).expect("the defaults are a table");
        let mut good = entries.clone();
        for (number, entry) in entries.iter().enumerate() {
            let Value::Table(entry) = entry else {
                self.problems.push(Problem::new(
                    format!("listeners[{number}]"),
                    show(entry),
                    "not a table",
                    "write one [[listeners]] table for each listener",
                ));
                self.table.remove("listeners");
                return;
            };
            for (name, value) in entry {
                let alone = Value::Table(Table::from_iter([(name.clone(), value.clone())]));
                if let Err(error) = alone.try_into::<Listener>() {
                    let fix = match defaults.get(name) {
                        Some(default) if show(default) != "\"\"" => {
                            format!("write it as the default is: {}", show(default))
                        }
                        _ => "write it as in the sample file".to_owned(),
                    };
                    let key = format!("listeners[{number}].{name}");
                    self.problems.push(with_its_own_fix(key, value, first_line(&error), fix));
                    if let Some(Value::Table(entry)) = good.get_mut(number) {
                        entry.remove(name);
                    }
                }
            }
        }
        self.table.insert("listeners".to_owned(), Value::Array(good));
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// A value for messages.
fn show(value: &Value) -> String {
    match value {
        Value::String(text) => format!("\"{text}\""),
        Value::Table(table) => {
            let shown = |k: &str, v| if is_secret(k) { HIDDEN.to_owned() } else { show(v) };
            let entries: Vec<String> = table.iter().map(|(k, v)| format!("{k} = {}", shown(k, v))).collect();
            format!("{{{}}}", entries.join(", "))
        }
        Value::Array(entries) => {
            format!("[{}]", entries.iter().map(show).collect::<Vec<_>>().join(", "))
        }
        Value::Integer(n) => n.to_string(),
        Value::Float(n) => n.to_string(),
        Value::Boolean(b) => b.to_string(),
        Value::Datetime(d) => d.to_string(),
    }
}

/// If the parser of a value says what to write, that becomes the fix.
fn with_its_own_fix(key: String, value: &Value, problem: String, fix: String) -> Problem {
    match problem.split_once("; ") {
        Some((problem, fix)) => Problem::new(key, show(value), problem, fix),
        None => Problem::new(key, show(value), problem, fix),
    }
}

fn first_line(error: &toml::de::Error) -> String {
    error.message().lines().next().unwrap_or("not valid").to_owned()
}

fn suggest(near: Option<String>) -> String {
    match near {
        Some(known) => format!("did you mean {known}?"),
        None => "remove it, or see docs/mqtt-server.toml for all keys".to_owned(),
    }
}

/// The key that was probably meant: the most similar one, or one of the same name in another section.
fn nearest(key: &str, schema: &Table) -> Option<String> {
    // A section and its key are often joined by one underscore.
    let plain = |key: &str| key.replace('.', "_");
    let last = |key: &str| key.rsplit('.').next().unwrap_or_default().to_owned();
    let mut known = Vec::new();
    key_names("", schema, &mut known);
    let (wanted, name) = (plain(key), last(key));
    let similar = known.iter().map(|known| (strsim::levenshtein(&wanted, &plain(known)), known));
    // A short name may differ less.
    let most = (wanted.len() / 3).clamp(1, 3);
    let similar = similar.filter(|(distance, _)| *distance <= most).min().map(|(_, known)| known);
    let longer = || {
        // MQTT_SERVER_ADRESS; the longest name that it begins with.
        let wanted = undoubled(&wanted);
        let begun =
            known.iter().filter(|known| known.len() > 3 && wanted.starts_with(&undoubled(&plain(known))));
        begun.max_by_key(|known| known.len())
    };
    similar.or_else(|| known.iter().find(|known| last(known) == name)).or_else(longer).cloned()
}

/// Each run of a letter once.
fn undoubled(text: &str) -> String {
    let mut letters: Vec<char> = text.chars().collect();
    letters.dedup();
    letters.into_iter().collect()
}

fn key_names(path: &str, schema: &Table, into: &mut Vec<String>) {
    for (name, value) in schema {
        let full = join(path, name);
        match value {
            Value::Table(inner) if !inner.is_empty() => key_names(&full, inner, into),
            _ => {}
        }
        into.push(full);
    }
}

/// The variable of a key.
fn as_variable(key: &str) -> String {
    format!("{PREFIX}{}", key.replace('.', "__").to_uppercase())
}

fn find<'a>(schema: &'a Table, key: &str) -> Option<&'a Value> {
    let path: Vec<String> = key.split('.').map(str::to_owned).collect();
    lookup(schema, &path)
}

fn lookup<'a>(table: &'a Table, path: &[String]) -> Option<&'a Value> {
    let (first, rest) = path.split_first()?;
    let value = table.get(first)?;
    if rest.is_empty() { Some(value) } else { lookup(value.as_table()?, rest) }
}

fn remove(table: &mut Table, path: &[String]) {
    match path {
        [] => {}
        [name] => {
            table.remove(name);
        }
        [name, rest @ ..] => {
            if let Some(Value::Table(inner)) = table.get_mut(name) {
                remove(inner, rest);
            }
        }
    }
}

/// All values with their paths; an open table counts as one value.
fn collect(table: &Table, schema: &Table, path: &mut Vec<String>, into: &mut Vec<(Vec<String>, Value)>) {
    for (name, value) in table {
        path.push(name.clone());
        match (value, schema.get(name)) {
            (Value::Table(inner), Some(Value::Table(known)))
                if !OPEN_TABLES.contains(&path.join(".").as_str()) =>
            {
                collect(inner, known, path, into);
            }
            _ => into.push((path.clone(), value.clone())),
        }
        path.pop();
    }
}

/// Reads an environment text in the form that the default has.
fn parse_as(default: &Value, text: &str) -> Result<Value, String> {
    match default {
        Value::Integer(_) => {
            text.trim().parse().map(Value::Integer).map_err(|_| "not a whole number".to_owned())
        }
        Value::Boolean(_) => match text.trim() {
            "true" | "1" => Ok(Value::Boolean(true)),
            "false" | "0" => Ok(Value::Boolean(false)),
            _ => Err("not true or false".to_owned()),
        },
        Value::Array(entries) if entries.is_empty() => {
            let entries = text.split(',').map(str::trim).filter(|entry| !entry.is_empty());
            Ok(Value::Array(entries.map(|entry| Value::String(entry.to_owned())).collect()))
        }
        Value::Table(_) => Err("a whole section cannot come from the environment".to_owned()),
        _ => Ok(Value::String(text.to_owned())),
    }
}
