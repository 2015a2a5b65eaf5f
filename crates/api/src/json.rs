//! Messages as JSON, as protobuf maps them: names in lowerCamelCase, bytes in base64, times as RFC 3339.

use std::sync::OnceLock;

use prost::{Message, Name};
use prost_reflect::{DescriptorPool, DynamicMessage, SerializeOptions};
use serde_json::Value;

use crate::DESCRIPTORS;

/// The descriptors of [`DESCRIPTORS`], decoded once.
///
/// # Panics
/// Never: the descriptors are those of this build.
pub fn pool() -> &'static DescriptorPool {
    static POOL: OnceLock<DescriptorPool> = OnceLock::new();
    POOL.get_or_init(|| {
        #[expect(clippy::expect_used, reason = "made by this crate's build script; a test decodes them")]
        DescriptorPool::decode(DESCRIPTORS).expect("the descriptors of this build")
    })
}

/// A message as a JSON object. Every field without presence is there, also where it has its default, so that whoever reads
/// finds the same keys in each; unset messages, `optional` and `oneof` fields are left out. Integers of 64 bits are numbers.
pub fn to_json<M: Message + Name>(message: &M) -> Value {
    let Some(descriptor) = pool().get_message_by_name(&M::full_name()) else { return Value::Null };
    let mut dynamic = DynamicMessage::new(descriptor);
    if dynamic.transcode_from(message).is_err() {
        return Value::Null;
    }
    let options = SerializeOptions::new().skip_default_fields(false).stringify_64_bit_integers(false);
    dynamic.serialize_with_options(serde_json::value::Serializer, &options).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gateway::v1;

    #[test]
    fn a_message_has_all_its_keys_and_times_for_people() {
        let value = v1::LatestValue {
            device_id: "kitchen".to_owned(),
            payload: "21.5".into(),
            receive_time: Some(prost_types::Timestamp { seconds: 1_700_000_000, nanos: 0 }),
            ..v1::LatestValue::default()
        };
        let expected = serde_json::json!({
            "deviceId": "kitchen", "topic": "", "payload": "MjEuNQ==", "qos": "QOS_UNSPECIFIED", "retain": false,
            "receiveTime": "2023-11-14T22:13:20Z", "serverId": "",
        });
        assert_eq!(to_json(&value), expected);
    }

    #[test]
    fn a_count_of_64_bits_is_a_number() {
        let queue = v1::Queue { pending: 1 << 40, ..v1::Queue::default() };
        assert_eq!(to_json(&queue)["pending"], serde_json::json!(1_u64 << 40));
    }
}
