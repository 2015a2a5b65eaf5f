//! Attacks on the work of a broker: each is something that a client may legally send, far too often.

use super::attack::{Client, Door, Then};
use super::packets::{self, Hello, PINGRESP, SUBACK, publish, subscribe, unsubscribe, ws_ping};
use super::{Plan, Sizes, http};
use crate::codec::{PINGREQ, PUBACK, PUBCOMP, PUBREC, PUBREL, ack};
use clap::ValueEnum;

/// Kind of attack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mix {
    /// Nothing; something else may attack meanwhile
    Quiet,
    /// Ten plain publishers at QoS 0: what all others are compared with
    Flood,
    /// Ten publishers at QoS 1
    Flood1,
    /// Publishing at QoS 0 to new topics all the time
    Topics,
    /// Publishing retained messages to new topics all the time
    RetainNew,
    /// One client: 1 MiB SUBSCRIBEs whose filters match retained messages
    Replay,
    /// Two of them
    Replay2,
    /// The same with 10,000 long filters in each packet, where more are refused
    ReplayLong,
    /// Ten clients: SUBSCRIBEs of 100 filters that match retained messages
    ReplayMany,
    /// One client: 2,100 wildcard filters that match none of many retained topics (--retained)
    Scan,
    /// 8,192 shapes of wildcard filters from each of ten clients, and messages to deep topics
    Deep,
    /// The same filters subscribed to and given up, again and again
    DeepChurn,
    /// PUBACKs for nothing, 3.1.1
    Puback,
    /// PUBACKs for nothing, MQTT 5
    PubackV5,
    /// PUBRECs for nothing
    Pubrec,
    /// PUBRELs for nothing
    Pubrel,
    /// PUBCOMPs for nothing
    Pubcomp,
    /// PINGREQs
    Pingreq,
    /// QoS 2 handshakes
    Qos2,
    /// UNSUBSCRIBEs, one unknown filter each
    Unsubscribe,
    /// UNSUBSCRIBEs of 1 MiB
    UnsubscribeWide,
    /// SUBSCRIBEs to the same filter
    Subscribe,
    /// SUBSCRIBEs to new filters
    SubscribeNew,
    /// SUBSCRIBEs of 1 MiB to new filters, each given up again
    SubscribeWide,
    /// SUBSCRIBEs that ask for a retained message each (retain handling 0)
    SubscribeRetained,
    /// SUBSCRIBE and UNSUBSCRIBE of new filters in sessions on disk
    SubscribeDurable,
    /// Joining and leaving new shared groups
    Shared,
    /// Connecting and tearing off
    Connect,
    /// The same with the same few client ids
    Takeover,
    /// The same with wills
    Wills,
    /// The same with persistent sessions
    Sessions,
    /// Connecting and sending what is malformed
    Malformed,
    /// 2,000 logins with wrong passwords, again and again; of 20 addresses with --sources 20
    HashQueue,
    /// One publisher to many subscribers (--subscribers)
    Fanout,
    /// Ten publishers to subscribers that do not read
    Slow,
    /// WebSocket pings
    WsPing,
    /// WebSocket frames of one byte
    WsTiny,
    /// One byte in each TCP segment
    Tiny,
    /// Updates of ten devices' shadows, 6 KB of JSON that changes all the time
    Shadow,
    /// Replies to commands that nobody sent
    CommandReply,
    /// Requests over HTTP, as many as are answered: lists of devices, and messages
    Http,
    /// Forms of logins to the web page that never come, 1,000 at once
    PageSlots,
    /// Memory: WebSocket pings whose answers are not read
    MemWsPings,
    /// Memory: PINGREQs and SUBSCRIBEs whose answers are not read
    MemReplies,
    /// Memory: 3,000 unfinished PUBLISHes of 1 MB
    MemFrames,
    /// Memory: 1,000 unfinished CONNECTs of 950 KB
    MemConnects,
    /// Memory: 2,000 CONNECTs of 190 KB, with credentials that wait for a decision
    MemCredentials,
    /// Memory: filters of 900 bytes, as many as are taken
    MemFilters,
    /// Memory: wills of 600 KB
    MemWills,
    /// Memory: wills of 240 KB
    MemSmallWills,
    /// Memory: 20,000 sessions with 20 KB of filters each, left behind
    MemSessions,
    /// Memory: 300 subscribers that do not read, each with a topic of its own
    MemSlow,
    /// Memory: queues of persistent sessions without a connection
    MemQueues,
    /// Memory: topic aliases of 4 KB
    MemAliases,
    /// Memory: retained messages of 1 MB
    MemRetained,
    /// Memory: unfinished bodies of 1 MB over HTTP
    MemHttpBodies,
    /// Memory: streams over HTTP that are not read
    MemHttpStreams,
}

