//! Protocols that are wrong in one point, for the tests: the simulator must catch each of them.

/// A point in which the protocol is wrong.
#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Weakening {
    /// Acknowledges without step (3).
    NoValidation,
    /// Reads the owners before the insert instead of after it.
    ValidationBefore,
    /// Lets an append join a validating read that is under way.
    JoinRead,
    /// Takes an insert without an answer for one that is stored.
    UnknownIsStored,
    /// Serves before step (8) is known to be applied.
    ServeBeforeSeal,
    /// Leaves step (8) out.
    NoSeal,
    /// After an unknown step (8), takes any seal for its own.
    SealBlind,
    /// Commits the view to one replica.
    CommitToOne,
    /// Writes nothing again in step (7), over an engine that repairs nothing either.
    NoRewrite,
    /// Writes only the first row of the last record again.
    HalfRewrite,
    /// Counts a record of which some parts are there.
    PartsMissing,
    /// Takes an owner of the same name for itself.
    SameIncarnation,
    /// Uses a directory whose position has left the chain.
    StaleDirectory,
    /// Uses a directory that is ahead of a seal.
    DirectoryAhead,
    /// Commits locally before step (4), and uses the directory in any case.
    LocalFirst,
    /// Puts the oldest keys behind a transaction's own changes.
    CursorLast,
    /// Publishes the record that passes a mark as the start.
    PublishEnd,
    /// Takes marks of a round of cleaning for passed as soon as that round ends.
    PassSoon,
    /// Deletes before the start is published.
    DeleteUnpublished,
    /// Appends what depends on another stream's record before that is inserted.
    NoThen,
    /// Appends what depends on another stream's record after its step (2).
    ThenAtInsert,
    /// Goes on in an epoch of its own in which it has served.
    SameEpoch,
    /// Decides by a look from before the end of its tenure.
    OldLook,
}

#[cfg(test)]
thread_local! {
    /// The point in which the protocol is wrong on this thread.
    pub(crate) static WEAKENING: std::cell::Cell<Option<Weakening>> = const { std::cell::Cell::new(None) };
}

/// Tells whether the protocol is wrong in one of these points; never outside tests.
macro_rules! weakened {
    ($($point:ident)|+) => {{
        #[cfg(test)]
        let is_wrong = matches!(
            $crate::weakening::WEAKENING.get(),
            Some($($crate::weakening::Weakening::$point)|+)
        );
        #[cfg(not(test))]
        let is_wrong = false;
        is_wrong
    }};
}
