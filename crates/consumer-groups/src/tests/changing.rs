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
        let create = || fixture.groups.create(definition("g"), &GroupStart::Latest);
        fixture.state.hold(true);
        // Numbers come from a holder that has acquired them, and the group is acquired before it is written.
        for step in ["numbers are not acquired", "its number is not written", "it is not acquired"] {
            assert!(timeout(SOON, create()).await.is_err(), "{step}");
            fixture.state.settle(1);
            fixture.asked().await;
        }
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

/// The failure: a call that was given up had removed the records, and the group was served until the next start, at which it
/// was gone with all that was acknowledged to publishers.
#[tokio::test(start_paused = true)]
async fn a_group_is_deleted_although_nobody_waits_for_it() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    fixture.create("g").await;
    fixture.state.hold(true);
    assert!(timeout(SOON, fixture.groups.delete("g")).await.is_err(), "it is not written");
    assert!(fixture.groups.get("g").is_ok());
    fixture.write();
    let gone = async {
        while fixture.groups.get("g").is_ok() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(LONG, gone).await.expect("in time");
    assert!(fixture.reload().await.is_empty());
}

/// The failure: a group that is moved while it is deleted is written once more, and is back at the next start.
#[tokio::test(start_paused = true)]
async fn a_seek_does_not_bring_a_deleted_group_back() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    fixture.create("g").await;
    fixture.state.hold(true);
    let (deleted, moved) = {
        let delete = fixture.groups.delete("g");
        let seek = async {
            fixture.asked().await;
            fixture.groups.seek("g", &GroupStart::Earliest, &Scope::ALL).await
        };
        let write = async {
            fixture.asked().await;
            // The seek has begun.
            tokio::time::sleep(SOON).await;
            fixture.write();
        };
        let all = async { tokio::join!(delete, seek, write) };
        let (deleted, moved, ()) = timeout(LONG, all).await.expect("in time");
        (deleted, moved)
    };
    deleted.expect("deleted");
    assert!(matches!(moved, Err(GroupError::NotFound | GroupError::Gone)), "{moved:?}");
    assert!(fixture.reload().await.is_empty());
}

/// The failure: a group that was moved, which is not written yet, comes back after it was deleted.
#[tokio::test(start_paused = true)]
async fn what_is_still_to_be_written_of_a_group_does_not_bring_it_back() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    fixture.create("g").await;
    fixture.state.fail(true);
    let refused =
        timeout(LONG, fixture.groups.seek("g", &GroupStart::Earliest, &Scope::ALL)).await.expect("in time");
    assert!(matches!(refused, Err(GroupError::Store(_))), "{refused:?}");
    let refused = timeout(LONG, fixture.groups.delete("g")).await.expect("in time");
    assert!(matches!(refused, Err(GroupError::Store(_))), "{refused:?}");
    assert!(fixture.groups.get("g").is_ok(), "still there");
    fixture.state.fail(false);
    let deleted = async {
        while fixture.groups.delete("g").await.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(LONG, deleted).await.expect("in time");
    assert!(fixture.reload().await.is_empty());
}
