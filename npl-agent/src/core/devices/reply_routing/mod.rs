// SPDX-License-Identifier: Apache-2.0
//! By which interface replies leave of Pods whose packets a rule routes by a table of their own.
//!
//! ```text
//!   1024: from all fwmark 0x80/0x80 lookup main      what came for the Node, answered where it came in
//!   1536: from 10.0.64.7 lookup 2                    a Pod of the second interface
//! ```
//!
//! A CNI of several interfaces marks connections that come for the Node, and has replies take the mark along. A request
//! that was translated before is for the Pod; so that its reply takes the first rule, somebody else has to mark it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
};

use super::{Device, redirect::Forwarding};
use crate::core::model::Family;

/// The kernel's number of the table that routes unless a rule says otherwise.
pub const MAIN_TABLE: u32 = 254;

/// A value of some bits of a packet's or connection's mark, which is not that of one without any.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark {
    value: u32,
    mask: u32,
}

impl Mark {
    /// Nothing where packets have it that nobody has marked.
    pub const fn new(value: u32, mask: u32) -> Option<Self> {
        // The kernel compares no other bits.
        let value = value & mask;
        if value == 0 { None } else { Some(Self { value, mask }) }
    }

    /// The bits that are set.
    pub const fn value(self) -> u32 {
        self.value
    }

    /// The bits that it speaks of.
    pub const fn mask(self) -> u32 {
        self.mask
    }
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}/{:#x}", self.value, self.mask)
    }
}

/// Whose packets a rule routes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Selector {
    /// What this address sends, or a part of that.
    Source(IpAddr),
    /// All that carries a mark.
    Mark(Mark),
}

/// A rule that has a table route some packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// Of which family's packets.
    pub family: Family,
    /// Which of them.
    pub selector: Selector,
    /// The table, by its number.
    pub table: u32,
}

/// A table's route to everywhere that no other of its routes leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DefaultRoute {
    /// Of which family's packets.
    pub family: Family,
    /// The table, by its number.
    pub table: u32,
    /// The device that it leaves by, by its index.
    pub ifindex: u32,
}

/// How the kernel chooses the interface that a packet leaves by, as far as that matters to replies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Routing {
    /// In the order in which the kernel asks them.
    pub rules: Vec<Rule>,
    /// One for each device of each table.
    pub default_routes: BTreeSet<DefaultRoute>,
}

/// Connections to have a mark: those by which a request has come in by a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Marking {
    /// Of which family.
    pub family: Family,
    /// The device, by its index.
    pub ifindex: u32,
    /// The mark.
    pub mark: Mark,
}

/// What becomes of replies whose sender a rule has routed by a table of its own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReplyRoutes {
    /// What leads replies of the marked ones back.
    pub markings: BTreeSet<Marking>,
    /// Whose replies leave by the uplink that their requests came in by, if their connections are marked.
    pub marked: BTreeSet<IpAddr>,
    /// Whose replies no mark leads there.
    pub unmarked: BTreeSet<IpAddr>,
}

/// Why replies of some Pods leave by other interfaces than their requests came in by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyRouteProblem {
    /// No rule leads a mark to the Node's own routes ahead of the Pods' rules.
    NoMark,
    /// One does, and nobody sets the mark.
    MarkNotSet,
}

impl Routing {
    /// Judges by rules and routes alone, and so before a Pod has its first mapping. A rule for an address of the Node's own
    /// is about no Pod.
    pub fn reply_routes(&self, devices: &[Device], uplinks: &BTreeSet<u32>) -> ReplyRoutes {
        let is_own = |addr: &IpAddr| devices.iter().any(|device| device.addresses.contains(addr));
        let mut routes = ReplyRoutes::default();
        let mut leading: BTreeMap<Family, BTreeSet<Marking>> = BTreeMap::new();
        for rule in &self.rules {
            match rule.selector {
                Selector::Mark(mark) if !leading.contains_key(&rule.family) => {
                    let markings = self.markings(rule, mark, uplinks);
                    if !markings.is_empty() {
                        leading.insert(rule.family, markings);
                    }
                }
                Selector::Source(addr) if rule.table != MAIN_TABLE && !is_own(&addr) => {
                    routes.take_in(addr, leading.get(&rule.family));
                }
                Selector::Mark(_) | Selector::Source(_) => {}
            }
        }
        routes
    }

    /// By which uplinks replies leave that a rule leads by its table, and that requests may have come in by.
    fn markings(&self, rule: &Rule, mark: Mark, uplinks: &BTreeSet<u32>) -> BTreeSet<Marking> {
        let is_its = |route: &&DefaultRoute| (route.family, route.table) == (rule.family, rule.table);
        let of_table = self.default_routes.iter().filter(is_its).filter(|route| uplinks.contains(&route.ifindex));
        of_table.map(|route| Marking { family: rule.family, ifindex: route.ifindex, mark }).collect()
    }
}

impl ReplyRoutes {
    /// The first rule for an address decides; those of a CNI that names destinations too follow each other.
    fn take_in(&mut self, addr: IpAddr, leading: Option<&BTreeSet<Marking>>) {
        if self.marked.contains(&addr) || self.unmarked.contains(&addr) {
            return;
        }
        if let Some(markings) = leading {
            self.marked.insert(addr);
            self.markings.extend(markings);
        } else {
            self.unmarked.insert(addr);
        }
    }

    /// What is wrong, and with which Pods. What is redirected has its way back asked for the Node's address, and not for the
    /// Pod's.
    pub fn problem(&self, forwarding: Forwarding, are_marked: bool) -> Option<(ReplyRouteProblem, &BTreeSet<IpAddr>)> {
        if forwarding == Forwarding::Redirect {
            None
        } else if !self.unmarked.is_empty() {
            Some((ReplyRouteProblem::NoMark, &self.unmarked))
        } else if !are_marked && !self.marked.is_empty() {
            Some((ReplyRouteProblem::MarkNotSet, &self.marked))
        } else {
            None
        }
    }

    /// The same about some addresses; what is marked is marked for all.
    #[must_use]
    pub fn of(mut self, addresses: &BTreeSet<IpAddr>) -> Self {
        for addrs in [&mut self.marked, &mut self.unmarked] {
            addrs.retain(|addr| addresses.contains(addr));
        }
        self
    }
}

#[cfg(test)]
mod tests;
