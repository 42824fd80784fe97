// SPDX-License-Identifier: Apache-2.0
//! The Node on which the mutated packets arrive: its addresses, mappings, next hops and programs.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::Command;

use aya::maps::{HashMap, MapData};
use aya::programs::xdp::XdpMode;
use npl_agent::core::model::{Family, Protocol};
use npl_common::mapping::{BackendV4, BackendV6, Frontend};
use npl_common::names;
use npl_common::next_hop::{PodNextHop, UPLINK, kind};
use npl_testkit::topology::mac_text;

use crate::lab::{Lab, TEST_DEVICE, open};
use crate::prog_run::redirect::set_next_hop;
use crate::prog_run::scene::{
    GENERATION, NODE_PORT, POD_PORT, client_ip, family, ip, node_ip, other_pod_ip, pod, pod_ip, second_node_ip,
};

/// The range of node ports that [`Lab`] configures.
pub(super) const RANGE: std::ops::RangeInclusive<u16> = 61_000..=61_100;
/// Node port of the Pod whose packets have no link-layer header.
pub(super) const L3_NODE_PORT: u16 = 61_001;
/// Node port that only [`client_ip`] may use.
pub(super) const RESTRICTED_NODE_PORT: u16 = 61_002;
/// A second node port of the first Pod, which makes tuple conflicts possible. Only UDP is mapped.
pub(super) const OTHER_NODE_PORT: u16 = 61_003;

/// MTU of the first Pod's device.
const POD_MTU: u16 = 1500;
/// MTU of the bridge of the restricted Pod.
const BRIDGE_MTU: u16 = 600;
/// MTU of the uplink.
pub(super) const UPLINK_MTU: u32 = 1400;
/// A device that stays down, to which the XDP program is attached.
const IDLE: &str = "idle0";
/// Link-layer addresses of the uplink and of the router.
pub(super) const UPLINK_MAC: [u8; 6] = [2, 0, 0, 0, 0x0a, 1];
pub(super) const ROUTER_MAC: [u8; 6] = [2, 0, 0, 0, 0x0a, 2];

/// The client and the Pod of packets without a link-layer header. A test run reads the `EtherType` at offset 12, which
/// is a part of the source address (see `prog_run::l3`).
pub(super) fn l3_client() -> IpAddr {
    ip("8.0.0.2", "2001:db8:86dd::2")
}

pub(super) fn l3_pod() -> SocketAddr {
    (ip("8.0.0.5", "fd00:0:86dd::5"), POD_PORT).into()
}

pub(super) fn restricted_pod() -> SocketAddr {
    (other_pod_ip(), 9000).into()
}

/// A mapping, and the element of its counters.
#[derive(Clone, Debug)]
pub(super) struct Mapping {
    pub(super) protocol: Protocol,
    pub(super) node_port: u16,
    pub(super) pod: SocketAddr,
    /// The only source that may use the mapping; `None` if the mapping is unrestricted.
    pub(super) only: Option<IpAddr>,
    pub(super) counters: u32,
}

/// The hook of a program, and which packets the program translates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Requests(Forwarding),
    Frames,
    RepliesAtUplink,
    RepliesAtPod { has_slow_path: bool },
    Observer,
}

/// How a program forwards translated requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Forwarding {
    Stack,
    Redirect,
    Offload,
}

/// A program of the kernel object.
pub(super) struct Program {
    pub(super) name: &'static str,
    pub(super) role: Role,
    /// Offset of the IP header.
    pub(super) l3: usize,
    fd: OwnedFd,
}

impl Program {
    pub(super) fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Whether the program handles packets that a client sends.
    pub(super) fn takes_requests(&self) -> bool {
        matches!(self.role, Role::Requests(_) | Role::Frames | Role::Observer)
    }
}

/// Everything that the oracle knows about the Node.
pub(super) struct Scene {
    pub(super) nodes: [IpAddr; 2],
    pub(super) mappings: Vec<Mapping>,
    pub(super) programs: Vec<Program>,
}

impl Scene {
    /// Writes the mappings, next hops and uplinks, and loads the programs.
    pub(super) fn new(lab: &mut Lab) -> Self {
        let nodes = [node_ip(), second_node_ip()];
        lab.set_addresses(&nodes);
        let mut mappings = Vec::new();
        for protocol in Protocol::ALL {
            for (node_port, pod) in [(NODE_PORT, pod()), (L3_NODE_PORT, l3_pod())] {
                lab.add(protocol, node_port, pod, GENERATION);
                mappings.push(Mapping { protocol, node_port, pod, only: None, counters: 0 });
            }
            let (node_port, pod, only) = (RESTRICTED_NODE_PORT, restricted_pod(), client_ip());
            lab.add_restricted(protocol, node_port, pod, GENERATION, &only.to_string());
            mappings.push(Mapping { protocol, node_port, pod, only: Some(only), counters: 0 });
        }
        lab.add(Protocol::Udp, OTHER_NODE_PORT, pod(), GENERATION);
        let (protocol, node_port) = (Protocol::Udp, OTHER_NODE_PORT);
        mappings.push(Mapping { protocol, node_port, pod: pod(), only: None, counters: 0 });
        for mapping in &mut mappings {
            mapping.counters = counters_of(mapping);
        }
        set_next_hop(pod().ip(), PodNextHop { ifindex: TEST_DEVICE, mtu: POD_MTU, kind: kind::PEER });
        set_next_hop(restricted_pod().ip(), PodNextHop { ifindex: TEST_DEVICE, mtu: BRIDGE_MTU, kind: kind::BRIDGE });
        let mut uplinks: HashMap<MapData, u32, u32> = open(names::MAP_UPLINK);
        uplinks.insert(uplink(), UPLINK, 0).unwrap();
        Self { nodes, mappings, programs: programs(lab) }
    }

