// SPDX-License-Identifier: Apache-2.0
//! Tests NPL on a Node whose Pods are ports of Open vSwitch, as the Pods of Antrea, OVN-Kubernetes and Kube-OVN are. The
//! host's stack reaches the Pods through a gateway device, which is a port too. The CNIs do not run: the tests imitate
//! their bridges, and Open vSwitch runs with its userspace datapath.

use std::io::ErrorKind;
use std::net::IpAddr;
use std::time::Duration;

use npl_agent::core::devices::redirect::{Forwarding, NetworkPolicy, RedirectRefusal};
use npl_agent::core::devices::xdp::Attach;
use npl_agent::core::devices::{Coverage, DeviceSelection, UplinkReason};
use npl_agent::core::model::{Family, Moment, Protocol};
use npl_agent::devices::uplinks::{DeviceReport, Uplinks};
use npl_agent::netlink;
use npl_agent::nft_guard::GuardMode;
use npl_testkit::open_vswitch::OpenVswitch;
use npl_testkit::packet::{Packet, tcp_flags};
use npl_testkit::poll;
use npl_testkit::topology::{Options, mac_text};
use npl_testkit::traffic::{self, Direction, transfer, udp_exchange, udp_socket};

use crate::lab::mapping;
use crate::wire;
use crate::world::{POD_PORT, World};

/// The bridge of the Pods.
const PODS: &str = "br-int";

/// The bridge of the uplink, as OVN-Kubernetes creates it.
const EXTERNAL: &str = "br-ex";

/// The gateway's addresses. The Pods' routes lead to these addresses.
const GATEWAY: [&str; 2] = ["10.244.0.254", "fd00:10:244::fe"];

/// A node port whose Pod port is closed.
const CLOSED: u16 = 61_050;

/// The source port of packets that must not reach the Pod.
const FORBIDDEN: u16 = 20_000;

/// Bytes of a transfer, enough for many full segments.
const SIZE: u64 = 1 << 20;

/// Time limit of each wait for a packet, far above the usual duration.
const LIMIT: Duration = Duration::from_secs(30);

/// Every forwarding mode. The order tests that a change of the mode leaves no state of the previous mode.
const MODES: [Forwarding; 3] = [Forwarding::Redirect, Forwarding::Offload, Forwarding::Stack];

/// Counts the packets that a Pod receives from [`FORBIDDEN`].
const FORBIDDEN_ARE_COUNTED: &str = "
table inet npl_test {
  counter forbidden {}
  chain prerouting {
    type filter hook prerouting priority raw;
    meta l4proto { tcp, udp } th sport 20000 counter name forbidden
  }
}";

/// Drops and counts the packets from [`FORBIDDEN`] that the host's stack forwards.
const FORBIDDEN_ARE_DROPPED: &str = "
table inet npl_test {
  counter dropped {}
  chain forward {
    type filter hook forward priority filter;
    udp sport 20000 counter name dropped drop
  }
}";

/// Counts the replies of a Pod that reach the client without translation.
const UNTRANSLATED_ARE_COUNTED: &str = "
table inet npl_test {
  counter untranslated {}
  chain prerouting {
    type filter hook prerouting priority raw;
    ip saddr 10.244.0.0/16 counter name untranslated
    ip6 saddr fd00:10:244::/64 counter name untranslated
  }
}";

/// A Node with Open vSwitch. Rust drops the fields in this order: the daemon ends before its namespace is deleted.
struct Scene {
    switch: OpenVswitch,
    world: World,
    /// The device that leads to the Pods.
    gateway: &'static str,
    /// The device with the Node's addresses.
    uplink: &'static str,
}

impl Scene {
    /// Creates a Node with one Pod. The Pod and the gateway device are ports of a bridge; the uplink is not.
    fn new(gateway: &'static str) -> Self {
        let mut world = World::bare(1, Options::default());
        let switch = OpenVswitch::start(&world.run, world.node()).unwrap();
        switch.add_bridge(PODS).unwrap();
        switch.add_internal_port(PODS, gateway).unwrap();
        let [v4, v6] = GATEWAY;
        let up = format!("link set {gateway} up\naddr add {v4}/24 dev {gateway}\naddr add {v6}/64 dev {gateway} nodad");
        world.node().ip(&up).unwrap();
        let pod = world.pod();
        let (device, addresses) = (pod.host_device.name(), pod.addresses);
        world
            .node()
            .ip(&format!("route del {}/32 dev {device}\nroute del {}/128 dev {device}", addresses.v4, addresses.v6))
            .unwrap();
        let routes = GATEWAY.map(|gateway| format!("route replace default via {gateway} dev eth0 onlink")).join("\n");
        pod.netns.ip(&routes).unwrap();
        switch.add_port(PODS, &pod.host_device, &pod.device).unwrap();
        world.install_on(&[]);
        for pod_ip in world.pod().ips() {
            let (frontend, backend) = mapping(Protocol::Udp, CLOSED, (pod_ip, POD_PORT + 1).into(), 1);
            world.datapath().upsert_mapping(frontend, backend).unwrap();
        }
        Self { switch, world, gateway, uplink: "eth0" }
    }

