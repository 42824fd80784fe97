// SPDX-License-Identifier: Apache-2.0
//! Tests the programs while the kernel blinds the constants of all BPF programs (`net.core.bpf_jit_harden=2`, the
//! default of Bottlerocket). The sysctl applies to the whole machine, so the test requires a separate machine, which
//! `cargo xtask test` emulates.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind, Write as _};
use std::path::Path;

use npl_agent::core::devices::redirect::Forwarding;
use npl_agent::core::model::Protocol;
use npl_testkit::kernel;
use npl_testkit::traffic::{self, udp_exchange, udp_socket};

use super::sctp;
use crate::bpffs_pool::BPFFS;
use crate::lab::{mapping, with_loader_lab};
use crate::links::programs::pinned_infos;
use crate::world::{POD_PORT, World};

/// The sysctl for the blinding of constants. The value 2 blinds the constants of all programs, including those that a
/// privileged process loads.
const SYSCTL: &str = "/proc/sys/net/core/bpf_jit_harden";

/// A node port whose Pod port is closed.
const CLOSED: u16 = 61_050;

/// The sysctl has the value 2 until this value is dropped, which restores the former value.
struct Hardened {
    former: String,
}

impl Hardened {
    fn begin() -> Self {
        assert!(
            kernel::is_own_machine().unwrap(),
            "this test sets a sysctl of the machine: run it on an emulated machine with `cargo xtask test --filter \
             every_program_loads --kernels latest`"
        );
        let former = fs::read_to_string(SYSCTL).unwrap();
        fs::write(SYSCTL, "2").unwrap();
        Self { former }
    }
}

impl Drop for Hardened {
    fn drop(&mut self) {
        let restored = fs::write(SYSCTL, &self.former);
        assert!(restored.is_ok() || std::thread::panicking(), "{restored:?}");
    }
}

/// Returns the length of each program's machine code in bytes, by name.
fn machine_code(bpffs: &Path) -> BTreeMap<String, u32> {
    pinned_infos(bpffs).into_iter().map(|((_build, name), info)| (name, info.size_jitted())).collect()
}

#[test]
#[ignore = "sets a sysctl of the machine; `cargo xtask test` runs it on emulated machines"]
fn every_program_loads_and_translates_with_blinded_constants() {
    let mut usual = BTreeMap::new();
    with_loader_lab(|lab| {
        assert!(lab.datapath.hooks.load_all().iter().all(Result::is_ok));
        usual = machine_code(Path::new(BPFFS));
    });
    let _hardened = Hardened::begin();
    let mut world = World::fresh(1);
    let refused: Vec<_> = world.datapath().hooks.load_all().into_iter().filter_map(Result::err).collect();
    assert!(refused.is_empty(), "{refused:?}");
    let blinded = machine_code(world.bpffs.path());
    assert!(blinded.keys().eq(usual.keys()), "{:?}, {:?}", blinded.keys(), usual.keys());
    for (name, length) in &usual {
        assert!(blinded[name] > *length, "{name}: {} bytes, and {length} bytes without blinding", blinded[name]);
    }
    let [usual, blinded] = [usual, blinded].map(|all| all.into_values().sum::<u32>());
    let said = format!("machine code of all programs: {usual} bytes, with blinded constants {blinded} bytes\n");
    io::stderr().write_all(said.as_bytes()).unwrap();
    for pod_ip in world.pod().ips() {
        let (frontend, backend) = mapping(Protocol::Udp, CLOSED, (pod_ip, POD_PORT + 1).into(), 1);
        world.datapath().upsert_mapping(frontend, backend).unwrap();
    }
    assert_served(&world);
    world.follow(Forwarding::Redirect);
    assert_served(&world);
    world.follow(Forwarding::Stack);
    // A Pod without SCTP answers each packet with an ICMP error, and the kernel limits the rate of these errors.
    // Therefore, no test of ICMP errors follows.
    sctp::assert_associations(&mut world);
}

/// Asserts that TCP, UDP, fragments and ICMP errors of both families are translated.
#[track_caller]
fn assert_served(world: &World) {
    world.assert_answers();
    for frontend in world.frontends() {
        assert_eq!(udp_exchange(world.client(), frontend, 4000, 4000).unwrap().pod, "web-0");
        let socket = udp_socket(world.client(), (frontend.ip(), CLOSED).into(), true).unwrap();
        let error = traffic::udp_ask(&socket, "is anybody there?").unwrap_err();
        let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
        assert_eq!(kind, Some(ErrorKind::ConnectionRefused), "{frontend}: the Pod's port is closed: {error:#}");
    }
}
