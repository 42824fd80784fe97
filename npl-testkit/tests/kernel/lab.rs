// SPDX-License-Identifier: Apache-2.0
//! The agent's datapath on a bpffs of its own, and its programs run packet by packet without any device.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use aya::maps::{Array, HashMap, Map, MapData, MapError};
use aya::programs::{ProgramError, SchedClassifier, TestRun as _, TestRunOptions, TestRunResult};
use aya::util::KernelVersion;
use aya::{Ebpf, EbpfLoader};
use caps::{CapSet, Capability};
use npl_agent::core::model::sources::{AllowList, SourceRange};
use npl_agent::core::model::{Backend, Family, Frontend, NodePort, PodPort, Protocol};
use npl_agent::datapath::{Datapath, Pins, embedded_object};
use npl_common::flow::{FlowKeyV4, FlowKeyV6, FlowState, FlowV4, FlowV6};
use npl_common::fragment;
use npl_common::half_open;
use npl_common::names;
use npl_testkit::packet::Packet;

use crate::counters::{Change, Counters};
use crate::left::{BPFFS, Shelf};

/// Secret of the half-open cache; any will do, and a constant one makes failures comparable.
pub(crate) const SEED: u64 = 0x0123_4567_89ab_cdef;

/// The device that the kernel says a frame of a test run came by: the loopback device, by its index in every namespace.
pub(crate) const TEST_DEVICE: u32 = 1;

/// `TC_ACT_UNSPEC`, which is also `TCX_NEXT`: the next program, and the stack after the last.
pub(crate) const NEXT: i32 = -1;

/// `TC_ACT_SHOT`, which is also `TCX_DROP`.
pub(crate) const DROP: i32 = 2;

/// Enough for every packet of the tests.
const OUTPUT_BYTES: usize = 4096;

/// A flow as the Pod sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlowId {
    pub(crate) client: SocketAddr,
    pub(crate) pod: SocketAddr,
    pub(crate) protocol: Protocol,
}

/// What the flow table has of a flow.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FlowEntry {
    pub(crate) node_addr: IpAddr,
    pub(crate) state: FlowState,
}

/// The half-open cache and the flow table of one family.
struct FlowMaps<K, V> {
    flows: HashMap<MapData, K, V>,
    slots: Array<MapData, u64>,
    fragments: Array<MapData, u64>,
}

/// A loaded datapath, with its maps also open for reading what the agent never looks at.
pub(crate) struct Lab {
    pub(crate) datapath: Datapath,
    v4: FlowMaps<FlowKeyV4, FlowV4>,
    v6: FlowMaps<FlowKeyV6, FlowV6>,
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

/// What the agent has in its container, and what makes room for maps before Linux 5.11. The verifier is more lenient
/// with who has `CAP_PERFMON` or `CAP_SYS_ADMIN`: programs that load under these alone load for the agent.
const CAPABILITIES: [Capability; 3] = [Capability::CAP_BPF, Capability::CAP_NET_ADMIN, Capability::CAP_SYS_RESOURCE];

/// The first kernel whose verifier asks for no more.
const CONTENT_WITH_THESE: KernelVersion = KernelVersion::new(6, 6, 0);

/// What was loaded with these rights.
static CONFINED: Shelf = Shelf::new();

/// What was loaded as the DaemonSet's init container does, which has one right more.
static AHEAD: Shelf = Shelf::new();

/// Runs `test` with a datapath that has no mappings, no addresses and no flows.
pub(crate) fn with_lab(test: impl FnOnce(&mut Lab) + Send) {
    let is_content = KernelVersion::current().unwrap() >= CONTENT_WITH_THESE;
    with_rights(&CONFINED, !is_content, test);
}

/// The same with programs that were loaded ahead of the agent.
pub(crate) fn with_lab_of_loader(test: impl FnOnce(&mut Lab) + Send) {
    with_rights(&AHEAD, true, test);
}

fn with_rights(shelf: &'static Shelf, with_perfmon: bool, test: impl FnOnce(&mut Lab) + Send) {
    // aya asks once in a process what the kernel has, and all tests go by it: it is asked with all rights.
    aya::features();
    let confined = || {
        // Of this thread alone, which ends with the test.
        let mut kept = caps::read(None, CapSet::Effective).unwrap();
        let may_stay = |it: &Capability| CAPABILITIES.contains(it) || (with_perfmon && *it == Capability::CAP_PERFMON);
        kept.retain(may_stay);
        caps::set(None, CapSet::Effective, &kept).unwrap();
        test(&mut Lab::open());
    };
    shelf.take().bpffs().run(confined).unwrap();
}

/// A mapping's two ends.
pub(crate) fn mapping(protocol: Protocol, node_port: u16, pod: SocketAddr, generation: u32) -> (Frontend, Backend) {
    let frontend = Frontend { family: Family::of(pod.ip()), node_port: NodePort(node_port), protocol };
    (frontend, Backend { pod_ip: pod.ip(), pod_port: PodPort(pod.port()), generation, is_restricted: false })
}

/// The ranges of a list, as a Service has it.
pub(crate) fn parsed(ranges: &str) -> BTreeSet<SourceRange> {
    AllowList::read(ranges).sources.ranges().collect()
}

impl Lab {
    fn open() -> Self {
        let mut datapath = Datapath::open(Path::new(BPFFS)).unwrap();
        datapath.configure("61000-61100".parse().unwrap(), || SEED).unwrap();
        let v4 = FlowMaps {
            flows: open(names::MAP_FLOW_V4),
            slots: open(names::MAP_HALF_OPEN_V4),
            fragments: open(names::MAP_FRAGMENT_V4),
        };
        let v6 = FlowMaps {
            flows: open(names::MAP_FLOW_V6),
            slots: open(names::MAP_HALF_OPEN_V6),
            fragments: open(names::MAP_FRAGMENT_V6),
        };
        Self { datapath, v4, v6, others: None }
    }

