//! Members that come back: the log is read for what they say that they work on, before they get anything.

use groups::{AckId, MemberKey, Ranges, Recall};
use store::{LogRead, ReadLimit, Slice, StoreError};

use super::{
    GroupError, LiveMember, MemberEnd,
    live::{GroupInner, Live, STEP},
};

/// Reads for one member, beyond one for each message that it names, before the rest of these is no longer looked for: with it
/// they come again.
const MOST_READS: usize = 1_024;

impl LiveMember {
    /// Finds what the member said that it works on when it joined. Returns the numbers of those deliveries that it does not have:
    /// they are another's, or void, or never were its own. To be called before anything is taken, unless it named nothing.
    ///
    /// # Errors
    /// [`MemberEnd`].
    pub async fn resume(&mut self, named: usize) -> Result<Ranges, MemberEnd> {
        recall(&self.live, self.key, named).await?;
        self.live.with(|inner| inner.logic.resume(self.key)).map_err(|groups::MemberGone| MemberEnd::Fenced)
    }

    /// The gateway ends the stream: what the member gives back with it was not its fault.
    pub fn part(&mut self) {
        self.live.with(|inner| inner.logic.part(self.key));
    }
}

/// Makes known what an earlier process delivered to members that have not come back since, as far as these name it.
pub(super) async fn find_named(live: &Live, ids: &[AckId]) -> Result<(), GroupError> {
    let mut members: Vec<MemberKey> = Vec::new();
    for step in ids.chunks(STEP) {
        live.with(|inner| {
            for id in step {
                if let Some(key) = inner.logic.claim_id(id)
                    && !members.contains(&key)
                {
                    members.push(key);
                }
            }
        });
    }
    for key in members {
        match recall(live, key, ids.len()).await {
            // Its lease has ended meanwhile, or it has come back: the acknowledgement says what became of it.
            Ok(()) | Err(MemberEnd::Fenced) => {}
            Err(ended) => return Err(ended.into()),
        }
    }
    Ok(())
}

/// Reads what the member has named, as far as it is not known.
async fn recall(live: &Live, key: MemberKey, named: usize) -> Result<(), MemberEnd> {
    for _ in 0..named + MOST_READS {
        if live.is_ended() {
            return Err(MemberEnd::GroupGone);
        }
        let next = live
            .with(|inner| inner.logic.next_recall(key))
            .map_err(|groups::MemberGone| MemberEnd::Fenced)?;
        let Some(recall) = next else { break };
        match read(live, &recall).await {
            Ok(slice) => live.with(|inner| inner.recall(live, key, &recall, &slice))?,
            Err(error) => {
                tracing::warn!(group = live.id.0, %error, "log cannot be read, what a member works on comes again");
                break;
            }
        }
    }
    Ok(())
}

async fn read(live: &Live, recall: &Recall) -> Result<Slice, StoreError> {
    let limit = ReadLimit { records: recall.records, bytes: recall.bytes };
    match live.log.read(recall.partition, recall.from, limit) {
        LogRead::Now(slice) => Ok(slice),
        LogRead::Later(slice) => slice.await,
    }
}

impl GroupInner {
    fn recall(
        &mut self,
        live: &Live,
        key: MemberKey,
        recall: &Recall,
        slice: &Slice,
    ) -> Result<(), MemberEnd> {
        let wanted = self.is_own(live.id, recall.partition);
        let recalled = self.logic.recall(key, recall, &slice.records, slice.next, wanted, (live.clock)());
        recalled.map_err(|groups::MemberGone| MemberEnd::Fenced)
    }
}
