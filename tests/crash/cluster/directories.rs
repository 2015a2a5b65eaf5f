//! Directories of another time or another hand in the place of a gateway's own: none of them is served as it is.

use std::{fs, path::Path};

use gateway_core::Protocol;

use super::deposit::Deposit;
use crate::{backends::Backends, blocking::Client, engine::Engine, pair::Pair};

/// Seconds, longer than the test.
const KEPT: u32 = 3_600;
/// CRC-32 of the formats 1 and 9, as a store has it beside them.
const SUMS: [u32; 2] = [0x99F8_B879, 0x5C4C_9096];

fn copy(from: &Path, to: &Path) {
    let _ = fs::remove_dir_all(to);
    fs::create_dir_all(to).expect("make a directory");
    for entry in fs::read_dir(from).expect("read a directory") {
        let entry = entry.expect("an entry");
        let target = to.join(entry.file_name());
        if entry.file_type().expect("a type").is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).expect("copy a file");
        }
    }
}

/// Two gateways, of which the directory of either can be replaced.
struct Scene {
    pair: Pair,
    deposit: Deposit,
}

impl Scene {
    fn begin(engine: &Engine) -> Self {
        let mut pair = Pair::new(engine);
        pair.start(0);
        pair.active();
        pair.start(1);
        pair.until("the copy is warm", |pair| pair.is_warm(1));
        let mut deposit = Deposit::keeping(KEPT);
        deposit.add(pair.port_of(0), 40, 2_000);
        Self { pair, deposit }
    }

    /// Copies the directory of the gateway that stands by.
    fn save(&mut self, to: &Path) {
        let other = 1 - self.pair.active();
        self.pair.until("the copy is warm", |pair| pair.is_warm(other));
        self.pair.kill(other, false);
        copy(&self.pair.data(other), to);
        self.pair.start(other);
    }

    /// The one that serves dies with its disk, and the other has everything.
    fn take_over(&mut self) {
        let active = self.pair.active();
        let other = 1 - active;
        self.pair.until("the copy is warm", |pair| pair.is_warm(other));
        self.deposit.add(self.pair.port_of(active), 5, 500);
        self.pair.kill(active, true);
        assert_eq!(self.pair.active(), other);
        self.deposit.is_whole(self.pair.port_of(other));
        self.pair.start(active);
        self.pair.until("the copy is warm", |pair| pair.is_warm(active));
    }

    /// Puts a directory in the place of the one of a gateway that stands by, which takes over; then in the place of the only one that
    /// is left.
    fn replace(&mut self, what: &str, directory: &Path) {
        println!("{what}");
        let other = 1 - self.pair.active();
        self.pair.kill(other, true);
        copy(directory, &self.pair.data(other));
        self.pair.start(other);
        self.take_over();
        (0..2).for_each(|number| self.pair.kill(number, true));
        copy(directory, &self.pair.data(other));
        self.pair.start(other);
        assert_eq!(self.pair.active(), other);
        self.deposit.is_whole(self.pair.port_of(other));
        self.pair.start(1 - other);
        self.pair.until("the copy is warm", |pair| pair.is_warm(1 - other));
    }
}

/// Damages every page of a tree in a store, and the end of what the log has.
fn damage(directory: &Path) {
    for store in ["state", "records"] {
        let file = directory.join(store).join("data.mdb");
        let mut bytes = fs::read(&file).expect("read a store");
        // Behind the two pages with the roots; flags at 10 say what a page is, and 12 is where its entries end.
        for page in bytes.chunks_mut(4096).skip(2).filter(|page| matches!(page[10], 1 | 2)) {
            page[12] ^= 0xFF;
        }
        fs::write(file, bytes).expect("damage a store");
    }
    for entry in fs::read_dir(directory.join("log")).expect("read the log") {
        let path = entry.expect("an entry").path();
        if path.extension().is_some_and(|extension| extension == "log") {
            let mut bytes = fs::read(&path).expect("read the log");
            let middle = bytes.len() / 2;
            bytes.iter_mut().skip(middle).take(64).for_each(|byte| *byte ^= 0x55);
            fs::write(path, bytes).expect("damage the log");
        }
    }
}

/// Notes another format in a store than it has; its checksum is right.
fn make_too_new(directory: &Path) {
    let file = directory.join("state").join("data.mdb");
    let mut bytes = fs::read(&file).expect("read a store");
    let note = |format: u32, sum: u32| {
        [[&b"format"[..], &format.to_le_bytes()].concat(), [&b"sum"[..], &sum.to_le_bytes()].concat()]
    };
    let [old, new] = [(1, SUMS[0]), (9, SUMS[1])].map(|(format, sum)| note(format, sum));
    let mut noted = 0;
    for (old, new) in old.iter().zip(&new) {
        for at in 0..bytes.len() - old.len() {
            if bytes[at..].starts_with(old) {
                bytes[at..at + new.len()].copy_from_slice(new);
                noted += 1;
            }
        }
    }
    assert!(noted >= 2, "a store does not say its format as it did");
    fs::write(file, bytes).expect("change a store");
}