    pub(crate) fn add(&mut self, protocol: Protocol, node_port: u16, pod: SocketAddr, generation: u32) {
        let (frontend, backend) = mapping(protocol, node_port, pod, generation);
        self.datapath.upsert_mapping(frontend, backend).unwrap();
    }

    /// As [`Self::add`], for these alone, whoever might use it before.
    pub(crate) fn add_for(
        &mut self,
        protocol: Protocol,
        node_port: u16,
        pod: SocketAddr,
        generation: u32,
        ranges: &str,
    ) {
        let (frontend, backend) = mapping(protocol, node_port, pod, generation);
        let former = self.datapath.sources().unwrap().remove(&frontend).unwrap_or_default();
        self.datapath.forget_sources(frontend, &former).unwrap();
        self.datapath.allow_sources(frontend, &parsed(ranges)).unwrap();
        self.datapath.upsert_mapping(frontend, Backend { is_restricted: true, ..backend }).unwrap();
    }

    /// Lets these use a mapping too.
    pub(crate) fn allow(&mut self, protocol: Protocol, node_port: u16, pod: SocketAddr, ranges: &str) {
        let (frontend, _) = mapping(protocol, node_port, pod, 0);
        self.datapath.allow_sources(frontend, &parsed(ranges)).unwrap();
    }

    /// Lets these not use a mapping any more.
    pub(crate) fn forget(&mut self, protocol: Protocol, node_port: u16, pod: SocketAddr, ranges: &str) {
        let (frontend, _) = mapping(protocol, node_port, pod, 0);
        self.datapath.forget_sources(frontend, &parsed(ranges)).unwrap();
    }

    pub(crate) fn remove(&mut self, family: Family, protocol: Protocol, node_port: u16) {
        let frontend = Frontend { family, node_port: NodePort(node_port), protocol };
        self.datapath.remove_mapping(frontend).unwrap();
    }

    pub(crate) fn set_addresses(&mut self, addresses: &[IpAddr]) {
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
        self.noting(frame, |lab, options| lab.program(program).test_run(options))
    }

    /// As [`Self::run`], of the program for drivers.
    pub(crate) fn run_xdp(&mut self, frame: &[u8]) -> Outcome {
        self.noting(frame, |lab, options| lab.datapath.hooks.load_xdp_program().unwrap().test_run(options))
    }

