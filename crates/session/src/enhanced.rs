//! Enhanced authentication (MQTT 5.0, 4.12) as a matter of packets: which AUTH may come when, and how many. What is in them
//! is somebody else's.

use bytes::Bytes;
use codec::{AuthPacket, Packet, reason};
use gateway_core::Timestamp;

use super::Violation;

/// AUTH packets of the client in one authentication. No method that we know needs more than two.
const MOST_PACKETS: u8 = 8;
/// Authentications that a client may begin in a minute on a live connection.
const MOST_A_MINUTE: u8 = 10;

/// The authentications of one connection whose CONNECT named a method.
#[derive(Debug)]
pub struct Enhanced {
    method: Box<str>,
    stage: EnhancedStage,
    /// AUTH packets of the client in this authentication.
    packets: u8,
    /// Beginning of the minute to which `begun` belongs.
    minute: Timestamp,
    begun: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EnhancedStage {
    /// None is under way.
    Idle,
    /// The client has presented something and waits for what we say.
    Ours,
    /// We have asked, and the client is to answer.
    Theirs,
}

/// Authentication data that a client has presented.
#[derive(Debug, PartialEq, Eq)]
pub struct PresentedAuth {
    /// True if the packet begins a new authentication.
    pub begins: bool,
    /// Authentication Data; empty if there was none.
    pub data: Bytes,
}

impl Enhanced {
    /// For a CONNECT that names this method: the first authentication is under way, and it is ours to answer.
    pub fn connecting(method: &str) -> Self {
        let (packets, begun) = (0, 0);
        Self { method: method.into(), stage: EnhancedStage::Ours, packets, minute: Timestamp(0), begun }
    }

    /// For a connection whose CONNECT named this method, and whose first authentication is over.
    pub fn connected(method: &str) -> Self {
        let mut enhanced = Self::connecting(method);
        enhanced.conclude(None);
        enhanced
    }

    /// The method in CONNECT, which is that of every authentication of the connection.
    pub fn method(&self) -> &str {
        &self.method
    }

    /// Returns whether an authentication is under way.
    pub fn is_under_way(&self) -> bool {
        self.stage != EnhancedStage::Idle
    }

    /// Takes an AUTH of the client.
    ///
    /// # Errors
    /// It is out of order, of another method, or one too many.
    pub fn take(&mut self, auth: AuthPacket, now: Timestamp) -> Result<PresentedAuth, Violation> {
        let broken = Err(Violation(reason::PROTOCOL_ERROR));
        // [MQTT-4.12.0-5] [MQTT-4.12.1-1]
        if auth.method.as_deref() != Some(&*self.method) {
            return broken;
        }
        let begins = match (auth.code, self.stage) {
            (reason::CONTINUE_AUTHENTICATION, EnhancedStage::Theirs) => false,
            (reason::RE_AUTHENTICATE, EnhancedStage::Idle) => true,
            // Success is for servers to say [MQTT-3.15.2-1].
            _ => return broken,
        };
        if begins {
            self.begin(now)?;
        }
        self.packets += 1;
        if self.packets > MOST_PACKETS {
            return Err(Violation(reason::QUOTA_EXCEEDED));
        }
        self.stage = EnhancedStage::Ours;
        Ok(PresentedAuth { begins, data: auth.data.unwrap_or_default() })
    }

    fn begin(&mut self, now: Timestamp) -> Result<(), Violation> {
        if self.begun == 0 || now >= self.minute.plus_secs(60) {
            (self.minute, self.begun) = (now, 0);
        }
        if self.begun == MOST_A_MINUTE {
            return Err(Violation(reason::QUOTA_EXCEEDED));
        }
        self.begun += 1;
        self.packets = 0;
        Ok(())
    }

    /// We ask the client: the AUTH to send [MQTT-4.12.0-2].
    pub fn ask(&mut self, data: Bytes) -> Packet<'static> {
        debug_assert_eq!(self.stage, EnhancedStage::Ours, "it is not for us to say something");
        self.stage = EnhancedStage::Theirs;
        self.packet(reason::CONTINUE_AUTHENTICATION, Some(data))
    }

