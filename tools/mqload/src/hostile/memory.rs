//! Attacks on the memory of a broker: each makes it hold something, and then stays. Bounded in number.

use super::attack::{Client, Door, Then};
use super::mixes::{Mix, greet, hello, id};
use super::packets::{Hello, SUBACK, publish, publish_alias, publish_head, subscribe, ws_ping};
use super::{Plan, http};
use crate::codec::PINGREQ;

/// Bytes handed over at once, so that little waits on our own side.
const PIECE: usize = 64 << 10;

/// `bytes` zeros.
fn zeros(bytes: usize) -> impl FnMut(&mut Vec<u8>) + Send {
    let mut left = bytes;
    move |out: &mut Vec<u8>| {
        let n = left.min(PIECE);
        left -= n;
        out.resize(out.len() + n, 0);
    }
}

/// Sends `count` packets that `one` appends by number, a piece at a time.
fn counted(count: usize, one: impl Fn(&mut Vec<u8>, usize) + Send) -> impl FnMut(&mut Vec<u8>) + Send {
    let mut n = 0;
    move |out: &mut Vec<u8>| {
        while n < count && out.len() < PIECE {
            one(out, n);
            n += 1;
        }
    }
}

fn long_filter(a: usize, b: usize, bytes: usize) -> String {
    format!("m/{a}/{b}/{}", "f".repeat(bytes))
}

fn wills(count: usize, bytes: usize) -> Plan {
    Plan::attack((0..count).map(move |i| {
        let will = Some((format!("will/{i}"), vec![b'w'; 60_000]));
        // Made anew for each connection: many of them at once would be a lot on our side.
        Client::new(move |out| {
            let hello =
                Hello { v5: true, will: will.clone(), pad: bytes - 60_000, ..Hello::new(id("will", i)) };
            out.extend_from_slice(&hello.encode());
        })
    }))
}