    pub(super) fn is_node(&self, address: IpAddr) -> bool {
        self.nodes.contains(&address)
    }

    /// The mapping of a node port.
    pub(super) fn mapping(&self, protocol: Protocol, node_port: u16) -> Option<&Mapping> {
        self.mappings.iter().find(|mapping| mapping.protocol == protocol && mapping.node_port == node_port)
    }

    /// All mappings of a Pod port; none if the Pod port is no endpoint.
    pub(super) fn mappings_of(&self, protocol: Protocol, pod: SocketAddr) -> Vec<&Mapping> {
        self.mappings.iter().filter(|mapping| mapping.protocol == protocol && mapping.pod == pod).collect()
    }

    /// The MTU of the device to which packets for a Pod are redirected; `None` if the stack forwards them.
    pub(super) fn pod_mtu(pod: IpAddr) -> Option<u32> {
        if pod == pod_ip() {
            Some(POD_MTU.into())
        } else if pod == restricted_pod().ip() {
            Some(BRIDGE_MTU.into())
        } else {
            None
        }
    }
}

/// Returns the index of a mapping's element in the map of counters.
fn counters_of(mapping: &Mapping) -> u32 {
    let frontend = Frontend { node_port: mapping.node_port, protocol: mapping.protocol.number(), pad: 0 };
    match family() {
        Family::V4 => {
            let map: HashMap<MapData, Frontend, BackendV4> = open(names::MAP_MAPPING_V4);
            map.get(&frontend, 0).unwrap().stats_index
        }
        Family::V6 => {
            let map: HashMap<MapData, Frontend, BackendV6> = open(names::MAP_MAPPING_V6);
            map.get(&frontend, 0).unwrap().stats_index
        }
    }
}

fn programs(lab: &mut Lab) -> Vec<Program> {
    let roles = [
        (names::PROG_INGRESS, Role::Requests(Forwarding::Stack), 14),
        (names::PROG_INGRESS_L3, Role::Requests(Forwarding::Stack), 0),
        (names::PROG_INGRESS_REDIRECT, Role::Requests(Forwarding::Redirect), 14),
        (names::PROG_INGRESS_OFFLOAD, Role::Requests(Forwarding::Offload), 14),
        (names::PROG_EGRESS, Role::RepliesAtUplink, 14),
        (names::PROG_EGRESS_L3, Role::RepliesAtUplink, 0),
        (names::PROG_EGRESS_OFFLOAD, Role::RepliesAtUplink, 14),
        (names::PROG_PODS_REDIRECT, Role::RepliesAtPod { has_slow_path: true }, 14),
        (names::PROG_PODS_OFFLOAD, Role::RepliesAtPod { has_slow_path: false }, 14),
        (names::PROG_TO_PODS, Role::Observer, 14),
    ];
    assert_eq!(roles.len(), names::PROGRAMS.len(), "every TC program must be tested");
    let mut programs: Vec<Program> = Vec::new();
    for (name, role, l3) in roles {
        let fd = lab.program(name).fd().unwrap().as_fd().try_clone_to_owned().unwrap();
        programs.push(Program { name, role, l3, fd });
    }
    let xdp = lab.datapath.hooks.load_xdp_program().unwrap();
    // If the program were attached to no device, each test run would add the program to the kernel's XDP dispatcher and
    // remove it, and both take many milliseconds (see `npl_testkit::meter`). The idle device receives no packets.
    xdp.attach_to_if_index(nix::net::if_::if_nametoindex(IDLE).unwrap(), XdpMode::Skb).unwrap();
    let fd = xdp.fd().unwrap().as_fd().try_clone_to_owned().unwrap();
    programs.push(Program { name: names::PROG_XDP, role: Role::Frames, l3: 14, fd });
    programs
}

/// The interface index of the uplink that [`set_up_network`] creates.
pub(super) fn uplink() -> u32 {
    nix::net::if_::if_nametoindex("up0").unwrap()
}

/// Creates an uplink with routes to all clients, in the thread's network namespace, so that replies can be redirected.
pub(super) fn set_up_network() {
    let (uplink, router) = (mac_text(UPLINK_MAC), mac_text(ROUTER_MAC));
    let lines = format!(
        "link set lo up
         link add up0 address {uplink} mtu {UPLINK_MTU} type veth peer name up1
         link add {IDLE} type veth peer name idle1
         link set up1 up
         link set up0 up
         address add 192.0.2.10/24 dev up0
         address add 192.0.2.11/24 dev up0
         address add 2001:db8:0:1::10/64 dev up0 nodad
         address add 2001:db8:0:1::11/64 dev up0 nodad
         neighbor add 192.0.2.1 lladdr {router} dev up0
         neighbor add 2001:db8:0:1::1 lladdr {router} dev up0
         route add default via 192.0.2.1
         -6 route add default via 2001:db8:0:1::1"
    );
    for line in lines.lines() {
        let status = Command::new("ip").args(line.split_whitespace()).status().unwrap();
        assert!(status.success(), "ip {line}");
    }
    for setting in ["ipv4/conf/all/forwarding", "ipv6/conf/all/forwarding"] {
        std::fs::write(format!("/proc/sys/net/{setting}"), "1").unwrap();
    }
}