    /// The client has proved who it is. The AUTH that says so on a live connection; in a handshake the CONNACK does.
    pub fn conclude(&mut self, data: Option<Bytes>) -> Packet<'static> {
        debug_assert_eq!(self.stage, EnhancedStage::Ours, "it is not for us to say something");
        self.stage = EnhancedStage::Idle;
        self.packet(reason::SUCCESS, data)
    }

    fn packet(&self, code: u8, data: Option<Bytes>) -> Packet<'static> {
        Packet::Auth(Box::new(AuthPacket {
            code,
            method: Some((*self.method).to_owned()),
            data,
            ..AuthPacket::default()
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: Timestamp = Timestamp(1_000);

    fn auth(code: u8, method: &str) -> AuthPacket {
        AuthPacket {
            code,
            method: Some(method.to_owned()),
            data: Some(Bytes::from_static(b"x")),
            ..AuthPacket::default()
        }
    }

    fn take(enhanced: &mut Enhanced, code: u8) -> Result<bool, u8> {
        enhanced.take(auth(code, "M"), AT).map(|presented| presented.begins).map_err(|Violation(code)| code)
    }

    const BROKEN: Result<bool, u8> = Err(reason::PROTOCOL_ERROR);

    #[test]
    fn each_side_speaks_in_its_turn() {
        let mut enhanced = Enhanced::connecting("M");
        assert_eq!(take(&mut enhanced, 0x18), BROKEN, "we have not answered CONNECT");
        assert_eq!(take(&mut enhanced, 0x19), BROKEN);
        let Packet::Auth(asked) = enhanced.ask(Bytes::from_static(b"?")) else { panic!() };
        assert_eq!((asked.code, asked.method.as_deref()), (0x18, Some("M")));
        assert_eq!(take(&mut enhanced, 0x19), BROKEN, "an authentication within another");
        assert_eq!(take(&mut enhanced, 0x00), BROKEN);
        assert_eq!(take(&mut enhanced, 0x18), Ok(false));
        assert_eq!(take(&mut enhanced, 0x18), BROKEN, "twice");
        let Packet::Auth(done) = enhanced.conclude(None) else { panic!() };
        assert_eq!((done.code, done.data, enhanced.is_under_way()), (0, None, false));
        assert_eq!(take(&mut enhanced, 0x18), BROKEN, "nothing was asked");
        assert_eq!(take(&mut enhanced, 0x00), BROKEN);
        assert_eq!(take(&mut enhanced, 0x19), Ok(true));
        assert!(enhanced.is_under_way());
    }

    #[test]
    fn every_auth_names_the_method_of_connect() {
        let mut enhanced = Enhanced::connecting("M");
        enhanced.conclude(None);
        let broken = Err(Violation(reason::PROTOCOL_ERROR));
        assert_eq!(enhanced.take(auth(0x19, "N"), AT), broken);
        assert_eq!(enhanced.take(AuthPacket { code: 0x19, ..AuthPacket::default() }, AT), broken);
        assert_eq!(enhanced.take(auth(0x19, "M"), AT).map(|presented| presented.data), Ok("x".into()));
    }

    #[test]
    fn an_authentication_has_an_end() {
        let mut enhanced = Enhanced::connecting("M");
        for _ in 0..MOST_PACKETS {
            enhanced.ask(Bytes::new());
            assert_eq!(take(&mut enhanced, 0x18), Ok(false));
        }
        enhanced.ask(Bytes::new());
        assert_eq!(take(&mut enhanced, 0x18), Err(reason::QUOTA_EXCEEDED));
    }

    #[test]
    fn so_many_authentications_begin_in_a_minute() {
        let mut enhanced = Enhanced::connecting("M");
        enhanced.conclude(None);
        let mut begin = |at| {
            let taken = enhanced.take(auth(0x19, "M"), at).map_err(|Violation(code)| code);
            if taken.is_ok() {
                enhanced.conclude(None);
            }
            taken.is_ok()
        };
        for n in 0..u64::from(MOST_A_MINUTE) {
            assert!(begin(AT.plus_secs(n as u32)));
        }
        assert!(!begin(AT.plus_secs(59)));
        assert!(begin(AT.plus_secs(60)));
    }
}
