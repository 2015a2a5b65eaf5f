//! Roles: the kinds of things that a caller may do.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// Purpose of a caller. `Publisher` may do all that `Reader` may, `Consumer` and `Operator` too, `Admin` everything;
/// these three share no more than reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Reads: messages as they come, latest values, history, retained messages, devices, events.
    Reader,
    /// Reads, and publishes: to topics, to devices, retained messages.
    Publisher,
    /// Reads, and consumes groups: takes their messages and acknowledges them.
    Consumer,
    /// Reads, and looks after devices: disconnects, deletes and traces them, deletes latest values and retained messages.
    Operator,
    /// Everything, tokens and reloading included.
    Admin,
}

impl Role {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Reader, Self::Publisher, Self::Consumer, Self::Operator, Self::Admin];

    /// As written in files and flags.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Reader => "reader",
            Self::Publisher => "publisher",
            Self::Consumer => "consumer",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Role {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let role = Self::ALL.into_iter().find(|role| role.as_str() == text);
        role.ok_or_else(|| format!("no role '{text}'; use reader, publisher, consumer, operator or admin"))
    }
}

/// The roles that may do one thing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Roles(u8);

impl Roles {
    /// Everybody with a role.
    pub const READ: Self = Self(0b11111);
    /// Roles that publish.
    pub const PUBLISH: Self = Self(0b1010);
    /// Roles that consume groups.
    pub const CONSUME: Self = Self(0b11000);
    /// Roles that look after devices.
    pub const OPERATE: Self = Self(0b1100);
    /// Roles that publish, and roles that look after devices.
    pub const CLEAR: Self = Self(0b1110);
    /// Roles that give others their rights.
    pub const ADMINISTER: Self = Self(0b1000);

    /// Returns whether `role` is one of them.
    pub fn include(self, role: Role) -> bool {
        let bit = match role {
            Role::Reader => 0b0001,
            Role::Publisher => 0b0010,
            Role::Operator => 0b0100,
            Role::Admin => 0b1000,
            Role::Consumer => 0b10000,
        };
        self.0 & bit != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_work_has_its_roles() {
        use Role::{Admin, Consumer, Operator, Publisher, Reader};

        let of = |roles: Roles| Role::ALL.into_iter().filter(|role| roles.include(*role)).collect::<Vec<_>>();
        assert_eq!(of(Roles::READ), [Reader, Publisher, Consumer, Operator, Admin]);
        assert_eq!(of(Roles::PUBLISH), [Publisher, Admin]);
        assert_eq!(of(Roles::CONSUME), [Consumer, Admin]);
        assert_eq!(of(Roles::OPERATE), [Operator, Admin]);
        assert_eq!(of(Roles::CLEAR), [Publisher, Operator, Admin]);
        assert_eq!(of(Roles::ADMINISTER), [Admin]);
        assert!(Role::ALL.iter().all(|role| role.as_str().parse() == Ok(*role)));
        assert!("root".parse::<Role>().unwrap_err().contains("'root'"));
    }
}
