//! Changes of the view.

use std::{sync::atomic::AtomicU64, time::Duration};

use ledger::{Ledger, StoredView, Swapped};

use crate::{
    Clock, View, ViewError,
    calls::{First, first, until_answered},
};

/// Time after which a compare-and-set without an answer counts as unknown.
const SWAP_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause before a view is read again after an unknown compare-and-set.
const PAUSE: Duration = Duration::from_millis(100);

/// Reads the view, again until it is answered.
///
/// # Errors
/// `NotCreated`, `Newer` and `Unreadable`.
pub async fn read_view(ledger: &dyn Ledger, clock: &dyn Clock) -> Result<(StoredView, View), ViewError> {
    let (_, stored) = until_answered(clock, &AtomicU64::new(0), || ledger.view()).await;
    let stored = stored.ok_or(ViewError::NotCreated)?;
    let view = View::read(&stored)?;
    Ok((stored, view))
}

/// Replaces the view by one that `transition` makes of it, and returns the new one. `transition` sees every view in the way of the
/// change, and returns `None` if nothing is left to do.
///
/// **A read does not settle an unknown compare-and-set: it may apply until the version has moved.** So after one, `transition` sees
/// the view again, and decides by it; as long as the version has not moved, it should make the same view of the same one.
///
/// Cancel safety: if dropped, the change may apply at any time until the version has moved.
///
/// # Errors
/// As [`read_view`], and as `transition`.
pub async fn change<E: From<ViewError>>(
    ledger: &dyn Ledger,
    clock: &dyn Clock,
    mut transition: impl FnMut(&View) -> Result<Option<View>, E>,
) -> Result<View, E> {
    loop {
        let (stored, view) = read_view(ledger, clock).await?;
        let Some(next) = transition(&view)? else { return Ok(view) };
        if swap(ledger, clock, &stored, &next).await? == Some(Swapped::Applied) {
            return Ok(next);
        }
    }
}

/// One compare-and-set of the view; `None` if it is unknown what became of it.
pub(crate) async fn swap(
    ledger: &dyn Ledger,
    clock: &dyn Clock,
    before: &StoredView,
    next: &View,
) -> Result<Option<Swapped>, ViewError> {
    let new = next.store(before.cluster, before.version + 1)?;
    if let First::One(Ok(swapped)) = first(ledger.swap(&new), clock.sleep(SWAP_TIMEOUT)).await {
        return Ok(Some(swapped));
    }
    clock.sleep(PAUSE).await;
    Ok(None)
}

/// Makes tables and the first view of a cluster; `cluster` is drawn. Not by two at once.
///
/// # Errors
/// `Created`, if there is a view of another, and `NotCreated` with an engine that does not answer.
pub async fn create(
    ledger: &dyn Ledger,
    clock: &dyn Clock,
    cluster: u128,
    view: &View,
) -> Result<(), ViewError> {
    let repeats = AtomicU64::new(0);
    until_answered(clock, &repeats, || ledger.create()).await;
    loop {
        let (_, there) = until_answered(clock, &repeats, || ledger.view()).await;
        match there {
            Some(there) if there.cluster == cluster => return Ok(()),
            Some(there) => return Err(ViewError::Created(View::read(&there)?.name)),
            None => {}
        }
        let none = StoredView { cluster, version: 0, document: bytes::Bytes::new(), owners: Vec::new() };
        swap(ledger, clock, &none, view).await?;
    }
}
