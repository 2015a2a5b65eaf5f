//! Devices that publish without end, and what each key's value must be in the end.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::Duration,
};

use codec::{Packet, Publish};
use gateway_core::{Protocol, QoS};

use crate::{
    client::{Client, Got},
    tables::wait_for,
};

const DEVICES: usize = 20;

/// Topics that only this device publishes to, and topics that all devices publish to.
const OWN: usize = 6;
const COMMON: usize = 4;

/// Values that one round publishes.
const ROUND: u64 = (DEVICES * (OWN + COMMON)) as u64;

/// Bytes of a payload.
const SIZE: usize = 512;

/// The last value sent of each key, all acknowledged.
#[derive(Default)]
pub(crate) struct Sent {
    /// Device, topic, payload.
    pub(crate) by_device: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
    /// Topic, device, payload; of what came last over all devices.
    pub(crate) by_topic: BTreeMap<String, (String, Vec<u8>)>,
}

impl Sent {
    /// After `self` came `later`.
    pub(crate) fn then(mut self, later: Self) -> Self {
        for (device, topics) in later.by_device {
            self.by_device.entry(device).or_default().extend(topics);
        }
        self.by_topic.extend(later.by_topic);
        self
    }

    pub(crate) fn note(&mut self, device: &str, topic: &str, payload: &[u8]) {
        let topics = self.by_device.entry(device.to_owned()).or_default();
        topics.insert(topic.to_owned(), payload.to_owned());
        self.by_topic.insert(topic.to_owned(), (device.to_owned(), payload.to_owned()));
    }

    /// Any of the keys: device, topic, payload.
    pub(crate) fn one(&self) -> (&str, &str, &[u8]) {
        let (device, topics) = self.by_device.first_key_value().expect("a device");
        let (topic, payload) = topics.first_key_value().expect("a topic");
        (device, topic, payload)
    }
}

/// Devices that publish at QoS 1 to all their topics in turn, as fast as acknowledgements come.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    acknowledged: Arc<AtomicU64>,
    thread: JoinHandle<Sent>,
}

impl Load {
    /// `name` begins the names of devices and topics.
    pub(crate) fn start(port: u16, name: &str) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let acknowledged = Arc::new(AtomicU64::new(0));
        // No load sends a value that another one sent.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let load = NEXT.fetch_add(1, Relaxed);
        let (name, ended, counter) = (name.to_owned(), Arc::clone(&stop), Arc::clone(&acknowledged));
        let thread = std::thread::spawn(move || {
            let ids: Vec<String> = (0..DEVICES).map(|number| format!("{name}-{number}")).collect();
            let mut devices: Vec<Client> =
                ids.iter().map(|id| Client::connect(port, Protocol::V5, id)).collect();
            let mut sent = Sent::default();
            let mut round = 0_u64;
            // At least one whole round, and no round in part.
            while round == 0 || !ended.load(Relaxed) {
                round += 1;
                for (id, device) in ids.iter().zip(&mut devices) {
                    publish(id, &name, device, (load, round), &mut sent);
                    counter.fetch_add((OWN + COMMON) as u64, Relaxed);
                }
                // The tested gateway needs its share of the processors.
                std::thread::sleep(Duration::from_millis(5));
            }
            sent
        });
        Self { stop, acknowledged, thread }
    }

    /// Waits until every device had two more values of each topic acknowledged.
    pub(crate) fn goes_on(&self) {
        self.goes_on_for(3 * ROUND);
    }

    /// Waits until this many more payload bytes were acknowledged.
    pub(crate) fn goes_on_for_bytes(&self, bytes: u64) {
        self.goes_on_for(bytes / SIZE as u64);
    }

    fn goes_on_for(&self, count: u64) {
        let wanted = self.acknowledged.load(Relaxed) + count;
        wait_for("acknowledgements", || {
            let now = self.acknowledged.load(Relaxed);
            if now >= wanted {
                return Ok(());
            }
            assert!(!self.thread.is_finished(), "the devices have ended");
            Err(format!("{now} of {wanted}"))
        });
    }

    /// Ends after a whole round, all of it acknowledged.
    pub(crate) fn finish(self) -> Sent {
        self.stop.store(true, Relaxed);
        self.thread.join().expect("the devices")
    }

    /// One round.
    pub(crate) fn once(port: u16, name: &str) -> Sent {
        let load = Self::start(port, name);
        load.finish()
    }
}

/// One value for each topic of `id`, all at once, and their acknowledgements.
fn publish(id: &str, name: &str, device: &mut Client, (load, round): (u32, u64), sent: &mut Sent) {
    let own = (0..OWN).map(|number| format!("{name}/{id}/own/{number}"));
    let common = (0..COMMON).map(|number| format!("{name}/common/{number}"));
    let values: Vec<(String, Vec<u8>)> = own
        .chain(common)
        .map(|topic| {
            let mut payload = format!("{load}.{round} of {id} on {topic}").into_bytes();
            payload.resize(SIZE, b' ');
            (topic, payload)
        })
        .collect();
    let packets: Vec<Packet<'_>> = (1..)
        .zip(&values)
        .map(|(packet_id, (topic, payload))| {
            Packet::Publish(Publish {
                dup: false,
                qos: QoS::AtLeastOnce,
                retain: false,
                topic,
                packet_id,
                payload,
                alias: None,
                expiry: None,
                ids: Vec::new(),
                properties: None,
            })
        })
        .collect();
    device.send_all(&packets);
    for (topic, payload) in &values {
        let got = device.next();
        assert!(matches!(got, Got::PubAck(code) if code < 0x80), "{id} got {got:?}");
        sent.note(id, topic, payload);
    }
}
