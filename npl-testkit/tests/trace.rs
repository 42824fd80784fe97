// SPDX-License-Identifier: Apache-2.0
//! Tests the trace build: its programs load, and log verdicts with level, reason and flow tuple. The tests need root,
//! and the object of `cargo xtask build-ebpf --features trace`.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::env;
use std::fs;
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use aya::maps::ProgramArray;
use aya::programs::{Program, SchedClassifier, TestRun as _, TestRunOptions, Xdp};
use aya::{Ebpf, EbpfLoader};
use aya_log::EbpfLogger;
use caps::{CapSet, Capability};
use log::{Level, Log, Metadata, Record};
use npl_agent::core::model::{Backend, Family, Frontend, NodePort, PodPort, Protocol};
use npl_agent::datapath::{Datapath, Pins};
use npl_common::names;
use npl_testkit::mounts::PrivateBpffs;
use npl_testkit::packet::{Packet, Transport, sctp_chunks, tcp_flags};
use npl_testkit::tools;

const BPFFS: &str = "/sys/fs/bpf";
const NODE_PORT: u16 = 61_000;
/// The node port of a mapping whose allow-list admits no client of the tests.
const RESTRICTED_PORT: u16 = 61_001;
const UNMAPPED_PORT: u16 = 61_002;

/// The capabilities of the init container of `deploy/npl.yaml`, and `CAP_SYS_RESOURCE`, which raises the memory limit
/// for maps before Linux 5.11. Without `CAP_PERFMON`, the verifier rejects the programs of a trace build.
const CAPABILITIES: [Capability; 4] =
    [Capability::CAP_BPF, Capability::CAP_NET_ADMIN, Capability::CAP_SYS_RESOURCE, Capability::CAP_PERFMON];

/// The addresses of client, Node and Pod in one family.
struct Scene {
    client: SocketAddr,
    node: IpAddr,
    pod: SocketAddr,
}

impl Scene {
    fn of_both_families() -> [Self; 2] {
        let [v4, v6] = [
            ["198.51.100.2:43210", "192.0.2.10", "10.0.0.5:8080"],
            ["[2001:db8:0:2::2]:43210", "2001:db8:0:1::10", "[fd00::a:5]:8080"],
        ];
        [v4, v6].map(|[client, node, pod]| Self {
            client: client.parse().unwrap(),
            node: node.parse().unwrap(),
            pod: pod.parse().unwrap(),
        })
    }

    /// Returns a SYN to a node port.
    fn request(&self, port: u16) -> Packet {
        Packet::tcp(self.client, (self.node, port).into(), tcp_flags::SYN, b"").to_this_machine()
    }

    /// Returns an SCTP packet that opens an association. The slow path translates all SCTP packets.
    fn sctp_request(&self, port: u16) -> Packet {
        Packet::sctp(self.client, (self.node, port).into(), sctp_chunks::INIT, &[0; 16]).to_this_machine()
    }

    fn reply(&self) -> Packet {
        let mut packet = Packet::tcp(self.pod, self.client, tcp_flags::SYN | tcp_flags::ACK, b"").to_this_machine();
        let request = self.request(NODE_PORT);
        if let (Transport::Tcp(syn_ack), Transport::Tcp(syn)) = (&mut packet.transport, &request.transport) {
            syn_ack.acknowledgement = syn.sequence + 1;
        }
        packet
    }

    /// Returns the log line that the program must write about a packet from the client.
    fn line(&self, level: Level, protocol: &str, port: u16, outcome: &str) -> (Level, String) {
        let (source, sport) = (self.client.ip(), self.client.port());
        let node = self.node;
        (level, format!("request {protocol} src={source} dst={node} sport={sport} dport={port} {outcome}"))
    }
}

/// The logged lines with their levels.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<(Level, String)>>>);

impl Log for Lines {
    fn enabled(&self, _metadata: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let line = record.args().to_string().trim_end().to_owned();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((record.level(), line));
    }

    fn flush(&self) {}
}

/// The programs of the trace build with the maps of an agent's datapath, and their logs.
struct Traced {
    datapath: Datapath,
    programs: Ebpf,
    logger: EbpfLogger<Lines>,
    lines: Lines,
}

