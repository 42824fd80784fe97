// SPDX-License-Identifier: Apache-2.0
//! Addresses that come and go while the agent has the kernel list them.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use npl_agent::core::devices::Device;
use npl_agent::netlink::{self, NetlinkError};
use npl_testkit::netns::Netns;
use npl_testkit::run::Run;

/// Addresses of each family that stay: more than the kernel tells at once.
const STAYING: u16 = 1000;
/// Addresses of each family that come and go. They stand ahead of those that stay, which move up when one goes.
const PASSING: u16 = 16;
/// Lists that are looked at.
const LOOKS: usize = 500;

fn staying() -> impl Iterator<Item = IpAddr> {
    let v4 = |number: u16| IpAddr::from([10, 0, number.to_be_bytes()[0], number.to_be_bytes()[1]]);
    let v6 = |number: u16| IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, number]);
    (1..=STAYING).flat_map(move |number| [v4(number), v6(number)])
}

fn lines(verb: &str, addresses: impl Iterator<Item = String>) -> String {
    addresses.map(|address| format!("addr {verb} {address} dev many")).collect::<Vec<_>>().join("\n")
}

/// The kernel has those of a narrower scope, and of IPv6 the newest, ahead of others.
fn passing() -> impl Iterator<Item = String> {
    (1..=PASSING).flat_map(|number| [format!("172.16.0.{number}/32 scope link"), format!("fd01::{number:x}/128")])
}

fn come_and_go(netns: &Netns, is_over: &AtomicBool) {
    while !is_over.load(Ordering::Relaxed) {
        netns.ip(&lines("add", passing())).unwrap();
        netns.ip(&lines("del", passing())).unwrap();
    }
}

/// As many lists of addresses as could be had without a change in between.
async fn look() -> Vec<BTreeSet<IpAddr>> {
    let mut lists = Vec::new();
    for _ in 0..LOOKS {
        match netlink::interfaces().await {
            Ok(devices) => lists.push(devices.iter().flat_map(|Device { addresses, .. }| addresses).copied().collect()),
            Err(NetlinkError::Changing { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
    lists
}

#[test]
fn a_list_that_changes_while_it_is_told_is_asked_for_again() {
    let run = Run::start().unwrap();
    let netns = run.netns("lists").unwrap();
    netns.ip("link add many type bridge").unwrap();
    netns.ip(&lines("add", staying().map(|ip| format!("{ip}/{}", if ip.is_ipv4() { 32 } else { 128 })))).unwrap();
    let is_over = AtomicBool::new(false);
    let lists = thread::scope(|scope| {
        scope.spawn(|| come_and_go(&netns, &is_over));
        let lists = netns.block_on(look());
        is_over.store(true, Ordering::Relaxed);
        lists.unwrap()
    });
    assert!(lists.len() > LOOKS / 10, "only {} of {LOOKS} could be had", lists.len());
    let lacks = |list: &&BTreeSet<IpAddr>| staying().any(|addr| !list.contains(&addr));
    let lacking = lists.iter().filter(lacks).count();
    // Newer kernels take an address off before they say that the list changes.
    assert!(lacking <= LOOKS / 10, "{lacking} of {} lack an address that is there all the while", lists.len());
}
