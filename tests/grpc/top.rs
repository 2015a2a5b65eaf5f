//! The devices of which most waits.

use access::backends::Role;
use mqtt_server::proto::gateway::v1::{self, DeviceRank, devices_client::DevicesClient};
use tokio::task::block_in_place;

use crate::{access::Guarded, client::Got, harness::*};

/// Rules out a ranking by something else, of devices that have nothing, or of those that the caller may not know of.
#[tokio::test(flavor = "multi_thread")]
async fn the_devices_of_which_most_waits_come_first_and_none_that_is_out_of_scope() {
    let guarded = Guarded::with(
        &[("all", Role::Admin, None, None), ("some", Role::Reader, None, Some(&["d*"]))],
        |config| {
            config.limits.mailbox_messages = 2;
            config.limits.offline_messages = 4;
        },
    )
    .await;
    let setup = &guarded.setup;
    // More sessions than are looked at in one step.
    let _idle: Vec<_> = block_in_place(|| (0..300).map(|n| setup.raw(&format!("i{n}"), |_| {})).collect());
    let connect = |id: &str| block_in_place(|| setup.raw(id, |connect| connect.receive_maximum = Some(1)));
    let (mut d1, mut d2, _x) = (connect("d1"), connect("d2"), connect("x"));
    let mut publisher = v1::publisher_client::PublisherClient::new(guarded.channel("all"));
    for (id, count, bytes) in [("d1", 3, 10), ("d2", 2, 1_000), ("x", 3, 2_000)] {
        for _ in 0..count {
            let request = v1::PublishRequest { payload: vec![7; bytes].into(), ..to_device(id, "") };
            soon("a publish", publisher.publish(request)).await.unwrap();
        }
    }
    for client in [&mut d1, &mut d2] {
        assert!(matches!(block_in_place(|| client.next()), Got::Publish(..)));
    }
    let top = async |who: &str, rank_by: DeviceRank, limit: i32| {
        let mut devices = DevicesClient::new(guarded.channel(who));
        let request = v1::ListTopDevicesRequest { rank_by: rank_by.into(), limit, ..Default::default() };
        let answer = soon("a ranking", devices.list_top_devices(request)).await.unwrap().into_inner();
        let ids: Vec<String> = answer.devices.into_iter().map(|device| device.device_id).collect();
        (ids.join(" "), answer.ranked)
    };
    assert_eq!(top("all", DeviceRank::PendingBytes, 0).await, ("x d2 d1".to_owned(), 303));
    assert_eq!(top("some", DeviceRank::PendingBytes, 0).await, ("d2 d1".to_owned(), 2));
    assert_eq!(top("some", DeviceRank::Unspecified, 1).await, ("d1".to_owned(), 2));
    assert_eq!(top("some", DeviceRank::Inflight, 0).await.0.len(), 5);
    assert_eq!(top("all", DeviceRank::Dropped, 0).await, (String::new(), 303));
}
