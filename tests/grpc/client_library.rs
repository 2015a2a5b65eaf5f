//! `clients/rust` against a real gateway: what is promised over lost connections and kill -9.
//!
//! Long because all of it shares the door that is slammed, and whoever asks what the library promises reads one file.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use codec::Packet;
use gateway_core::Protocol;
use mqtt_gateway_client::{
    Client, Code, Delivery, GiveBack, Reason, Update,
    consume::{Consumed, Options},
    v1::{
        CommandSpec, CommandState, CreateGroupRequest, CreateTokenRequest, Filter, Group,
        ListCommandsRequest, ListDevicesRequest, ListLatestRequest, ListMembersRequest, ListPendingRequest,
        PublishRequest, RevokeTokenRequest, Role, StartCommandRequest, SubscribeRequest, Wait,
        WatchLatestRequest, consumed_message::Content, groups_client::GroupsClient, subscribe_item,
        watch_latest_item,
    },
};
use parking_lot::Mutex;
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::Notify,
};

use crate::{
    access::Guarded,
    client::decoded,
    commands::Responder,
    harness::{Setup, puback, soon, to, to_device},
    support::Server,
};

/// A door of its own before a gateway, which stays while the gateway goes and comes back on another port.
struct Door {
    port: u16,
    to: Arc<AtomicU16>,
    cut: Arc<Notify>,
    passed: Arc<AtomicUsize>,
}

impl Door {
    async fn before(port: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let (to, cut, passed) =
            (Arc::new(AtomicU16::new(port)), Arc::new(Notify::new()), Arc::new(AtomicUsize::new(0)));
        let door = Self { port: listener.local_addr().unwrap().port(), to, cut, passed };
        let (to, cut, passed) = (Arc::clone(&door.to), Arc::clone(&door.cut), Arc::clone(&door.passed));
        tokio::spawn(async move {
            while let Ok((mut inside, _)) = listener.accept().await {
                let (to, cut, passed) = (to.load(SeqCst), Arc::clone(&cut), Arc::clone(&passed));
                tokio::spawn(async move {
                    let Ok(mut outside) = TcpStream::connect(("127.0.0.1", to)).await else { return };
                    passed.fetch_add(1, SeqCst);
                    tokio::select! {
                        _ = copy_bidirectional(&mut inside, &mut outside) => {}
                        () = cut.notified() => {}
                    }
                });
            }
        });
        door
    }

    /// Ends what goes through it.
    fn slam(&self) {
        self.cut.notify_waiters();
    }
}

async fn client(setup: &Setup) -> (Client, Door) {
    let door = Door::before(setup.gateway.address("grpc").unwrap().port()).await;
    let client = Client::at(format!("http://127.0.0.1:{}", door.port)).connect().await.unwrap();
    (client, door)
}

async fn group(client: &Client, name: &str, filter: &str) {
    let filter =
        Filter { topic_filters: vec![filter.to_owned()], include_backends: true, ..Filter::default() };
    let group = Group { name: name.to_owned(), filter: Some(filter), ..Group::default() };
    let request = CreateGroupRequest { group: Some(group), ..CreateGroupRequest::default() };
    client.groups().create_group(request).await.unwrap();
}

