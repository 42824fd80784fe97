// SPDX-License-Identifier: Apache-2.0
//! Finds through which interface the replies of a Pod leave if a policy routing rule gives the Pod its own routing
//! table.
//!
//! ```text
//!   1024: from all fwmark 0x80/0x80 lookup main      connections to the Node: reply by the interface of the request
//!   1536: from 10.0.64.7 lookup 2                    a Pod of the second interface
//! ```
//!
//! A CNI that uses several interfaces of the Node marks connections to the Node, and sets the same mark on the replies
//! of these connections. The CNI does not mark a translated request, because the request's destination is the Pod's
//! address. So the nftables guard (NPL's nftables table) marks the connections of translated requests.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
};

use super::{Device, redirect::Forwarding};
use crate::core::model::Family;

/// The number of the main routing table.
pub const MAIN_TABLE: u32 = 254;

/// A mask of bits in the mark of a packet or connection, and a nonzero value of these bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark {
    value: u32,
    mask: u32,
}

impl Mark {
    /// Creates a mark; `None` if the masked value is zero, because unmarked packets have this value, too.
    pub const fn new(value: u32, mask: u32) -> Option<Self> {
        // The kernel compares only the bits of the mask.
        let value = value & mask;
        if value == 0 { None } else { Some(Self { value, mask }) }
    }

    /// The value of the bits that the mask selects.
    pub const fn value(self) -> u32 {
        self.value
    }

    /// The mask, which selects the bits that are compared.
    pub const fn mask(self) -> u32 {
        self.mask
    }
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}/{:#x}", self.value, self.mask)
    }
}

/// The packets to which a policy routing rule applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Selector {
    /// Packets with this source address. The rule may have further conditions.
    Source(IpAddr),
    /// Packets that have this mark.
    Mark(Mark),
}

/// A policy routing rule that selects a routing table for packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoutingRule {
    /// The IP family.
    pub family: Family,
    /// The packets to which the rule applies.
    pub selector: Selector,
    /// The number of the routing table.
    pub table: u32,
}

/// A default route of a routing table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DefaultRoute {
    /// The IP family.
    pub family: Family,
    /// The number of the routing table.
    pub table: u32,
    /// The ifindex of the outgoing device.
    pub ifindex: u32,
}

/// The policy routing rules and default routes that decide through which interface replies leave.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Routing {
    /// The policy routing rules that match a source address or a mark, in the order of their priority.
    pub rules: Vec<RoutingRule>,
    /// Default routes: one entry for each outgoing device of each table.
    pub default_routes: BTreeSet<DefaultRoute>,
    /// The routing tables of all rules that match a packet's mark, with or without further conditions.
    pub tables_of_marks: BTreeSet<(Family, u32)>,
    /// The policy routing rules for all packets that arrive on a device.
    pub incoming: Vec<IncomingRule>,
    /// The routing tables of the rules in [`Self::incoming`], each with the ifindexes of the devices through which any of
    /// its routes leads. Tables without routes are absent.
    pub tables_of_incoming: BTreeMap<(Family, u32), BTreeSet<u32>>,
}

/// A policy routing rule for all packets that arrive on a device, such as `iif DEVICE lookup TABLE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IncomingRule {
    /// The IP family.
    pub family: Family,
    /// The name of the device.
    pub device: String,
    /// The number of the routing table.
    pub table: u32,
}

/// A rule of the nftables guard that marks the connections whose request arrived on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Marking {
    /// The IP family.
    pub family: Family,
    /// The ifindex of the device on which the request arrived.
    pub ifindex: u32,
    /// The mark that the rule sets.
    pub mark: Mark,
}

/// How replies are routed if a policy routing rule gives the Pod, or a Node address, its own routing table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReplyRoutes {
    /// The connections to mark, so that replies leave through the interface on which their request arrived.
    pub markings: BTreeSet<Marking>,
    /// Pods whose replies leave through the interface of the request only if their connections are marked.
    pub marked: BTreeSet<IpAddr>,
    /// Pods whose replies cannot be routed through an uplink by a mark, because there is no rule that matches a mark,
    /// precedes the Pod's rule, and selects a table with a default route through an uplink.
    pub unmarked: BTreeSet<IpAddr>,
    /// Addresses of the Node with their own routing table, if that table has default routes through other uplinks than
    /// the main table has. The kernel routes a forwarded reply by the Pod's address, before NPL changes the source to
    /// the Node's address. So the reply does not use the table of the Node's address.
    pub misrouted_addresses: BTreeSet<IpAddr>,
}