    fn noting(
        &mut self,
        frame: &[u8],
        run: impl FnOnce(&mut Self, TestRunOptions<'_>) -> Result<TestRunResult, ProgramError>,
    ) -> Outcome {
        let before = Counters::read(&self.datapath.tables);
        let mut output = vec![0; OUTPUT_BYTES];
        let mut options = TestRunOptions::new();
        options.data_in = Some(frame);
        options.data_out = Some(&mut output);
        let result = run(self, options).unwrap();
        output.truncate(usize::try_from(result.data_size_out).unwrap());
        let changes = Counters::read(&self.datapath.tables).changes_since(&before);
        Outcome { action: result.return_value.cast_signed(), bytes: output, changes }
    }

    pub(crate) fn program(&mut self, name: &'static str) -> &mut SchedClassifier {
        match &mut self.others {
            Some(others) => others.program_mut(name).unwrap().try_into().unwrap(),
            None => self.datapath.hooks.load_program(name).unwrap(),
        }
    }

    /// Loads the programs again, over flow tables of one element that is taken.
    ///
    /// The tables that the agent makes evict and hardly ever refuse; a plain hash of the same shape refuses.
    pub(crate) fn replace_flow_tables_by_full_ones(&mut self) {
        let pins = Pins::new(Path::new(BPFFS));
        for name in [names::MAP_FLOW_V4, names::MAP_FLOW_V6] {
            std::fs::remove_file(pins.map(name)).unwrap();
        }
        HashMap::<MapData, FlowKeyV4, FlowV4>::create(1, 0).unwrap().pin(pins.map(names::MAP_FLOW_V4)).unwrap();
        HashMap::<MapData, FlowKeyV6, FlowV6>::create(1, 0).unwrap().pin(pins.map(names::MAP_FLOW_V6)).unwrap();
        (self.v4.flows, self.v6.flows) = (open(names::MAP_FLOW_V4), open(names::MAP_FLOW_V6));
        // A flow that no test has.
        let nobody = FlowState {
            last_seen_ns: 0,
            generation: 0,
            refreshed: 0,
            ifindex: 0,
            node_port: 0,
            client_tcp_flags: 0,
            pod_tcp_flags: 0,
        };
        let key = FlowKeyV4 { client_addr: [0; 4], pod_addr: [0; 4], client_port: 0, pod_port: 0, protocol: 0 };
        self.v4.flows.insert(key, FlowV4 { state: nobody, node_addr: [0; 4], pad: 0 }, 0).unwrap();
        let key = FlowKeyV6 { client_addr: [0; 16], pod_addr: [0; 16], client_port: 0, pod_port: 0, protocol: 0 };
        self.v6.flows.insert(key, FlowV6 { state: nobody, node_addr: [0; 16] }, 0).unwrap();
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
    pub(crate) fn flow(&self, id: FlowId) -> Option<FlowEntry> {
        match id.ends() {
            Ends::V4(key) => self.v4.flows.get(&key, 0).ok().map(|flow| FlowEntry::new(flow.node_addr, flow.state)),
            Ends::V6(key) => self.v6.flows.get(&key, 0).ok().map(|flow| FlowEntry::new(flow.node_addr, flow.state)),
        }
    }

    /// Takes a flow out of the table, as the kernel does with the least recently used one of a full table.
    pub(crate) fn evict(&mut self, id: FlowId) {
        match id.ends() {
            Ends::V4(key) => self.v4.flows.remove(&key).unwrap(),
            Ends::V6(key) => self.v6.flows.remove(&key).unwrap(),
        }
    }

    /// The half-open cache's word for a flow, if the slot is its own; else that of an attempt at it.
    pub(crate) fn slot(&mut self, id: FlowId) -> Option<u64> {
        self.word(id, half_open::slot(hash(id))).or_else(|| self.attempt(id))
    }

    /// The word of an attempt at a connection.
    pub(crate) fn attempt(&mut self, id: FlowId) -> Option<u64> {
        self.word(id, half_open::handshake_slot(hash(id)))
    }

    fn word(&mut self, id: FlowId, slot: u32) -> Option<u64> {
        Some(self.slots(id).get(&slot, 0).unwrap()).filter(|word| half_open::matches(*word, hash(id)))
    }

    /// Overwrites a flow's slot.
    pub(crate) fn set_slot(&mut self, id: FlowId, word: u64) {
        self.slots(id).set(half_open::slot(hash(id)), word, 0).unwrap();
    }

    /// Overwrites the slot of an attempt at it.
    pub(crate) fn set_attempt(&mut self, id: FlowId, word: u64) {
        self.slots(id).set(half_open::handshake_slot(hash(id)), word, 0).unwrap();
    }

    /// All records of fragmented datagrams, with their slots.
    pub(crate) fn fragment_records(&mut self, family: Family) -> Vec<(u32, u64)> {
        (0..).zip(self.fragments(family).iter().map(Result::unwrap)).filter(|(_, word)| *word != 0).collect()
    }

    /// Overwrites a slot of theirs.
    pub(crate) fn set_fragment_record(&mut self, family: Family, slot: u32, word: u64) {
        self.fragments(family).set(slot, word, 0).unwrap();
    }

    /// Makes all of them older, by units of about a second.
    pub(crate) fn age_fragment_records(&mut self, family: Family, units: u64) {
        for (slot, word) in self.fragment_records(family) {
            self.set_fragment_record(family, slot, fragment::aged(word, units));
        }
    }

    fn fragments(&mut self, family: Family) -> &mut Array<MapData, u64> {
        if family == Family::V4 { &mut self.v4.fragments } else { &mut self.v6.fragments }
    }

    fn slots(&mut self, id: FlowId) -> &mut Array<MapData, u64> {
        if id.pod.is_ipv4() { &mut self.v4.slots } else { &mut self.v6.slots }
    }
}

/// A flow's key in its family's table.
enum Ends {
    V4(FlowKeyV4),
    V6(FlowKeyV6),
}

impl FlowId {
    fn ends(self) -> Ends {
        let (client_port, pod_port, protocol) = (self.client.port(), self.pod.port(), self.protocol.number().into());
        match (self.client.ip(), self.pod.ip()) {
            (IpAddr::V4(client), IpAddr::V4(pod)) => {
                let (client_addr, pod_addr) = (client.octets(), pod.octets());
                Ends::V4(FlowKeyV4 { client_addr, pod_addr, client_port, pod_port, protocol })
            }
            (IpAddr::V6(client), IpAddr::V6(pod)) => {
                let (client_addr, pod_addr) = (client.octets(), pod.octets());
                Ends::V6(FlowKeyV6 { client_addr, pod_addr, client_port, pod_port, protocol })
            }
            ends => panic!("{ends:?} are of two families"),
        }
    }
}

impl FlowEntry {
    fn new(node_addr: impl Into<IpAddr>, state: FlowState) -> Self {
        Self { node_addr: node_addr.into(), state }
    }
}

/// A flow's hash, as the programs take it.
pub(crate) fn hash(id: FlowId) -> u64 {
    let rest = u64::from(id.client.port()) << 32 | u64::from(id.pod.port()) << 8 | u64::from(id.protocol.number());
    match id.ends() {
        Ends::V4(key) => {
            let [client, pod] = [key.client_addr, key.pod_addr].map(|addr| u64::from(u32::from_ne_bytes(addr)));
            npl_common::hash::flow(SEED, client << 32 | pod, rest)
        }
        Ends::V6(key) => {
            let [client, pod] = [key.client_addr, key.pod_addr].map(words);
            let seed = npl_common::hash::absorb(npl_common::hash::absorb_both(SEED, client[0], client[1]), pod[0]);
            npl_common::hash::flow(seed, pod[1], rest)
        }
    }
}

/// An address as two words, the first 32 bits as loaded in the upper half of the first.
fn words(addr: [u8; 16]) -> [u64; 2] {
    let word = |at: usize| u64::from(u32::from_ne_bytes(*addr[at..].first_chunk().unwrap()));
    [word(0) << 32 | word(4), word(8) << 32 | word(12)]
}

pub(crate) fn open<T: TryFrom<Map, Error = MapError>>(name: &str) -> T {
    let map = MapData::from_pin(Pins::new(Path::new(BPFFS)).map(name)).and_then(Map::from_map_data);
    map.and_then(T::try_from).unwrap()
}
