//! WAIT_ACKED: whatever happens to the device, the caller is told as soon as the gateway knows.

use std::io::Write as _;

use codec::{AckKind, Connect, Packet, encode_ack};
use gateway_core::{Protocol, limits::OverflowPolicy};
use mqtt_server::{config::Config, proto::gateway::v1};
use tokio::{runtime::Handle, task::block_in_place};
use tonic::Code;

use crate::{
    client::{Client, Got, decoded},
    harness::*,
};

/// Answer to a caller.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Told {
    Acked(u32),
    Rejected(u32),
    Dropped(v1::DropReason),
    Refused(Code, &'static str),
}

/// Step of a test once the message is on its way.
type Then = fn(&Setup, Client) -> Option<Client>;

struct Row {
    name: &'static str,
    configure: fn(&mut Config),
    connect: fn(&mut Connect),
    /// Another message is in flight and takes the only place.
    behind: bool,
    /// With a store the first that wait are in memory, and the oldest on disk go instead.
    in_memory: bool,
    request: fn(&mut v1::PublishRequest),
    then: Then,
    told: Told,
}

const ROW: Row = Row {
    name: "",
    configure: |_| {},
    connect: |_| {},
    behind: false,
    in_memory: false,
    request: |_| {},
    then: |_, client| Some(client),
    told: Told::Acked(0),
};

fn qos_2(request: &mut v1::PublishRequest) {
    request.qos = v1::Qos::ExactlyOnce.into();
}

fn one_place(connect: &mut Connect) {
    connect.receive_maximum = Some(1);
}

fn expires(request: &mut v1::PublishRequest) {
    request.expiry_seconds = Some(1);
}

fn short_queue(config: &mut Config) {
    config.limits.mailbox_messages = 3;
    config.limits.offline_messages = 3;
}

fn answer(client: &mut Client, kind: AckKind, code: u8) {
    let mut bytes = Vec::new();
    encode_ack(kind, 1, code, Protocol::V5, &mut bytes);
    client.stream.write_all(&bytes).unwrap();
}

fn again(setup: &Setup, change: impl FnOnce(&mut Connect)) -> Client {
    setup.raw("dev", change)
}

fn takes_and_acknowledges(mut client: Client) -> Option<Client> {
    let bytes = client.next_bytes().unwrap();
    let Packet::Publish(publish) = decoded(&bytes, Protocol::V5) else { panic!("{bytes:?}") };
    puback(&mut client, publish.packet_id, 0);
    Some(client)
}

/// Sends to the device until its queue is full or the oldest message in it has gone.
fn fill(setup: &Setup) -> Option<Told> {
    // A session with a store reads into memory what waits on disk, up to 128 messages, as soon as it is there.
    for _ in 0..300 {
        let sent = Handle::current().block_on(setup.publish(to_device("dev", "one too many")));
        if let Err(status) = sent {
            return Some(told(Err(status)));
        }
    }
    None
}

