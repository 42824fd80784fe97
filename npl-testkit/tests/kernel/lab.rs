// SPDX-License-Identifier: Apache-2.0
//! Loads the agent's datapath on a private bpffs and runs its programs on single packets, without any device.

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
use npl_common::names;
use npl_common::{conntrack, fragment, half_open, host_connection};
use npl_testkit::packet::{Packet, SCTP_TAG};

use crate::bpffs_pool::{BPFFS, BpffsPool};
use crate::counters::{Change, Counters};
use crate::prog_run::scene::{CLIENT_ISN, POD_ISN};

/// The secret hash seed of the half-open cache. The seed is constant, so that failures are reproducible.
pub(crate) const SEED: u64 = 0x0123_4567_89ab_cdef;

/// Ingress device of every packet of a test run: the loopback device, which has index 1 in every network namespace.
pub(crate) const TEST_DEVICE: u32 = 1;

/// The verdict `TC_ACT_UNSPEC`, which equals `TCX_NEXT`: the next program runs, or the kernel stack gets the packet.
pub(crate) const NEXT: i32 = -1;

/// The verdict `TC_ACT_SHOT`, which equals `TCX_DROP`: the packet is dropped.
pub(crate) const DROP: i32 = 2;

/// Output buffer size; every packet of the tests fits.
const OUTPUT_BYTES: usize = 4096;

/// A flow tuple as the Pod sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlowId {
    pub(crate) client: SocketAddr,
    pub(crate) pod: SocketAddr,
    pub(crate) protocol: Protocol,
}

/// An entry of the flow table.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FlowEntry {
    pub(crate) node_addr: IpAddr,
    pub(crate) state: FlowState,
}

/// The flow tables, the half-open cache, the fragment tracking records and the host connection records of one family.
struct FlowMaps<K, V> {
    /// The flow tables, in the order of [`Protocol::ALL`].
    flows: [HashMap<MapData, K, V>; 3],
    slots: Array<MapData, u64>,
    fragments: Array<MapData, u64>,
    host_connections: Array<MapData, u64>,
}

/// A loaded datapath. Maps that the agent does not read are opened here too, so that tests can inspect them.
pub(crate) struct Lab {
    pub(crate) datapath: Datapath,
    v4: FlowMaps<FlowKeyV4, FlowV4>,
    v6: FlowMaps<FlowKeyV6, FlowV6>,
    /// The programs, loaded a second time with full flow tables; `None` unless the test has replaced the flow tables.
    full_tables: Option<Ebpf>,
}

/// The verdict, the output packet and the counter changes of one program run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) action: i32,
    pub(crate) bytes: Vec<u8>,
    pub(crate) changes: Vec<Change>,
}

/// Capabilities of the agent's container, and `CAP_SYS_RESOURCE`, which raises the memory limit for maps before Linux
/// 5.11. `CAP_PERFMON` and `CAP_SYS_ADMIN` are dropped, because the verifier is more lenient with them. A program that
/// loads with only these three capabilities therefore also loads for the agent.
const CAPABILITIES: [Capability; 3] = [Capability::CAP_BPF, Capability::CAP_NET_ADMIN, Capability::CAP_SYS_RESOURCE];

/// First kernel whose verifier accepts the programs without `CAP_PERFMON`.
const LOADS_WITHOUT_PERFMON: KernelVersion = KernelVersion::new(6, 6, 0);

/// BPF file systems whose programs were loaded with the agent's capabilities.
static AGENT_POOL: BpffsPool = BpffsPool::new();

/// BPF file systems whose programs were loaded with the capabilities of the DaemonSet's init container, which also has
/// `CAP_PERFMON`.
static LOADER_POOL: BpffsPool = BpffsPool::new();

/// Runs `test` on a datapath without mappings, node addresses and flows.
pub(crate) fn with_lab(test: impl FnOnce(&mut Lab) + Send) {
    with_rights(&AGENT_POOL, needs_perfmon(), test);
}

/// Whether this kernel loads the programs only with `CAP_PERFMON`, which [`with_lab`] then adds to the agent's
/// capabilities.
pub(crate) fn needs_perfmon() -> bool {
    KernelVersion::current().unwrap() < LOADS_WITHOUT_PERFMON
}

/// Does the same as [`with_lab`], with the capabilities of the init container, which loads the programs.
pub(crate) fn with_loader_lab(test: impl FnOnce(&mut Lab) + Send) {
    with_rights(&LOADER_POOL, true, test);
}

