//! Changes that the passage of time brings.

use gateway_core::Timestamp;

use super::{super::config::TICK_WORK, Group};

impl Group {
    /// Does what is due: takes back what was not acknowledged in time, lets keys go on whose pause is over, ends leases and
    /// handovers. Returns when there is something to do next: `now` if it has stopped for the amount of work.
    pub fn tick(&mut self, now: Timestamp) -> Option<Timestamp> {
        let mut work = TICK_WORK;
        while let Some(&(due, partition, key)) = self.delayed.first()
            && due <= now
            && work > 0
        {
            work -= 1;
            self.delayed.pop_first();
            if let Some(lagging) = self.at_mut(partition).lagging.get_mut(&key) {
                lagging.due = None;
            }
            self.forget_done(partition);
            self.hungry(partition);
        }
        while let Some(&(deadline, member, id)) = self.extended.first()
            && deadline <= now
            && work > 0
        {
            work -= 1;
            self.extended.pop_first();
            self.time_out(member, id, now);
        }
        let members = u32::try_from(self.members.len()).unwrap_or(u32::MAX);
        let mut next = None;
        for index in 0..members {
            while let Some((id, slot)) = self.member_mut(index).and_then(|member| member.deliveries.first()) {
                if slot.deadline > now || work == 0 {
                    next = earlier(next, Some(slot.deadline));
                    break;
                }
                work -= 1;
                self.time_out(index, id, now);
            }
            match self.member(index).and_then(|member| member.lease_until) {
                Some(until) if until <= now => self.leave(index, now),
                until => next = earlier(next, until),
            }
        }
        if self.handovers > 0 {
            for partition in 0..=u8::MAX {
                match self.at(partition).handover_until {
                    Some(until) if until <= now => {
                        let owner = self.at(partition).owner;
                        self.rewind(partition, |entry| Some(entry.member) != owner, true, true);
                    }
                    until => next = earlier(next, until),
                }
            }
        }
        next = earlier(next, self.end_awaiting(now));
        next = earlier(next, self.delayed.first().map(|&(due, ..)| due));
        next = earlier(next, self.extended.first().map(|&(deadline, ..)| deadline));
        next.map(|next| next.max(now))
    }
}

fn earlier(a: Option<Timestamp>, b: Option<Timestamp>) -> Option<Timestamp> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}
