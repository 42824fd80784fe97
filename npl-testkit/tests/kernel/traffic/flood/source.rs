// SPDX-License-Identifier: Apache-2.0
//! Sources of a SYN flood.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use aya::programs::{SchedClassifier, TestRun as _, TestRunOptions};
use aya::util::KernelVersion;
use npl_common::traffic::random_client;
use npl_testkit::live_frames;
use npl_testkit::meter::{self, Arrival, Clients, Entry, Flows, Meter, Segment};
use npl_testkit::packet::{Packet, tcp_flags};

use super::FLOODED_PORT;
use crate::world::{POD_PORT, World, is_emulated};

/// The first address of the random clients; this address and the following ones are public.
const FIRST_CLIENT: Ipv4Addr = Ipv4Addr::new(16, 0, 0, 0);

/// Number of SYNs between two checks of `is_over`. Sending this number takes some hundredths of a second.
const CHUNK: u32 = 10_000;

/// Time limit of a flood, which usually takes less than a minute.
const LIMIT: Duration = Duration::from_mins(15);

/// Sends SYNs, each from another source, to the second Pod's node port.
pub(super) enum Source<'p> {
    /// The Node's uplink receives the SYNs. SYNs that arrive at the Pod are counted and dropped.
    Uplink(Box<Meter>),
    /// The uplink's program runs on one SYN at a time. The test uses this source on kernels without live XDP frames,
    /// and on emulated processors, which are too slow for a packet generator.
    Program { ingress: &'p SchedClassifier, flooded: SocketAddr },
}

impl<'p> Source<'p> {
    pub(super) fn new(world: &World, ingress: &'p SchedClassifier) -> Self {
        let flooded = SocketAddr::from((world.node_ip(), FLOODED_PORT));
        if is_emulated() || KernelVersion::current().unwrap() < live_frames::SINCE {
            return Self::Program { ingress, flooded };
        }
        let (pod, _) = &world.pods[1];
        pod.fix_neighbour().unwrap();
        let client = world.topology.client();
        let (devices, ends) = ([&client.device, &client.uplink], [(FIRST_CLIENT, 0).into(), flooded]);
        let frame = meter::frame(Segment::Syn, devices, ends, POD_PORT).unwrap();
        let arrival = Arrival { address: pod.ip(), ports: [POD_PORT; 2], source: None };
        let flows = Flows { frame, clients: Clients::Random, entry: Entry::Uplink, mappings: 1, arrival };
        Self::Uplink(Box::new(Meter::new(&meter::object().unwrap(), client, pod, &flows).unwrap()))
    }

    /// Sends `syns` SYNs from one processor, or fewer if `is_over` becomes true. Returns the number of sent SYNs.
    pub(super) fn send(&self, syns: u64, is_over: &AtomicBool) -> u64 {
        live_frames::stay_on_last_processor().unwrap();
        let start = Instant::now();
        let mut sent = 0;
        while sent < syns && !is_over.load(Ordering::Relaxed) {
            assert!(start.elapsed() < LIMIT, "{sent} of {syns} SYNs were sent within {} s", LIMIT.as_secs());
            sent += match self {
                Self::Uplink(meter) => {
                    let chunk = u32::try_from(syns - sent).unwrap_or(CHUNK).min(CHUNK);
                    meter.send(chunk).unwrap();
                    chunk.into()
                }
                Self::Program { ingress, flooded } => {
                    receive(ingress, random_source(sent), *flooded);
                    1
                }
            };
        }
        sent
    }

    /// Waits a limited time for `sent` SYNs to arrive at the Pod, and returns the number that have arrived; `None` for
    /// [`Self::Program`], whose SYNs arrive at no device.
    pub(super) fn arrived(&self, sent: u64) -> Option<u64> {
        match self {
            Self::Uplink(meter) => Some(meter.wait_for(sent).unwrap()),
            Self::Program { .. } => None,
        }
    }
}

fn receive(ingress: &SchedClassifier, source: SocketAddr, flooded: SocketAddr) {
    let frame = Packet::tcp(source, flooded, tcp_flags::SYN, &[]).to_this_machine().build();
    let mut options = TestRunOptions::new();
    options.data_in = Some(&frame);
    ingress.test_run(options).unwrap();
}

fn random_source(number: u64) -> SocketAddr {
    let (address, port) = random_client(number);
    (IpAddr::V4(Ipv4Addr::from_bits(FIRST_CLIENT.to_bits() + address)), port).into()
}
