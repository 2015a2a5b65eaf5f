//! The format of an environment, and the upgrades from older ones to today's.
//!
//! Every store has a list of upgrades, one for each format that was ever replaced, and opens its tables by
//! [`Environment::open_tables`]. All steps that are missing, and the note of the new format, are one transaction: a crash
//! leaves the old format or the new one. The tools read the newest format only.

use heed::{Env, RoTxn, RwTxn, WithoutTls, types::Bytes};

use super::environment::{Environment, Table};
use store::StoreError;

/// The table of the format.
pub(super) const META: &str = "meta";
const FORMAT: &[u8] = b"format";
/// Key of the CRC-32 of these records: damage must not pass for a newer format, which would be refused.
const SUM: &[u8] = b"sum";

/// No format is so high; without a sum, as older versions left it, this is damage.
const IMPOSSIBLE: u32 = 1000;

/// Rewrites what is there from one format to the next.
pub(super) type FormatUpgrade = fn(&Env<WithoutTls>, &mut RwTxn<'_>) -> Result<(), heed::Error>;

/// A store: its folder, its tables in the newest format, and its upgrades from format 1 on.
type StoreFormat = (&'static str, &'static [&'static str], &'static [FormatUpgrade]);

const STORES: &[StoreFormat] = &[
    ("latest", &["latest", "newest"], &[]),
    ("sessions", &["sessions", "subscriptions", "groups"], &[]),
    ("queues", &super::queues::TABLES, &[]),
    ("retained", &["retained"], &[]),
    ("groups", &["groups"], &[]),
    ("publisher", &["answers", "scheduled", "commands"], &[]),
    ("shadows", &["shadows"], &[]),
];

fn upgrades(store: &str) -> &'static [FormatUpgrade] {
    STORES.iter().find(|(name, ..)| *name == store).map_or(&[], |(.., upgrades)| *upgrades)
}

/// The tables of a store in the newest format, without that of the format; none of a store that is not known.
pub(super) fn tables(store: &str) -> &'static [&'static str] {
    STORES.iter().find(|(name, ..)| *name == store).map_or(&[], |(_, tables, _)| *tables)
}

/// Returns whether the records of the format are as they were written.
pub(super) fn is_sound(records: &[(Vec<u8>, Vec<u8>)]) -> bool {
    let value = |wanted: &[u8]| records.iter().find(|(key, _)| key == wanted).map(|(_, value)| &value[..]);
    match (value(FORMAT), value(SUM)) {
        (Some(format), Some(sum)) => *sum == crc32fast::hash(format).to_le_bytes(),
        (Some(format), None) => format.try_into().is_ok_and(|bytes| u32::from_le_bytes(bytes) < IMPOSSIBLE),
        (None, _) => records.is_empty(),
    }
}

/// The format after all upgrades.
const fn newest(upgrades: &[FormatUpgrade]) -> u32 {
    upgrades.len() as u32 + 1
}

/// Why a store cannot be read as it is, if it has another format than the newest.
pub(super) fn problem(
    store: &str,
    env: &Env<WithoutTls>,
    txn: &RoTxn<'_, WithoutTls>,
) -> Result<Option<String>, heed::Error> {
    let newest = newest(upgrades(store));
    Ok(match found(env, txn)? {
        Some(found) if found > newest => Some(refusal(store, found, newest)),
        Some(found) if found < newest => {
            Some(format!("{store} have format {found}: start this version on it first"))
        }
        _ => None,
    })
}

/// Why a store cannot be copied, if a newer version wrote it: what is meant by its tables is not known.
pub(super) fn newer(
    store: &str,
    env: &Env<WithoutTls>,
    txn: &RoTxn<'_, WithoutTls>,
) -> Result<Option<String>, heed::Error> {
    let newest = newest(upgrades(store));
    let found = found(env, txn)?.filter(|found| *found > newest);
    Ok(found.map(|found| refusal(store, found, newest)))
}

/// The format of what is there; `None` in a new environment.
fn found(env: &Env<WithoutTls>, txn: &RoTxn<'_, WithoutTls>) -> Result<Option<u32>, heed::Error> {
    let Some(meta) = env.open_database::<Bytes, Bytes>(txn, Some(META))? else { return Ok(None) };
    let format = meta.get(txn, FORMAT)?;
    Ok(format.map(|bytes| bytes.try_into().map_or(u32::MAX, u32::from_le_bytes)))
}

fn refusal(store: &str, found: u32, newest: u32) -> String {
    format!("{store} have format {found}, this version reads up to {newest}: use the version that wrote them")
}

