// SPDX-License-Identifier: Apache-2.0
//! Models of the two known consumers of the annotation, AKO and F5 CIS, written from a description of their behavior.
//! Both consumers are Go programs, so the models decode JSON as leniently as Go's decoder.

mod ako;
mod cis;
mod go_json;
mod pools;

use std::net::{IpAddr, SocketAddr};

use anyhow::{Result, ensure};

pub use self::ako::Ako;
pub use self::pools::{Consumer, Member, PoolPort, Pools};
use crate::cluster::Entry;

/// A target port for which no annotation of the tests has an entry.
const NO_TARGET: u16 = 1;

/// Reads an annotation as both consumers do, for each Pod port. Fails unless both consumers find exactly the pool
/// members that the entries name.
pub fn agree(annotation: &str, entries: &[Entry]) -> Result<()> {
    let targets: Vec<u16> = entries.iter().map(|entry| entry.pod_port).chain([NO_TARGET]).collect();
    for target in targets {
        let of_target: Vec<&Entry> = entries.iter().filter(|entry| entry.pod_port == target).collect();
        let all = sorted(of_target.iter().map(|entry| entry.address()));
        let v4 = sorted(of_target.iter().map(|entry| entry.address()).filter(SocketAddr::is_ipv4));
        for ako in [Ako::Current, Ako::LastAddress] {
            let read = sorted(ako.members(annotation, target, |ip| matches!(ip, IpAddr::V4(_))));
            ensure!(read == v4, "{ako:?} reads {read:?} for target port {target}, not {v4:?}, from {annotation}");
        }
        let read = sorted(Ako::Current.members(annotation, target, |_| true));
        ensure!(read == all, "AKO reads {read:?} for target port {target}, not {all:?}, from {annotation}");
        let mut once = all;
        once.dedup();
        let read = cis::members(annotation, target);
        let mut addresses: Vec<SocketAddr> = read.iter().filter_map(cis::Member::address).collect();
        addresses.sort_unstable();
        ensure!(
            addresses == once && read.len() == once.len(),
            "CIS reads {read:?} for target port {target}, not {once:?}, from {annotation}"
        );
    }
    Ok(())
}

fn sorted(members: impl IntoIterator<Item = SocketAddr>) -> Vec<SocketAddr> {
    let mut members: Vec<_> = members.into_iter().collect();
    members.sort_unstable();
    members
}

#[cfg(test)]
mod tests;
