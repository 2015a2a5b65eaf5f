//! All bans: those of the operator's file, those made by RPC, which are kept in the data directory, and those of clients
//! that flap, which are short and end with the process.

use std::{fs, io, net::IpAddr, path::PathBuf, sync::Arc};

use access::bans::{Ban, BanList, BanSubject, BanTarget, Fingerprint, TooManyBans, parse_bans};
use broker::CloseReason;
use edge::{reload::Reload, tls::CertificateId};
use gateway_core::{Peer, clock};
use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};
use store::{DataDir, StoreError};
use thiserror::Error;
use tokio::sync::Notify;

use crate::{Connected, ConnectionCheck};

/// The file in the data directory.
const KEPT: &str = "bans.json";

/// Source of a ban.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum BanOrigin {
    /// The operator's file; only there it can be changed.
    File,
    /// The RPC.
    Rpc,
    /// The gateway made it itself.
    Flapping,
}

impl BanOrigin {
    const ALL: [Self; 3] = [Self::File, Self::Rpc, Self::Flapping];

    /// In metrics and page tokens.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Rpc => "rpc",
            Self::Flapping => "flapping",
        }
    }

    /// Returns the source that [`Self::as_str`] names so.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|source| source.as_str() == text)
    }
}

/// A ban in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedBan {
    /// The ban.
    pub ban: Ban,
    /// Source of the ban.
    pub source: BanOrigin,
}

/// Error in the bans that stops the gateway from starting.
#[derive(Debug, Error)]
pub enum BansError {
    /// The operator's file.
    #[error("bans.file = {}: {problem}", .path.display())]
    File {
        /// Its path.
        path: PathBuf,
        /// The fault, with its line.
        problem: String,
    },
    /// The file in the data directory.
    #[error("{}: {problem}; bring it back from a backup, or remove it and with it all bans that were made by RPC", .path.display())]
    Kept {
        /// Its path.
        path: PathBuf,
        /// The fault.
        problem: String,
    },
}

