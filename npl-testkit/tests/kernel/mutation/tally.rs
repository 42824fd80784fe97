// SPDX-License-Identifier: Apache-2.0
//! Counts the results of the runs per program.

use std::collections::BTreeMap;
use std::fmt;

use npl_agent::core::model::Family;
use npl_common::names::PROGRAMS;
use npl_common::reason::Reason;

/// The result of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Untouched,
    Counted(Reason),
    Translated,
    Redirected,
    /// A translated first SCTP fragment whose copy waits in the reassembly buffer.
    Held,
    Refused,
    /// The kernel's test run rejects frames without a complete IP header.
    Rejected,
}

/// Reasons that the packets need not reach. The first two need a kernel without memory. A host connection needs two
/// packets with the same endpoints, in a certain order.
const NOT_REQUIRED: [Reason; 3] = [Reason::FlowTableFull, Reason::RewriteFailed, Reason::HostConnection];

#[derive(Default)]
pub(super) struct Tally(BTreeMap<(&'static str, Kind), u64>);

impl Tally {
    pub(super) fn add(&mut self, program: &'static str, kind: Kind) {
        *self.0.entry((program, kind)).or_default() += 1;
    }

    fn of(&self, is_included: impl Fn(&'static str, Kind) -> bool) -> u64 {
        self.0.iter().filter(|((program, kind), _)| is_included(program, *kind)).map(|(_, count)| count).sum()
    }

    /// Asserts that the packets have reached every kind of result that single packets can reach.
    pub(super) fn is_complete(&self, family: Family) {
        for name in PROGRAMS {
            assert!(self.of(|program, kind| program == *name && kind == Kind::Untouched) > 0, "{name}: {self}");
        }
        let is_possible = |reason: Reason| family == Family::V6 || reason != Reason::Ipv6ExtensionHeaders;
        let is_required = |reason: &&Reason| is_possible(**reason) && !NOT_REQUIRED.contains(reason);
        for reason in Reason::ALL.iter().filter(is_required) {
            // A tuple conflict is counted in addition to the translation of the packet.
            let is_counted = |kind| {
                let is_refused = *reason == Reason::SourceRefused && kind == Kind::Refused;
                is_refused || *reason == Reason::TupleConflict || kind == Kind::Counted(*reason)
            };
            assert!(self.of(|_, kind| is_counted(kind)) > 0, "no packet was counted as {}: {self}", reason.name());
        }
        for kind in [Kind::Translated, Kind::Redirected, Kind::Held] {
            assert!(self.of(|_, other| other == kind) > 0, "{kind:?}: {self}");
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = |kind| self.of(|_, other| other == kind);
        write!(
            formatter,
            "{} packets: {} untouched and uncounted, {} counted and untouched, {} translated for the stack, \
             {} translated and redirected, {} held, {} refused, {} rejected by the kernel's test run",
            self.of(|_, _| true),
            total(Kind::Untouched),
            self.of(|_, kind| matches!(kind, Kind::Counted(_))),
            total(Kind::Translated),
            total(Kind::Redirected),
            total(Kind::Held),
            total(Kind::Refused),
            total(Kind::Rejected)
        )?;
        for ((program, kind), count) in &self.0 {
            write!(formatter, "\n  {program} {kind:?}: {count}")?;
        }
        Ok(())
    }
}