/// The failures: a directory of an earlier time, of another cluster, or a damaged one is served, or begun empty; one that has what the
/// ledger has given up shows it; a newer version's directory is emptied.
#[test]
#[ignore = "takes minutes: scripts/crash.sh N cluster directories"]
fn no_directory_is_served_but_one_that_agrees_with_the_ledger() {
    let Some(engine) = Engine::postgres() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let mut foreign = Scene::begin(&engine);
    foreign.deposit.add(foreign.pair.port_of(0), 60, 1_000);
    foreign.save(&at("foreign"));
    drop(foreign);

    let mut scene = Scene::begin(&engine);
    let backends = Backends::start(scene.pair.grpc(), scene.pair.balancer());
    scene.save(&at("before"));
    // So much that what was there before is repeated and its rows are removed.
    let active = scene.pair.active();
    let rows = "select count(*) from mqtt_server.ledger join mqtt_server.cluster on cluster = id";
    let first = format!(
        "{rows} where name = '{}' and stream = 0 and epoch = 1 and segment = 0",
        scene.pair.cluster()
    );
    let mut churned = 0;
    while engine.order(&["sql", "primary", &first]).trim() != "0" {
        assert!(churned < 20, "the beginning is never removed");
        scene.deposit.add_over(scene.pair.port_of(active), 500, 60_000, 20);
        churned += 1;
    }
    scene.save(&at("old"));
    for _ in 0..3 {
        scene.take_over();
    }
    scene.replace("a directory of some epochs ago", &at("old"));
    scene.replace("a directory of before the start", &at("before"));
    scene.replace("a directory of another cluster", &at("foreign"));

    scene.save(&at("damaged"));
    damage(&at("damaged"));
    scene.replace("a damaged directory", &at("damaged"));
    assert!(scene.pair.log_of(0).contains("damaged") || scene.pair.log_of(1).contains("damaged"));

    println!("a directory of a newer version");
    scene.save(&at("new"));
    make_too_new(&at("new"));
    let other = 1 - scene.pair.active();
    scene.pair.kill(other, true);
    copy(&at("new"), &scene.pair.data(other));
    scene.pair.start(other);
    let status = scene.pair.exit_of(other);
    assert!(!status.success(), "a gateway used the directory of a newer version");
    assert!(scene.pair.data(other).join("state/data.mdb").exists(), "it was emptied");
    println!("    {status}: {}", scene.pair.log_of(other).lines().last().unwrap_or_default());
    scene.pair.forget_disk(other);
    scene.pair.start(other);
    scene.take_over();
    let (problems, figures) = backends.finish(&[]);
    println!("{figures}");
    assert!(problems.is_empty(), "{problems:#?}");

    ahead_of_the_seal(&engine, &mut scene, &at("ahead"));
}

/// A record that one directory has is damaged in the ledger, and given up.
fn ahead_of_the_seal(engine: &Engine, scene: &mut Scene, saved: &Path) {
    println!("a directory ahead of the seal");
    let Scene { pair, deposit } = scene;
    let active = pair.active();
    let other = 1 - active;
    pair.until("the copy is warm", |pair| pair.is_warm(other));
    pair.kill(other, false);
    let mut publisher = Client::connect(pair.port_of(active), Protocol::V5, "publisher");
    publisher.publish_acked(&format!("deposit-{KEPT}/given-up"), b"to be given up", true);
    pair.kill(active, false);
    copy(&pair.data(active), saved);
    let of =
        format!("name = '{}' and stream = 0 and position('given-up'::bytea in data) > 0", pair.cluster());
    let place = format!(
        "select epoch, n from mqtt_server.ledger join mqtt_server.cluster on cluster = id where {of} order by epoch desc, n limit 1"
    );
    let place = engine.order(&["sql", "primary", &place]);
    let (epoch, n) = place.trim().split_once('|').expect("a row");
    let flip = format!(
        "update mqtt_server.ledger set data = set_byte(data, length(data) - 1, get_byte(data, length(data) - 1) # 255) \
         from mqtt_server.cluster where cluster = id and name = '{}' and stream = 0 and epoch = {epoch} and n = {n} and part = 0",
        pair.cluster()
    );
    engine.order(&["sql", "primary", &flip]);
    pair.start(other);
    let status = pair.exit_of(other);
    assert_eq!(status.code(), Some(3), "a damaged ledger has an exit of its own");
    let line = pair.log_of(other).lines().last().unwrap_or_default().to_owned();
    println!("    {line}");
    assert!(line.contains(epoch) && line.contains(n), "it is not said where: {line}");
    let accepted = pair.tool(&["accept-loss", "0", "0", epoch, n]);
    assert!(accepted.status.success(), "{}", String::from_utf8_lossy(&accepted.stderr));
    pair.start(other);
    assert_eq!(pair.active(), other);
    deposit.is_whole(pair.port_of(other));
    pair.forget_disk(active);
    copy(saved, &pair.data(active));
    pair.start(active);
    scene.take_over();
    scene.replace("the same once more", saved);
}
