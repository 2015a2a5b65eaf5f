//! Data directories of earlier versions, which had an environment for each store.
//!
//! This version reads none of them: `tool::convert` makes new ones of them. And an earlier version must not begin anew beside what
//! this one keeps, so that it finds an environment `sessions` of a format that it does not know, and says so.

use std::{fs, path::Path};

use heed::{Database, types::Bytes};

use super::{
    format::{self, META},
    open,
};
use store::StoreError;

/// Environments of earlier versions.
pub(super) const EARLIER: [&str; 6] = ["queues", "retained", "publisher", "groups", "shadows", "sessions"];

/// A folder in which converted environments wait for their places.
pub(super) const CONVERTED: &str = "converted";

/// The format of the environment `sessions` that earlier versions refuse.
const REFUSED: u32 = 2;

/// Returns whether the directory is of an earlier version, or its conversion has not ended.
pub(super) fn is_earlier(directory: &Path) -> bool {
    let has = |name: &str| directory.join(name).join("data.mdb").exists();
    let [stores @ .., sessions] = EARLIER;
    let is_refusal = directory.join("state").exists();
    stores.into_iter().any(has) || directory.join(CONVERTED).exists() || (has(sessions) && !is_refusal)
}

/// Refuses a directory of an earlier version, with the command that converts it.
pub(super) fn check(directory: &Path) -> Result<(), StoreError> {
    if !is_earlier(directory) {
        return Ok(());
    }
    let path = directory.display();
    Err(StoreError::Format(format!(
        "data directory {path} is of an earlier version; convert it: mqtt-server store convert {path}"
    )))
}

/// Leaves an environment that earlier versions refuse, unless it is there.
pub(super) fn refuse(directory: &Path) -> Result<(), heed::Error> {
    let [.., sessions] = EARLIER;
    let (folder, beside) = (directory.join(sessions), directory.join("sessions.new"));
    if folder.exists() {
        return Ok(());
    }
    let _ = fs::remove_dir_all(&beside);
    fs::create_dir(&beside)?;
    let env = open::create(&beside, 1 << 16, 1)?;
    let mut txn = env.write_txn()?;
    let meta: Database<Bytes, Bytes> = env.create_database(&mut txn, Some(META))?;
    format::note(REFUSED).iter().try_for_each(|(key, value)| meta.put(&mut txn, key, value))?;
    txn.commit()?;
    env.prepare_for_closing().wait();
    fs::rename(beside, folder)?;
    store::sync_directory(directory)?;
    Ok(())
}