fn with_rights(pool: &'static BpffsPool, with_perfmon: bool, test: impl FnOnce(&mut Lab) + Send) {
    // aya probes the kernel's features only once per process, so the probe must run before capabilities are dropped.
    aya::features();
    let run_confined = || {
        // Capabilities are dropped for this thread only, which ends with the test.
        let mut kept = caps::read(None, CapSet::Effective).unwrap();
        let is_kept = |capability: &Capability| {
            CAPABILITIES.contains(capability) || (with_perfmon && *capability == Capability::CAP_PERFMON)
        };
        kept.retain(is_kept);
        caps::set(None, CapSet::Effective, &kept).unwrap();
        test(&mut Lab::open());
    };
    pool.take().bpffs().run(run_confined).unwrap();
}

/// Returns the frontend and the backend of a mapping.
pub(crate) fn mapping(protocol: Protocol, node_port: u16, pod: SocketAddr, generation: u32) -> (Frontend, Backend) {
    let frontend = Frontend { family: Family::of(pod.ip()), node_port: NodePort(node_port), protocol };
    (frontend, Backend { pod_ip: pod.ip(), pod_port: PodPort(pod.port()), generation, is_restricted: false })
}

/// Parses the source ranges of an allow-list, in the format of a Service.
pub(crate) fn parsed(ranges: &str) -> BTreeSet<SourceRange> {
    AllowList::read(ranges).sources.ranges().collect()
}

/// The position of a protocol's flow table in [`names::FLOW_TABLES_V4`] and [`names::FLOW_TABLES_V6`].
fn table_of(protocol: Protocol) -> usize {
    Protocol::ALL.into_iter().position(|other| other == protocol).unwrap()
}

impl Lab {
    fn open() -> Self {
        let mut datapath = Datapath::open(Path::new(BPFFS)).unwrap();
        datapath.configure("61000-61100".parse().unwrap(), || SEED).unwrap();
        let v4 = FlowMaps {
            flows: names::FLOW_TABLES_V4.map(open),
            slots: open(names::MAP_HALF_OPEN_V4),
            fragments: open(names::MAP_FRAGMENT_V4),
            host_connections: open(names::MAP_HOST_CONNECTION_V4),
        };
        let v6 = FlowMaps {
            flows: names::FLOW_TABLES_V6.map(open),
            slots: open(names::MAP_HALF_OPEN_V6),
            fragments: open(names::MAP_FRAGMENT_V6),
            host_connections: open(names::MAP_HOST_CONNECTION_V6),
        };
        Self { datapath, v4, v6, full_tables: None }
    }

    pub(crate) fn add(&mut self, protocol: Protocol, node_port: u16, pod: SocketAddr, generation: u32) {
        let (frontend, backend) = mapping(protocol, node_port, pod, generation);
        self.datapath.upsert_mapping(frontend, backend).unwrap();
    }

