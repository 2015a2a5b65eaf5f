//! The words every layer shares: identifiers, topics, messages and their properties, limits, counters and time.
//!
//! Knows nothing of wire formats, sockets or stores.

mod budget;
pub mod clock;
pub mod commit;
pub mod counters;
pub mod database;
mod effort;
mod flow;
mod id;
mod journal;
mod levels;
pub mod limits;
pub mod log_limits;
mod machine;
mod message;
pub mod metrics;
mod offer;
mod peer;
mod quotas;
mod receipt;
mod record;
mod reserved;
mod shares;
mod sync;
mod tail;
mod thread;
mod topic;
pub mod units;

pub use budget::Budget;
pub use commit::{Commit, CommitRefused, LeaseGate, Received, Unit};
pub use effort::Effort;
pub use flow::{Bucket, Flow};
pub use id::{ClientId, Protocol, QoS, Timestamp};
pub use journal::{Journal, JournalPage, QueueEntry, QueueId, QueueOp, StoredEntry};
pub use levels::Levels;
pub use message::{BRIDGE_MARK, Durability, Message, Origin, OriginKind, Properties, SharedMessage, Yielded};
pub use offer::{Offer, Outcome};
pub use peer::Peer;
pub use quotas::Quotas;
pub use receipt::{DropReason, Receipt, ReceiptState};
pub use record::{GroupId, LogRecord, PARTITIONS, Partition};
pub use reserved::{ReservedTopics, below_own_name, is_one_level};
pub use shares::{Feeder, NoRoom, Shares, part_of_qos_0};
pub use tail::Tail;
pub use thread::give_way;
pub use topic::{
    MAX_TOPIC_BYTES, TopicError, TopicFilter, TopicName, has_wildcard, level_count, matches, parse_shared,
};
