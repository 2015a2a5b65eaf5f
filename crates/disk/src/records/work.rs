//! Makes writes: checks each against what those before it leave, and writes it. One whose conditions are not met changes nothing
//! and holds up no other.

use super::{
    RecordTables, report_damage,
    room::{self, ShadowRoom},
    turns::{Turns, TurnsInbox},
};
use crate::{committer::EnvironmentWriter, table::WriteTxn};
use store::encoding::fields;
use store::{Expect, RecordChange, RecordFence, RecordKind, RecordOutcome, RecordWrite};

/// The writer's.
pub(super) struct RecordWork {
    pub(super) tables: RecordTables,
    pub(super) room: ShadowRoom,
    pub(super) turns: Turns,
    pub(super) outcomes: Vec<RecordOutcome>,
    pub(super) buffer: Vec<u8>,
}

impl RecordWork {
    fn make(
        tables: RecordTables,
        room: &mut ShadowRoom,
        txn: &mut WriteTxn<'_>,
        write: &RecordWrite,
        buffer: &mut Vec<u8>,
    ) -> Result<RecordOutcome, heed::Error> {
        let RecordWrite { changes, fence } = write;
        if let Some(RecordFence { kind, key, version }) = fence {
            let found = tables.of(*kind).get(txn, key)?;
            if !is_met(found, (*kind, key), &Expect::Version(*version)) {
                return Ok(RecordOutcome::Fenced);
            }
        }
        let (mut before, mut now) = (0, 0);
        for RecordChange { kind, key, value, expect } in changes {
            let is_bounded = *kind == RecordKind::Shadows;
            if *expect == Expect::Any && !is_bounded {
                continue;
            }
            let found = tables.of(*kind).get(txn, key)?;
            if !is_met(found, (*kind, key), expect) {
                return Ok(RecordOutcome::Conflict);
            }
            if is_bounded {
                before += found.map_or(0, |found| room::size(key, found.len()));
                now += value.as_ref().map_or(0, |value| room::size(key, fields::HEAD + value.len()));
            }
        }
        let shadows = tables.of(RecordKind::Shadows);
        if now > before && !room.admits(shadows, txn, &changes[0].key, now - before)? {
            return Ok(RecordOutcome::Full);
        }
        room.note(before, now);
        for RecordChange { kind, key, value, .. } in changes {
            match value {
                Some(value) => {
                    fields::begin(buffer);
                    buffer.extend_from_slice(value);
                    fields::seal(buffer);
                    tables.of(*kind).put(txn, key, buffer)?;
                }
                None => {
                    tables.of(*kind).delete(txn, key)?;
                }
            }
        }
        Ok(RecordOutcome::Done)
    }
}

fn is_met(found: Option<&[u8]>, (kind, key): (RecordKind, &[u8]), expect: &Expect) -> bool {
    let found = found.map(|value| fields::open(value).map(|input| input.0));
    if found == Some(None) {
        report_damage(kind, key);
    }
    expect.is_met(found)
}

impl EnvironmentWriter for RecordWork {
    type Inbox = TurnsInbox;

    fn accept(&mut self, inbox: &mut TurnsInbox) {
        self.turns.accept(inbox);
    }

    fn plan(&mut self, redo: usize) -> bool {
        self.turns.plan(redo)
    }

    fn apply(&mut self, txn: &mut WriteTxn<'_>) -> Result<(), heed::Error> {
        let Self { tables, room, turns, outcomes, buffer } = self;
        outcomes.clear();
        room.begun();
        for op in turns.planned() {
            outcomes.push(Self::make(*tables, room, txn, &op.write, buffer)?);
        }
        Ok(())
    }

    fn adds(&self) -> bool {
        self.turns.adds()
    }

    fn committed(&mut self) {
        self.room.committed();
        self.turns.committed(&mut self.outcomes);
    }

    fn failed(&mut self) {
        self.turns.failed();
    }

    fn more(&self) -> bool {
        !self.turns.is_empty()
    }

    fn close(&mut self) {
        self.turns.close();
    }
}