/// Connections of a flood.
const FLOODERS: usize = 10;
/// A packet a little below the usual limit of 1 MiB.
const WIDE: usize = (1 << 20) - 64;
/// Bytes that a flooder puts together at once.
const CHUNK: usize = 64 << 10;

pub fn id(kind: &str, i: usize) -> String {
    format!("attack-{kind}-{i}")
}

pub fn hello(kind: &str, i: usize) -> Client {
    greet(Hello::new(id(kind, i)))
}

pub fn greet(hello: Hello) -> Client {
    let bytes = hello.encode();
    Client::new(move |out| out.extend_from_slice(&bytes))
}

/// So many clients that each send `chunk` again and again.
fn flood(kind: &str, chunk: &[u8]) -> Plan {
    Plan::attack((0..FLOODERS).map(|i| hello(kind, i).repeat(chunk.to_vec())))
}

/// As many packets as a chunk holds; `one` appends the packet with this number.
fn chunk(mut one: impl FnMut(&mut Vec<u8>, usize)) -> Vec<u8> {
    let mut out = Vec::with_capacity(CHUNK + 1024);
    for n in 0.. {
        if out.len() >= CHUNK {
            break;
        }
        one(&mut out, n);
    }
    out
}

fn pid(n: usize) -> u16 {
    (n % 60_000) as u16 + 1
}

/// So many clients that each send packets which `one` appends by client and running number.
fn running(kind: &str, one: impl Fn(&mut Vec<u8>, usize, usize) + Clone + Send + 'static) -> Plan {
    Plan::attack((0..FLOODERS).map(|i| hello(kind, i).feed(counting(i, one.clone()))))
}

fn counting(
    i: usize,
    one: impl Fn(&mut Vec<u8>, usize, usize) + Send + 'static,
) -> impl FnMut(&mut Vec<u8>) + Send {
    let mut n = 0;
    move |out: &mut Vec<u8>| {
        while out.len() < CHUNK {
            one(out, i, n);
            n += 1;
        }
    }
}

/// Filters from `make` until a packet is full.
fn filling(bytes: usize, overhead: usize, make: impl Fn(usize) -> String) -> Vec<String> {
    let mut left = bytes;
    let mut all = Vec::new();
    for n in 0.. {
        let filter = make(n);
        let Some(rest) = left.checked_sub(filter.len() + overhead) else { break };
        left = rest;
        all.push(filter);
    }
    all
}

/// Publishes `count` retained messages to the topics that `topic` gives, before the attack.
fn retain(count: usize, topic: impl Fn(usize) -> String + Send + 'static) -> Client {
    let mut n = 0;
    hello("seed", 0)
        .feed(move |out| {
            while n < count && out.len() < CHUNK {
                publish(out, &topic(n), 0, true, 0, b"retained");
                n += 1;
                if n == count {
                    out.extend_from_slice(&PINGREQ);
                }
            }
        })
        .done(PINGRESP, 1, Then::Close)
        .once_only()
}

/// A wildcard filter for a topic of thirteen levels `l0/../l12` and one more: bit k of `shape` makes level k a `+`.
fn shape(shape: usize) -> String {
    let levels = (0..13).map(|k| if shape >> k & 1 == 1 { "+/".to_string() } else { format!("l{k}/") });
    levels.chain(["+".to_string()]).collect()
}

fn deep_topic(n: usize) -> String {
    (0..13).map(|k| format!("l{k}/")).chain([format!("n{n}")]).collect()
}

/// 2^13 shapes, in packets that stay well below every limit.
fn shapes(out: &mut Vec<u8>) {
    for first in (0..1 << 13).step_by(512) {
        subscribe(out, first as u16 + 1, (first..first + 512).map(shape), 0);
    }
}

