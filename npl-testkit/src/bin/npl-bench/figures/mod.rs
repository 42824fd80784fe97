// SPDX-License-Identifier: Apache-2.0
//! Figures that are no packet rates: what each is measured with, what it should be, and what became of it.

#![expect(clippy::print_stderr, reason = "progress goes to standard error")]

mod samples;
mod table;

pub(crate) use self::samples::{Row, Samples, percentile};
pub(crate) use self::table::{table, verdict};

/// What a figure is measured with; each measures all of its figures at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// An agent from its start on an empty Node to its restart with a thousand mappings, round by round.
    Life,
    /// A cluster with many Services.
    Services,
    /// Many Nodes at one API server.
    Fleet,
    /// The datapath's tables alone.
    Kernel,
    /// The kernel programs alone.
    Program,
    /// Connections over TCP through a Node.
    Sockets,
    /// A real cluster whose Services are rules of iptables.
    Iptables,
    /// A real cluster whose Services are rules of nftables.
    Nftables,
    /// A real cluster on which many Pods are started at once.
    Crowd,
}

/// One line of the table.
#[derive(Debug)]
pub(crate) struct Figure {
    /// As in results and for `--only`.
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    /// What was measured beside it, round by round, in the same unit.
    pub(crate) beside: Option<&'static str>,
    pub(crate) aims: &'static [Aim],
    pub(crate) stage: Stage,
}

/// What a figure should be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Aim {
    /// The median at most this.
    Median(f64),
    /// The 99th percentile at most this.
    P99(f64),
    /// Every value at most this.
    Most(f64),
    /// The rounds' ratios to what was measured beside it: their median at most this.
    Ratio(f64),
    /// Their median at least this.
    LeastRatio(f64),
}

/// A figure that nothing was measured beside.
pub(crate) const fn figure(name: &'static str, unit: &'static str, stage: Stage, aims: &'static [Aim]) -> Figure {
    Figure { name, unit, beside: None, aims, stage }
}

impl Figure {
    /// The same, with what was measured beside it.
    pub(crate) const fn beside(self, beside: &'static str) -> Self {
        Self { beside: Some(beside), ..self }
    }
}

/// Tells how far the bench is.
pub(crate) fn say(what: &str) {
    eprintln!("bench: {what}");
}
