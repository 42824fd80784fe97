// SPDX-License-Identifier: Apache-2.0
//! A model of the AVI Kubernetes Operator (AKO): the pool members that AKO reads from an annotation.

use std::net::{IpAddr, SocketAddr};

use super::go_json::{self, Fields};

/// AKO releases that read the annotation differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ako {
    /// AKO 1.13.2 and newer.
    Current,
    /// AKO up to 1.13.1, where all pool members of a Pod get the address of the Pod's last annotation entry.
    LastAddress,
}

impl Ako {
    /// Returns the pool members for a target port, limited to the address families of the pool, in annotation order.
    ///
    /// AKO ignores the protocol, keeps duplicates, and skips entries without a valid address.
    pub fn members(self, annotation: &str, target_port: u16, is_wanted: impl Fn(IpAddr) -> bool) -> Vec<SocketAddr> {
        let all = go_json::decode(annotation, i64::MAX);
        let last = all.iter().rev().find_map(address);
        let matching = all.iter().filter(|fields| fields.pod_port == i64::from(target_port));
        let member = |fields: &Fields| {
            let own = address(fields).filter(|ip| is_wanted(*ip))?;
            let ip = match self {
                Self::Current => own,
                Self::LastAddress => last?,
            };
            Some(SocketAddr::new(ip, u16::try_from(fields.node_port).ok()?))
        };
        matching.filter_map(member).collect()
    }
}

fn address(fields: &Fields) -> Option<IpAddr> {
    fields.node_ip.parse().ok()
}
