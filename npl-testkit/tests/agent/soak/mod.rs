// SPDX-License-Identifier: Apache-2.0
//! Changes Pods, Services, addresses, devices and agents at random while clients use stable Pods. Afterwards, memory,
//! open files, map elements and all objects in the kernel are the same as before.
//!
//! `NPL_SOAK` sets the duration of the changes in seconds, and `NPL_SOAK_SEED` the seed of the random numbers. `cargo
//! xtask test --soak 2h` sets `NPL_SOAK`.

mod churn;
mod state;

use std::net::IpAddr;
use std::time::{Duration, Instant};

use npl_testkit::cluster::Entry;
use npl_testkit::echo::Protocol;
use npl_testkit::node_state::State;
use npl_testkit::topology::MASQUERADE;
use npl_testkit::traffic::{Direction, Load, Request, Transfer};
use npl_testkit::{extent, poll, run};
use serde_json::json;

use self::churn::{Churn, Restarts};
use crate::families::{create_dual_stack_pod, set_service};
use crate::world::{LIMIT, NAMESPACE, NODE, World};

/// The duration of the changes if `NPL_SOAK` is unset.
const DURATION: Duration = Duration::from_mins(1);

/// The time limit of the agent's waits, which the flags set to short times, and the interval of the resync.
const FLAGS: [&str; 6] = ["--drain", "1s", "--quarantine", "1s", "--resync", "1s"];

/// The Pods that the churn does not change.
const STABLE: [&str; 2] = ["stable-0", "stable-1"];

/// The bytes per second of each transfer.
const RATE: u64 = 256 * 1024;

/// The largest growth of the agent's anonymous memory in kB during the churn. The size of the heap depends on the order
/// of allocations, and the count contains the stacks of the threads; after a minute of churn, the growth is a few
/// hundred kB. In a soak of 2 h with 100 000 changes, a leak of 50 bytes per change exceeds this allowance.
const MEMORY_ALLOWANCE: u64 = 4 * 1024;

/// The requests that clients send to stable Pods, and the transfers from and to these Pods.
struct Traffic {
    load: Load,
    transfers: Vec<Transfer>,
    bytes: u64,
}

impl Traffic {
    /// Creates the stable Pods and their Service, and starts the traffic.
    fn start(world: &mut World, duration: Duration) -> Self {
        world.create_service();
        set_service(world, &json!({"ipFamilyPolicy": "RequireDualStack"}));
        world.enable_service();
        let mut requests = Vec::new();
        for pod in STABLE {
            create_dual_stack_pod(world, pod);
            requests.extend(world.wait_for_entries(pod, 4).iter().map(|entry| request(world, pod, entry)));
        }
        let client = &world.topology.client().netns;
        let server = world.address_of_family(STABLE[0], false);
        let bytes = RATE * duration.as_secs().max(1);
        let start = |direction| Transfer::start(client, server, direction, bytes, RATE).unwrap();
        let transfers = [Direction::Upload, Direction::Download].map(start).into();
        Self { load: Load::start(client, 100, requests), transfers, bytes }
    }

    /// Verifies that no request was lost or answered by another Pod.
    fn check(&self, stage: &str) {
        assert_eq!(self.load.report().failures, [], "{stage}");
    }

    /// Ends the traffic, verifies that all requests and transfers succeeded, and removes the stable Pods. Returns the
    /// number of answers.
    fn end(self, world: &mut World) -> u64 {
        self.load.wait_for_answers(100, LIMIT).unwrap();
        for transfer in self.transfers {
            transfer.remove_rate_limit();
            assert_eq!(transfer.join().unwrap().bytes, self.bytes);
        }
        let report = self.load.stop();
        assert_eq!(report.failures, []);
        world.cluster.delete_service(NAMESPACE, "web").unwrap();
        for pod in STABLE {
            world.delete_pod(pod);
        }
        world.servers.clear();
        report.total()
    }
}

fn request(world: &World, pod: &str, entry: &Entry) -> Request {
    let client = world.topology.client().addresses;
    let client: IpAddr = if entry.node_ip.is_ipv6() { client.v6.into() } else { client.v4.into() };
    Request { protocol: entry.protocol, server: entry.address(), pod: pod.to_owned(), client }
}

