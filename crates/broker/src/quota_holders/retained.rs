//! Share of one retained message in the quotas of its publisher's quota holders.

use std::sync::Arc;

use super::{Counted, QuotaExceeded, QuotaHolder, QuotaHolders, try_add_all};

/// See the module.
#[derive(Debug)]
pub(crate) struct RetainedQuotaUse {
    quota_holders: Vec<Arc<QuotaHolder>>,
    bytes: usize,
}

impl Drop for RetainedQuotaUse {
    fn drop(&mut self) {
        for holder in &self.quota_holders {
            holder.give_back(Counted::RetainedMessages, 1);
            holder.give_back(Counted::RetainedBytes, self.bytes);
        }
    }
}

impl RetainedQuotaUse {
    /// Somebody of these quota holders sets a message of `bytes`, in the place of one that has `former`, of which it takes over
    /// what is of the same quota holders. The rest of `former` is given back when the caller drops it.
    ///
    /// # Errors
    /// A quota does not allow it. Nothing has changed then.
    pub(crate) fn set(
        quota_holders: &QuotaHolders,
        former: Option<&mut Self>,
        bytes: usize,
    ) -> Result<Option<Self>, QuotaExceeded> {
        if quota_holders.is_empty() {
            return Ok(None);
        }
        let before = former.as_ref().map_or(0, |former| former.bytes);
        let had = |holder: &Arc<QuotaHolder>| {
            former
                .as_ref()
                .is_some_and(|former| former.quota_holders.iter().any(|had| Arc::ptr_eq(had, holder)))
        };
        let wanted = quota_holders.iter().flat_map(|holder| match had(holder) {
            true => [
                (holder, Counted::RetainedMessages, 0),
                (holder, Counted::RetainedBytes, bytes.saturating_sub(before)),
            ],
            false => [(holder, Counted::RetainedMessages, 1), (holder, Counted::RetainedBytes, bytes)],
        });
        try_add_all(wanted).map_err(QuotaExceeded::counted)?;
        for holder in quota_holders.iter().filter(|holder| had(holder)) {
            holder.give_back(Counted::RetainedBytes, before.saturating_sub(bytes));
        }
        if let Some(former) = former {
            former.quota_holders.retain(|had| !quota_holders.iter().any(|holder| Arc::ptr_eq(had, holder)));
        }
        Ok(Some(Self { quota_holders: quota_holders.to_vec(), bytes }))
    }

    /// A message of an earlier process, which counts whatever the quotas say.
    pub(crate) fn restored(quota_holders: &QuotaHolders, bytes: usize) -> Option<Self> {
        for holder in quota_holders {
            holder.add(Counted::RetainedMessages, 1);
            holder.add(Counted::RetainedBytes, bytes);
        }
        (!quota_holders.is_empty()).then(|| Self { quota_holders: quota_holders.to_vec(), bytes })
    }
}
