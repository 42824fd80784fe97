// SPDX-License-Identifier: Apache-2.0
//! Tests a Node whose uplink is a bond of two devices, with failovers while the agent runs.
//!
//! ```text
//!   client ── sw0 ─┬─ eth0 ═══ eth0 ─┬─ up0 ── node
//!                  └─ eth1 ═══ eth1 ─┘
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::net::{TcpStream, UdpSocket};
use std::os::unix::fs::MetadataExt as _;

use npl_common::names::{ABI_VERSION, LINK_DIR, PIN_ROOT};
use npl_testkit::echo::Protocol;
use npl_testkit::netns::Netns;
use npl_testkit::{kernel, poll, traffic};

use crate::redirect::{NOTHING_IS_FORWARDED, wait_for_redirected_pods};
use crate::world::{LIMIT, World};

/// The `ip` command that creates the bond. The primary device is `eth0`, which becomes active again as soon as its link
/// is up.
const BOND: &str = "link add up0 type bond mode active-backup miimon 50 primary eth0";

/// The `ip` command that adds the second cable. The interface index differs from that of the peer, so that the kernel
/// reports carrier changes without delay.
const SECOND_PAIR: &str = "link add eth1 index 101 type veth peer name eth1 netns";

/// The client's end: a switch that connects both cables to the client.
const SWITCH: &str = "link add sw0 type bridge forward_delay 0
link set eth0 master sw0
link set eth1 master sw0
link set eth1 up
link set sw0 up";

const MEMBERS: &str = "link set eth0 down
link set eth0 master up0
link set eth1 master up0
link set up0 up";

/// The namespace in which a change is made, the `ip` command of the change, and the active device of the bond
/// afterwards.
type Change = (fn(&World) -> &Netns, &'static str, &'static str);

const CHANGES: [Change; 4] = [
    (client, "link set eth0 down", "eth1"),
    (client, "link set eth0 up", "eth0"),
    (node, "link set eth0 nomaster", "eth1"),
    (node, "link set eth0 down\nlink set eth0 master up0", "eth0"),
];

fn node(world: &World) -> &Netns {
    world.topology.node()
}

fn client(world: &World) -> &Netns {
    &world.topology.client().netns
}

/// Creates a Node whose addresses are on a bond, without an agent. `None` if the kernel does not support bonds.
fn world_with_bond() -> Option<World> {
    let world = World::new();
    if !kernel::make_device(node(&world), "bond", BOND, false).unwrap() {
        return None;
    }
    node(&world).ip(&format!("{SECOND_PAIR} {}", client(&world).name())).unwrap();
    client(&world).ip(SWITCH).unwrap();
    node(&world).ip(MEMBERS).unwrap();
    world.topology.move_node_to("up0").unwrap();
    world.topology.move_client_to("sw0").unwrap();
    wait_for_active_member(&world, "eth0");
    world.create_node();
    world.create_service();
    world.enable_service();
    Some(world)
}

fn wait_for_active_member(world: &World, member: &str) {
    let shown = || fs::read_to_string("/proc/thread-self/net/bonding/up0").unwrap();
    let active = format!("Currently Active Slave: {member}\n");
    let is_active = || node(world).run(shown).unwrap().contains(&active).then_some(());
    poll::until(&format!("{member} to become the active device"), LIMIT, is_active).unwrap();
}

/// A client's open connection and UDP flow to a Pod.
struct Conversation {
    stream: TcpStream,
    socket: UdpSocket,
}

impl Conversation {
    fn open(world: &World, pod: &str) -> Self {
        let [tcp, udp] = [Protocol::Tcp, Protocol::Udp].map(|protocol| world.address(pod, protocol));
        let (stream, socket) =
            (traffic::tcp_connect(client(world), tcp), traffic::udp_socket(client(world), udp, true));
        Self { stream: stream.unwrap(), socket: socket.unwrap() }
    }

