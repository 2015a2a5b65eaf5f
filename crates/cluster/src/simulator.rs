//! The protocol in virtual time.

use crate::*;

/// The failure: the gateway cannot spawn what the protocol runs.
#[test]
fn futures_can_be_spawned() {
    fn is_send<T: Send>(_: &dyn Fn() -> T) {}
    type Parts<'a> = (
        &'a std::sync::Arc<dyn ledger::Ledger>,
        &'a std::sync::Arc<dyn Clock>,
        &'a std::sync::Arc<Node>,
        &'a mut dyn HomeCopy,
    );
    fn of_take<'a>((ledger, clock, me, copy): Parts<'a>) -> impl Send + 'a {
        take(ledger, clock, me, 0, None, LEASE_WAIT, copy)
    }
    fn of_step<'a>(follower: &'a mut Follower, (ledger, clock, _, copy): Parts<'a>) -> impl Send + 'a {
        follower.step(&**ledger, &**clock, copy)
    }
    fn of_tenure(tenure: &Tenure) -> impl Send {
        (tenure.run(), tenure.lost(), tenure.publish_start(0, 0, 0), tenure.release(Vec::new()))
    }
    fn of_writer(writer: &mut StreamWriter) -> impl Send {
        writer.append_cleaned(b"", true)
    }
    let _ = (of_take, of_step, of_tenure, of_writer);
    is_send(&|| ());
}