    /// Does the same as [`Self::new`], and makes the uplink a port of a second bridge, which has the Node's addresses.
    fn with_external_bridge(gateway: &'static str) -> Self {
        let scene = Self { uplink: EXTERNAL, ..Self::new(gateway) };
        scene.switch.add_bridge(EXTERNAL).unwrap();
        scene.world.node().ip(&format!("link set {EXTERNAL} up")).unwrap();
        let client = scene.world.topology.client();
        scene.switch.add_port(EXTERNAL, &client.uplink, &client.device).unwrap();
        scene.world.topology.move_node_to(EXTERNAL).unwrap();
        scene
    }

    /// Attaches the programs to the devices that the agent selects, and asserts that no packet is redirected.
    #[track_caller]
    fn follow(&mut self, forwarding: Forwarding) {
        let DeviceReport { coverage, decisions, errors, .. } = self.survey(forwarding);
        assert!(errors.is_empty(), "{errors:?}");
        let chosen = |name: &str| decisions.uplinks[name];
        assert_eq!(chosen(self.uplink), Ok(UplinkReason::HasNodeAddress));
        assert_eq!(chosen(self.world.pod().host_device.name()), Err(UplinkReason::LeadsToPods));
        // The gateway device is a TAP device here; with the kernel's datapath, it is a device of the kind `openvswitch`,
        // which also gets the programs, as a device with an address.
        assert_eq!(chosen(self.gateway), Ok(UplinkReason::IsTunnel));
        let attached = decisions.uplinks.values().filter(|decision| decision.is_ok()).count();
        assert_eq!(coverage, Coverage { attached, failed: 0 });
        assert_eq!(decisions.reply_route_problem, None);
        let refusals: Vec<_> = decisions.next_hops.values().map(|hop| hop.map(drop)).collect();
        let expected =
            if forwarding == Forwarding::Stack { vec![] } else { vec![Err(RedirectRefusal::UnknownKind); 2] };
        assert_eq!(refusals, expected, "in {forwarding:?} mode");
        assert!(self.world.datapath().redirected().unwrap().is_empty());
    }

    fn survey(&mut self, forwarding: Forwarding) -> DeviceReport {
        let policy = (forwarding, NetworkPolicy::Applies);
        let mut uplinks = Uplinks::new(DeviceSelection::Auto, policy, Attach::Tc, GuardMode::Off);
        let (node, node_ips) = (self.world.node().clone(), self.world.node_ips());
        let datapath = self.world.datapath();
        let report = node.block_on(async {
            let survey = netlink::join_survey(&mut uplinks.survey(datapath, [].into())).await.unwrap();
            uplinks.apply(datapath, survey, &node_ips, Moment::default()).unwrap()
        });
        report.unwrap()
    }

    /// Asserts that requests, transfers and ICMP errors of both families reach their receivers, and that every packet to
    /// and from the Pod passes through Open vSwitch.
    #[track_caller]
    fn assert_served(&self) {
        let (world, pod) = (&self.world, self.world.pod());
        for _ in 0..3 {
            world.assert_answers();
        }
        for (server, client) in world.frontends().into_iter().zip(world.client_ips()) {
            for direction in [Direction::Upload, Direction::Download] {
                assert_eq!(transfer(world.client(), server, direction, SIZE).unwrap().bytes, SIZE);
            }
            let answer = udp_exchange(world.client(), server, 4000, 4000).unwrap();
            assert_eq!((answer.pod.as_str(), answer.client.ip()), (pod.name.as_str(), client));
            let socket = udp_socket(world.client(), (server.ip(), CLOSED).into(), true).unwrap();
            let error = traffic::udp_ask(&socket, "is anybody there?").unwrap_err();
            let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
            assert_eq!(kind, Some(ErrorKind::ConnectionRefused), "the Pod's port is closed: {error:#}");
        }
    }

