// SPDX-License-Identifier: Apache-2.0
//! The agent's datapath on a bpffs of its own, and its programs run packet by packet without any device.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use aya::maps::{Array, HashMap, Map, MapData, MapError};
use aya::programs::{SchedClassifier, TestRun as _, TestRunOptions};
use aya::{Ebpf, EbpfLoader};
use npl_agent::core::model::{Backend, Family, Frontend, NodePort, PodPort, Protocol};
use npl_agent::datapath::{Datapath, Pins, embedded_object};
use npl_common::flow::{FlowKeyV4, FlowV4};
use npl_common::names;
use npl_common::syn;
use npl_testkit::mounts;
use npl_testkit::packet::Packet;

use crate::counters::{Change, Counters};

/// Where every test has its own bpffs, in a mount namespace of its own.
pub(crate) const BPFFS: &str = "/sys/fs/bpf";

/// Secret of the half-open cache; any will do, and a constant one makes failures comparable.
pub(crate) const SEED: u64 = 0x0123_4567_89ab_cdef;

/// `TC_ACT_UNSPEC`, which is also `TCX_NEXT`: the next program, and the stack after the last.
pub(crate) const NEXT: i32 = -1;

/// Enough for every packet of the tests.
const OUTPUT_BYTES: usize = 4096;

/// A flow that no test has.
const NOBODYS_FLOW: FlowKeyV4 =
    FlowKeyV4 { client_addr: [0; 4], pod_addr: [0; 4], client_port: 0, pod_port: 0, protocol: 0 };
const NOBODYS_END: FlowV4 = FlowV4 {
    last_seen_ns: 0,
    node_addr: [0; 4],
    node_port: 0,
    client_tcp_flags: 0,
    pod_tcp_flags: 0,
    generation: 0,
    touched: 0,
    ifindex: 0,
    pad: 0,
};

/// A loaded datapath, with its maps also open for reading what the agent never looks at.
pub(crate) struct Lab {
    pub(crate) datapath: Datapath,
    flows: HashMap<MapData, FlowKeyV4, FlowV4>,
    slots: Array<MapData, u64>,
    /// The same programs over another flow table.
    others: Option<Ebpf>,
}

/// What one run of a program did.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) action: i32,
    pub(crate) bytes: Vec<u8>,
    pub(crate) changes: Vec<Change>,
}

/// Runs `test` with a datapath that has no mappings and no addresses; all of it is gone afterwards.
pub(crate) fn with_lab(test: impl FnOnce(&mut Lab) + Send) {
    mounts::with_private_bpffs(Path::new(BPFFS), || test(&mut Lab::open())).unwrap();
}

/// A mapping's two ends.
pub(crate) fn mapping(protocol: Protocol, node_port: u16, pod: SocketAddr, generation: u32) -> (Frontend, Backend) {
    let frontend = Frontend { family: Family::V4, node_port: NodePort(node_port), protocol };
    (frontend, Backend { pod_ip: pod.ip(), pod_port: PodPort(pod.port()), generation })
}

impl Lab {
    fn open() -> Self {
        let mut datapath = Datapath::open(Path::new(BPFFS)).unwrap();
        datapath.configure("61000-61100".parse().unwrap(), || SEED).unwrap();
        Self { datapath, flows: open(names::MAP_FLOW_V4), slots: open(names::MAP_SYN_V4), others: None }
    }

    pub(crate) fn add(&mut self, protocol: Protocol, node_port: u16, pod: &str, generation: u32) {
        let (frontend, backend) = mapping(protocol, node_port, pod.parse().unwrap(), generation);
        self.datapath.upsert_mapping(frontend, backend).unwrap();
    }

    pub(crate) fn remove(&mut self, protocol: Protocol, node_port: u16) {
        let frontend = Frontend { family: Family::V4, node_port: NodePort(node_port), protocol };
        self.datapath.remove_mapping(frontend).unwrap();
    }

    pub(crate) fn set_addresses(&mut self, addresses: &[Ipv4Addr]) {
        let left_out = self.datapath.tables.set_local_addresses(addresses).unwrap();
        assert!(left_out.is_empty(), "{left_out:?} found no room");
    }

