// SPDX-License-Identifier: Apache-2.0
//! Which connections the guard is to mark, and what the log has heard of Pods whose replies may leave elsewhere.

use std::{collections::BTreeSet, net::IpAddr};

use tracing::{field::display, info, warn};

use crate::{
    core::devices::{
        redirect::Forwarding,
        reply_routing::{Marking, Trouble, WaysBack},
    },
    nft_guard::GuardMode,
};

/// What was last found, so that only changes are told.
#[derive(Debug)]
pub struct Returns {
    forwarding: Forwarding,
    guard: GuardMode,
    markings: BTreeSet<Marking>,
    trouble: Option<Trouble>,
}

impl Returns {
    /// Nothing found yet.
    pub const fn new(forwarding: Forwarding, guard: GuardMode) -> Self {
        Self { forwarding, guard, markings: BTreeSet::new(), trouble: None }
    }

    /// Which connections are to be marked.
    pub const fn markings(&self) -> &BTreeSet<Marking> {
        &self.markings
    }

    /// Takes in what was found, and which Pods have mappings.
    pub fn take_in(&mut self, ways: WaysBack, mapped: &BTreeSet<IpAddr>) {
        let ways = ways.of(mapped);
        let (trouble, pods) = ways.trouble(self.forwarding, self.guard != GuardMode::Off).unzip();
        if self.trouble != trouble {
            self.trouble = trouble;
            self.tell(pods.unwrap_or(&BTreeSet::new()));
        }
        self.markings = ways.markings;
    }

    fn tell(&self, pods: &BTreeSet<IpAddr>) {
        let (count, pod_ip) = (pods.len(), pods.first().map(display));
        match self.trouble {
            None => info!("replies leave by the interfaces that their requests came in by"),
            Some(Trouble::NoMark) => warn!(
                count,
                pod_ip,
                "rules route packets of Pods by tables of their own, and none ahead of them leads a mark to the Node's: replies \
                 leave by other interfaces than their requests came in by; see \"Beside the rules of others\" in \
                 docs/datapath.md"
            ),
            Some(Trouble::NobodyMarks) => warn!(
                count,
                pod_ip,
                "rules route packets of Pods by tables of their own, and with --nft-guard off nobody marks connections to \
                 mappings: replies leave by other interfaces than their requests came in by"
            ),
        }
    }
}
