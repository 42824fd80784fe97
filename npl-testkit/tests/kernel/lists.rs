// SPDX-License-Identifier: Apache-2.0
//! Tests the agent's address dumps while addresses are added and removed.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use npl_agent::core::devices::Device;
use npl_agent::netlink::{self, NetlinkError};
use npl_testkit::netns::Netns;
use npl_testkit::run::Run;
use npl_testkit::topology::host_prefix;

/// Permanent addresses of each family: more than fit into one netlink message.
const PERMANENT: u16 = 1000;
/// Temporary addresses of each family. The kernel lists temporary addresses before permanent addresses, so the
/// positions of permanent addresses change whenever a temporary address is removed.
const TEMPORARY: u16 = 16;
/// Number of address dumps that the test makes while another thread adds and removes the temporary addresses.
const DUMPS: usize = 500;

fn permanent() -> impl Iterator<Item = IpAddr> {
    let v4 = |number: u16| IpAddr::from([10, 0, number.to_be_bytes()[0], number.to_be_bytes()[1]]);
    let v6 = |number: u16| IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, number]);
    (1..=PERMANENT).flat_map(move |number| [v4(number), v6(number)])
}

fn lines(verb: &str, addresses: impl Iterator<Item = String>) -> String {
    addresses.map(|address| format!("addr {verb} {address} dev many")).collect::<Vec<_>>().join("\n")
}

/// `ip` commands that add the temporary addresses so that the kernel lists these addresses first. The kernel lists IPv4
/// addresses of a narrower scope first, and the newest IPv6 addresses first.
fn temporary() -> impl Iterator<Item = String> {
    (1..=TEMPORARY).flat_map(|number| [format!("172.16.0.{number}/32 scope link"), format!("fd01::{number:x}/128")])
}

fn add_and_delete_repeatedly(netns: &Netns, is_over: &AtomicBool) {
    while !is_over.load(Ordering::Relaxed) {
        netns.ip(&lines("add", temporary())).unwrap();
        netns.ip(&lines("del", temporary())).unwrap();
    }
}

/// Returns all complete address dumps; dumps that a concurrent change interrupted are omitted.
async fn dump_repeatedly() -> Vec<BTreeSet<IpAddr>> {
    let mut lists = Vec::new();
    for _ in 0..DUMPS {
        match netlink::interfaces().await {
            Ok(devices) => lists.push(devices.iter().flat_map(|Device { addresses, .. }| addresses).copied().collect()),
            Err(NetlinkError::Changing { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
    lists
}

#[test]
fn address_dump_that_a_change_interrupts_is_reported_as_changing() {
    let run = Run::start().unwrap();
    let netns = run.netns("lists").unwrap();
    netns.ip("link add many type bridge").unwrap();
    netns.ip(&lines("add", permanent().map(host_prefix))).unwrap();
    let is_over = AtomicBool::new(false);
    let lists = thread::scope(|scope| {
        scope.spawn(|| add_and_delete_repeatedly(&netns, &is_over));
        let lists = netns.block_on(dump_repeatedly());
        is_over.store(true, Ordering::Relaxed);
        lists.unwrap()
    });
    assert!(lists.len() > DUMPS / 10, "only {} of {DUMPS} dumps are complete", lists.len());
    let lacks = |list: &&BTreeSet<IpAddr>| permanent().any(|addr| !list.contains(&addr));
    let lacking = lists.iter().filter(lacks).count();
    // Some dumps may lack an address, because newer kernels remove an address before they mark a running dump as
    // interrupted.
    assert!(lacking <= DUMPS / 10, "{lacking} of {} dumps lack a permanent address", lists.len());
}
