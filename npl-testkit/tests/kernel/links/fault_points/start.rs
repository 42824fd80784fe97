// SPDX-License-Identifier: Apache-2.0
//! The steps of an agent's start, in a process of its own, so that a test can kill the process at any step.

use std::env;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Instant;

use nix::net::if_::if_nametoindex;
use npl_agent::core::devices::plan::DevicePlan;
use npl_agent::core::devices::redirect::ProgramSet;
use npl_agent::core::devices::{Device, DeviceKind};
use npl_agent::core::model::Protocol;
use npl_agent::datapath::{Datapath, Takeover};
use npl_agent::devices::apply::apply;
use npl_testkit::poll;
use serde::{Deserialize, Serialize};

use super::LIMIT;
use crate::lab::{SEED, mapping};
use crate::world::{NODE_PORT, POD_PORT, World, port_range, set_addresses};

/// The environment variable with the [`Start`] that the process performs.
pub(super) const START: &str = "NPL_START_TO_KILL";
/// The name of the test that performs a start in a process of its own.
pub(super) const PROCESS: &str = "links::fault_points::start::process_that_is_killed_at_a_step_of_its_start";

/// How programs are attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Mechanism {
    /// As TCX links if the kernel has TCX (Linux 6.6).
    Links,
    /// Always as filters, as before Linux 6.6.
    Filters,
    /// As [`Self::Links`], and the XDP program is attached too.
    LinksAndXdp,
}

/// An agent's start on a Node of a test.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Start {
    bpffs: PathBuf,
    mechanism: Mechanism,
    uplinks: Vec<String>,
    node_ips: Vec<IpAddr>,
    /// The addresses of each Pod. The first Pod has the node port [`NODE_PORT`].
    pods: Vec<Vec<IpAddr>>,
    /// A file that the process creates when it waits for the answers to all requests of before the takeover.
    pub(super) waits: PathBuf,
    /// A file that the test creates when all these requests are answered.
    pub(super) continues: PathBuf,
}

impl Start {
    pub(super) fn new(world: &World, mechanism: Mechanism) -> Self {
        Self {
            bpffs: world.bpffs.path().to_owned(),
            mechanism,
            uplinks: world.uplinks().into_iter().map(|device| device.name).collect(),
            node_ips: world.node_ips().into(),
            pods: world.pods.iter().map(|(pod, _)| pod.ips()).collect(),
            waits: world.run.file("waits"),
            continues: world.run.file("continues"),
        }
    }

    /// Performs the steps of a starting agent in the agent's order, in the network namespace of this thread. The agent
    /// waits for replies before it removes the programs of another version; here, `await_replies` does.
    pub(super) fn perform(&self, await_replies: impl FnOnce()) -> Datapath {
        let mut datapath = Datapath::open(&self.bpffs).unwrap();
        if self.mechanism == Mechanism::Filters {
            datapath.hooks.use_filters();
        }
        datapath.configure(port_range(), || SEED).unwrap();
        // Writes the endpoints of copied mappings.
        datapath.mappings().unwrap();
        set_addresses(&mut datapath, &self.node_ips);
        self.attach(&mut datapath);
        for (node_port, pod) in (NODE_PORT..).zip(&self.pods) {
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                for ip in pod {
                    let (frontend, backend) = mapping(protocol, node_port, SocketAddr::new(*ip, POD_PORT), 1);
                    datapath.upsert_mapping(frontend, backend).unwrap();
                }
            }
        }
        if let Takeover::AwaitsReplies { until } = datapath.remove_predecessors(Instant::now()).unwrap() {
            // Until now, the XDP program of the other version may have prevented the XDP program from being attached.
            self.attach(&mut datapath);
            await_replies();
            assert!(matches!(datapath.remove_predecessors(until).unwrap(), Takeover::Complete(_)));
        }
        datapath
    }

    /// Waits in the process of [`PROCESS`] until the test creates the file [`Self::continues`].
    fn await_test(&self) {
        fs::write(&self.waits, "").unwrap();
        poll::until("the test to continue", LIMIT, || self.continues.exists().then_some(())).unwrap();
    }

    fn attach(&self, datapath: &mut Datapath) {
        let ifindex = |name: &String| if_nametoindex(name.as_str()).unwrap();
        let device = |name| Device { has_default_route: true, ..Device::new(ifindex(name), name, DeviceKind::Veth) };
        let devices: Vec<Device> = self.uplinks.iter().map(device).collect();
        let programs = devices.iter().map(|device| (device.ifindex, ProgramSet::Uplink)).collect();
        let has_xdp = self.mechanism == Mechanism::LinksAndXdp;
        let xdp = devices.iter().filter(|_| has_xdp).map(|device| device.ifindex).collect();
        let plan = DevicePlan { programs, xdp, ..DevicePlan::default() };
        let before = datapath.hooks.attached_hooks().unwrap();
        let applied = apply(datapath, &devices, &before, &plan);
        assert!(applied.errors.is_empty(), "{:?}", applied.errors);
    }
}

#[test]
#[ignore = "the tests of fault points run this test in a process that they kill"]
fn process_that_is_killed_at_a_step_of_its_start() {
    if let Ok(start) = env::var(START) {
        let start: Start = serde_json::from_str(&start).unwrap();
        start.perform(|| start.await_test());
    }
}
