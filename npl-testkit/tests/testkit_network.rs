// SPDX-License-Identifier: Apache-2.0
//! Tests of the test kit's networks, on which the results of all other tests depend. These tests require root.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use aya::maps::{Array, HashMap, Map, MapData, PerCpuArray, PerCpuValues};
use aya::util::nr_cpus;
use npl_testkit::agent::{self, Agent};
use npl_testkit::echo::{EchoServer, Protocol};
use npl_testkit::mounts::{self, PrivateBpffs};
use npl_testkit::residue::Residue;
use npl_testkit::run::{self, Run};
use npl_testkit::topology::{Offload, Options, Pod, Topology};
use npl_testkit::traffic::{self, Direction, Load, Request, Transfer, UdpOptions};
use npl_testkit::{maps, netns, poll, tools};

const PORT: u16 = 8080;

struct World {
    topology: Topology,
    pods: Vec<(Pod, EchoServer)>,
    run: Run,
}

fn world(options: Options, pods: u8) -> World {
    let run = Run::start().unwrap();
    let mut topology = Topology::new(&run, "", options).unwrap();
    let pods = (0..pods)
        .map(|index| {
            let pod = topology.add_pod(&run, &format!("web-{index}")).unwrap();
            let server = EchoServer::start_in(&pod.netns, &pod.name, &[PORT]).unwrap();
            (pod, server)
        })
        .collect();
    World { topology, pods, run }
}

impl World {
    fn servers(&self) -> impl Iterator<Item = (&Pod, SocketAddr)> {
        self.pods.iter().flat_map(|(pod, _)| pod.ips().into_iter().map(move |ip| (pod, SocketAddr::new(ip, PORT))))
    }
}

#[test]
fn every_client_reaches_every_pod_in_both_families_and_protocols() {
    let world = world(Options { clients: 2, ..Options::default() }, 2);
    for client in world.topology.clients() {
        for (pod, server) in world.servers() {
            let address =
                if server.is_ipv4() { IpAddr::V4(client.addresses.v4) } else { IpAddr::V6(client.addresses.v6) };
            let tcp = traffic::tcp_request(&client.netns, server, "who are you?").unwrap();
            assert_eq!((tcp.pod.as_str(), tcp.client.ip(), tcp.protocol), (pod.name.as_str(), address, Protocol::Tcp));
            let udp = traffic::udp_request(&client.netns, server, b"and you?", UdpOptions::default()).unwrap().answer;
            assert_eq!((udp.pod.as_str(), udp.client.ip(), udp.received), (pod.name.as_str(), address, 8));
        }
    }
}

#[test]
fn datagram_without_checksum_is_answered() {
    let world = world(Options::default(), 1);
    let server = (world.pods[0].0.ip(), PORT).into();
    let options = UdpOptions { checksum: false, ..UdpOptions::default() };
    let answer = traffic::udp_request(&world.topology.client().netns, server, b"no checksum", options).unwrap();
    assert_eq!(answer.answer.received, 11);
}

#[test]
fn transfer_is_complete_with_and_without_offloads_at_any_mtu() {
    let world = world(Options { mtu: 9000, ..Options::default() }, 1);
    let client = world.topology.client();
    let (pod, _) = &world.pods[0];
    for on in [true, false] {
        client.device.set_offloads(&Offload::ALL, on).unwrap();
        pod.device.set_offloads(&Offload::ALL, on).unwrap();
        for direction in [Direction::Upload, Direction::Download] {
            let report = traffic::transfer(&client.netns, (pod.ip(), PORT).into(), direction, 8 << 20).unwrap();
            assert_eq!(report.bytes, 8 << 20);
        }
    }
}

#[test]
fn progress_of_a_transfer_is_reported() {
    let world = world(Options::default(), 1);
    let server = (world.pods[0].0.ip(), PORT).into();
    let client = &world.topology.client().netns;
    // The transfer takes two seconds, so that it is still running when the test calls `is_running`, even on a slow
    // machine.
    let transfer = Transfer::start(client, server, Direction::Download, 16 << 20, 8 << 20).unwrap();
    transfer.wait_for_share(1.0 / 16.0, Duration::from_secs(5)).unwrap();
    assert!(transfer.is_running());
    let report = transfer.join().unwrap();
    assert!(report.elapsed >= Duration::from_millis(1_600), "the transfer exceeded its rate: {report:?}");
}