impl World {
    /// Returns the TCP address of one family that the annotation of a dual-stack Pod contains.
    fn address_of_family(&self, pod: &str, is_v6: bool) -> std::net::SocketAddr {
        let entries = self.wait_for_entries(pod, 4);
        let wanted = |entry: &&Entry| entry.protocol == Protocol::Tcp && entry.node_ip.is_ipv6() == is_v6;
        entries.iter().find(wanted).unwrap().address()
    }
}

/// Changes objects for `duration` under traffic, and removes the objects. Returns the number of changes and of answers
/// that clients of stable Pods have received.
fn round(world: &mut World, churn: &mut Churn, duration: Duration, restarts: Restarts) -> (usize, u64) {
    world.annotations = world.cluster.watch_mappings(NAMESPACE, duration + Duration::from_mins(30)).unwrap();
    let traffic = Traffic::start(world, duration);
    churn.every_kind(world, restarts, &|stage| traffic.check(stage));
    let (began, mut changes) = (Instant::now(), 0);
    while began.elapsed() < duration {
        let change = churn.step(world, restarts);
        traffic.check(&change);
        changes += 1;
    }
    churn.remove_all(world);
    let repairs = world.repairs();
    assert!(repairs.values().all(|count| *count == 0), "the churn changes no kernel object of NPL: {repairs:?}");
    (changes, traffic.end(world))
}

#[test]
fn churn_leaves_memory_open_files_and_kernel_state_as_they_were() {
    let duration = extent::number("NPL_SOAK").unwrap().map_or(DURATION, Duration::from_secs);
    let seed = extent::number("NPL_SOAK_SEED")
        .unwrap()
        .unwrap_or_else(|| u64::from_str_radix(&run::random_hex(4).unwrap(), 16).unwrap());
    println!("NPL_SOAK_SEED={seed}");
    let mut world = World::new();
    let addresses = world.topology.node_addresses();
    world.cluster.create_node(NODE, &[addresses.v4.into(), addresses.v6.into()]).unwrap();
    let node = world.topology.node();
    node.nft(MASQUERADE).unwrap();
    // Without this setting, a macvlan device of the churn would answer ARP requests for the Node's own address.
    node.sysctl("net/ipv4/conf/all/arp_ignore", "1").unwrap();
    let (cgroup, shown) = world.client_cgroup();
    let flags = FLAGS.iter().copied().chain(["--cgroup", &shown]).map(str::to_owned).collect();
    let mut churn = Churn::new(seed, flags, cgroup);
    churn.start_agent_in_every_mode(&mut world);
    let kernel = state_at_start(&mut world);

    let restarted = round(&mut world, &mut churn, duration / 2, Restarts::Yes);
    churn.start_agent(&mut world);
    state::wait_for_kernel(&world, &kernel, "after the restarts of agents");

    // The resources of one process are compared before and after a round without restarts. An earlier short round
    // opens the connections, and allocates the memory, that the agent keeps.
    round(&mut world, &mut churn, Duration::ZERO, Restarts::No);
    state::wait_for_kernel(&world, &kernel, "after the first round of the last agent");
    let before = least_resources(&mut world);
    let kept = round(&mut world, &mut churn, duration / 2, Restarts::No);
    state::wait_for_kernel(&world, &kernel, "after the last round");
    let after = state::wait_for_process(&mut world, &before);
    println!("changes and answers: {restarted:?} with restarts, {kept:?} without; {before:?}; {after:?}");
    let limit = before.memory + MEMORY_ALLOWANCE;
    assert!(after.memory <= limit, "the agent's memory grew from {} kB to {} kB", before.memory, after.memory);
}

/// Waits until the started agent has surveyed the Node's network and has written the kernel state for this network.
/// Returns the kernel state.
fn state_at_start(world: &mut World) -> State {
    let before = world.passes();
    poll::until("passes of the agent", LIMIT, || (world.passes() > before + 3).then_some(())).unwrap();
    state::of_kernel(world)
}

/// Returns the least resources that the agent has during several passes. A survey opens further sockets until its end.
fn least_resources(world: &mut World) -> state::Resources {
    let mut least = state::of_process(world);
    let before = world.passes();
    poll::until("passes of the agent", LIMIT, || {
        least.reduce_to(&state::of_process(world));
        (world.passes() > before + 3).then_some(())
    })
    .unwrap();
    least
}