impl Environment {
    /// Brings what is there to the newest format, then opens or creates the tables. Blocks on the disk.
    ///
    /// # Errors
    /// [`StoreError::Format`] if it has a newer one; nothing is changed then, nor if a step fails.
    pub(super) fn open_tables<T>(
        &self,
        create: impl FnMut(&mut RwTxn<'_>) -> Result<T, heed::Error>,
    ) -> Result<T, StoreError> {
        self.upgrade(upgrades(self.name()), create)
    }

    fn upgrade<T>(
        &self,
        upgrades: &[FormatUpgrade],
        mut create: impl FnMut(&mut RwTxn<'_>) -> Result<T, heed::Error>,
    ) -> Result<T, StoreError> {
        let newest = newest(upgrades);
        let found = self.reading(|txn| found(&self.env, txn))?;
        if let Some(found) = found.filter(|found| *found > newest) {
            return Err(StoreError::Format(refusal(self.name(), found, newest)));
        }
        let missing = found.map_or(&[][..], |found| &upgrades[(found.max(1) - 1) as usize..]);
        let opened = self.writing(|txn| {
            for upgrade in missing {
                upgrade(&self.env, txn)?;
            }
            if found != Some(newest) || !has_sum(&self.env, txn)? {
                self.set_format(txn, newest)?;
            }
            create(txn)
        });
        let opened = opened.map_err(|e| self.failed(&e))?;
        if !missing.is_empty() {
            tracing::info!(store = self.name(), from = found, to = newest, "store has a new format");
        }
        Ok(opened)
    }

    /// Records the format.
    pub(super) fn set_format(&self, txn: &mut RwTxn<'_>, format: u32) -> Result<(), heed::Error> {
        let meta: Table = self.env.create_database(txn, Some(META))?;
        let format = format.to_le_bytes();
        meta.put(txn, FORMAT, &format)?;
        meta.put(txn, SUM, &crc32fast::hash(&format).to_le_bytes())
    }
}

/// Returns whether the format has its sum: versions before the first release wrote none.
fn has_sum(env: &Env<WithoutTls>, txn: &RwTxn<'_>) -> Result<bool, heed::Error> {
    let Some(meta) = env.open_database::<Bytes, Bytes>(txn, Some(META))? else { return Ok(false) };
    Ok(meta.get(txn, SUM)?.is_some())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::environment::EnvironmentOptions;
    use store::DataDir;

    fn environment(dir: &Path) -> Environment {
        let options = EnvironmentOptions {
            name: "test",
            map_size: 64 << 10,
            max_map_size: usize::MAX,
            tables: 2,
            hook: None,
        };
        Environment::open(&DataDir::open(dir).unwrap(), options).unwrap()
    }

    /// The table as this process has it; one is made in an empty environment.
    fn open(environment: &Environment, upgrades: &[FormatUpgrade]) -> Result<Table, StoreError> {
        environment.upgrade(upgrades, |txn| environment.env.create_database(txn, Some("t")))
    }

    fn table(env: &Env<WithoutTls>, txn: &RwTxn<'_>) -> Table {
        env.open_database(txn, Some("t")).unwrap().unwrap()
    }

    /// To format 2: values are twice as long, more than the map had room for.
    fn double(env: &Env<WithoutTls>, txn: &mut RwTxn<'_>) -> Result<(), heed::Error> {
        let table = table(env, txn);
        let all: Vec<(Vec<u8>, Vec<u8>)> = table
            .iter(txn)?
            .map(|entry| entry.map(|(key, value)| (key.to_vec(), value.repeat(2))))
            .collect::<Result<_, _>>()?;
        all.iter().try_for_each(|(key, value)| table.put(txn, key, value))
    }

    /// To format 3: there is one more.
    fn add(env: &Env<WithoutTls>, txn: &mut RwTxn<'_>) -> Result<(), heed::Error> {
        table(env, txn).put(txn, b"added", b"")
    }

    fn fail(env: &Env<WithoutTls>, txn: &mut RwTxn<'_>) -> Result<(), heed::Error> {
        table(env, txn).clear(txn)?;
        Err(heed::Error::Io(std::io::ErrorKind::Other.into()))
    }

    fn contents(environment: &Environment, table: Table) -> (Option<u32>, u64, usize) {
        let read = |txn: &RoTxn<'_, WithoutTls>| {
            let length = table.first(txn)?.map_or(0, |(_, value)| value.len());
            Ok((found(&environment.env, txn)?, table.len(txn)?, length))
        };
        environment.reading(read).unwrap()
    }

    #[test]
    fn an_older_format_is_upgraded_whole_and_a_newer_one_refused() {
        let dir = tempfile::tempdir().unwrap();
        {
            let environment = environment(dir.path());
            let table = open(&environment, &[]).unwrap();
            let fill = |txn: &mut RwTxn<'_>| (0..20_u8).try_for_each(|n| table.put(txn, &[n], &[n; 1500]));
            environment.writing(fill).unwrap();
            assert_eq!(contents(&environment, table), (Some(1), 20, 1500));
        }
        {
            let environment = environment(dir.path());
            assert!(matches!(open(&environment, &[double, fail]), Err(StoreError::Unavailable(_))));
        }
        {
            let environment = environment(dir.path());
            let table = open(&environment, &[double]).unwrap();
            assert_eq!(
                contents(&environment, table),
                (Some(2), 20, 3000),
                "the step that failed left nothing"
            );
        }
        for _ in 0..2 {
            let environment = environment(dir.path());
            let table = open(&environment, &[double, add]).unwrap();
            assert_eq!(contents(&environment, table), (Some(3), 21, 3000), "each step once");
        }
        let environment = environment(dir.path());
        let error = open(&environment, &[double]).err().unwrap();
        assert!(matches!(&error, StoreError::Format(text) if text.contains("format 3")), "{error}");
        let table = open(&environment, &[double, add]).unwrap();
        assert_eq!(contents(&environment, table), (Some(3), 21, 3000), "refused and left as it is");
    }
}
