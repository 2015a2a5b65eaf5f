//! The dispatcher: which replies are taken, and what becomes of the others.

use broker::{BrokerConfig, ReservedOutcome, Turn};
use gateway_core::{ClientId, Levels, OriginKind, clock};

use super::*;

struct Bench {
    broker: Broker,
    dispatcher: Arc<ReplyDispatcher>,
}

fn bench(most: usize, per_device: usize) -> Bench {
    let dispatcher = ReplyDispatcher::new(CommandsOptions {
        topics: CommandTopics::new(
            "cmd/".to_owned(),
            Levels::parse("{id}/{name}", &["id", "name"]).unwrap(),
            Levels::parse("{id}/reply/{status}", &["id", "status"]).unwrap(),
        ),
        max_outstanding: most,
        max_outstanding_per_device: per_device,
    });
    let broker =
        Broker::new(BrokerConfig { reserved: vec![reserved(&dispatcher)], ..BrokerConfig::default() });
    Bench { broker, dispatcher }
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
    fn open(&self, device: &str) -> Result<dispatcher::PendingReply, NoReply> {
        self.dispatcher.open(&spec(device), self.broker.account())
    }

    /// Publishes as the device, to a topic whose levels after the device's name are `rest`.
    fn say(&self, device: &str, rest: &str, properties: Option<Properties>) -> ReservedOutcome {
        let client_id = ClientId::new(device);
        let origin = Origin { kind: OriginKind::Device, client_id: Some(&client_id), slot: 0 };
        let properties = properties.map(Arc::new);
        let mut message = Message::new("cmd", b"done", Timestamp(7), origin);
        message.properties = properties.as_ref();
        self.dispatcher.take(&message, rest, &self.broker, &mut Turn::default())
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
        assert_eq!(
            bench.say(device, &rest, properties),
            ReservedOutcome::Taken,
            "acknowledged: {device} {rest}"
        );
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
    let of_device = NoReply::TooMany("commands.max_outstanding_per_device");
    assert_eq!(bench.open("d").err(), Some(of_device));
    let third = bench.open("e").unwrap();
    assert_eq!(bench.open("f").err(), Some(NoReply::TooMany("commands.max_outstanding")));
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
    let waiter = bench.dispatcher.wait_for(&device);
    let other = bench.dispatcher.wait_for(&device);
    let connected = waiter.connected.notified();
    tokio::pin!(connected);
    connected.as_mut().enable();
    bench.dispatcher.connected(&ClientId::new("e"));
    drop(other);
    bench.dispatcher.connected(&ClientId::new("d"));
    connected.await;
}

/// Devices with one command each, of which only one may be on its way at a time.
async fn started(bench: &Bench, devices: usize) -> Arc<CommandRegistry> {
    let options = CommandRegistryOptions {
        max_outstanding: 1,
        max_outstanding_per_device: 1,
        max_active: devices + 10,
        max_active_per_device: 10,
        max_bytes: 64 << 20,
        keep: Duration::from_secs(60),
        max_kept: devices,
    };
    let registry =
        CommandRegistry::open(options, Arc::new(store::NoRecords), bench.broker.account()).unwrap();
    let times = Times { start: Timestamp(0), expire: clock::now().plus_millis(1_000_000), retry: None };
    for number in 0..devices {
        let spec = spec(&format!("d{number}"));
        registry.start(Some(number.to_string()), spec, times, CommandDigest::default()).await.unwrap();
    }
    registry.tick(clock::now(), devices + 10);
    registry
}

#[tokio::test]
async fn a_place_that_is_free_again_costs_no_look_at_all_who_wait() {
    let devices = 500;
    let bench = bench(10, 10);
    let registry = started(&bench, devices).await;
    let (mut looks, mut sent) = (0, Vec::new());
    while sent.len() < devices {
        let mut out = None;
        while let Some(parcels) = registry.next_parcels() {
            looks += 1;
            for parcel in parcels {
                registry.begin(parcel.number).unwrap();
                out = Some(parcel.id);
            }
        }
        let id = out.expect("a place is free, and somebody waits for it");
        registry.cancel(&id).await.unwrap();
        sent.push(id);
    }
    assert!(looks <= 3 * devices, "{looks} looks for {devices} devices");
}

#[tokio::test]
async fn who_had_a_place_waits_behind_those_who_had_none() {
    let bench = bench(10, 10);
    let registry = started(&bench, 3).await;
    let times = Times { start: Timestamp(0), expire: clock::now().plus_millis(1_000_000), retry: None };
    registry.start(Some("again".to_owned()), spec("d0"), times, CommandDigest::default()).await.unwrap();
    registry.tick(clock::now(), 10);
    let mut order = Vec::new();
    for _ in 0..4 {
        let mut out = None;
        while let Some(parcels) = registry.next_parcels() {
            for parcel in parcels {
                registry.begin(parcel.number).unwrap();
                out = Some(parcel.id);
            }
        }
        let id = out.expect("a place is free, and somebody waits for it");
        registry.cancel(&id).await.unwrap();
        order.push(id);
    }
    assert_eq!(order, ["0", "1", "2", "again"]);
}

#[tokio::test]
async fn a_list_of_active_ones_looks_at_no_command_that_has_ended() {
    let bench = bench(10, 10);
    let registry = started(&bench, 200).await;
    for number in 0..190 {
        registry.cancel(&number.to_string()).await.unwrap();
    }
    let looks = std::cell::Cell::new(0);
    let list = |active: bool, before: Option<u64>, most: usize| {
        looks.set(0);
        let (page, next) = registry.list(None, active, before, most, |_| {
            looks.set(looks.get() + 1);
            true
        });
        (page.into_iter().map(|(_, record)| record.id.clone()).collect::<Vec<_>>(), next)
    };
    let (page, next) = list(true, None, 100);
    let ids: Vec<String> = (190..200).rev().map(|number| number.to_string()).collect();
    assert_eq!((page, next, looks.get()), (ids, None, 10));
    // Pages go on across the steps in which the table is looked at.
    let (mut all, mut before) = (Vec::new(), None);
    loop {
        let (page, next) = list(false, before, 70);
        all.extend(page);
        before = next;
        if next.is_none() {
            break;
        }
    }
    let ids: Vec<String> = (0..200).rev().map(|number| number.to_string()).collect();
    assert_eq!(all, ids);
}

/// A gateway that is started with lower bounds than it had must not hold up the threads of devices while it forgets.
#[tokio::test]
async fn what_is_over_a_lower_bound_is_forgotten_in_steps_and_all_of_it() {
    let bench = bench(10, 10);
    let registry = started(&bench, 60).await;
    for number in 0..60 {
        registry.cancel(&number.to_string()).await.unwrap();
    }
    let registry = registry.with_less(5, 64 << 20);
    let kept = |registry: &CommandRegistry| registry.list(None, false, None, 1_000, |_| true).0.len();
    let now = clock::now();
    assert_eq!(registry.tick(now, 20), Some(now), "there is more");
    assert_eq!(kept(&registry), 40);
    while registry.tick(now, 20) == Some(now) {}
    assert_eq!(kept(&registry), 5);
}

/// The failure: a device connects while a command that found it away is on its way back, and does not get it until it connects
/// again.
#[tokio::test]
async fn a_connection_beside_an_attempt_that_fails_is_not_missed() {
    let bench = bench(10, 10);
    let registry = started(&bench, 1).await;
    let parcel = registry.next_parcels().unwrap().pop().unwrap();
    let attempt = registry.begin(parcel.number).unwrap();
    registry.connected("d0");
    registry.take_back(parcel.number, attempt);
    let again: Vec<u64> = registry.next_parcels().unwrap().iter().map(|parcel| parcel.number).collect();
    assert_eq!(again, [parcel.number]);
}

/// The failure: replies are refused although commands that have ended long ago could make room.
#[tokio::test]
async fn a_reply_takes_the_room_of_commands_that_have_ended() {
    let bench = bench(10, 10);
    let devices = 40;
    let registry = started(&bench, devices).await.with_less(40, 100_000);
    for number in 0..devices {
        let device = format!("d{number}");
        let client_id = ClientId::new(&device);
        let origin = Origin { kind: OriginKind::Device, client_id: Some(&client_id), slot: 0 };
        let id = number.to_string();
        let payload = vec![b'x'; 10_000];
        let message = Message::new("cmd", &payload, Timestamp(7), origin);
        let address = topics::ReplyAddress { id: &id, status: Some(0) };
        let taken = registry.take(&device, &address, &message);
        assert_eq!(taken, Some(ReservedOutcome::Taken), "reply {number}");
        assert_eq!(registry.get(&id).map(|record| record.machine.state()), Some(CommandState::Replied));
    }
}
