//! Two gateways share the tables of one keyspace.

use gateway_core::Protocol;

use crate::{
    cassandra,
    client::Client,
    gateway::Gateway,
    load::{Load, Sent},
    tables::{Tables, wait_for},
};

#[test]
fn two_gateways_share_a_keyspace_and_read_each_others_values() {
    let Some(cassandra) = cassandra::shared() else { return };
    let tables = Tables::open(&cassandra.address, None);
    let both = [0, 1].map(|_| Gateway::start(&cassandra.address, &tables, ""));
    let loads = ["east", "west"].map(|name| (name, usize::from(name == "west")));
    let loads = loads.map(|(name, gateway)| Load::start(both[gateway].mqtt(), name));
    loads.iter().for_each(Load::goes_on);
    for load in loads {
        tables.hold(&load.finish());
    }

    // A device that moves from one to the other and back: what it said last stays, wherever it said so.
    let mut sent = Sent::default();
    for turn in 0..20 {
        let gateway = &both[turn % 2];
        let payload = format!("turn {turn}");
        Client::connect(gateway.mqtt(), Protocol::V5, "nomad").publish_acked(
            "nomad/place",
            payload.as_bytes(),
            false,
        );
        sent.note("nomad", "nomad/place", payload.as_bytes());
        // Clocks tell gateways apart to the millisecond.
        std::thread::sleep(std::time::Duration::from_millis(5));
        if turn == 10 {
            both.iter().for_each(Gateway::has_written_all);
        }
    }
    tables.hold(&sent);
    for gateway in &both {
        gateway.has_written_all();
        for device in [Some("nomad"), None] {
            assert_eq!(gateway.get("nomad/place", device).unwrap().payload, "turn 19");
        }
        let values = gateway.list("west-3").unwrap();
        let topics: Vec<&str> = values.iter().map(|value| value.topic.as_str()).collect();
        assert_eq!(topics.len(), 10, "{topics:?}");
        assert!(topics.is_sorted(), "{topics:?}");
    }

    // Neither is hurt by the other's end.
    let [first, second] = both;
    drop(first);
    second.is_well();
    tables.hold(&Load::once(second.mqtt(), "west"));
    wait_for("a value of the gateway that has gone", || {
        let value = second.get("east/common/0", None).map_err(|status| status.to_string())?;
        assert!(value.device_id.starts_with("east-"));
        Ok(())
    });
}