    pub(crate) fn ingress(&mut self, packet: &Packet) -> Outcome {
        self.run(names::PROG_INGRESS, &packet.build())
    }

    pub(crate) fn egress(&mut self, packet: &Packet) -> Outcome {
        self.run(names::PROG_EGRESS, &packet.build())
    }

    /// Runs a program over a frame and notes everything that it changed.
    pub(crate) fn run(&mut self, program: &'static str, frame: &[u8]) -> Outcome {
        let before = Counters::read(&self.datapath.tables);
        let mut output = vec![0; OUTPUT_BYTES];
        let mut options = TestRunOptions::new();
        options.data_in = Some(frame);
        options.data_out = Some(&mut output);
        let result = self.program(program).test_run(options).unwrap();
        output.truncate(usize::try_from(result.data_size_out).unwrap());
        let changes = Counters::read(&self.datapath.tables).changes_since(&before);
        Outcome { action: result.return_value.cast_signed(), bytes: output, changes }
    }

    pub(crate) fn program(&mut self, name: &'static str) -> &mut SchedClassifier {
        match &mut self.others {
            Some(others) => others.program_mut(name).unwrap().try_into().unwrap(),
            None => self.datapath.hooks.program(name).unwrap(),
        }
    }

    /// Loads the programs again, over a flow table of one element that is taken.
    ///
    /// The table that the agent makes evicts and hardly ever refuses; a plain hash of the same shape refuses.
    pub(crate) fn replace_flow_table_by_a_full_one(&mut self) {
        let pins = Pins::new(Path::new(BPFFS));
        let pin = pins.map(names::MAP_FLOW_V4);
        std::fs::remove_file(&pin).unwrap();
        HashMap::<MapData, FlowKeyV4, FlowV4>::create(1, 0).unwrap().pin(&pin).unwrap();
        self.flows = open(names::MAP_FLOW_V4);
        self.flows.insert(NOBODYS_FLOW, NOBODYS_END, 0).unwrap();
        let mut loader = EbpfLoader::new();
        for name in names::PINNED_MAPS {
            loader.map_pin_path(name, pins.map(name));
        }
        let mut others = loader.load(embedded_object().unwrap()).unwrap();
        for name in [names::PROG_INGRESS, names::PROG_EGRESS] {
            let program: &mut SchedClassifier = others.program_mut(name).unwrap().try_into().unwrap();
            program.load().unwrap();
        }
        self.others = Some(others);
    }

    /// The flow table's entry.
    pub(crate) fn flow(&self, key: FlowKeyV4) -> Option<FlowV4> {
        self.flows.get(&key, 0).ok()
    }

    /// Takes a flow out of the table, as the kernel does with the least recently used one of a full table.
    pub(crate) fn evict(&mut self, key: FlowKeyV4) {
        self.flows.remove(&key).unwrap();
    }

    /// The half-open cache's word for a flow, if the slot is its own.
    pub(crate) fn slot(&self, key: FlowKeyV4) -> Option<u64> {
        let hash = hash(key);
        Some(self.slots.get(&syn::slot(hash), 0).unwrap()).filter(|word| syn::matches(*word, hash))
    }

    /// Overwrites a flow's slot.
    pub(crate) fn set_slot(&mut self, key: FlowKeyV4, word: u64) {
        self.slots.set(syn::slot(hash(key)), word, 0).unwrap();
    }
}

/// A flow's hash, from its key.
pub(crate) fn hash(key: FlowKeyV4) -> u64 {
    let [client, pod] = [key.client_addr, key.pod_addr].map(|addr| u64::from(u32::from_ne_bytes(addr)));
    let rest = u64::from(key.client_port) << 32 | u64::from(key.pod_port) << 8 | u64::from(key.protocol);
    syn::hash(SEED, client << 32 | pod, rest)
}

fn open<T: TryFrom<Map, Error = MapError>>(name: &str) -> T {
    let map = MapData::from_pin(Pins::new(Path::new(BPFFS)).map(name)).and_then(Map::from_map_data);
    map.and_then(T::try_from).unwrap()
}
