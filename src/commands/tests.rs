//! The desk: which replies are taken, and what becomes of the others.

use std::collections::BTreeMap;

use broker::{BrokerConfig, Taken, Turn};
use gateway_core::{ClientId, OriginKind};

use super::*;

struct Bench {
    broker: Broker,
    desk: Arc<Desk>,
}

fn bench(most: usize, per_device: usize) -> Bench {
    let desk = Desk::new(CommandsOptions {
        prefix: "cmd/".to_owned(),
        max_outstanding: most,
        max_outstanding_per_device: per_device,
    });
    let broker = Broker::new(BrokerConfig {
        limits: Arc::default(),
        non_broker: false,
        namespace: String::new(),
        listener_strategies: BTreeMap::new(),
        latest: None,
        history: None,
        stores: None,
        log: None,
        reserved: vec![reserved(&desk)],
        durability: Default::default(),
        judge_will: None,
        tenants: BTreeMap::new(),
    });
    Bench { broker, desk }
}

fn spec(device: &str) -> Spec {
    Spec {
        device: device.into(),
        name: "reboot".to_owned(),
        payload: Bytes::from_static(b"now"),
        properties: None,
        qos: QoS::AtLeastOnce,
    }
}

impl Bench {
    fn open(&self, device: &str) -> Result<desk::Ticket, Failure> {
        self.desk.open(&spec(device), self.broker.account())
    }

    /// What a device says to a topic behind its name.
    fn say(&self, device: &str, rest: &str, properties: Option<Properties>) -> Taken {
        let client_id = ClientId::new(device);
        let origin = Origin { kind: OriginKind::Device, client_id: Some(&client_id), slot: 0 };
        let properties = properties.map(Arc::new);
        let mut message = Message::new("cmd", b"done", Timestamp(7), origin);
        message.properties = properties.as_ref();
        self.desk.take(&message, rest, &self.broker, &mut Turn::default())
    }
}

fn correlated(data: &[u8], status: Option<&str>) -> Option<Properties> {
    Some(Properties {
        correlation_data: Some(Bytes::copy_from_slice(data)),
        user: status.map(|status| ("status".to_owned(), status.to_owned())).into_iter().collect(),
        ..Properties::default()
    })
}

#[test]
fn a_reply_needs_the_id_and_the_correlation_or_a_status_level() {
    let bench = bench(10, 10);
    let mut ticket = bench.open("d").unwrap();
    let (id, data) = (ticket.id.clone(), ticket.correlation);
    let wrong = [
        ("d", format!("{id}/reply"), None),
        ("d", format!("{id}/reply"), correlated(b"guess", Some("200"))),
        ("d", format!("{id}/reply/200"), correlated(b"guess", None)),
        ("d", format!("{id}x/reply/200"), correlated(&data, None)),
        ("e", format!("{id}/reply/200"), correlated(&data, None)),
        ("d", format!("{id}/reply/ok"), correlated(&data, None)),
        ("d", format!("{id}/reply/+1"), correlated(&data, None)),
        ("d", format!("{id}/reply/"), correlated(&data, None)),
        ("d", format!("{id}/reply/200/more"), correlated(&data, None)),
        ("d", format!("{id}/reboot"), correlated(&data, None)),
        ("d", id.clone(), correlated(&data, None)),
    ];
    for (device, rest, properties) in wrong {
        assert_eq!(bench.say(device, &rest, properties), Taken::Taken, "acknowledged: {device} {rest}");
        assert!(ticket.reply.try_recv().is_err(), "{device} {rest}");
    }
    bench.say("d", &format!("{id}/reply"), correlated(&data, Some("404")));
    let reply = ticket.reply.try_recv().unwrap();
    assert_eq!(
        (&reply.answer.payload[..], reply.answer.status, reply.answer.at),
        (&b"done"[..], 404, Timestamp(7))
    );

    for (rest, properties, status) in [
        ("reply/202", None, 202),
        ("reply/500", correlated(&[0; 16], Some("1")), 500),
        ("reply", correlated(&[0; 16], Some("many")), 0),
        ("reply", correlated(&[0; 16], None), 0),
    ] {
        let mut ticket = bench.open("d").unwrap();
        let properties = properties.map(|mut properties| {
            properties.correlation_data = Some(Bytes::copy_from_slice(&ticket.correlation));
            properties
        });
        bench.say("d", &format!("{}/{rest}", ticket.id), properties);
        assert_eq!(ticket.reply.try_recv().unwrap().answer.status, status, "{rest}");
    }
}

#[test]
fn a_call_that_ends_gives_back_its_place_and_its_memory() {
    let bench = bench(3, 2);
    let first = bench.open("d").unwrap();
    let second = bench.open("d").unwrap();
    let of_device = Failure::TooMany("commands.max_outstanding_per_device");
    assert_eq!(bench.open("d").err(), Some(of_device));
    let third = bench.open("e").unwrap();
    assert_eq!(bench.open("f").err(), Some(Failure::TooMany("commands.max_outstanding")));
    assert!(bench.broker.account().held(broker::MemoryKind::Commands) > 0);
    assert_ne!((&first.id, first.correlation), (&second.id, second.correlation));
    drop(first);
    bench.say("d", &format!("{}/reply/200", second.id), None);
    drop(bench.open("d").unwrap());
    drop((second, third));
    assert_eq!(bench.broker.account().held(broker::MemoryKind::Commands), 0);
    assert!(bench.open("d").is_ok());
}

#[tokio::test]
async fn a_connection_after_the_look_is_told_to_who_waits() {
    let bench = bench(10, 10);
    let device: Arc<str> = "d".into();
    let waiter = bench.desk.wait_for(&device);
    let other = bench.desk.wait_for(&device);
    let connected = waiter.connected.notified();
    tokio::pin!(connected);
    connected.as_mut().enable();
    bench.desk.connected(&ClientId::new("e"));
    drop(other);
    bench.desk.connected(&ClientId::new("d"));
    connected.await;
}
