//! Share of one retained message in the quotas of its publisher's parties.

use std::sync::Arc;

use super::{Counted, Parties, Party, QuotaExceeded, try_add_all};

/// See the module.
#[derive(Debug)]
pub(crate) struct Ownership {
    parties: Vec<Arc<Party>>,
    bytes: usize,
}

impl Drop for Ownership {
    fn drop(&mut self) {
        for party in &self.parties {
            party.give_back(Counted::RetainedMessages, 1);
            party.give_back(Counted::RetainedBytes, self.bytes);
        }
    }
}

impl Ownership {
    /// Somebody of these parties sets a message of `bytes`, in the place of one that has `former`, of which it takes over
    /// what is of the same parties. The rest of `former` is given back when the caller drops it.
    ///
    /// # Errors
    /// A quota does not allow it. Nothing has changed then.
    pub(crate) fn set(
        parties: &Parties,
        former: Option<&mut Self>,
        bytes: usize,
    ) -> Result<Option<Self>, QuotaExceeded> {
        if parties.is_empty() {
            return Ok(None);
        }
        let before = former.as_ref().map_or(0, |former| former.bytes);
        let had = |party: &Arc<Party>| {
            former.as_ref().is_some_and(|former| former.parties.iter().any(|had| Arc::ptr_eq(had, party)))
        };
        let wanted = parties.iter().flat_map(|party| match had(party) {
            true => [
                (party, Counted::RetainedMessages, 0),
                (party, Counted::RetainedBytes, bytes.saturating_sub(before)),
            ],
            false => [(party, Counted::RetainedMessages, 1), (party, Counted::RetainedBytes, bytes)],
        });
        try_add_all(wanted).map_err(QuotaExceeded::counted)?;
        for party in parties.iter().filter(|party| had(party)) {
            party.give_back(Counted::RetainedBytes, before.saturating_sub(bytes));
        }
        if let Some(former) = former {
            former.parties.retain(|had| !parties.iter().any(|party| Arc::ptr_eq(had, party)));
        }
        Ok(Some(Self { parties: parties.to_vec(), bytes }))
    }

    /// A message of an earlier process, which counts whatever the quotas say.
    pub(crate) fn restored(parties: &Parties, bytes: usize) -> Option<Self> {
        for party in parties {
            party.add(Counted::RetainedMessages, 1);
            party.add(Counted::RetainedBytes, bytes);
        }
        (!parties.is_empty()).then(|| Self { parties: parties.to_vec(), bytes })
    }
}