    /// Asserts that neither TCP nor UDP packets reach the Pod while an `OpenFlow` rule drops them, and that `FORWARD` rules
    /// apply.
    #[track_caller]
    fn assert_policies_apply(&self) {
        let world = &self.world;
        world.pod().netns.nft(FORBIDDEN_ARE_COUNTED).unwrap();
        for (server, client) in world.frontends().into_iter().zip(world.client_ips()) {
            for (protocol, packet) in [
                ("tcp", Packet::tcp((client, FORBIDDEN).into(), server, tcp_flags::SYN, b"")),
                ("udp", Packet::udp((client, FORBIDDEN).into(), server, b"forbidden")),
            ] {
                let rule = format!("{protocol}{},tp_src={FORBIDDEN}", if client.is_ipv6() { "6" } else { "" });
                self.switch.add_flow(PODS, &format!("priority=100,{rule},actions=drop")).unwrap();
                self.send(client, packet);
                let is_dropped = || (self.switch.packets_matched(PODS, &rule).unwrap() > 0).then_some(());
                poll::until(&format!("a packet that `{rule}` drops"), LIMIT, is_dropped).unwrap();
                self.switch.remove_flows(PODS, &rule).unwrap();
            }
        }
        assert_eq!(world.pod().netns.packets_counted("inet npl_test forbidden").unwrap(), 0);
        world.pod().netns.nft("delete table inet npl_test").unwrap();
        world.node().nft(FORBIDDEN_ARE_DROPPED).unwrap();
        for (server, client) in world.frontends().into_iter().zip(world.client_ips()) {
            self.send(client, Packet::udp((client, FORBIDDEN).into(), server, b"forbidden"));
        }
        let is_dropped = || (world.node().packets_counted("inet npl_test dropped").unwrap() == 2).then_some(());
        poll::until("the packets that a FORWARD rule drops", LIMIT, is_dropped).unwrap();
        world.node().nft("delete table inet npl_test").unwrap();
    }

    fn send(&self, client: IpAddr, mut packet: Packet) {
        let link = self.world.topology.client();
        let uplink = self.world.topology.node_device(self.uplink);
        let wire = wire::open_for(Family::of(client), &link.device, &uplink);
        packet.ethernet = Some(wire.ethernet());
        assert!(wire.send(&packet.build()).is_ok());
    }
}

#[track_caller]
fn assert_works_in_every_mode(scene: &mut Scene) {
    // In offload mode, the agent redirects packets only with this setting.
    scene.world.node().set_liberal_tracking(true).unwrap();
    for forwarding in MODES {
        scene.world.wait_for_closed_connections();
        scene.follow(forwarding);
        scene.assert_served();
        scene.assert_policies_apply();
    }
}

/// The device has the name of Antrea's gateway device.
#[test]
fn pods_on_open_vswitch_are_served_and_its_rules_apply_in_every_mode() {
    assert_works_in_every_mode(&mut Scene::new("antrea-gw0"));
}

/// The bridge of the uplink, and the name of the gateway device, are those of OVN-Kubernetes.
#[test]
fn pods_and_uplink_on_open_vswitch_are_served_in_every_mode() {
    assert_works_in_every_mode(&mut Scene::with_external_bridge("ovn-k8s-mp0"));
}

/// In OVN-Kubernetes' shared gateway mode, Open vSwitch sends a Pod's packets to the uplink without the host's stack. No
/// program of NPL sees these packets. docs/compatibility.md names this mode as not supported.
#[test]
fn replies_that_bypass_the_host_in_open_vswitch_are_not_translated() {
    let mut scene = Scene::with_external_bridge("ovn-k8s-mp0");
    scene.follow(Forwarding::Stack);
    scene.assert_served();
    scene.switch.connect([PODS, EXTERNAL]).unwrap();
    let client = scene.world.topology.client();
    let mac = mac_text(client.device.link_address().unwrap());
    let [pod, exit] = [scene.world.pod().host_device.name(), &format!("patch-{PODS}")];
    let numbers = [pod, exit].map(|port| scene.switch.port_number(port).unwrap());
    for (server, (family, client_ip)) in scene
        .world
        .frontends()
        .into_iter()
        .zip([("ip,nw_dst", client.addresses.v4.to_string()), ("ipv6,ipv6_dst", client.addresses.v6.to_string())])
    {
        let flow = format!(
            "priority=100,in_port={},{family}={client_ip},actions=mod_dl_dst:{mac},output:{}",
            numbers[0], numbers[1]
        );
        scene.switch.add_flow(PODS, &flow).unwrap();
        let _counted_from_here = scene.world.client().nft(UNTRANSLATED_ARE_COUNTED).unwrap();
        let socket = udp_socket(scene.world.client(), server, true).unwrap();
        socket.send(b"who are you?").unwrap();
        let count = || scene.world.client().packets_counted("inet npl_test untranslated").unwrap();
        poll::until("an untranslated reply", LIMIT, || (count() > 0).then_some(())).unwrap();
        scene.world.client().nft("delete table inet npl_test").unwrap();
        scene.switch.remove_flows(PODS, &format!("{family}={client_ip}")).unwrap();
    }
    scene.assert_served();
}