const ROWS: &[Row] = &[
    Row {
        name: "acknowledges",
        then: |_, mut client| {
            answer(&mut client, AckKind::PubAck, 0x10);
            Some(client)
        },
        told: Told::Acked(0x10),
        ..ROW
    },
    Row {
        name: "refuses QoS 1",
        then: |_, mut client| {
            answer(&mut client, AckKind::PubAck, 0x83);
            Some(client)
        },
        told: Told::Rejected(0x83),
        ..ROW
    },
    Row {
        name: "refuses QoS 2",
        request: qos_2,
        then: |_, mut client| {
            answer(&mut client, AckKind::PubRec, 0x97);
            Some(client)
        },
        told: Told::Rejected(0x97),
        ..ROW
    },
    Row {
        name: "takes QoS 2",
        request: qos_2,
        then: |_, mut client| {
            answer(&mut client, AckKind::PubRec, 0);
            assert!(matches!(client.next(), Got::Other(_)), "PUBREL");
            answer(&mut client, AckKind::PubComp, 0);
            Some(client)
        },
        ..ROW
    },
    Row {
        name: "comes back and acknowledges",
        then: |setup, client| {
            drop(client);
            takes_and_acknowledges(again(setup, |_| {}))
        },
        ..ROW
    },
    Row {
        name: "is taken over by a connection that acknowledges",
        then: |setup, _client| takes_and_acknowledges(again(setup, |_| {})),
        ..ROW
    },
    Row {
        name: "is taken over by a connection that begins anew",
        then: |setup, _client| Some(again(setup, |connect| connect.clean_start = true)),
        told: Told::Dropped(v1::DropReason::SessionEnded),
        ..ROW
    },
    Row {
        name: "comes back and begins anew",
        then: |setup, client| {
            drop(client);
            Some(again(setup, |connect| connect.clean_start = true))
        },
        told: Told::Dropped(v1::DropReason::SessionEnded),
        ..ROW
    },
    Row {
        name: "comes back for smaller packets only",
        request: |request| request.payload = vec![7; 1_000].into(),
        then: |setup, client| {
            drop(client);
            Some(again(setup, |connect| connect.maximum_packet_size = Some(500)))
        },
        told: Told::Dropped(v1::DropReason::TooLarge),
        ..ROW
    },
    Row {
        name: "goes, and its session with it",
        connect: |connect| connect.session_expiry = None,
        then: |_, _client| None,
        told: Told::Dropped(v1::DropReason::SessionEnded),
        ..ROW
    },
    Row {
        name: "goes, and its session expires",
        connect: |connect| connect.session_expiry = Some(1),
        then: |_, _client| None,
        told: Told::Dropped(v1::DropReason::SessionEnded),
        ..ROW
    },
    Row {
        name: "is deleted by an operator",
        then: |setup, client| {
            let request = v1::DeleteDeviceRequest { device_id: "dev".to_owned() };
            Handle::current().block_on(setup.devices().delete_device(request)).unwrap();
            Some(client)
        },
        told: Told::Dropped(v1::DropReason::SessionEnded),
        ..ROW
    },
    Row {
        name: "has a full queue that takes no more",
        configure: short_queue,
        connect: one_place,
        behind: true,
        then: |setup, client| {
            assert_eq!(fill(setup), Some(Told::Refused(Code::ResourceExhausted, "QUEUE_FULL")));
            let mut client = takes_none(client);
            answer(&mut client, AckKind::PubAck, 0);
            takes_and_acknowledges(client)
        },
        ..ROW
    },
    Row {
        name: "has a full queue from which the oldest goes",
        configure: |config| {
            short_queue(config);
            config.limits.overflow = OverflowPolicy::DropOldest;
        },
        connect: one_place,
        behind: true,
        in_memory: true,
        then: |setup, client| {
            assert_eq!(fill(setup), None);
            Some(client)
        },
        told: Told::Dropped(v1::DropReason::QueueFull),
        ..ROW
    },
    Row {
        name: "is connected and has no room until the message expires",
        connect: one_place,
        behind: true,
        request: expires,
        told: Told::Dropped(v1::DropReason::Expired),
        ..ROW
    },
    Row {
        name: "is away until the message expires that was never sent",
        connect: one_place,
        behind: true,
        request: expires,
        then: |_, _client| None,
        told: Told::Dropped(v1::DropReason::Expired),
        ..ROW
    },
];

fn wait_acked(request: v1::PublishRequest) -> v1::PublishRequest {
    v1::PublishRequest { wait: v1::Wait::Acked.into(), ..request }
}

/// Nothing has come.
fn takes_none(mut client: Client) -> Client {
    assert_eq!(client.ping(), []);
    client
}

fn told(answer: Result<v1::PublishResponse, tonic::Status>) -> Told {
    match answer {
        Ok(answer) => match answer.outcome() {
            v1::Outcome::Acked => Told::Acked(answer.reason_code.unwrap()),
            v1::Outcome::Rejected => Told::Rejected(answer.reason_code.unwrap()),
            v1::Outcome::Dropped => Told::Dropped(answer.drop_reason()),
            other => panic!("{other:?}"),
        },
        Err(status) => {
            let (code, reason) = refusal(&status);
            let known = ["QUEUE_FULL"].into_iter().find(|known| *known == reason);
            Told::Refused(code, known.unwrap_or_else(|| panic!("{status:?}")))
        }
    }
}

async fn outcome(row: &Row, stored: bool) -> Told {
    let setup = Setup::with(|config| {
        config.store.enabled = stored;
        config.grpc.default_deadline = "1h".parse().unwrap();
        (row.configure)(config);
    })
    .await;
    let mut client = block_in_place(|| setup.raw("dev", row.connect));
    if row.behind {
        setup.publish(to_device("dev", "first")).await.unwrap();
        assert!(matches!(block_in_place(|| client.next()), Got::Publish(..)));
    }
    let mut request = wait_acked(to_device("dev", "x"));
    (row.request)(&mut request);
    let call = {
        let mut publisher = setup.publisher();
        tokio::spawn(async move { publisher.publish(request).await })
    };
    if row.behind {
        let waits = async {
            loop {
                let request = v1::GetDeviceRequest { device_id: "dev".to_owned(), ..Default::default() };
                let device = setup.devices().get_device(request).await.unwrap().into_inner().device.unwrap();
                if device.queue.is_some_and(|queue| queue.pending > 0) {
                    return;
                }
                tokio::task::yield_now().await;
            }
        };
        soon("a message that waits", waits).await;
    } else {
        assert!(matches!(block_in_place(|| client.next()), Got::Publish(..)), "{}", row.name);
    }
    let _client = block_in_place(|| (row.then)(&setup, client));
    told(soon(row.name, call).await.unwrap().map(tonic::Response::into_inner))
}

/// Rules out a caller that waits for its deadline, an hour here, although the gateway knows the answer.
#[tokio::test(flavor = "multi_thread")]
async fn no_caller_waits_when_the_answer_is_known() {
    for stored in [true, false] {
        for row in ROWS.iter().filter(|row| !(stored && row.in_memory)) {
            assert_eq!(outcome(row, stored).await, row.told, "{} (stored: {stored})", row.name);
        }
    }
}
