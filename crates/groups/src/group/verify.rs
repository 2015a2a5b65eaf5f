//! Invariants that must hold between any two calls, for the model.

use std::collections::BTreeSet;

use super::{
    super::{
        config::{MAX_AHEAD, MAX_REMEMBERED},
        member::Amount,
    },
    Group,
};

impl Group {
    pub(crate) fn verify(&mut self) {
        let mut waiting = 0;
        let mut outstanding = vec![Amount::default(); self.members.len()];
        let mut ahead = outstanding.clone();
        let mut owned = vec![0; self.members.len()];
        let mut delayed = BTreeSet::new();
        let mut handovers = 0;
        for index in 0..=u8::MAX {
            let wants = self.kind(index).is_some();
            let state = self.at(index);
            let owner = state.owner.and_then(|owner| self.member(owner));
            assert_eq!(state.owner.is_some(), owner.is_some(), "the owner is there");
            if let Some(owner) = owner {
                let (listed, queued) = (state.listed, state.queued);
                assert!(!listed || owner.ready.contains(&index));
                assert!(!queued || owner.hungry.contains(&index));
                assert!(queued || !wants, "{index} is to be read and its owner does not know");
                let takes = !state.ready.is_empty() && state.foreign == 0 && !self.config.paused;
                assert!(listed || !takes, "{index} has messages and its owner does not know");
            } else {
                assert!(state.ready.is_empty() && !state.listed && !state.queued);
            }
            if let Some(owner) = state.owner {
                owned[owner as usize] += 1;
            }
            if state.is_idle() {
                assert_eq!((state.foreign, state.handover_until), (0, None));
                continue;
            }
            if let Some(owner) = state.owner {
                for one in &state.ready {
                    ahead[owner as usize].add(one.cost);
                }
            }
            for entry in state.out.iter() {
                outstanding[entry.member as usize].add(entry.cost);
                let slot = self.member(entry.member).and_then(|member| member.deliveries.get(entry.delivery));
                assert_eq!(slot.map(|slot| (slot.partition, slot.offset)), Some((index, entry.offset)));
            }
            let foreign = state.out.iter().filter(|entry| Some(entry.member) != state.owner).count();
            assert_eq!(state.foreign, foreign);
            assert_eq!(state.handover_until.is_some(), foreign > 0 && state.owner.is_some());
            handovers += usize::from(state.handover_until.is_some());
            waiting += state.again.len();
            let mut places: Vec<u64> = state.out.iter().map(|entry| entry.offset).collect();
            places.extend(state.ready.iter().map(|one| one.record.offset));
            places.extend(state.again.iter().map(|waiting| waiting.offset));
            places.extend(state.dying.keys());
            for (&key, lagging) in &state.lagging {
                waiting += lagging.todo.len();
                places.extend(lagging.todo.iter().map(|waiting| waiting.offset));
                delayed.extend(lagging.due.map(|due| (due, index, key)));
                assert!(lagging.todo.iter().is_sorted_by_key(|waiting| waiting.offset));
                assert!(lagging.due.is_some() || !lagging.is_done(), "an ordinary key lags");
                let fresh = lagging.todo.iter().filter(|waiting| waiting.attempts == 0).count();
                assert!(fresh <= MAX_REMEMBERED + 200);
            }
            let all = places.len();
            let different: BTreeSet<u64> = places.into_iter().collect();
            assert_eq!(different.len(), all, "a message is in one place");
            assert!(different.last().is_none_or(|&last| last < state.read));
            let progress = state.progress();
            assert_eq!(progress.named(), all);
            assert_eq!(progress.floor(), state.floor());
        }
        assert_eq!((self.waiting, self.handovers), (waiting, handovers));
        assert_eq!(self.delayed, delayed);
        let mut extended = 0;
        for (index, member) in self.members.iter().enumerate() {
            let Some(member) = member else { continue };
            let listed = |index: &&u8| self.at(**index).listed && self.at(**index).owner.is_some();
            assert_eq!(member.ready.iter().filter(listed).count(), member.ready.len());
            let queued = |index: &&u8| self.at(**index).queued && self.at(**index).owner.is_some();
            assert_eq!(member.hungry.iter().filter(queued).count(), member.hungry.len());
            assert_eq!(member.outstanding, outstanding[index]);
            assert_eq!(member.ahead, ahead[index]);
            assert!(
                member.ahead.messages <= 1 || member.ahead.bytes <= MAX_AHEAD,
                "read further ahead than allowed"
            );
            assert_eq!(member.partitions, owned[index]);
            let left = outstanding[index].messages;
            extended += member.deliveries.verify(left);
        }
        assert_eq!(self.extended.len(), extended);
        let counts: Vec<usize> = self
            .members
            .iter()
            .flatten()
            .filter(|member| !member.draining)
            .map(|member| member.partitions)
            .collect();
        if let (Some(least), Some(most)) = (counts.iter().min(), counts.iter().max()) {
            assert!(most - least <= 1 && counts.iter().sum::<usize>() == 256, "spread evenly: {counts:?}");
        }
    }
}