/// Error that left a ban unmade or unremoved.
#[derive(Debug, Error)]
pub enum BanError {
    /// There are as many as are allowed.
    #[error(transparent)]
    Full(#[from] TooManyBans),
    /// The ban is in the operator's file.
    #[error("this ban is in the file that bans.file names; remove it there")]
    InFile,
    /// There is none.
    #[error("there is no such ban")]
    Missing,
    /// The file cannot be written; all is as before.
    #[error("bans cannot be written: {0}")]
    Store(#[from] StoreError),
}

/// All bans.
pub struct BanRegistry {
    most: usize,
    file: Option<PathBuf>,
    /// Without a directory, bans made by RPC end with the process.
    directory: Option<Arc<DataDir>>,
    lists: RwLock<Lists>,
    /// Held while the stored bans change, also while they are written: so that the file is never older than an answer.
    writing: Mutex<()>,
    /// Tells of new bans, for those who are connected.
    pub changed: Notify,
}

struct Lists {
    file: BanList,
    rpc: BanList,
    flapping: BanList,
}

/// A ban as it is kept.
#[derive(Serialize, Deserialize)]
struct BanRecord {
    kind: String,
    value: String,
    reason: Box<str>,
    by: Box<str>,
    made: u64,
    expires: Option<u64>,
}

impl BanRegistry {
    /// Reads the operator's file and the stored bans. Blocks.
    ///
    /// # Errors
    /// One of the files cannot be read or is wrong: a start without the bans in it would let those in whom they are for.
    pub fn open(config: &config::Bans, directory: Option<Arc<DataDir>>) -> Result<Self, BansError> {
        let most = config.max;
        let file = match &config.file {
            Some(path) => read_file(path, most)
                .map_err(|problems| BansError::File { path: path.clone(), problem: problems.join("; ") })?,
            None => BanList::new(most),
        };
        let mut rpc = BanList::new(most);
        if let Some(directory) = &directory {
            let path = directory.path().join(KEPT);
            let kept = read_kept(&path).map_err(|problem| BansError::Kept { path, problem })?;
            for ban in kept.into_iter().filter(|ban| ban.is_in_force(wall())) {
                // A smaller limit than before lets go of some: those that expire are for a time anyway.
                if rpc.add(ban).is_err() {
                    tracing::warn!(most, "bans.max is smaller than the number of bans that were made by RPC");
                    break;
                }
            }
        }
        let lists = RwLock::new(Lists { file, rpc, flapping: BanList::new(most) });
        let file = config.file.clone();
        Ok(Self { most, file, directory, lists, writing: Mutex::new(()), changed: Notify::new() })
    }

    /// The ban that hits this address now.
    pub(crate) fn of_address(&self, ip: IpAddr) -> Option<Ban> {
        let lists = self.lists.read();
        lists.all().iter().find_map(|list| list.of_address(ip, wall())).cloned()
    }

    /// Returns the ban that hits a client now.
    pub fn of(&self, who: &BanSubject<'_>) -> Option<Ban> {
        let lists = self.lists.read();
        lists.all().iter().find_map(|list| list.of(who, wall())).cloned()
    }

    /// Makes a ban, in the place of one made by RPC for the same target. It is in force and on disk when this returns.
    /// Blocks on the disk.
    ///
    /// # Errors
    /// See [`BanError`]; nothing has changed then.
    pub fn add(&self, ban: Ban) -> Result<(), BanError> {
        let _writing = self.writing.lock();
        let target = ban.target.clone();
        let before = {
            let mut lists = self.lists.write();
            lists.rpc.sweep(wall());
            let before = lists.rpc.get(&target).cloned();
            lists.rpc.add(ban)?;
            before
        };
        if let Err(error) = self.write() {
            let mut lists = self.lists.write();
            lists.rpc.remove(&target);
            // The ban was there a moment ago.
            let _ = before.map(|before| lists.rpc.add(before));
            return Err(error.into());
        }
        self.changed.notify_one();
        Ok(())
    }

    /// Removes the ban for exactly this target. Blocks on the disk.
    ///
    /// # Errors
    /// See [`BanError`]; nothing has changed then.
    pub fn remove(&self, target: &BanTarget) -> Result<(), BanError> {
        let _writing = self.writing.lock();
        let (flapping, removed) = {
            let mut lists = self.lists.write();
            (lists.flapping.remove(target), lists.rpc.remove(target))
        };
        let Some(removed) = removed else {
            let in_file = self.lists.read().file.get(target).is_some();
            return match flapping {
                Some(_) => Ok(()),
                None if in_file => Err(BanError::InFile),
                None => Err(BanError::Missing),
            };
        };
        if let Err(error) = self.write() {
            // The ban was there a moment ago.
            let _ = self.lists.write().rpc.add(removed);
            return Err(error.into());
        }
        Ok(())
    }

    /// Bans a client that flaps for `seconds`. Without effect if there are as many as are allowed.
    pub(super) fn add_flapping(&self, client_id: &str, seconds: u64) -> Result<(), TooManyBans> {
        let now = wall();
        let mut lists = self.lists.write();
        if lists.flapping.len() >= self.most {
            lists.flapping.sweep(now);
        }
        lists.flapping.add(Ban {
            target: BanTarget::ClientId(client_id.into()),
            reason: "connects too often".into(),
            by: "gateway".into(),
            made: now,
            expires: Some(now.saturating_add(seconds)),
        })?;
        drop(lists);
        self.changed.notify_one();
        Ok(())
    }

    /// All that are in force, by target.
    pub fn list(&self) -> Vec<ListedBan> {
        let now = wall();
        let lists = self.lists.read();
        let mut all: Vec<ListedBan> = lists
            .all()
            .into_iter()
            .zip(BanOrigin::ALL)
            .flat_map(|(list, source)| list.iter().map(move |ban| ListedBan { ban: ban.clone(), source }))
            .filter(|listed| listed.ban.is_in_force(now))
            .collect();
        drop(lists);
        all.sort_by(|a, b| (&a.ban.target, a.source).cmp(&(&b.ban.target, b.source)));
        all
    }

    /// Returns the number of bans, by source.
    pub fn counts(&self) -> [(BanOrigin, usize); 3] {
        let lists = self.lists.read();
        [
            (BanOrigin::File, lists.file.len()),
            (BanOrigin::Rpc, lists.rpc.len()),
            (BanOrigin::Flapping, lists.flapping.len()),
        ]
    }

    /// Forgets what has expired. About once a minute; what is kept on disk follows with the next change.
    pub fn sweep(&self) {
        let now = wall();
        let mut lists = self.lists.write();
        lists.rpc.sweep(now);
        lists.flapping.sweep(now);
    }

    fn write(&self) -> Result<(), StoreError> {
        let Some(directory) = &self.directory else { return Ok(()) };
        let records: Vec<BanRecord> = self.lists.read().rpc.iter().map(BanRecord::of).collect();
        let text = serde_json::to_string_pretty(&records)
            .map_err(|error| StoreError::Unavailable(error.to_string()))?;
        directory.replace_file(KEPT, &text)
    }
}

impl Lists {
    fn all(&self) -> [&BanList; 3] {
        [&self.file, &self.rpc, &self.flapping]
    }
}

impl ConnectionCheck for BanRegistry {
    fn verdict(&self, connected: &Connected<'_>) -> Option<CloseReason> {
        let Connected { client_id, info } = *connected;
        let identity = connected.identity();
        let proved = identity.and_then(|identity| identity.principal.username.as_deref());
        let certificate = identity.and_then(|identity| identity.certificate.as_ref());
        let who = BanSubject {
            client_id,
            username: info.username.as_deref(),
            common_name: certificate.and_then(CertificateId::common_name),
            fingerprint: certificate.map(|certificate| Fingerprint(*certificate.fingerprint())),
            address: (info.peer != Peer::UNIX).then(|| info.peer.ip()),
        };
        let hit = self.of(&who).is_some()
            || proved.is_some()
                && self.of(&BanSubject { client_id, username: proved, ..BanSubject::default() }).is_some();
        hit.then_some(CloseReason::Banned)
    }
}

impl Reload for BanRegistry {
    fn name(&self) -> &'static str {
        "bans"
    }

    fn files(&self) -> Vec<PathBuf> {
        self.file.iter().cloned().collect()
    }

    fn reload(&self) -> Result<String, Vec<String>> {
        let Some(path) = &self.file else { return Ok("no file of bans".to_owned()) };
        let list = read_file(path, self.most).map_err(|problems| {
            problems.into_iter().map(|problem| format!("{}: {problem}", path.display())).collect::<Vec<_>>()
        })?;
        let said = format!("{} bans", list.len());
        self.lists.write().file = list;
        self.changed.notify_one();
        Ok(said)
    }
}

fn read_file(path: &PathBuf, most: usize) -> Result<BanList, Vec<String>> {
    let text = fs::read_to_string(path).map_err(|error| vec![error.to_string()])?;
    let by = path.file_name().unwrap_or_default().to_string_lossy();
    parse_bans(&text, &by, most).map_err(|error| error.0)
}

fn read_kept(path: &PathBuf) -> Result<Vec<Ban>, String> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error.to_string()),
    };
    let records: Vec<BanRecord> = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    records.into_iter().map(BanRecord::ban).collect()
}