/// Connections that are torn off as soon as they are greeted.
fn storm(count: usize, make: impl Fn(usize, usize) -> Hello + Clone + Send + 'static) -> Plan {
    Plan::attack((0..count).map(|i| {
        let make = make.clone();
        let mut n = 0;
        Client::new(move |out| {
            out.extend_from_slice(&make(i, n).encode());
            n += 1;
        })
        .done(packets::CONNACK, 1, Then::Again)
    }))
}

/// Packets of 1 MiB whose filters, topics with `tail` at their end, match a retained message each.
fn replay(clients: usize, tail: &str) -> Plan {
    const TOPICS: usize = 10_000;
    let most = if tail.is_empty() { usize::MAX } else { TOPICS };
    let filters = filling(WIDE, 3, |n| format!("r/{}{tail}", n % TOPICS)).into_iter().take(most);
    let mut packet = Vec::new();
    subscribe(&mut packet, 1, filters, 0);
    let attack = (0..clients).map(|i| hello("replay", i).repeat(packet.clone()));
    let tail = tail.to_string();
    Plan::attack(attack).after([retain(TOPICS, move |n| format!("r/{n}{tail}"))])
}

pub fn plan(mix: Mix, sizes: &Sizes) -> Plan {
    match mix {
        Mix::Quiet => Plan::default(),
        Mix::Flood => {
            flood("flood", &chunk(|out, _| publish(out, "flood/nobody", 0, false, 0, &[b'f'; 256])))
        }
        Mix::Flood1 => running("flood1", |out, i, n| {
            publish(out, &format!("flood/{i}"), 1, false, pid(n), &[b'f'; 256]);
        }),
        Mix::Topics => {
            running("topics", |out, i, n| publish(out, &format!("new/{i}/{n}"), 0, false, 0, b"value"))
        }
        Mix::RetainNew => {
            running("retain", |out, i, n| publish(out, &format!("new/{i}/{n}"), 0, true, 0, b"value"))
        }
        Mix::Replay => replay(1, ""),
        Mix::Replay2 => replay(2, ""),
        Mix::ReplayLong => replay(1, &format!("/{}", "r".repeat(95))),
        Mix::ReplayMany => running("replay", |out, _, n| {
            subscribe(out, pid(n), (0..100).map(|k| format!("r/{}", (100 * n + k) % 10_000)), 0);
        })
        .after([retain(10_000, |n| format!("r/{n}"))]),
        Mix::Scan => scan(sizes.retained),
        Mix::Deep => {
            let prepare = (0..FLOODERS).map(|i| {
                let mut all = Vec::new();
                shapes(&mut all);
                hello("deep", i).once(all).done(SUBACK, 16, Then::Hold).once_only()
            });
            let publish = |i: usize| {
                let one = |out: &mut Vec<u8>, i: usize, n: usize| {
                    publish(out, &deep_topic(i * 1_000_000_000 + n), 0, false, 0, b"deep");
                };
                hello("deep-publisher", i).feed(counting(i, one))
            };
            Plan::attack((0..FLOODERS).map(publish)).after(prepare)
        }
        Mix::DeepChurn => Plan::attack((0..FLOODERS).map(|i| {
            let mut all = Vec::new();
            shapes(&mut all);
            for first in (0..1 << 13).step_by(512) {
                unsubscribe(&mut all, first as u16 + 1, (first..first + 512).map(shape));
            }
            hello("churn", i).repeat(all)
        })),
        Mix::Puback => flood("puback", &chunk(|out, n| ack(out, PUBACK, pid(n)))),
        Mix::PubackV5 => {
            let chunk = chunk(|out, n| ack(out, PUBACK, pid(n)));
            let client = |i| greet(Hello { v5: true, ..Hello::new(id("puback5", i)) }).repeat(chunk.clone());
            Plan::attack((0..FLOODERS).map(client))
        }
        Mix::Pubrec => flood("pubrec", &chunk(|out, n| ack(out, PUBREC, pid(n)))),
        Mix::Pubrel => flood("pubrel", &chunk(|out, n| ack(out, PUBREL, pid(n)))),
        Mix::Pubcomp => flood("pubcomp", &chunk(|out, n| ack(out, PUBCOMP, pid(n)))),
        Mix::Pingreq => flood("ping", &chunk(|out, _| out.extend_from_slice(&PINGREQ))),
        Mix::Qos2 => flood(
            "qos2",
            &chunk(|out, n| {
                publish(out, "qos2/nobody", 2, false, pid(n), b"twice");
                ack(out, PUBREL, pid(n));
            }),
        ),
        Mix::Unsubscribe => {
            running("unsubscribe", |out, _, n| unsubscribe(out, pid(n), [format!("u/{}", n % 1000)]))
        }
        Mix::UnsubscribeWide => {
            let mut packet = Vec::new();
            unsubscribe(&mut packet, 1, filling(WIDE, 2, |n| format!("u/{n}")));
            flood("unsubscribe", &packet)
        }
        Mix::Subscribe => running("subscribe", |out, i, n| subscribe(out, pid(n), [format!("same/{i}")], 0)),
        Mix::SubscribeNew => running("subscribe", |out, i, n| {
            // Up to the usual limit of a session, and then what was there is given up.
            subscribe(out, pid(n), [format!("new/{i}/{n}/+")], 0);
            if n >= 5000 {
                unsubscribe(out, pid(n), [format!("new/{i}/{}/+", n - 5000)]);
            }
        }),
        Mix::SubscribeWide => Plan::attack((0..FLOODERS).map(|i| {
            let filters = filling(WIDE, 3, |n| format!("w/{i}/{n}"));
            let mut all = Vec::new();
            subscribe(&mut all, 1, filters.clone(), 0);
            unsubscribe(&mut all, 2, filters);
            hello("wide", i).repeat(all)
        })),
        Mix::SubscribeRetained => running("retained", |out, _, n| {
            subscribe(out, pid(n), [format!("r/{}", n % 1000)], 0);
        })
        .after([retain(1000, |n| format!("r/{n}"))]),
        Mix::SubscribeDurable => Plan::attack((0..FLOODERS).map(|i| {
            let one = |out: &mut Vec<u8>, i: usize, n: usize| {
                subscribe(out, pid(n), [format!("disk/{i}/{}", n % 5000)], 1);
                unsubscribe(out, pid(n), [format!("disk/{i}/{}", (n + 2500) % 5000)]);
            };
            greet(Hello { keep: true, ..Hello::new(id("disk", i)) }).feed(counting(i, one))
        })),
        Mix::Shared => running("shared", |out, i, n| {
            subscribe(out, pid(n), [format!("$share/g{n}/s/{i}")], 0);
            unsubscribe(out, pid(n), [format!("$share/g{n}/s/{i}")]);
        }),
        Mix::Connect => storm(50, |i, n| Hello::new(format!("storm-{i}-{n}"))),
        Mix::Takeover => storm(50, |i, _| Hello::new(format!("storm-{}", i % 5))),
        Mix::Wills => storm(50, |i, n| {
            let will = Some((format!("will/{i}"), vec![b'w'; 1024]));
            Hello { will, ..Hello::new(format!("storm-{i}-{n}")) }
        }),
        Mix::Sessions => {
            storm(50, |i, n| Hello { keep: true, ..Hello::new(format!("storm-{i}-{}", n % 1000)) })
        }
        Mix::Malformed => {
            let client = |i| hello("malformed", i).once(vec![0xf0, 0]);
            Plan::attack((0..100).map(client))
        }
        Mix::HashQueue => Plan::attack((0..2000).map(|i| {
            let mut n = 0;
            Client::new(move |out| {
                let login = Some(("bystander".to_string(), format!("guess-{i}-{n}")));
                out.extend_from_slice(&Hello { login, ..Hello::new(id("guess", i)) }.encode());
                n += 1;
            })
            .eager()
        })),
        Mix::Fanout => fanout(sizes.subscribers),
        Mix::Slow => slow(),
        Mix::WsPing => ws("ws-ping", &chunk(|out, _| ws_ping(out, b"ping"))),
        Mix::WsTiny => ws(
            "ws-tiny",
            // PINGREQs, byte by byte.
            &chunk(|out, n| out.extend_from_slice(&[0x82, 0x81, 0, 0, 0, 0, PINGREQ[n % 2]])),
        ),
        Mix::Tiny => {
            let chunk = chunk(|out, _| publish(out, "tiny/nobody", 0, false, 0, b"tiny"));
            Plan::attack((0..FLOODERS).map(|i| {
                let mut client = hello("tiny", i).repeat(chunk.clone());
                client.piece = 1;
                client
            }))
        }
        Mix::Shadow => Plan::attack((0..FLOODERS).map(|i| {
            let topic = format!("$gateway/devices/{}/shadow/update", id("shadow", i));
            let one = move |out: &mut Vec<u8>, _: usize, n: usize| {
                publish(out, &topic, 0, false, 0, shadow(n).as_bytes());
            };
            hello("shadow", i).feed(counting(i, one))
        })),
        Mix::CommandReply => running("reply", |out, i, n| {
            publish(out, &format!("cmd/{}/{n}/reply/200", id("reply", i)), 1, false, pid(n), b"done");
        }),
        Mix::Http => Plan::attack((0..FLOODERS).map(|i| {
            let mut both = http::head("GET", "devices?pageSize=1000", 0);
            both.extend_from_slice(&http::head("POST", &format!("topics/http/{i}"), 1024));
            both.extend_from_slice(&[b'h'; 1024]);
            http::client(both.clone()).repeat(both)
        })),
        Mix::PageSlots => Plan::attack((0..1_000).map(|_| {
            let head = "POST /page/login HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: same-origin\r\n\
                        Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 100\r\n\r\n";
            http::client(head.into())
        })),
        memory => super::memory::plan(memory),
    }
}