    /// Adds a mapping that is restricted to the sources in `ranges`. Earlier allow-list entries of the mapping are
    /// removed.
    pub(crate) fn add_restricted(
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

    /// Adds source ranges to a mapping's allow-list.
    pub(crate) fn allow(&mut self, protocol: Protocol, node_port: u16, pod: SocketAddr, ranges: &str) {
        let (frontend, _) = mapping(protocol, node_port, pod, 0);
        self.datapath.allow_sources(frontend, &parsed(ranges)).unwrap();
    }

    /// Removes source ranges from a mapping's allow-list.
    pub(crate) fn disallow(&mut self, protocol: Protocol, node_port: u16, pod: SocketAddr, ranges: &str) {
        let (frontend, _) = mapping(protocol, node_port, pod, 0);
        self.datapath.forget_sources(frontend, &parsed(ranges)).unwrap();
    }

    pub(crate) fn remove(&mut self, family: Family, protocol: Protocol, node_port: u16) {
        let frontend = Frontend { family, node_port: NodePort(node_port), protocol };
        self.datapath.remove_mapping(frontend).unwrap();
    }

    pub(crate) fn set_addresses(&mut self, addresses: &[IpAddr]) {
        let left_out = self.datapath.tables.set_local_addresses(addresses).unwrap();
        assert!(left_out.is_empty(), "{left_out:?} are too many for the map");
    }

    pub(crate) fn ingress(&mut self, packet: &Packet) -> Outcome {
        self.run(names::PROG_INGRESS, &packet.build())
    }

    pub(crate) fn egress(&mut self, packet: &Packet) -> Outcome {
        self.run(names::PROG_EGRESS, &packet.build())
    }

    /// Runs a program on a frame and records its verdict, output and counter changes.
    pub(crate) fn run(&mut self, program: &'static str, frame: &[u8]) -> Outcome {
        self.run_counted(frame, |lab, options| lab.program(program).test_run(options))
    }

    /// Runs a program on a frame, and returns the verdict and the output frame. Tests of many packets use this
    /// function, because reading the counters takes longer than the run itself.
    pub(crate) fn run_uncounted(&mut self, program: &'static str, frame: &[u8]) -> (i32, Vec<u8>) {
        output(frame, |options| self.program(program).test_run(options))
    }

    /// Does the same as [`Self::run_uncounted`], for the XDP program.
    pub(crate) fn run_xdp_uncounted(&mut self, frame: &[u8]) -> (i32, Vec<u8>) {
        output(frame, |options| self.datapath.hooks.load_xdp_program().unwrap().test_run(options))
    }

    /// Does the same as [`Self::run`], for the XDP program.
    pub(crate) fn run_xdp(&mut self, frame: &[u8]) -> Outcome {
        self.run_counted(frame, |lab, options| lab.datapath.hooks.load_xdp_program().unwrap().test_run(options))
    }

    fn run_counted(
        &mut self,
        frame: &[u8],
        run: impl FnOnce(&mut Self, TestRunOptions<'_>) -> Result<TestRunResult, ProgramError>,
    ) -> Outcome {
        let before = Counters::read(&self.datapath.tables);
        let (action, bytes) = output(frame, |options| run(self, options));
        let changes = Counters::read(&self.datapath.tables).changes_since(&before);
        Outcome { action, bytes, changes }
    }

    pub(crate) fn program(&mut self, name: &'static str) -> &mut SchedClassifier {
        match &mut self.full_tables {
            Some(programs) => programs.program_mut(name).unwrap().try_into().unwrap(),
            None => self.datapath.hooks.load_program(name).unwrap(),
        }
    }

    /// Loads the programs a second time, with flow tables that have one element, which is in use.
    ///
    /// The agent's flow tables (LRU maps) evict entries, and reject an insertion only in rare cases. These flow tables
    /// are hash maps with the same key and value, which reject an insertion when they are full.
    pub(crate) fn replace_flow_tables_by_full_ones(&mut self) {
        let pins = Pins::new(Path::new(BPFFS));
        for name in [names::FLOW_TABLES_V4, names::FLOW_TABLES_V6].concat() {
            std::fs::remove_file(pins.map(name)).unwrap();
        }
        for name in names::FLOW_TABLES_V4 {
            HashMap::<MapData, FlowKeyV4, FlowV4>::create(1, 0).unwrap().pin(pins.map(name)).unwrap();
        }
        for name in names::FLOW_TABLES_V6 {
            HashMap::<MapData, FlowKeyV6, FlowV6>::create(1, 0).unwrap().pin(pins.map(name)).unwrap();
        }
        (self.v4.flows, self.v6.flows) = (names::FLOW_TABLES_V4.map(open), names::FLOW_TABLES_V6.map(open));
        // The one element of each table has a key that no test uses.
        let state = FlowState {
            last_seen_ns: 0,
            generation: 0,
            refreshed: 0,
            pod_acknowledgement: 0,
            node_port: 0,
            client_tcp_flags: 0,
            pod_tcp_flags: 0,
        };
        let key = FlowKeyV4 { client_addr: [0; 4], pod_addr: [0; 4], client_port: 0, pod_port: 0, protocol: 0 };
        for table in &mut self.v4.flows {
            table.insert(key, FlowV4 { state, node_addr: [0; 4], pad: 0 }, 0).unwrap();
        }
        let key = FlowKeyV6 { client_addr: [0; 16], pod_addr: [0; 16], client_port: 0, pod_port: 0, protocol: 0 };
        for table in &mut self.v6.flows {
            table.insert(key, FlowV6 { state, node_addr: [0; 16] }, 0).unwrap();
        }
        let mut loader = EbpfLoader::new();
        for name in names::PINNED_MAPS {
            loader.map_pin_path(name, pins.map(name));
        }
        let mut programs = loader.load(embedded_object().unwrap()).unwrap();
        for name in [names::PROG_INGRESS, names::PROG_EGRESS] {
            let program: &mut SchedClassifier = programs.program_mut(name).unwrap().try_into().unwrap();
            program.load().unwrap();
        }
        self.full_tables = Some(programs);
    }

    /// Returns the flow's entry in the flow table.
    pub(crate) fn flow(&self, id: FlowId) -> Option<FlowEntry> {
        let table = table_of(id.protocol);
        match id.key() {
            FlowKey::V4(key) => {
                self.v4.flows[table].get(&key, 0).ok().map(|flow| FlowEntry::new(flow.node_addr, flow.state))
            }
            FlowKey::V6(key) => {
                self.v6.flows[table].get(&key, 0).ok().map(|flow| FlowEntry::new(flow.node_addr, flow.state))
            }
        }
    }

    /// Removes a flow's entry from the flow table, as the kernel evicts the least recently used entry of a full
    /// table.
    pub(crate) fn evict(&mut self, id: FlowId) {
        let table = table_of(id.protocol);
        match id.key() {
            FlowKey::V4(key) => self.v4.flows[table].remove(&key).unwrap(),
            FlowKey::V6(key) => self.v6.flows[table].remove(&key).unwrap(),
        }
    }

    /// Returns the flow's entry in the half-open cache: from the flow's own slot, or else from its datagram slot, or
    /// else from the slot of its handshake.
    pub(crate) fn slot(&mut self, id: FlowId) -> Option<u64> {
        self.own_slot(id).or_else(|| self.datagram_slot(id)).or_else(|| self.handshake(id))
    }

    /// Returns the flow's entry in its datagram slot: the entry of a UDP or SCTP flow that is half-open without a
    /// handshake.
    pub(crate) fn datagram_slot(&mut self, id: FlowId) -> Option<u64> {
        self.entry_at(id, half_open::datagram_slot(hash(id)))
    }

    /// Returns the values of all slots of the half-open cache, in the flow's family.
    pub(crate) fn half_open_words(&mut self, id: FlowId) -> Vec<u64> {
        self.slots(id).iter().map(Result::unwrap).collect()
    }

    /// Overwrites the slot with this index in the half-open cache of the flow's family.
    pub(crate) fn set_half_open_word(&mut self, id: FlowId, index: u32, word: u64) {
        self.slots(id).set(index, word, 0).unwrap();
    }

    /// Returns the flow's entry in its own slot of the half-open cache.
    pub(crate) fn own_slot(&mut self, id: FlowId) -> Option<u64> {
        self.entry_at(id, half_open::slot(hash(id)))
    }

    /// Returns the half-open cache's entry for the handshake of a flow with the initial sequence numbers or tags of
    /// `prog_run::scene`. The entry's key contains the number that acknowledges the SYN or INIT.
    pub(crate) fn handshake(&mut self, id: FlowId) -> Option<u64> {
        let key = handshake_key(id);
        self.entry_of(id, half_open::handshake_slot(key), key)
    }

    fn entry_at(&mut self, id: FlowId, slot: u32) -> Option<u64> {
        self.entry_of(id, slot, hash(id))
    }

    fn entry_of(&mut self, id: FlowId, slot: u32, key: u64) -> Option<u64> {
        Some(self.slots(id).get(&slot, 0).unwrap()).filter(|entry| half_open::matches(*entry, key))
    }

    /// Overwrites the flow's slot of the half-open cache.
    pub(crate) fn set_slot(&mut self, id: FlowId, entry: u64) {
        self.slots(id).set(half_open::slot(hash(id)), entry, 0).unwrap();
    }

    /// Overwrites the slot of the half-open cache for the handshake that [`Self::handshake`] describes.
    pub(crate) fn set_handshake(&mut self, id: FlowId, entry: u64) {
        self.slots(id).set(half_open::handshake_slot(handshake_key(id)), entry, 0).unwrap();
    }

    /// Empties the half-open cache's slots for the handshake that [`Self::handshake`] describes, as if a SYN flood had
    /// overwritten them.
    pub(crate) fn forget_handshake(&mut self, id: FlowId) {
        let reply_key = conntrack::reply_key(hash(id), numbers(id).1);
        for key in [handshake_key(id), reply_key] {
            self.slots(id).set(half_open::handshake_slot(key), 0, 0).unwrap();
        }
    }

    /// Empties the half-open cache's slots for the flow's mid-stream entry.
    pub(crate) fn forget_mid_stream(&mut self, id: FlowId) {
        let key = conntrack::mid_stream_key(hash(id));
        for slot in [half_open::handshake_slot(key), half_open::second_handshake_slot(key)] {
            self.slots(id).set(slot, 0, 0).unwrap();
        }
    }

    /// Returns all fragment tracking records, with their slots.
    pub(crate) fn fragment_records(&mut self, family: Family) -> Vec<(u32, u64)> {
        (0..).zip(self.fragments(family).iter().map(Result::unwrap)).filter(|(_, record)| *record != 0).collect()
    }

    /// Overwrites one fragment tracking record.
    pub(crate) fn set_fragment_record(&mut self, family: Family, slot: u32, record: u64) {
        self.fragments(family).set(slot, record, 0).unwrap();
    }

    /// Makes all fragment tracking records older by `units`, each of about one second.
    pub(crate) fn age_fragment_records(&mut self, family: Family, units: u64) {
        for (slot, record) in self.fragment_records(family) {
            self.set_fragment_record(family, slot, fragment::aged(record, units));
        }
    }

    /// Makes the record of a host connection older by `units`, each of about one second. In `id`, the Node's endpoint
    /// takes the place of the Pod's.
    pub(crate) fn age_host_connection(&mut self, id: FlowId, units: u64) {
        let records = match Family::of(id.client.ip()) {
            Family::V4 => &mut self.v4.host_connections,
            Family::V6 => &mut self.v6.host_connections,
        };
        let slots = [host_connection::slot(hash(id)), host_connection::second_slot(hash(id))];
        let is_record = |slot: &u32| host_connection::matches(records.get(slot, 0).unwrap(), hash(id));
        let slot = slots.into_iter().find(is_record).unwrap();
        records.set(slot, host_connection::aged(records.get(&slot, 0).unwrap(), units), 0).unwrap();
    }

    fn fragments(&mut self, family: Family) -> &mut Array<MapData, u64> {
        if family == Family::V4 { &mut self.v4.fragments } else { &mut self.v6.fragments }
    }

    fn slots(&mut self, id: FlowId) -> &mut Array<MapData, u64> {
        if id.pod.is_ipv4() { &mut self.v4.slots } else { &mut self.v6.slots }
    }
}

/// Calls `run`, which runs a program on a frame. Returns the program's verdict and the output frame.
fn output(frame: &[u8], run: impl FnOnce(TestRunOptions<'_>) -> Result<TestRunResult, ProgramError>) -> (i32, Vec<u8>) {
    let mut output = vec![0; OUTPUT_BYTES];
    let mut options = TestRunOptions::new();
    options.data_in = Some(frame);
    options.data_out = Some(&mut output);
    let result = run(options).unwrap();
    output.truncate(usize::try_from(result.data_size_out).unwrap());
    (result.return_value.cast_signed(), output)
}

/// A flow's key in the flow table of its family.
enum FlowKey {
    V4(FlowKeyV4),
    V6(FlowKeyV6),
}

impl FlowId {
    fn key(self) -> FlowKey {
        let (client_port, pod_port, protocol) = (self.client.port(), self.pod.port(), self.protocol.number().into());
        match (self.client.ip(), self.pod.ip()) {
            (IpAddr::V4(client), IpAddr::V4(pod)) => {
                let (client_addr, pod_addr) = (client.octets(), pod.octets());
                FlowKey::V4(FlowKeyV4 { client_addr, pod_addr, client_port, pod_port, protocol })
            }
            (IpAddr::V6(client), IpAddr::V6(pod)) => {
                let (client_addr, pod_addr) = (client.octets(), pod.octets());
                FlowKey::V6(FlowKeyV6 { client_addr, pod_addr, client_port, pod_port, protocol })
            }
            addresses => panic!("{addresses:?} are of two families"),
        }
    }
}

impl FlowEntry {
    fn new(node_addr: impl Into<IpAddr>, state: FlowState) -> Self {
        Self { node_addr: node_addr.into(), state }
    }
}

/// Returns the numbers that are part of the keys of a handshake's two half-open entries: the acknowledgement numbers of
/// the Pod's SYN-ACK and of the client's ACK, or the verification tags for SCTP.
fn numbers(id: FlowId) -> (u32, u32) {
    match id.protocol {
        Protocol::Sctp => (SCTP_TAG, SCTP_TAG),
        Protocol::Tcp | Protocol::Udp => (CLIENT_ISN + 1, POD_ISN + 1),
    }
}

/// Returns the key of the handshake that [`Lab::handshake`] describes.
fn handshake_key(id: FlowId) -> u64 {
    conntrack::handshake_key(hash(id), numbers(id).0)
}

/// Returns the flow's hash, as the kernel programs compute it.
pub(crate) fn hash(id: FlowId) -> u64 {
    match id.key() {
        FlowKey::V4(key) => key.hash(SEED),
        FlowKey::V6(key) => key.hash(SEED),
    }
}

pub(crate) fn open<T: TryFrom<Map, Error = MapError>>(name: &str) -> T {
    let map = MapData::from_pin(Pins::new(Path::new(BPFFS)).map(name)).and_then(Map::from_map_data);
    map.and_then(T::try_from).unwrap()
}
