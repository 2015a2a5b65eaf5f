//! Reads on the blocking pool, a few at a time.

use std::sync::Arc;

use tokio::sync::Semaphore;

use store::StoreError;

/// Permits for reads.
#[derive(Clone)]
pub(super) struct ReadPermits(Arc<Semaphore>);

impl ReadPermits {
    /// At most `at_once` reads at a time; more wait.
    pub(super) fn new(at_once: usize) -> Self {
        Self(Arc::new(Semaphore::new(at_once)))
    }

    /// Runs `read` on the blocking pool, in its turn. Cancelled, a read that has begun goes on.
    pub(super) async fn run<T: Send + 'static>(
        self,
        read: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let permit = self.0.acquire_owned().await.map_err(|_| StoreError::closed())?;
        // The permit goes with the read: a caller that gave up must not make room for one more that hangs.
        let read = move || {
            let _permit = permit;
            read()
        };
        tokio::task::spawn_blocking(read)
            .await
            .map_err(|e| StoreError::Unavailable(format!("read did not finish: {e}")))?
    }
}