impl Traced {
    /// Runs `test` with all programs of the trace build loaded.
    fn with(test: impl FnOnce(&mut Self) + Send) {
        aya::features();
        let confined = || {
            let mut kept = caps::read(None, CapSet::Effective).unwrap();
            kept.retain(|it| CAPABILITIES.contains(it));
            caps::set(None, CapSet::Effective, &kept).unwrap();
            test(&mut Self::load());
        };
        PrivateBpffs::mount(Path::new(BPFFS)).unwrap().run(confined).unwrap();
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "the object has programs of four types")]
    fn load() -> Self {
        let mut datapath = Datapath::open(Path::new(BPFFS)).unwrap();
        datapath.configure("61000-61100".parse().unwrap(), || 1).unwrap();
        let pins = Pins::new(Path::new(BPFFS));
        let mut loader = EbpfLoader::new();
        for name in names::PINNED_MAPS {
            loader.map_pin_path(name, pins.map(name));
        }
        let mut programs = loader.load(&fs::read(object()).unwrap()).unwrap();
        let lines = Lines::default();
        let logger = EbpfLogger::init_with_logger(&mut programs, lines.clone()).unwrap();
        for (name, program) in programs.programs_mut() {
            let loaded = match program {
                Program::SchedClassifier(program) => program.load(),
                Program::CgroupSock(program) => program.load(),
                Program::CgroupSockAddr(program) => program.load(),
                Program::Xdp(program) => program.load(),
                _ => panic!("{name} is of another type"),
            };
            loaded.unwrap_or_else(|error| panic!("{name}: {error:?}"));
        }
        let mut traced = Self { datapath, programs, logger, lines };
        traced.place_slow_path();
        traced
    }

    /// Replaces the slow-path programs of the datapath's own build by those of the trace build.
    fn place_slow_path(&mut self) {
        let mut jumps = ProgramArray::try_from(self.programs.take_map(names::MAP_SLOW_PATH).unwrap()).unwrap();
        for (index, name) in (0..).zip(names::SLOW_PATH_PROGRAMS) {
            let program: &SchedClassifier = self.programs.program(name).unwrap().try_into().unwrap();
            jumps.set(index, program.fd().unwrap(), 0).unwrap();
        }
    }

    /// Maps the node ports of a scene.
    fn map(&mut self, scene: &Scene) {
        assert!(self.datapath.tables.set_local_addresses(&[scene.node]).unwrap().is_empty());
        for protocol in [Protocol::Tcp, Protocol::Sctp] {
            for (port, is_restricted) in [(NODE_PORT, false), (RESTRICTED_PORT, true)] {
                let frontend = Frontend { family: Family::of(scene.node), node_port: NodePort(port), protocol };
                let (pod_ip, pod_port) = (scene.pod.ip(), PodPort(scene.pod.port()));
                let backend = Backend { pod_ip, pod_port, generation: 1, is_restricted };
                self.datapath.upsert_mapping(frontend, backend).unwrap();
            }
        }
    }

    /// Runs a TC program on a packet and returns the logged lines.
    fn run(&mut self, program: &str, packet: &Packet) -> Vec<(Level, String)> {
        let program: &mut SchedClassifier = self.programs.program_mut(program).unwrap().try_into().unwrap();
        program.test_run(options(&packet.build())).unwrap();
        self.logged()
    }

    /// Runs the XDP program on a frame and returns the logged lines.
    fn run_xdp(&mut self, frame: &Packet) -> Vec<(Level, String)> {
        let program: &mut Xdp = self.programs.program_mut(names::PROG_XDP).unwrap().try_into().unwrap();
        program.test_run(options(&frame.build())).unwrap();
        self.logged()
    }

    fn logged(&mut self) -> Vec<(Level, String)> {
        self.logger.flush();
        mem::take(&mut self.lines.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn options(frame: &[u8]) -> TestRunOptions<'_> {
    let mut options = TestRunOptions::new();
    options.data_in = Some(frame);
    options
}

/// The path of the object: `NPL_TRACE_OBJECT`, or the output of `cargo xtask build-ebpf --features trace`.
fn object() -> PathBuf {
    let named = env::var_os("NPL_TRACE_OBJECT").map(PathBuf::from);
    named.unwrap_or_else(|| tools::repository_file("target/bpf/npl-trace.bpf.o"))
}

#[test]
fn verdict_is_logged_with_level_reason_and_flow_tuple() {
    Traced::with(|traced| {
        for scene in Scene::of_both_families() {
            traced.map(&scene);
            for (port, level, outcome) in [
                (NODE_PORT, Level::Debug, "translated"),
                (UNMAPPED_PORT, Level::Info, "passed: no_mapping"),
                (RESTRICTED_PORT, Level::Warn, "dropped: source_refused"),
            ] {
                let tcp = traced.run(names::PROG_INGRESS, &scene.request(port));
                assert_eq!(tcp, [scene.line(level, "tcp ", port, outcome)]);
                // There must be one line only: the program tail-calls the slow path, and only the slow path logs.
                let sctp = traced.run(names::PROG_INGRESS, &scene.sctp_request(port));
                assert_eq!(sctp, [scene.line(level, "sctp", port, outcome)]);
            }
        }
    });
}

#[test]
fn reply_is_logged_as_it_left_the_pod() {
    Traced::with(|traced| {
        for scene in Scene::of_both_families() {
            traced.map(&scene);
            traced.run(names::PROG_INGRESS, &scene.request(NODE_PORT));
            let (pod, client) = (scene.pod, scene.client);
            let (source, destination, sport, dport) = (pod.ip(), client.ip(), pod.port(), client.port());
            let line = format!("reply   tcp  src={source} dst={destination} sport={sport} dport={dport} translated");
            assert_eq!(traced.run(names::PROG_EGRESS, &scene.reply()), [(Level::Debug, line)]);
        }
    });
}

#[test]
fn xdp_logs_the_requests_that_it_translates_or_drops_before_tc() {
    Traced::with(|traced| {
        for scene in Scene::of_both_families() {
            traced.map(&scene);
            for (port, level, outcome) in
                [(NODE_PORT, Level::Debug, "translated"), (RESTRICTED_PORT, Level::Warn, "dropped: source_refused")]
            {
                assert_eq!(traced.run_xdp(&scene.request(port)), [scene.line(level, "tcp ", port, outcome)]);
            }
            assert_eq!(traced.run_xdp(&scene.request(UNMAPPED_PORT)), []);
        }
    });
}

#[test]
fn packet_to_a_port_outside_of_the_range_is_not_logged() {
    Traced::with(|traced| {
        for scene in Scene::of_both_families() {
            traced.map(&scene);
            assert_eq!(traced.run(names::PROG_INGRESS, &scene.request(22)), []);
        }
    });
}