/// A document of about 6 KB, another one for each number.
fn shadow(n: usize) -> String {
    let fields: Vec<String> =
        (0..200).map(|field| format!("\"field{field}\":{{\"is\":{}}}", n + field)).collect();
    format!("{{\"state\":{{\"reported\":{{{}}}}}}}", fields.join(","))
}

fn scan(retained: usize) -> Plan {
    let filters: Vec<String> = (0..2100).map(|k| format!("s/+/+/none{k}")).collect();
    let mut packet = Vec::new();
    for some in filters.chunks(200) {
        subscribe(&mut packet, 1, some.iter().cloned(), 0);
    }
    let topic = |n| format!("s/{}/{}/x", n / 1000, n % 1000);
    Plan::attack([hello("scan", 0).once(packet)]).after([retain(retained, topic)])
}

fn fanout(subscribers: usize) -> Plan {
    let prepare = (0..subscribers).map(|i| {
        let mut bytes = Vec::new();
        subscribe(&mut bytes, 1, ["all/of/you".to_string()], 0);
        hello("fan", i).once(bytes).done(SUBACK, 1, Then::Hold).once_only()
    });
    Plan::attack([
        hello("fan-publisher", 0).repeat(chunk(|out, _| publish(out, "all/of/you", 0, false, 0, b"all")))
    ])
    .after(prepare)
}