    /// Asserts that the TCP connection and the UDP flow still work. The TCP request is sent first: packets are lost
    /// while the switch's forwarding table still contains the former port, and only TCP retransmits lost packets.
    #[track_caller]
    fn assert_goes_on(&self, pod: &str, question: &str) {
        let answer = traffic::tcp_ask(&self.stream, question).unwrap();
        assert_eq!((answer.pod.as_str(), answer.client), (pod, self.stream.local_addr().unwrap()));
        let answer = traffic::udp_ask(&self.socket, question).unwrap();
        assert_eq!((answer.pod.as_str(), answer.client), (pod, self.socket.local_addr().unwrap()));
    }
}

/// Returns the link pins of the bond with their inode numbers, which change if a pin is recreated.
fn pins(world: &World) -> BTreeMap<String, u64> {
    let folder = world.bpffs.path().join(PIN_ROOT).join(format!("v{ABI_VERSION}")).join(LINK_DIR);
    let of_bond = format!("{}_", world.topology.node_device("up0").ifindex().unwrap());
    let pins = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let named = pins.map(|pin| (pin.file_name().into_string().unwrap(), pin.metadata().unwrap().ino()));
    named.filter(|(name, _)| name.starts_with(&of_bond)).collect()
}

/// Asserts that the programs are attached to the bond and to neither of its member devices.
#[track_caller]
fn assert_bond_is_attached(world: &mut World) {
    let metrics = world.agent().metrics().unwrap();
    for line in [r#"npl_devices{state="attached"} 1"#, r#"npl_devices{state="failed"} 0"#] {
        assert!(metrics.lines().any(|found| found == line), "{line} is not in {metrics}");
    }
    let status = world.agent_options(&[]).command_json("status").unwrap();
    let devices = status["devices"].as_array().unwrap();
    let bond = devices.iter().find(|device| device["name"] == "up0").unwrap();
    assert_eq!(bond["attached"], serde_json::json!(["ingress", "egress"]));
    assert!(!devices.iter().any(|device| device["name"] == "eth0" || device["name"] == "eth1"), "{status}");
}

/// Makes the agent survey the devices again, and waits until the agent serves the new address. By then, the agent has
/// also applied all earlier changes.
fn wait_for_look(world: &World, new_address: &str) {
    node(world).ip(&format!("addr add {new_address}/32 dev up0")).unwrap();
    let status = || world.agent_options(&[]).command(&["status"]).unwrap();
    poll::until("the agent to survey the devices", LIMIT, || status().contains(new_address).then_some(())).unwrap();
}

#[track_caller]
fn assert_nothing_is_lost(world: &mut World, new_address: &str) {
    world.assert_served("web-0");
    let conversation = Conversation::open(world, "web-0");
    conversation.assert_goes_on("web-0", "before the first change");
    assert_bond_is_attached(world);
    let (before, said) = (pins(world), world.agent_log().len());
    assert_eq!(before.len(), 2, "the bond needs two links, for requests and replies: {before:?}");
    for (who, lines, active) in CHANGES {
        who(world).ip(lines).unwrap();
        wait_for_active_member(world, active);
        conversation.assert_goes_on("web-0", &lines.replace('\n', ", "));
        world.assert_served("web-0");
        assert_bond_is_attached(world);
    }
    wait_for_look(world, new_address);
    assert_eq!(pins(world), before, "programs were detached temporarily");
    let log = world.agent_log().split_off(said);
    assert!(
        !["programs are attached to the device", "do not support the device"]
            .iter()
            .any(|message| log.contains(message)),
        "{log}"
    );
    conversation.assert_goes_on("web-0", "after the last change");
}

/// The failovers run twice: with forwarding through the host's stack, and with redirect.
#[test]
fn connections_and_programs_survive_a_bond_failover() {
    let Some(mut world) = world_with_bond() else { return };
    world.start_agent(&[]);
    world.create_pod("web-0");
    assert_nothing_is_lost(&mut world, "192.0.2.77");
    world.agent().kill().unwrap();
    world.start_agent(&["--forwarding", "redirect"]);
    wait_for_redirected_pods(&world, 1);
    node(&world).nft(NOTHING_IS_FORWARDED).unwrap();
    assert_nothing_is_lost(&mut world, "192.0.2.78");
}