#[test]
fn load_counts_responses_and_records_every_failure() {
    let mut world = world(Options::default(), 2);
    let client = world.topology.client();
    let requests: Vec<Request> = world
        .pods
        .iter()
        .flat_map(|(pod, _)| {
            [Protocol::Tcp, Protocol::Udp].map(|protocol| Request {
                protocol,
                server: (pod.ip(), PORT).into(),
                pod: pod.name.clone(),
                client: client.addresses.v4.into(),
            })
        })
        .collect();
    let load = Load::start(&client.netns, 200, requests);
    poll::until("forty responses", Duration::from_secs(10), || (load.report().total() >= 40).then_some(())).unwrap();
    assert_eq!(load.report().failures, []);
    assert_eq!(load.report().answered.len(), 4);
    let (pod, server) = world.pods.remove(0);
    drop(server);
    world.topology.remove_pod(&pod.name).unwrap();
    poll::until("a failure", Duration::from_mins(1), || (!load.report().failures.is_empty()).then_some(())).unwrap();
    let report = load.stop();
    assert!(report.failures.iter().all(|failure| failure.request.pod == pod.name), "{:?}", report.failures);
}

#[test]
fn a_run_leaves_nothing_behind() {
    let world = world(Options::default(), 1);
    let bpffs = world.run.bpffs("bpffs").unwrap();
    let directory = world.run.directory().to_owned();
    let names: BTreeSet<String> = run::netns_names().into_iter().filter(|name| name.contains(world.run.id())).collect();
    assert_eq!(names.len(), 3, "{names:?}");
    assert_eq!(mounts::below(&directory).unwrap(), [bpffs.path()]);
    drop(bpffs);
    drop(world);
    assert!(run::netns_names().is_disjoint(&names));
    assert!(!directory.exists());
}

#[test]
fn concurrent_starts_remove_the_remains_of_a_killed_run() {
    let id = run::random_hex(4).unwrap();
    let directory = run::directory_of(&id);
    std::fs::create_dir_all(&directory).unwrap();
    let left: BTreeSet<String> = (0..8).map(|index| format!("npl-{id}-{index}")).collect();
    for name in &left {
        assert!(Command::new("ip").args(["netns", "add", name]).status().unwrap().success());
    }
    thread::scope(|scope| {
        let starters: Vec<_> = (0..8).map(|_| scope.spawn(Run::start)).collect();
        for starter in starters {
            starter.join().unwrap().unwrap();
        }
    });
    assert!(run::netns_names().is_disjoint(&left));
    assert!(!directory.exists());
}

#[test]
fn private_bpffs_is_invisible_outside() {
    let run = Run::start().unwrap();
    let path = run.directory().to_owned();
    let _others = (run.bpffs("others").unwrap(), run.netns("others").unwrap());
    let bpffs = PrivateBpffs::mount(&path).unwrap();
    let seen = || mounts::below(&path).unwrap();
    // The second call runs on a second thread, which must see the same mount namespace.
    assert_eq!(bpffs.run(seen).unwrap(), [path.as_path()]);
    assert_eq!(bpffs.run(seen).unwrap(), [path.as_path()]);
    assert_eq!(mounts::below(&path).unwrap(), [path.join("others")]);
    // The private namespace must have no copies of other owners' mounts, which would keep links and namespaces alive.
    let held = || -> Vec<PathBuf> {
        let of_kind = |mount: &mounts::Mount| ["bpf", "nsfs"].contains(&mount.kind.as_str());
        mounts::all().unwrap().into_iter().filter(of_kind).map(|mount| mount.point).collect()
    };
    assert_eq!(bpffs.run(held).unwrap(), [path]);
}

#[test]
fn maps_of_all_types_are_emptied() {
    const ELEMENTS: u32 = 1000;
    let run = Run::start().unwrap();
    let bpffs = run.bpffs("bpf").unwrap();
    let [words, bytes, table, counts] = ["words", "bytes", "table", "counts"].map(|name| bpffs.path().join(name));
    let mut array = Array::<MapData, [u64; 2]>::create(ELEMENTS, 0).unwrap();
    let mut odd = Array::<MapData, [u8; 11]>::create(1, 0).unwrap();
    let mut hash = HashMap::<MapData, u32, u64>::create(ELEMENTS, 0).unwrap();
    let mut counters = PerCpuArray::<MapData, u64>::create(ELEMENTS, 0).unwrap();
    let processors = nr_cpus().unwrap();
    for index in 0..ELEMENTS {
        counters.set(index, PerCpuValues::try_from(vec![7; processors]).unwrap(), 0).unwrap();
        array.set(index, [1, u64::MAX], 0).unwrap();
        hash.insert(index, 1, 0).unwrap();
    }
    odd.set(0, [0xff; 11], 0).unwrap();
    array.pin(&words).unwrap();
    odd.pin(&bytes).unwrap();
    hash.pin(&table).unwrap();
    counters.pin(&counts).unwrap();
    for pin in [&words, &bytes, &table, &counts] {
        maps::empty(pin).unwrap();
    }
    let opened = |pin| MapData::from_pin(pin).unwrap();
    let array = Array::<_, [u64; 2]>::try_from(Map::Array(opened(&words))).unwrap();
    let odd = Array::<_, [u8; 11]>::try_from(Map::Array(opened(&bytes))).unwrap();
    let hash = HashMap::<_, u32, u64>::try_from(Map::HashMap(opened(&table))).unwrap();
    assert!(array.iter().all(|element| element.unwrap() == [0, 0]) && array.len() == ELEMENTS);
    assert_eq!(odd.get(&0, 0).unwrap(), [0; 11]);
    assert_eq!(hash.keys().count(), 0);
    let counters = PerCpuArray::<_, u64>::try_from(Map::PerCpuArray(opened(&counts))).unwrap();
    assert!(counters.iter().all(|values| values.unwrap().iter().all(|value| *value == 0)));
    assert!(maps::empty(&bpffs.path().join("none")).is_err());
}