/// The reason why some replies leave through another interface than the one on which their requests arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyRouteProblem {
    /// There is no rule that matches a mark, precedes the Pods' rules, and selects a table with a default route through
    /// an uplink.
    NoMark,
    /// A rule for a mark selects a table with a default route through an uplink, but the nftables guard does not set
    /// the mark on connections.
    MarkNotSet,
    /// A rule selects a separate routing table for packets from an address of the Node, but replies of Pods are not
    /// routed by this table.
    NodeAddress,
}

impl Routing {
    /// Returns how the replies of all Pods are routed. The result does not depend on mappings, so it is also correct
    /// for a Pod that has no mapping yet.
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
                    routes.add_pod(addr, leading.get(&rule.family));
                }
                Selector::Source(addr) if self.misroutes(rule, leading.get(&rule.family), uplinks) => {
                    routes.misrouted_addresses.insert(addr);
                }
                Selector::Mark(_) | Selector::Source(_) => {}
            }
        }
        routes
    }

    /// Whether replies to clients of a Node address leave through another uplink than this rule selects for the
    /// address. This is possible if the default routes of the rule's table lead through other uplinks than those of the
    /// main table, and the preceding rules for marks do not lead to all uplinks of the rule's table.
    fn misroutes(&self, rule: &RoutingRule, leading: Option<&BTreeSet<Marking>>, uplinks: &BTreeSet<u32>) -> bool {
        let of_rule = self.default_uplinks(rule.family, rule.table, uplinks);
        let of_marks: BTreeSet<u32> = leading.into_iter().flatten().map(|marking| marking.ifindex).collect();
        !of_rule.is_empty()
            && of_rule != self.default_uplinks(rule.family, MAIN_TABLE, uplinks)
            && !of_rule.is_subset(&of_marks)
    }

    /// The interface indexes of the devices through which the default routes of a routing table lead.
    pub fn default_devices(&self, family: Family, table: u32) -> BTreeSet<u32> {
        let is_its = |route: &&DefaultRoute| (route.family, route.table) == (family, table);
        self.default_routes.iter().filter(is_its).map(|route| route.ifindex).collect()
    }

    /// The uplinks through which the default routes of a routing table lead.
    fn default_uplinks(&self, family: Family, table: u32, uplinks: &BTreeSet<u32>) -> BTreeSet<u32> {
        &self.default_devices(family, table) & uplinks
    }

    /// The IP families in which a packet's mark can decide the uplink: a rule for a mark selects a table that is not
    /// the main table, and this table has a default route through an uplink.
    pub fn families_routed_by_mark(&self, uplinks: &BTreeSet<u32>) -> BTreeSet<Family> {
        let leads_out = |(family, table): &&(Family, u32)| {
            *table != MAIN_TABLE && !self.default_uplinks(*family, *table, uplinks).is_empty()
        };
        self.tables_of_marks.iter().filter(leads_out).map(|(family, _)| *family).collect()
    }

    /// The connections to mark for a rule that matches `mark`: one marking for each uplink of the default routes in the
    /// rule's table.
    fn markings(&self, rule: &RoutingRule, mark: Mark, uplinks: &BTreeSet<u32>) -> BTreeSet<Marking> {
        let of_table = self.default_uplinks(rule.family, rule.table, uplinks).into_iter();
        of_table.map(|ifindex| Marking { family: rule.family, ifindex, mark }).collect()
    }
}

impl ReplyRoutes {
    /// Adds the Pod of a policy routing rule. The second and any further rule for the same Pod address is ignored: a
    /// CNI may create several rules for one address, with different destinations.
    fn add_pod(&mut self, addr: IpAddr, leading: Option<&BTreeSet<Marking>>) {
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

    /// Returns the problem and the addresses of the affected Pods, or of the Node. `are_marked` is whether the nftables
    /// guard sets, or is enabled to set, the marks in [`Self::markings`]. With `--forwarding redirect`, there is no
    /// problem: the programs look up the route of a redirected reply with the Node's address as the source.
    pub fn problem(&self, forwarding: Forwarding, are_marked: bool) -> Option<(ReplyRouteProblem, &BTreeSet<IpAddr>)> {
        if forwarding == Forwarding::Redirect {
            None
        } else if !self.unmarked.is_empty() {
            Some((ReplyRouteProblem::NoMark, &self.unmarked))
        } else if !are_marked && !self.marked.is_empty() {
            Some((ReplyRouteProblem::MarkNotSet, &self.marked))
        } else if !self.misrouted_addresses.is_empty() {
            Some((ReplyRouteProblem::NodeAddress, &self.misrouted_addresses))
        } else {
            None
        }
    }

    /// Removes all Pods except those with these addresses. The markings and the Node's addresses do not change.
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
