//! Groups that are made, moved and deleted while the disk is slow or refuses, and by calls that are given up.

use super::*;

const SOON: Duration = Duration::from_secs(5);

impl Fixture {
    /// Waits until the disk has something to write.
    async fn asked(&self) {
        let asked = async {
            while self.state.waiting() == 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(LONG, asked).await.expect("in time");
    }

    /// Writes what waits, and what comes.
    fn write(&self) {
        self.state.hold(false);
        self.state.settle(usize::MAX);
    }

    /// The groups after a restart.
    async fn reload(&self) -> Vec<String> {
        self.groups.stop().await;
        let groups = load(&self.log, &self.state).await;
        groups.list(None, 10).into_iter().map(|info| info.definition.name).collect()
    }
}

/// The failure: the call that is made again finds the group of the one that was given up, says OK, and the group is gone at the
/// next start because the disk refused it.
#[tokio::test(start_paused = true)]
async fn a_group_is_only_found_once_it_is_on_disk() {
    for refused in [false, true] {
        let fixture = Fixture::new(MemoryLogOptions::default()).await;
        let create = || fixture.groups.create(definition("g"), &Start::Latest);
        fixture.state.hold(true);
        assert!(timeout(SOON, create()).await.is_err(), "its number is not written");
        fixture.state.settle(1);
        fixture.asked().await;
        assert!(timeout(SOON, create()).await.is_err(), "nor is what it is");
        assert!(fixture.groups.list(None, 10).is_empty());
        fixture.state.fail(refused);
        fixture.state.settle(1);
        fixture.state.fail(false);
        fixture.write();
        let (info, _) = timeout(LONG, create()).await.expect("in time").expect("a group");
        assert_eq!(info.id, GroupId(if refused { 2 } else { 1 }));
        assert_eq!(fixture.reload().await, ["g"], "refused first: {refused}");
    }
}