fn slow() -> Plan {
    let deaf = (0..FLOODERS).map(|i| {
        let mut bytes = Hello::new(id("deaf", i)).encode();
        subscribe(&mut bytes, 1, ["slow/#".to_string()], 1);
        Client::new(move |out| out.extend_from_slice(&bytes)).deaf()
    });
    let mut plan = running("slow", |out, i, n| {
        publish(out, &format!("slow/{i}"), 1, false, pid(n), &[b's'; 256]);
    });
    plan.attack.extend(deaf);
    plan
}

fn ws(kind: &str, chunk: &[u8]) -> Plan {
    Plan::attack((0..FLOODERS).map(|i| {
        let mut client = hello(kind, i).repeat(chunk.to_vec());
        client.door = Door::Ws;
        client
    }))
}

#[cfg(test)]
mod tests {
    use super::super::packets::Counter;
    use super::*;

    /// Every mix that sends MQTT over TCP sends whole packets, one after another.
    #[test]
    fn streams_of_all_mixes_are_packets() {
        let sizes = Sizes { retained: 1000, subscribers: 10 };
        for mix in Mix::value_variants() {
            let Plan { prepare, attack } = plan(*mix, &sizes);
            for mut client in
                prepare.into_iter().chain(attack).take(12).filter(|client| client.door == Door::Tcp)
            {
                let mut bytes = Vec::new();
                (client.hello)(&mut bytes);
                let unfinished = matches!(mix, Mix::MemFrames | Mix::MemConnects);
                if !unfinished {
                    (client.feed)(&mut bytes);
                }
                let mut counter = Counter::default();
                counter.feed(&bytes);
                assert_eq!(counter.at_boundary(), *mix != Mix::MemConnects, "{mix:?}");
            }
        }
    }
}
