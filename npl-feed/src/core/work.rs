// SPDX-License-Identifier: Apache-2.0
//! Counts expensive operations, so that tests can bound the work of a change without a clock. Outside of tests, nothing
//! is counted.

/// An operation whose number tests bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    /// A digest is computed.
    Digest,
    /// A Pod is examined, because a Pod has changed or a drain has ended.
    Visit,
    /// An xDS stream looks up a resource by its name.
    LookUp,
    /// Two snapshots are compared.
    Comparison,
    /// All groups of a snapshot are listed.
    Listing,
    /// A DNS record is built.
    Record,
}

#[cfg(not(test))]
pub(crate) const fn count(_: Operation, _: usize) {}

#[cfg(test)]
pub(crate) use self::counted::{count, during};

#[cfg(test)]
mod counted {
    use std::cell::Cell;

    use super::Operation;

    thread_local! {
        static COUNTS: [Cell<usize>; 6] = const { [const { Cell::new(0) }; 6] };
    }

    fn of(operation: Operation) -> usize {
        COUNTS.with(|counts| counts[operation as usize].get())
    }

    pub(crate) fn count(operation: Operation, number: usize) {
        COUNTS.with(|counts| counts[operation as usize].update(|count| count + number));
    }

    /// Returns the number of operations of this thread during `work`.
    pub(crate) fn during(operation: Operation, work: impl FnOnce()) -> usize {
        let before = of(operation);
        work();
        of(operation) - before
    }
}
