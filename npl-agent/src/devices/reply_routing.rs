// SPDX-License-Identifier: Apache-2.0
//! Which connections the guard is to mark, and what the log has heard of Pods whose replies may leave elsewhere.

use std::{collections::BTreeSet, net::IpAddr};

use tracing::{field::display, info, warn};

use crate::{
    core::devices::{
        redirect::Forwarding,
        reply_routing::{Marking, ReplyRouteProblem, ReplyRoutes},
    },
    nft_guard::GuardMode,
};

/// What was last found, so that only changes are told.
#[derive(Debug)]
pub struct ReplyRouting {
    forwarding: Forwarding,
    guard: GuardMode,
    markings: BTreeSet<Marking>,
    problem: Option<ReplyRouteProblem>,
}

impl ReplyRouting {
    /// Nothing found yet.
    pub const fn new(forwarding: Forwarding, guard: GuardMode) -> Self {
        Self { forwarding, guard, markings: BTreeSet::new(), problem: None }
    }

    /// Which connections are to be marked.
    pub const fn markings(&self) -> &BTreeSet<Marking> {
        &self.markings
    }

    /// Takes in what was found, and which Pods have mappings.
    pub fn take_in(&mut self, routes: ReplyRoutes, mapped: &BTreeSet<IpAddr>) {
        let routes = routes.of(mapped);
        let (problem, pods) = routes.problem(self.forwarding, self.guard != GuardMode::Off).unzip();
        if self.problem != problem {
            self.problem = problem;
            self.tell(pods.unwrap_or(&BTreeSet::new()));
        }
        self.markings = routes.markings;
    }

    fn tell(&self, pods: &BTreeSet<IpAddr>) {
        let (count, pod_ip) = (pods.len(), pods.first().map(display));
        match self.problem {
            None => info!("replies leave by the interfaces that their requests came in by"),
            Some(ReplyRouteProblem::NoMark) => warn!(
                count,
                pod_ip,
                "rules route packets of Pods by tables of their own, and none ahead of them leads a mark to the Node's: replies \
                 leave by other interfaces than their requests came in by; see \"Beside the rules of others\" in \
                 docs/datapath.md"
            ),
            Some(ReplyRouteProblem::MarkNotSet) => warn!(
                count,
                pod_ip,
                "rules route packets of Pods by tables of their own, and with --nft-guard off nobody marks connections to \
                 mappings: replies leave by other interfaces than their requests came in by"
            ),
        }
    }
}