pub fn plan(mix: Mix) -> Plan {
    match mix {
        Mix::MemWsPings => Plan::attack((0..20).map(|i| {
            let mut pings = Vec::new();
            while pings.len() < PIECE {
                ws_ping(&mut pings, &[b'p'; 125]);
            }
            // 100 MB of pings from each, were they all taken.
            let mut client =
                hello("ws-pings", i).feed(counted(1600, move |out, _| out.extend_from_slice(&pings))).deaf();
            client.door = Door::Ws;
            client
        })),
        Mix::MemReplies => Plan::attack((0..20).map(|i| {
            let one = |out: &mut Vec<u8>, n: usize| {
                for _ in 0..100 {
                    out.extend_from_slice(&PINGREQ);
                }
                subscribe(out, n as u16 | 1, (0..200).map(|k| format!("m/{k}")), 0);
            };
            hello("replies", i).feed(counted(100_000, one)).deaf()
        })),
        Mix::MemFrames => Plan::attack((0..3000).map(|i| {
            let mut begin = Vec::new();
            publish_head(&mut begin, "m/unfinished", 1_000_000 + 64);
            let mut rest = zeros(1_000_000 - 100);
            hello("frames", i).feed(move |out| {
                out.append(&mut begin);
                rest(out);
            })
        })),
        Mix::MemConnects => Plan::attack((0..1000).map(|i| {
            let mut packet = Hello { v5: true, pad: 950_000, ..Hello::new(id("connects", i)) }.encode();
            packet.truncate(40);
            // The beginning is right; of the properties' text only zeros come, and never all.
            let begin = packet.clone();
            Client::new(move |out| out.extend_from_slice(&begin)).feed(zeros(940_000)).eager().once_only()
        })),
        Mix::MemCredentials => Plan::attack((0..2000).map(|i| {
            // Made anew for each connection, as the wills are. Longer client ids are refused at once.
            Client::new(move |out| {
                let text = "c".repeat(63_000);
                let login = Some((format!("{i}-{text}"), text));
                let will = Some((format!("will/{i}"), vec![b'w'; 63_000]));
                out.extend_from_slice(&Hello { login, will, ..Hello::new(id("credentials", i)) }.encode());
            })
            .eager()
        })),
        Mix::MemFilters => Plan::attack((0..100).map(|i| {
            let one = move |out: &mut Vec<u8>, n: usize| {
                subscribe(out, n as u16 + 1, (0..100).map(|k| long_filter(i, n * 100 + k, 900)), 0);
            };
            hello("filters", i).feed(counted(100, one))
        })),
        Mix::MemWills => wills(1000, 600_000),
        Mix::MemSmallWills => wills(4000, 240_000),
        Mix::MemSessions => Plan::attack((0..50).map(|i| {
            let mut n = 0;
            Client::new(move |out| {
                // The last one stays.
                let session = n.min(400);
                let name = format!("session-{i}-{session}-{}", "s".repeat(200));
                out.extend_from_slice(&Hello { keep: true, ..Hello::new(name) }.encode());
                subscribe(out, 1, (0..20).map(|k| long_filter(i * 1000 + session, k, 1000)), 0);
                n += 1;
            })
            .done(SUBACK, 1, Then::Again)
        })),
        Mix::MemSlow => slow(300),
        Mix::MemQueues => queues(200),
        Mix::MemAliases => Plan::attack((0..2000).map(|i| {
            let one = move |out: &mut Vec<u8>, n: usize| {
                publish_alias(out, &format!("{i}/{n}/{}", "a".repeat(4000)), n as u16 + 1);
            };
            greet(Hello { v5: true, ..Hello::new(id("aliases", i)) }).feed(counted(64, one))
        })),
        Mix::MemRetained => Plan::attack((0..10).map(|i| {
            let one = move |out: &mut Vec<u8>, n: usize| {
                publish(out, &format!("m/{i}/{n}"), 0, true, 0, &vec![b'r'; 1_000_000]);
            };
            hello("retained", i).feed(counted(120, one))
        })),
        Mix::MemHttpBodies => Plan::attack((0..64).map(|i| {
            let head = http::head("POST", &format!("topics/mem/{i}"), 1_000_000);
            http::client(head).feed(zeros(1_000_000 - 100))
        })),
        Mix::MemHttpStreams => {
            let deaf = (0..50).map(|i| {
                http::client(http::head("GET", &format!("stream/messages?filters=sse/{i}"), 0)).deaf()
            });
            let mut plan =
                Plan::attack((0..50).map(|i| hello("sse", i).feed(counted(480, large(format!("sse/{i}"))))));
            plan.attack.splice(0..0, deaf);
            plan
        }
        _ => Plan::default(),
    }
}

/// Subscribers that do not read, and for each a publisher of 30 MB.
fn slow(count: usize) -> Plan {
    let deaf = (0..count).map(|i| {
        let mut bytes = Hello::new(id("deaf", i)).encode();
        subscribe(&mut bytes, 1, [format!("slow/{i}")], 1);
        Client::new(move |out| out.extend_from_slice(&bytes)).deaf()
    });
    let mut plan =
        Plan::attack((0..count).map(|i| hello("slow", i).feed(counted(480, large(format!("slow/{i}"))))));
    plan.attack.splice(0..0, deaf);
    plan
}

/// Persistent sessions that leave, and a publisher of 30 MB for each.
fn queues(count: usize) -> Plan {
    let away = (0..count).map(|i| {
        let mut bytes = Vec::new();
        subscribe(&mut bytes, 1, [format!("away/{i}")], 1);
        greet(Hello { keep: true, ..Hello::new(id("away", i)) })
            .once(bytes)
            .done(SUBACK, 1, Then::Close)
            .once_only()
    });
    Plan::attack((0..count).map(|i| hello("queue", i).feed(counted(480, large(format!("away/{i}"))))))
        .after(away)
}

/// Messages of 64 KB at QoS 1.
fn large(topic: String) -> impl Fn(&mut Vec<u8>, usize) + Send {
    move |out, n| publish(out, &topic, 1, false, n as u16 + 1, &[b'm'; 64_000])
}