impl BanRecord {
    fn of(ban: &Ban) -> Self {
        Self {
            kind: ban.target.kind().to_owned(),
            value: ban.target.value(),
            reason: ban.reason.clone(),
            by: ban.by.clone(),
            made: ban.made,
            expires: ban.expires,
        }
    }

    fn ban(self) -> Result<Ban, String> {
        let Self { kind, value, reason, by, made, expires } = self;
        Ok(Ban { target: BanTarget::parse(&kind, &value)?, reason, by, made, expires })
    }
}

/// Seconds since 1970, on the wall: bans end by the calendar.
pub(super) fn wall() -> u64 {
    clock::to_wall(clock::now()).0 / 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ban(kind: &str, value: &str, expires: Option<u64>) -> Ban {
        let target = BanTarget::parse(kind, value).unwrap();
        Ban { target, reason: "noise".into(), by: "ops".into(), made: 1, expires }
    }

    fn open(directory: &Arc<DataDir>, file: Option<PathBuf>) -> Result<BanRegistry, BansError> {
        BanRegistry::open(
            &config::Bans { file, max: 3, ..config::Bans::default() },
            Some(Arc::clone(directory)),
        )
    }

    #[test]
    fn bans_by_rpc_are_there_after_a_restart_and_expired_ones_are_not() {
        let home = tempfile::tempdir().unwrap();
        let directory = DataDir::open(home.path()).unwrap();
        let bans = open(&directory, None).unwrap();
        for (kind, value) in [("client_id", "a"), ("address", "192.0.2.0/24")] {
            bans.add(ban(kind, value, Some(wall() + 1000))).unwrap();
        }
        bans.add(ban("username", "u", Some(wall()))).unwrap();
        bans.add_flapping("f", 1000).unwrap();
        let again = open(&directory, None).unwrap();
        let kept: Vec<BanOrigin> = again.list().iter().map(|listed| listed.source).collect();
        assert_eq!(kept, [BanOrigin::Rpc, BanOrigin::Rpc], "what flaps is forgotten");
        assert_eq!(&again.list()[..1], &bans.list()[..1]);
        again.remove(&BanTarget::parse("client_id", "a").unwrap()).unwrap();
        assert_eq!(open(&directory, None).unwrap().list().len(), 1);
    }

    #[test]
    fn a_damaged_file_of_kept_bans_stops_the_start_instead_of_letting_all_in() {
        let home = tempfile::tempdir().unwrap();
        let directory = DataDir::open(home.path()).unwrap();
        fs::write(home.path().join(KEPT), "[{\"kind\"").unwrap();
        assert!(open(&directory, None).is_err());
    }

    #[test]
    fn a_ban_that_cannot_be_written_is_not_made() {
        let home = tempfile::tempdir().unwrap();
        let directory = DataDir::open(home.path()).unwrap();
        let bans = open(&directory, None).unwrap();
        bans.add(ban("client_id", "a", None)).unwrap();
        fs::create_dir(home.path().join("bans.new")).unwrap();
        assert!(matches!(bans.add(ban("client_id", "b", None)), Err(BanError::Store(_))));
        assert!(bans.remove(&BanTarget::parse("client_id", "a").unwrap()).is_err());
        let listed: Vec<String> = bans.list().iter().map(|listed| listed.ban.target.value()).collect();
        assert_eq!(listed, ["a"]);
    }

    #[test]
    fn the_operators_file_is_read_again_and_a_broken_one_changes_nothing() {
        let home = tempfile::tempdir().unwrap();
        let directory = DataDir::open(home.path()).unwrap();
        let path = home.path().join("ops.toml");
        let entry = |id: &str| format!("[[bans]]\nclient_id = \"{id}\"\n");
        fs::write(&path, entry("a")).unwrap();
        let bans = open(&directory, Some(path.clone())).unwrap();
        let hit = |id: &str| bans.of(&BanSubject { client_id: id, ..BanSubject::default() }).is_some();
        assert!(hit("a") && !hit("b"));
        fs::write(&path, entry("b")).unwrap();
        bans.reload().unwrap();
        assert!(!hit("a") && hit("b"));
        fs::write(&path, entry("c") + "[[bans]]\n").unwrap();
        let problems = bans.reload().unwrap_err();
        assert!(problems[0].contains("ops.toml: line 3"), "{problems:?}");
        assert!(hit("b") && !hit("c"));
        assert!(matches!(bans.remove(&BanTarget::parse("client_id", "b").unwrap()), Err(BanError::InFile)));
        fs::remove_file(&path).unwrap();
        assert!(bans.reload().is_err() && hit("b"));
        assert!(open(&directory, Some(path)).is_err(), "nor does the gateway start without it");
    }

    #[test]
    fn there_are_no_more_bans_of_a_source_than_are_allowed() {
        let bans = BanRegistry::open(&config::Bans { max: 3, ..config::Bans::default() }, None).unwrap();
        for number in 0..3 {
            bans.add(ban("client_id", &number.to_string(), Some(wall() + 1000))).unwrap();
            bans.add_flapping(&number.to_string(), 0).unwrap();
        }
        assert!(matches!(bans.add(ban("client_id", "x", None)), Err(BanError::Full(_))));
        bans.add_flapping("y", 1000).unwrap();
        assert_eq!(bans.counts(), [(BanOrigin::File, 0), (BanOrigin::Rpc, 3), (BanOrigin::Flapping, 1)]);
    }
}
