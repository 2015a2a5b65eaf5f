//! Upgrades of an environment to the newest format. All steps that are missing, and the note of the new format, are one
//! transaction: a crash leaves the old format or the new one.

use heed::{Env, WithoutTls, types::Bytes};

use super::{
    environment::Environment,
    format::{FormatUpgrade, META, POSITION, SUM, found, newest, note, refusal, upgrades},
    marker,
    table::WriteTxn,
};
use store::StoreError;

impl Environment {
    /// Brings what is there to the newest format, then opens or creates the tables. Blocks on the disk.
    ///
    /// # Errors
    /// [`StoreError::Format`] if it has a newer one; nothing is changed then, nor if a step fails.
    pub(super) fn open_tables<T>(
        &self,
        create: impl FnMut(&mut WriteTxn<'_>) -> Result<T, heed::Error>,
    ) -> Result<T, StoreError> {
        self.upgrade(upgrades(self.name()), create)
    }

    fn upgrade<T>(
        &self,
        upgrades: &[FormatUpgrade],
        mut create: impl FnMut(&mut WriteTxn<'_>) -> Result<T, heed::Error>,
    ) -> Result<T, StoreError> {
        let newest = newest(upgrades);
        let found = self.reading(|txn| found(&self.env, txn))?;
        if let Some(found) = found.filter(|found| *found > newest) {
            return Err(StoreError::Format(refusal(self.name(), found, newest)));
        }
        let missing = found.map_or(&[][..], |found| &upgrades[(found.max(1) - 1) as usize..]);
        let opened = self.writing(|txn| {
            for upgrade in missing {
                upgrade(&self.env, txn.bare())?;
            }
            if found != Some(newest) || !is_complete(&self.env, txn)? {
                self.set_format(txn, newest)?;
            }
            create(txn)
        });
        let opened = opened.map_err(|e| self.failed(&e))?;
        marker::note_format(&self.folder(), newest);
        if !missing.is_empty() {
            tracing::info!(store = self.name(), from = found, to = newest, "store has a new format");
        }
        Ok(opened)
    }

    /// Records the format, and a position if there is none.
    pub(super) fn set_format(&self, txn: &mut WriteTxn<'_>, format: u32) -> Result<(), heed::Error> {
        let meta = self.table(txn, META)?;
        for (key, value) in note(format) {
            if key != POSITION || meta.get(txn, key)?.is_none() {
                meta.put(txn, key, &value)?;
            }
        }
        Ok(())
    }
}

/// Returns whether the note has all its records: versions before the first release wrote no sum, and later ones no position.
fn is_complete(env: &Env<WithoutTls>, txn: &WriteTxn<'_>) -> Result<bool, heed::Error> {
    let Some(meta) = env.open_database::<Bytes, Bytes>(txn, Some(META))? else { return Ok(false) };
    Ok(meta.get(txn, SUM)?.is_some() && meta.get(txn, POSITION)?.is_some())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use heed::{Database, RoTxn, RwTxn};

    use super::*;
    use crate::{environment::EnvironmentOptions, table::Table};
    use store::DataDir;

    fn environment(dir: &Path) -> Environment {
        let options = EnvironmentOptions {
            name: "test",
            map_size: 64 << 10,
            max_map_size: usize::MAX,
            tables: 2,
            hook: None,
            shipping: None,
        };
        Environment::open(&DataDir::open(dir).unwrap(), options).unwrap()
    }

    /// The table as this process has it; one is made in an empty environment.
    fn open(environment: &Environment, upgrades: &[FormatUpgrade]) -> Result<Table, StoreError> {
        environment.upgrade(upgrades, |txn| environment.table(txn, "t"))
    }

    fn table(env: &Env<WithoutTls>, txn: &RwTxn<'_>) -> Database<Bytes, Bytes> {
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
            let fill = |txn: &mut WriteTxn<'_>| (0..20_u8).try_for_each(|n| table.put(txn, &[n], &[n; 1500]));
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