#[test]
fn command_and_closure_run_inside_the_namespace() {
    let run = Run::start().unwrap();
    let netns = run.netns("inside").unwrap();
    let outside = std::fs::read_link("/proc/self/ns/net").unwrap();
    let inside = netns.run(|| std::fs::read_link("/proc/thread-self/ns/net").unwrap()).unwrap();
    assert_ne!(inside, outside);
    let mut command = netns.command("readlink").unwrap();
    let output = command.arg("/proc/self/ns/net").output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), inside.to_string_lossy());
    assert!(netns.path().starts_with(netns::DIRECTORY));
}

#[test]
fn agent_runs_with_two_capabilities_and_the_devices_of_its_node() {
    let run = Run::start().unwrap();
    let node = run.netns("node").unwrap();
    let text = run.file("agent.sh");
    std::fs::write(&text, "#!/bin/sh\ngrep -E 'CapEff|CapPrm|NoNewPrivs' /proc/self/status\nls /sys/class/net\n")
        .unwrap();
    std::fs::set_permissions(&text, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let script = run.file("agent");
    tools::copy_program(&text, &script).unwrap();
    let options = agent::Options {
        binary: script,
        node_name: "node-1".to_owned(),
        netns: node,
        kubeconfig: run.file("kubeconfig"),
        service_account: None,
        bpffs: run.file("bpffs"),
        log: run.file("agent.log"),
        runtime_dir: run.file("run"),
        has_perfmon: false,
        flags: Vec::new(),
        wrapper: Vec::new(),
    };
    let error = format!("{:#}", Agent::start(options).unwrap_err());
    // In the masks of capabilities, CAP_NET_ADMIN is bit 12, and CAP_BPF is bit 39.
    for wanted in ["exit status: 0", "CapPrm:\t0000008000001000", "CapEff:\t0000008000001000", "NoNewPrivs:\t1"] {
        assert!(error.contains(wanted), "{error}");
    }
    assert!(error.ends_with("\n  lo"), "{error}");
}

/// Runs `work` while other threads start child processes continuously.
fn amid_children<T>(work: impl FnOnce() -> T) -> T {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    assert!(Command::new("/bin/true").status().unwrap().success());
                }
            });
        }
        let done = work();
        is_over.store(true, Ordering::Relaxed);
        done
    })
}

#[test]
fn copied_program_runs_while_other_threads_start_processes() {
    let run = Run::start().unwrap();
    let outcome = amid_children(|| {
        (0..100).try_for_each(|index| {
            let program = run.file(&format!("true-{index}"));
            tools::copy_program(Path::new("/bin/true"), &program)?;
            tools::output(&mut Command::new(&program)).map(drop)
        })
    });
    outcome.unwrap();
}

#[test]
fn response_is_awaited_while_other_threads_start_processes() {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let answer = amid_children(|| traffic::udp_receive(&socket, b"anybody there?", Duration::from_secs(2)));
    assert_eq!(answer.unwrap(), None);
}

#[test]
fn residue_lists_remaining_objects() {
    let before = Residue::look().unwrap();
    let run = Run::start().unwrap();
    let bpffs = run.bpffs("bpffs").unwrap();
    let kept = run.netns("kept").unwrap();
    let new: Vec<String> = before.new_things().unwrap().into_iter().collect();
    assert!(new.contains(&format!("network namespace {}", kept.name())), "{new:?}");
    assert!(new.contains(&format!("mount at {}", bpffs.path().display())), "{new:?}");
}

#[test]
fn the_next_run_removes_the_remains_of_a_killed_one() {
    let leave = "exec /bin/true";
    let mut owner = Command::new("/bin/sh").args(["-c", leave]).spawn().unwrap();
    let id = run::random_hex(4).unwrap();
    let directory = Path::new(run::ROOT).join(&id);
    std::fs::create_dir_all(&directory).unwrap();
    std::fs::write(directory.join("owner"), format!("{} 1", owner.id())).unwrap();
    owner.wait().unwrap();
    let name = format!("npl-{id}-left");
    assert!(Command::new("ip").args(["netns", "add", &name]).status().unwrap().success());
    let _next = Run::start().unwrap();
    assert!(!run::netns_names().contains(&name));
    assert!(!directory.exists());
}
