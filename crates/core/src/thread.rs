//! Threads whose work can wait a little.

/// By how much such a thread is nicer than others: where cores are short, messages of connected devices go first, and it
/// still gets a quarter of a core.
#[cfg(target_os = "linux")]
const NICENESS: i32 = 5;

/// Lowers the priority of the calling thread, where the system has one for each thread.
pub fn give_way() {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::setpriority_process(None, NICENESS) {
        // The work is as good at the priority of all others.
        let name = std::thread::current().name().map(str::to_owned);
        tracing::debug!(thread = name, %error, "a thread keeps the priority of others");
    }
}
