// SPDX-License-Identifier: Apache-2.0
//! Figures other than packet rates: how each is measured, its goal, and its result.

#![expect(clippy::print_stderr, reason = "progress goes to standard error")]

mod samples;
mod table;

pub(crate) use self::samples::{Row, Samples, percentile};
pub(crate) use self::table::{table, verdict};

/// The measurement that produces a figure. Each measurement produces all of its figures in one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// An agent from its start on an empty Node to its restart with a thousand mappings, round by round.
    Life,
    /// A cluster with many Services.
    Services,
    /// Many Nodes with one API server.
    Fleet,
    /// The requests of one agent and the bytes that the agent reads from the API server, in a cluster with many
    /// Services.
    ApiLoad,
    /// Writing the datapath's maps.
    Kernel,
    /// The kernel programs in isolation.
    Program,
    /// An established flow during floods.
    Flood,
    /// The same work on one processor and on two.
    Lanes,
    /// TCP connections through a Node.
    Sockets,
    /// A real cluster with kube-proxy in iptables mode.
    Iptables,
    /// A real cluster with kube-proxy in nftables mode.
    Nftables,
    /// A real cluster with Cilium in place of kube-proxy.
    Cilium,
    /// A real cluster in which many Pods are started at the same time.
    Crowd,
    /// Real load balancers that read the feed.
    Feed,
}

/// A measured quantity, which is one row of the table of results.
#[derive(Debug)]
pub(crate) struct Figure {
    /// The name in results and for `--only`.
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    /// The reference that the figure is compared with, round by round and in the same unit.
    pub(crate) beside: Option<&'static str>,
    pub(crate) aims: &'static [Aim],
    pub(crate) stage: Stage,
}

/// The goal of a figure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Aim {
    /// An upper bound of the median.
    Median(f64),
    /// An upper bound of the 99th percentile.
    P99(f64),
    /// An upper bound of every value.
    Most(f64),
    /// An upper bound of the median of the ratios to the reference.
    Ratio(f64),
    /// A lower bound of the median of the ratios to the reference.
    LeastRatio(f64),
}

/// Returns a figure without a reference.
pub(crate) const fn figure(name: &'static str, unit: &'static str, stage: Stage, aims: &'static [Aim]) -> Figure {
    Figure { name, unit, beside: None, aims, stage }
}

impl Figure {
    /// Returns the same figure, compared with the reference of this name.
    pub(crate) const fn beside(self, beside: &'static str) -> Self {
        Self { beside: Some(beside), ..self }
    }
}

/// Prints the progress of the bench.
pub(crate) fn say(what: &str) {
    eprintln!("bench: {what}");
}