async fn until(mut done: impl FnMut() -> bool) {
    soon("it", async {
        while !done() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

fn text(delivery: &Delivery) -> (String, String) {
    let Some(Content::Message(message)) = &delivery.content else { panic!("not a message") };
    (message.topic.clone(), String::from_utf8(message.payload.to_vec()).unwrap())
}

#[tokio::test]
async fn a_refusal_has_a_reason_that_a_program_can_branch_on() {
    let setup = Setup::new().await;
    let (client, _door) = client(&setup).await;
    let refused =
        client.publish(PublishRequest { topic: "a/+".to_owned(), ..to("", "x") }).await.unwrap_err();
    assert_eq!((refused.code(), refused.reason()), (Code::InvalidArgument, &Reason::InvalidField));
    assert!(!refused.is_temporary());
    assert_eq!(client.latest(None, "nothing").await.unwrap(), None);
    assert_eq!(client.shadow("nobody", "").await.unwrap(), None);
    let spec =
        CommandSpec { device_id: "nobody".to_owned(), name: "open".to_owned(), ..CommandSpec::default() };
    let offline = client.command(spec, None, Duration::from_secs(30)).await.unwrap_err();
    assert_eq!(offline.reason(), &Reason::DeviceOffline);
    let gone =
        client.consume(Options::of("none"), |_| async { Ok(()) }, std::future::pending()).await.unwrap_err();
    assert_eq!(gone.reason(), &Reason::GroupNotFound);
}

#[tokio::test]
async fn a_publish_that_is_sent_again_is_published_once() {
    let setup = Setup::new().await;
    let (client, door) = client(&setup).await;
    let mut stream = setup.subscribe(SubscribeRequest::default()).await;
    let request = PublishRequest { idempotency_key: "k".to_owned(), ..to("a", "1") };
    client.publish(request.clone()).await.unwrap();
    // The answer is lost with the connection, for all that the client knows: it sends it again.
    door.slam();
    client.publish(request).await.unwrap();
    client.publish(to("a", "2")).await.unwrap();
    assert_eq!(stream.next().await.payload, "1");
    assert_eq!(stream.next().await.payload, "2");
}

/// The failures: whoever waits in vain is not told how far the message came, and has no key to go on with.
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_that_is_over_tells_how_far_it_came_and_goes_on_with_its_key() {
    let setup = Setup::new().await;
    let mut device = setup.raw("dev", |_| {});
    let address = format!("http://{}", setup.gateway.address("grpc").unwrap());
    let client = Client::at(address).patience(Duration::from_secs(3)).connect().await.unwrap();
    let request = to_device("dev", "x");
    let late = soon("the end", client.publish_and_wait(request.clone())).await.unwrap_err();
    assert_eq!((late.code(), late.reason()), (Code::DeadlineExceeded, &Reason::WaitIncomplete), "{late}");
    assert_eq!(late.level(), Some("SENT"));
    let idempotency_key = late.idempotency_key().unwrap().to_owned();
    let bytes = device.next_bytes().unwrap();
    let Packet::Publish(publish) = decoded(&bytes, Protocol::V5) else { panic!("{bytes:?}") };
    puback(&mut device, publish.packet_id, 0);
    let again = client.publish_and_wait(PublishRequest { idempotency_key, ..request }).await.unwrap();
    assert_eq!((again.sent, again.reason_code), (1, Some(0)), "{again:?}");
    // The message was published once: the next one is another.
    client.publish(to_device("dev", "y")).await.unwrap();
    let bytes = device.next_bytes().unwrap();
    let Packet::Publish(publish) = decoded(&bytes, Protocol::V5) else { panic!("{bytes:?}") };
    assert_eq!(publish.payload, &b"y"[..]);
}

/// The failure: nobody can repeat a call whose key was made for it and is not told.
#[tokio::test]
async fn a_publish_that_nobody_answers_tells_its_key() {
    let silent = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = format!("http://{}", silent.local_addr().unwrap());
    let client = Client::at(address).patience(Duration::from_millis(300)).connect_lazily().unwrap();
    let late = client.publish(to("a", "1")).await.unwrap_err();
    assert_eq!((late.code(), late.reason()), (Code::DeadlineExceeded, &Reason::NoAnswerInTime), "{late}");
    assert!(late.idempotency_key().is_some_and(|key| !key.is_empty()));
    assert_eq!(late.level(), None);
    let request = PublishRequest { idempotency_key: "mine".to_owned(), ..to("a", "1") };
    let late = client.publish(request.clone()).await.unwrap_err();
    assert_eq!(late.idempotency_key(), Some("mine"));
    drop(silent);
    let lost = client.publish(request).await.unwrap_err();
    assert_eq!(lost.idempotency_key(), Some("mine"), "{lost}");
    let reading = client.latest(None, "a").await.unwrap_err();
    assert_eq!(reading.idempotency_key(), None);
}

#[tokio::test]
async fn a_subscription_goes_on_over_a_lost_connection() {
    let setup = Setup::new().await;
    let (client, door) = client(&setup).await;
    let mut stream = client.subscribe(SubscribeRequest::default());
    let mut next = async || loop {
        match soon("an update", stream.next()).await.unwrap() {
            Update::Item(subscribe_item::Item::Message(message)) => return Ok(message.payload),
            Update::Reconnected { .. } => return Err(()),
            Update::Item(_) => {}
            Update::Lost(error) => assert_eq!(error.reason(), &Reason::Unreachable),
        }
    };
    // Nobody is told when the first stream is there: publish until it is.
    let first = async {
        loop {
            client.publish(to("a", "1")).await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::select! {
        got = next() => assert_eq!(got.unwrap(), "1"),
        () = first => {}
    }
    door.slam();
    while next().await.is_ok() {}
    client.publish(to("a", "2")).await.unwrap();
    while next().await.unwrap() != "2" {}
}

#[tokio::test]
async fn a_watch_shows_the_values_again_after_a_lost_connection() {
    let setup = Setup::new().await;
    let device = setup.device("d").await;
    device.send("t", "1").await;
    let (client, door) = client(&setup).await;
    let value = async || client.latest(Some("d"), "t").await.unwrap();
    soon("a value", async { while value().await.is_none() {} }).await;
    let mut watch = client.watch_latest(WatchLatestRequest::default());
    let (mut values, mut again) = (0, false);
    while values < 2 {
        match soon("an update", watch.next()).await.unwrap() {
            Update::Item(watch_latest_item::Item::Value(value)) => {
                assert_eq!(value.payload, "1");
                values += 1;
                if values == 1 {
                    door.slam();
                }
            }
            Update::Reconnected { resumed } => again = !resumed,
            _ => {}
        }
    }
    assert!(again);
}

#[tokio::test]
async fn messages_of_a_device_are_handled_in_order_and_others_at_once() {
    let setup = Setup::new().await;
    let (client, _door) = client(&setup).await;
    group(&client, "g", "t/#").await;
    let (one, two) = (setup.device("one").await, setup.device("two").await);
    for number in 0..20 {
        one.send("t/one", &number.to_string()).await;
    }
    two.send("t/two", "0").await;
    let (seen, stop) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Notify::new()));
    let blocked = Arc::new(Notify::new());
    let handle = {
        let (seen, stop, blocked) = (Arc::clone(&seen), Arc::clone(&stop), Arc::clone(&blocked));
        move |delivery: Delivery| {
            let (seen, stop, blocked) = (Arc::clone(&seen), Arc::clone(&stop), Arc::clone(&blocked));
            async move {
                let (topic, number) = text(&delivery);
                // The first of one device waits until the other device is through: they do not wait for each other.
                if topic == "t/one" && number == "0" {
                    blocked.notified().await;
                }
                if topic == "t/two" {
                    blocked.notify_one();
                }
                let mut seen = seen.lock();
                seen.push((topic, number));
                if seen.len() == 21 {
                    stop.notify_one();
                }
                Ok(())
            }
        }
    };
    let told = soon("the end", client.consume(Options::of("g"), handle, async { stop.notified().await }))
        .await
        .unwrap();
    assert_eq!(told, Consumed { acknowledged: 21, ..Consumed::default() });
    let order: Vec<usize> =
        seen.lock().iter().filter(|(topic, _)| topic == "t/one").map(|(_, n)| n.parse().unwrap()).collect();
    assert_eq!(order, (0..20).collect::<Vec<_>>());
}

#[tokio::test]
async fn what_a_handler_gives_back_comes_again_and_so_after_a_panic() {
    let setup = Setup::new().await;
    let (client, _door) = client(&setup).await;
    group(&client, "g", "t/#").await;
    client.publish(to("t/1", "x")).await.unwrap();
    let (calls, stop) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let handle = {
        let (calls, stop) = (Arc::clone(&calls), Arc::clone(&stop));
        move |delivery: Delivery| {
            let (call, stop) = (calls.fetch_add(1, SeqCst), Arc::clone(&stop));
            async move {
                match call {
                    0 => Err(GiveBack {
                        reason: "not now".to_owned(),
                        delay: Some(Duration::ZERO),
                        ..GiveBack::default()
                    }),
                    1 => panic!("a handler that panics"),
                    _ => {
                        assert_eq!(delivery.attempt, 3);
                        stop.notify_one();
                        Ok(())
                    }
                }
            }
        }
    };
    let told = soon("the end", client.consume(Options::of("g"), handle, async { stop.notified().await }))
        .await
        .unwrap();
    assert_eq!(told, Consumed { acknowledged: 1, given_back: 2, ..Consumed::default() });
}

/// The failure: a handler that needs longer than the group's deadline has its message given to another member meanwhile.
#[tokio::test]
async fn what_is_kept_has_its_deadline_moved_until_its_handler_is_done() {
    let setup = Setup::new().await;
    let (client, _door) = client(&setup).await;
    group(&client, "g", "t/#").await;
    client.publish(to("t/1", "x")).await.unwrap();
    let (calls, stop, go) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()), Arc::new(Notify::new()));
    let handle = {
        let (calls, stop, go) = (Arc::clone(&calls), Arc::clone(&stop), Arc::clone(&go));
        move |_| {
            let (calls, stop, go) = (Arc::clone(&calls), Arc::clone(&stop), Arc::clone(&go));
            async move {
                calls.fetch_add(1, SeqCst);
                go.notified().await;
                stop.notify_one();
                Ok(())
            }
        }
    };
    // The shortest there is: its deadline moves every second, and is nearer than that of the group.
    let options = Options::of("g").keep(Duration::ZERO);
    let consuming = client.consume(options, handle, async { stop.notified().await });
    let meanwhile = async {
        let mut deadlines = HashSet::new();
        while deadlines.len() < 4 {
            let request = ListPendingRequest { name: "g".to_owned(), ..ListPendingRequest::default() };
            let pending = client.groups().list_pending(request).await.unwrap().into_inner().messages;
            deadlines
                .extend(pending.iter().filter_map(|message| message.ack_deadline_time).map(|at| at.seconds));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        go.notify_one();
    };
    let (told, ()) = soon("the end", async { tokio::join!(consuming, meanwhile) }).await;
    assert_eq!(told.unwrap(), Consumed { acknowledged: 1, ..Consumed::default() });
    assert_eq!(calls.load(SeqCst), 1, "nobody else got it");
}

/// The failures: a member has another name after a lost connection, or no lease, and others get what its handlers work on.
#[tokio::test]
async fn a_member_comes_back_within_its_lease_under_the_same_name() {
    let setup = Setup::new().await;
    let (client, door) = client(&setup).await;
    group(&client, "g", "t/#").await;
    client.publish(to("t/1", "x")).await.unwrap();
    let (calls, stop) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let (begun, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let handle = {
        let (calls, begun, go) = (Arc::clone(&calls), Arc::clone(&begun), Arc::clone(&go));
        move |_| {
            calls.fetch_add(1, SeqCst);
            let (begun, go) = (Arc::clone(&begun), Arc::clone(&go));
            async move {
                begun.notify_one();
                go.notified().await;
                Ok(())
            }
        }
    };
    let consuming = client.consume(Options::of("g"), handle, async { stop.notified().await });
    // Not through the door.
    let groups = GroupsClient::new(setup.channel.clone());
    let members = async || {
        let request = ListMembersRequest { name: "g".to_owned() };
        groups.clone().list_members(request).await.unwrap().into_inner().members
    };
    let meanwhile = async {
        begun.notified().await;
        let before = members().await;
        assert_eq!(before.len(), 1, "{before:?}");
        assert!(before[0].member_id.starts_with("member-"), "{before:?}");
        let delivered = before[0].oldest_delivery_time.unwrap().seconds;
        let inside = door.to.swap(0, SeqCst);
        door.slam();
        let away = soon("the loss", async {
            loop {
                match members().await {
                    members if members.iter().any(|member| member.connected) => {}
                    members => return members,
                }
            }
        })
        .await;
        assert_eq!(away.len(), 1, "it has its place for its lease");
        let lease = away[0].lease_time.unwrap().seconds;
        // By the clock of the gateway: 15 s after it has heard of the loss.
        assert!(lease >= delivered + 15, "{delivered} {lease}");
        door.to.store(inside, SeqCst);
        let again = soon("the next stream", async {
            loop {
                let members = members().await;
                // The outstanding message has come again, too.
                if members.iter().any(|member| member.connected && member.outstanding == 1) {
                    return members;
                }
            }
        })
        .await;
        assert_eq!(again.len(), 1, "{again:?}");
        assert_eq!(again[0].member_id, before[0].member_id);
        go.notify_one();
        let settled = async { while members().await.iter().any(|member| member.outstanding > 0) {} };
        soon("the acknowledgement", settled).await;
        stop.notify_one();
    };
    let (told, ()) = soon("the end", async { tokio::join!(consuming, meanwhile) }).await;
    assert_eq!(told.unwrap(), Consumed { acknowledged: 1, ..Consumed::default() });
    assert_eq!(calls.load(SeqCst), 1);
    // Another call is another member, and the one that has left keeps nothing.
    client.publish(to("t/1", "y")).await.unwrap();
    let name = Mutex::new(String::new());
    let handle = |_| async { Ok(()) };
    let stopping = async {
        let one = async { while members().await.len() != 1 {} };
        soon("its place", one).await;
        *name.lock() = members().await[0].member_id.clone();
    };
    soon("the second", client.consume(Options::of("g"), handle, stopping)).await.unwrap();
    assert!(name.lock().starts_with("member-"));
    assert!(
        members().await.is_empty(),
        "who has left keeps no place, even if it had not heard yet that it has joined"
    );
}

/// The failure: a handler that needs longer than the group's deadline has its message handled a second time meanwhile,
/// and so has what waits behind it.
#[tokio::test]
async fn what_a_slow_handler_has_and_what_waits_behind_it_stay_with_it() {
    let setup = Setup::new().await;
    let (client, _door) = client(&setup).await;
    let filter =
        Filter { topic_filters: vec!["t/#".to_owned()], include_backends: true, ..Filter::default() };
    // The shortest there is.
    let ack_deadline = Duration::from_secs(1).try_into().ok();
    let group = Group { name: "g".to_owned(), filter: Some(filter), ack_deadline, ..Group::default() };
    let request = CreateGroupRequest { group: Some(group), ..CreateGroupRequest::default() };
    client.groups().create_group(request).await.unwrap();
    for text in ["1", "2"] {
        client.publish(to("t/1", text)).await.unwrap();
    }
    let (seen, stop, go) =
        (Arc::new(Mutex::new(Vec::new())), Arc::new(Notify::new()), Arc::new(Notify::new()));
    let handle = {
        let (seen, stop, go) = (Arc::clone(&seen), Arc::clone(&stop), Arc::clone(&go));
        move |delivery: Delivery| {
            let (seen, stop, go) = (Arc::clone(&seen), Arc::clone(&stop), Arc::clone(&go));
            async move {
                seen.lock().push((text(&delivery).1, delivery.attempt));
                go.notified().await;
                go.notify_one();
                if seen.lock().len() >= 2 {
                    stop.notify_one();
                }
                Ok(())
            }
        }
    };
    let consuming = client.consume(Options::of("g"), handle, async { stop.notified().await });
    let meanwhile = async {
        let mut deadlines: HashMap<String, HashSet<i64>> = HashMap::new();
        while deadlines.len() < 2 || deadlines.values().any(|seen| seen.len() < 4) {
            let request = ListPendingRequest { name: "g".to_owned(), ..ListPendingRequest::default() };
            for message in client.groups().list_pending(request).await.unwrap().into_inner().messages {
                let deadline = message.ack_deadline_time.map(|time| time.seconds);
                deadlines.entry(message.message_id).or_default().extend(deadline);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        go.notify_one();
    };
    let (told, ()) = soon("the end", async { tokio::join!(consuming, meanwhile) }).await;
    assert_eq!(*seen.lock(), [("1".to_owned(), 1), ("2".to_owned(), 1)]);
    assert_eq!(told.unwrap(), Consumed { acknowledged: 2, ..Consumed::default() });
}

/// The failure: what a member that stops could not finish waits for its lease, since its name has one.
#[tokio::test]
async fn what_is_left_after_the_time_to_drain_goes_to_others_at_once() {
    let setup = Setup::new().await;
    let (client, _door) = client(&setup).await;
    group(&client, "g", "t/#").await;
    for text in ["1", "2"] {
        client.publish(to("t/1", text)).await.unwrap();
    }
    let options = Options::of("g").lease(Duration::from_secs(3600)).drain(Duration::ZERO);
    let pending = async || {
        let request = ListPendingRequest { name: "g".to_owned(), ..ListPendingRequest::default() };
        client.groups().list_pending(request).await.unwrap().into_inner().messages.len()
    };
    let begun = Notify::new();
    let handle = |_| {
        begun.notify_one();
        std::future::pending()
    };
    let both = async {
        begun.notified().await;
        while pending().await < 2 {}
    };
    let told = soon("the end", client.consume(options, handle, both)).await.unwrap();
    assert_eq!(told, Consumed { unsettled: 1, ..Consumed::default() });
    let (seen, stop) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Notify::new()));
    let handle = {
        let (seen, stop) = (Arc::clone(&seen), Arc::clone(&stop));
        move |delivery: Delivery| {
            seen.lock().push(text(&delivery).1);
            if seen.lock().len() == 2 {
                stop.notify_one();
            }
            async { Ok(()) }
        }
    };
    let told = soon("the rest", client.consume(Options::of("g"), handle, async { stop.notified().await }));
    assert_eq!(told.await.unwrap(), Consumed { acknowledged: 2, ..Consumed::default() });
    assert_eq!(*seen.lock(), ["1", "2"]);
}

/// The failure: a command is there twice because the answer to the first try was lost.
#[tokio::test]
async fn a_command_that_is_started_again_is_there_once() {
    let setup = Setup::new().await;
    let (client, door) = client(&setup).await;
    let spec =
        CommandSpec { device_id: "valve".to_owned(), name: "open".to_owned(), ..CommandSpec::default() };
    let request = StartCommandRequest { spec: Some(spec), ..StartCommandRequest::default() };
    let started = client.start_command(request.clone()).await.unwrap();
    assert!(!started.command_id.is_empty() && started.state() == CommandState::Queued, "{started:?}");
    // For all that the client knows its answer went with the connection: it asks again, under the same id.
    door.slam();
    let again = StartCommandRequest { command_id: started.command_id.clone(), ..request.clone() };
    let again = client.start_command(again).await.unwrap();
    assert_eq!((again.command_id, again.create_time), (started.command_id.clone(), started.create_time));
    // Without an id it is another command.
    let other = client.start_command(request).await.unwrap();
    assert_ne!(other.command_id, started.command_id);
    let list = ListCommandsRequest { device_id: "valve".to_owned(), ..ListCommandsRequest::default() };
    let listed = client.list_commands(list).all().await.unwrap();
    assert_eq!(listed.len(), 2, "{listed:?}");
}

/// The failures: a list ends with its first page, or with the connection; what is not there is an error.
#[tokio::test]
async fn lists_are_read_to_their_end_over_a_lost_connection() {
    let setup = Setup::new().await;
    let mut devices = Vec::new();
    for number in 0..7 {
        let device = setup.device(&format!("d{number}")).await;
        device.send("t", "1").await;
        devices.push(device);
    }
    let (client, door) = client(&setup).await;
    let mut list = client.list_devices(ListDevicesRequest { page_size: 3, ..ListDevicesRequest::default() });
    let mut seen = Vec::new();
    while let Some(device) = soon("a device", list.next()).await.unwrap() {
        if seen.is_empty() {
            door.slam();
        }
        seen.push(device.device_id);
    }
    seen.sort();
    assert_eq!(seen, (0..7).map(|number| format!("d{number}")).collect::<Vec<_>>());
    assert!(list.next().await.unwrap().is_none(), "it stays at its end");
    let request = ListLatestRequest { page_size: 2, ..ListLatestRequest::default() };
    let values = async || client.list_latest(request.clone()).all().await.unwrap().len();
    soon("all values", async { while values().await < 7 {} }).await;
    assert!(client.device("d3").await.unwrap().is_some_and(|device| device.online));
    assert_eq!(client.device("nobody").await.unwrap(), None);
    assert_eq!(client.stored_command("nothing").await.unwrap(), None);
}

/// The failures: a watch ends with the connection, or goes on for ever when its command has ended.
#[tokio::test(flavor = "multi_thread")]
async fn a_watched_command_is_followed_to_its_end() {
    let setup = Setup::new().await;
    let (client, door) = client(&setup).await;
    let start = async || {
        let spec =
            CommandSpec { device_id: "valve".to_owned(), name: "open".to_owned(), ..CommandSpec::default() };
        let request = StartCommandRequest { spec: Some(spec), ..StartCommandRequest::default() };
        client.start_command(request).await.unwrap().command_id
    };
    let id = start().await;
    let mut watch = client.watch_command(&id);
    let first = soon("the command", watch.next()).await.unwrap().unwrap();
    assert_eq!((first.command_id.as_str(), first.state()), (id.as_str(), CommandState::Queued));
    door.slam();
    let mut device = Responder::new(&setup, Protocol::V5, "valve");
    let heard = device.hear();
    device.answer(&heard, 200, "opened");
    let mut last = first;
    while let Some(command) = soon("a change", watch.next()).await.unwrap() {
        last = command;
    }
    assert_eq!((last.state(), last.reply.unwrap().payload.as_ref()), (CommandState::Replied, &b"opened"[..]));
    assert!(watch.next().await.unwrap().is_none(), "it stays at its end");
    assert_eq!(client.stored_command(&id).await.unwrap().unwrap().state(), CommandState::Replied);
    let ended = client.cancel_command(&id).await.unwrap_err();
    assert_eq!(ended.reason(), &Reason::CommandEnded);
    drop(device);
    let missing = client.watch_command("nothing").next().await.unwrap_err();
    assert_eq!(missing.reason(), &Reason::CommandNotFound);
}

/// The failures: a stream ends for good with its token though there is another, or never ends without one; the source
/// is asked once.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_goes_on_with_the_next_token_of_its_source() {
    let guarded = Guarded::with_roles().await;
    let address = format!("http://{}", guarded.setup.gateway.address("grpc").unwrap());
    let admin = Client::at(&address).token(guarded.token("admin")).unwrap().connect().await.unwrap();
    let request = CreateTokenRequest { role: Role::Reader.into(), ..CreateTokenRequest::default() };
    let made = admin.security().create_token(request).await.unwrap().into_inner();
    let token = Arc::new(Mutex::new(made.secret.clone()));
    let shown = Arc::clone(&token);
    let ask = move || Ok::<_, String>(shown.lock().clone());
    let renewing = Client::at(&address).token_from(ask).connect().await.unwrap();
    let fixed = Client::at(&address).token(&made.secret).unwrap().connect().await.unwrap();
    let request = WatchLatestRequest::default();
    let (mut goes_on, mut ends) = (renewing.watch_latest(request.clone()), fixed.watch_latest(request));
    for watch in [&mut goes_on, &mut ends] {
        let first = soon("the first", watch.next()).await.unwrap();
        assert!(matches!(first, Update::Item(watch_latest_item::Item::SnapshotEnd(_))), "{first:?}");
    }
    *token.lock() = guarded.token("reader").to_owned();
    let revoke = RevokeTokenRequest { token_id: made.token.unwrap().token_id };
    admin.security().revoke_token(revoke).await.unwrap();
    let ended = soon("the end", ends.next()).await.unwrap_err();
    assert_eq!(ended.reason(), &Reason::CredentialsRevoked);
    let lost = soon("the loss", goes_on.next()).await.unwrap();
    let Update::Lost(error) = lost else { panic!("{lost:?}") };
    assert_eq!(error.reason(), &Reason::CredentialsRevoked);
    let again = soon("the next stream", goes_on.next()).await.unwrap();
    assert!(matches!(again, Update::Reconnected { resumed: false }), "{again:?}");
    // A source that fails says so.
    let failing = Client::at(&address).token_from(|| Err::<String, _>("the vault is shut"));
    let failed = failing.connect().await.unwrap().device("d").await.unwrap_err();
    assert_eq!(failed.code(), Code::Unauthenticated);
    assert!(failed.message().contains("the vault is shut"), "{failed}");
}

#[tokio::test]
async fn a_drain_lets_handlers_finish_and_acknowledges_them() {
    let setup = Setup::new().await;
    let (client, _door) = client(&setup).await;
    group(&client, "g", "t/#").await;
    for number in 0..10 {
        client.publish(to("t/1", &number.to_string())).await.unwrap();
    }
    let (stop, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let handle = {
        let (stop, go) = (Arc::clone(&stop), Arc::clone(&go));
        move |_| {
            let (stop, go) = (Arc::clone(&stop), Arc::clone(&go));
            async move {
                stop.notify_one();
                go.notified().await;
                go.notify_one();
                Ok(())
            }
        }
    };
    let stopping = async {
        stop.notified().await;
        go.notify_one();
    };
    let told = soon("the end", client.consume(Options::of("g"), handle, stopping)).await.unwrap();
    assert_eq!(told.unsettled, 0);
    // Messages that were not delivered before the drain are still there, and none of the others.
    let lag = client
        .groups()
        .get_group(mqtt_gateway_client::v1::GetGroupRequest { name: "g".to_owned() })
        .await
        .unwrap();
    let status = lag.into_inner().group.unwrap().status.unwrap();
    assert_eq!(status.lag_messages + told.acknowledged, 10, "{told:?} {status:?}");
    assert!(told.acknowledged >= 1);
}

#[tokio::test]
async fn what_was_done_is_acknowledged_over_a_lost_connection_not_done_twice() {
    let setup = Setup::new().await;
    let (client, door) = client(&setup).await;
    group(&client, "g", "t/#").await;
    client.publish(to("t/1", "x")).await.unwrap();
    let (calls, stop) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let (begun, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let handle = {
        let (calls, begun, go) = (Arc::clone(&calls), Arc::clone(&begun), Arc::clone(&go));
        move |_| {
            calls.fetch_add(1, SeqCst);
            let (begun, go) = (Arc::clone(&begun), Arc::clone(&go));
            async move {
                begun.notify_one();
                go.notified().await;
                Ok(())
            }
        }
    };
    let consuming = client.consume(Options::of("g"), handle, async { stop.notified().await });
    let meanwhile = async {
        begun.notified().await;
        let before = door.passed.load(SeqCst);
        door.slam();
        until(|| door.passed.load(SeqCst) > before).await;
        go.notify_one();
        let lag = async || {
            let request = mqtt_gateway_client::v1::GetGroupRequest { name: "g".to_owned() };
            let group = client.groups().get_group(request).await.ok()?.into_inner().group?;
            Some(group.status?.lag_messages)
        };
        soon("the acknowledgement", async { while lag().await != Some(0) {} }).await;
        stop.notify_one();
    };
    let (told, ()) = soon("the end", async { tokio::join!(consuming, meanwhile) }).await;
    assert_eq!(told.unwrap().acknowledged, 1);
    assert_eq!(calls.load(SeqCst), 1);
}

/// Kill rounds: a consumer that acknowledges while the gateway dies under it. Nothing that was published and accepted is
/// missing, and the messages of each topic come in their order, repeated at most.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_missing_and_order_holds_over_kill_9_during_consume() {
    const ROUNDS: usize = 4;
    // Without TLS: a server of the tests that starts anew has a new authority.
    let plain = "insecure_grpc = true\ngrpc.tls = false\n";
    let mut server = Server::start_with(&[], plain);
    let door = Door::before(server.ports.grpc).await;
    let client = Client::at(format!("http://127.0.0.1:{}", door.port)).connect().await.unwrap();
    group(&client, "g", "t/#").await;
    let over = Arc::new(AtomicBool::new(false));
    let publishing = tokio::spawn({
        let (client, over) = (client.clone(), Arc::clone(&over));
        async move {
            let mut accepted = HashSet::new();
            for number in 0.. {
                if over.load(SeqCst) {
                    break;
                }
                let request = to(&format!("t/{}", number % 7), &number.to_string());
                let key = format!("n{number}");
                let request = PublishRequest { idempotency_key: key, wait: Wait::Durable.into(), ..request };
                // With its key it is there once, whatever a kill leaves open; what fails is sent until it is accepted.
                loop {
                    match client.publish(request.clone()).await {
                        Ok(_) => {
                            accepted.insert(number);
                            break;
                        }
                        // The kill came between the key and the answer: it may be there or not.
                        Err(error) if *error.reason() == Reason::OutcomeLost => break,
                        Err(error) => assert!(error.is_temporary(), "{error}"),
                    }
                }
            }
            accepted
        }
    });
    let seen: Arc<Mutex<Vec<usize>>> = Arc::default();
    let stop = Arc::new(Notify::new());
    let consuming = tokio::spawn({
        let (client, seen, stop) = (client.clone(), Arc::clone(&seen), Arc::clone(&stop));
        async move {
            let handle = move |delivery: Delivery| {
                let seen = Arc::clone(&seen);
                async move {
                    let number = text(&delivery).1.parse().unwrap();
                    seen.lock().push(number);
                    Ok(())
                }
            };
            let options = Options::of("g").member("m").outstanding(16);
            client.consume(options, handle, async { stop.notified().await }).await
        }
    });
    for round in 1..=ROUNDS {
        until(|| seen.lock().len() >= round * 40).await;
        server = tokio::task::spawn_blocking(move || server.kill_and_restart(&[], plain)).await.unwrap();
        door.to.store(server.ports.grpc, SeqCst);
        door.slam();
    }
    over.store(true, SeqCst);
    let accepted = soon("the last publish", publishing).await.unwrap();
    assert!(accepted.len() >= ROUNDS * 40 - ROUNDS);
    until(|| accepted.is_subset(&seen.lock().iter().copied().collect())).await;
    stop.notify_one();
    let told = soon("the end", consuming).await.unwrap().unwrap();
    assert_eq!(told.missing, 0);
    // A message may come again after a kill; then those behind it do too. First sights are in order, for each topic.
    let (mut last, mut first) = (HashMap::new(), HashSet::new());
    for number in seen.lock().iter().copied().filter(|number| first.insert(*number)) {
        let before = last.insert(number % 7, number);
        assert!(before.is_none_or(|before| before < number), "{number} after {before:?}");
    }
}

/// The failure: whoever was back first got all, so that what the other member worked on was begun a second time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_two_members_work_on_is_begun_once_over_a_restart() {
    let plain = "insecure_grpc = true\ngrpc.tls = false\n";
    for restart in [Server::stop_and_restart, Server::kill_and_restart] {
        let server = Server::start_with(&[], plain);
        let door = Door::before(server.ports.grpc).await;
        let client = Client::at(format!("http://127.0.0.1:{}", door.port)).connect().await.unwrap();
        group(&client, "g", "t/#").await;
        let begun: Arc<Mutex<HashMap<String, Vec<String>>>> = Arc::default();
        let (go, stop) = (tokio::sync::watch::channel(false).0, Arc::new(Notify::new()));
        let members: Vec<_> = ["one", "two"]
            .map(|name| {
                let (client, stop, begun, go) =
                    (client.clone(), Arc::clone(&stop), Arc::clone(&begun), go.subscribe());
                let handle = move |delivery: Delivery| {
                    begun.lock().entry(name.to_owned()).or_default().push(text(&delivery).0);
                    let mut go = go.clone();
                    async move {
                        let _ = go.wait_for(|go| *go).await;
                        Ok(())
                    }
                };
                let options = Options::of("g").member(name).lease(Duration::from_secs(20));
                tokio::spawn(async move { client.consume(options, handle, stop.notified()).await })
            })
            .into();
        let connected = async |count: usize| {
            soon("both members", async {
                loop {
                    let request = ListMembersRequest { name: "g".to_owned() };
                    let listed = client.groups().list_members(request).await;
                    let members = listed.map_or_else(|_| Vec::new(), |listed| listed.into_inner().members);
                    if members.iter().filter(|member| member.connected).count() == count {
                        break;
                    }
                }
            })
            .await;
        };
        connected(2).await;
        let publish = async || {
            for number in 0..10 {
                client.publish(to(&format!("t/{number}"), "x")).await.unwrap();
            }
        };
        publish().await;
        let count = || begun.lock().values().map(Vec::len).sum::<usize>();
        until(|| count() == 10).await;
        assert_eq!(begun.lock().len(), 2, "each has some");
        let server = tokio::task::spawn_blocking(move || restart(server, &[], plain)).await.unwrap();
        door.to.store(server.ports.grpc, SeqCst);
        door.slam();
        connected(2).await;
        // Behind whatever would come again.
        publish().await;
        go.send_replace(true);
        until(|| count() == 20).await;
        stop.notify_waiters();
        let mut acknowledged = 0;
        for member in members {
            acknowledged += soon("the end", member).await.unwrap().unwrap().acknowledged;
        }
        assert_eq!((count(), acknowledged), (20, 20), "{begun:?}");
    }
}
