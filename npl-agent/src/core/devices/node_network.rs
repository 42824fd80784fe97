// SPDX-License-Identifier: Apache-2.0
//! Finds Pods on the Node's own network (macvlan, ipvlan, an underlay bridge). Pods on the Node's own network answer
//! clients directly: the replies do not pass through the Node, so NPL does not translate them. The client then receives
//! replies from the Pod's address, to which the client has sent no packet.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use super::{Device, DeviceKind, UplinkReason, choose_by_rules, redirect::Route};

/// The addresses of the Pods that are on the same network as an uplink of the Node, each with the name of that uplink.
pub type PodsOnNodeNetwork = BTreeMap<IpAddr, String>;

/// The routes to the Pods of the Node, as found by the last look-up in the routing tables.
#[derive(Debug, Default)]
pub struct PodRoutes {
    /// The Pod addresses whose routes were looked up.
    known: BTreeSet<IpAddr>,
    /// The route to each Pod address; addresses without a route are absent.
    routes: BTreeMap<IpAddr, Route>,
    /// By ifindex: each device that leads to Pods on the network of an uplink, with the name of that uplink.
    uplinks: BTreeMap<u32, String>,
}

impl PodRoutes {
    /// Replaces the routes to all Pods, and the devices that lead to Pods on the network of an uplink.
    pub fn replace(
        &mut self,
        devices: &[Device],
        node_ips: &[IpAddr],
        known: BTreeSet<IpAddr>,
        routes: BTreeMap<IpAddr, Route>,
    ) {
        let uplink = |device: &Device| Some((device.ifindex, network_of(device, devices, node_ips)?.name.clone()));
        self.uplinks = devices.iter().filter_map(uplink).collect();
        (self.known, self.routes) = (known, routes);
    }

    /// Adds the routes to Pod addresses whose routes were not looked up before.
    pub fn add(&mut self, known: BTreeSet<IpAddr>, routes: BTreeMap<IpAddr, Route>) {
        self.known.extend(known);
        self.routes.extend(routes);
    }

    /// Removes all Pod addresses except `addresses`. Returns the addresses in `addresses` whose routes were not looked
    /// up yet.
    pub fn retain(&mut self, addresses: &BTreeSet<IpAddr>) -> BTreeSet<IpAddr> {
        self.known.retain(|addr| addresses.contains(addr));
        self.routes.retain(|addr, _| addresses.contains(addr));
        addresses.difference(&self.known).copied().collect()
    }

    /// The Pods on the network of an uplink. Pods whose route has a gateway are left out: while a CNI replaces the
    /// routes to its Pods, the look-up returns the default route.
    pub fn on_node_network(&self) -> PodsOnNodeNetwork {
        let direct = self.routes.iter().filter(|(_, route)| !route.has_gateway);
        direct.filter_map(|(addr, route)| Some((*addr, self.uplinks.get(&route.ifindex)?.clone()))).collect()
    }
}

/// Returns the uplink on whose network the Pods behind `device` are; `None` if there is no such uplink. A macvlan or
/// ipvlan device on the Node (a shim) leads to Pods on the network of its lower device.
pub fn network_of<'a>(device: &'a Device, devices: &'a [Device], node_ips: &[IpAddr]) -> Option<&'a Device> {
    if is_of_node_network(device, node_ips) {
        return Some(device);
    }
    let lower = device.link.shares_network_of?;
    devices.iter().find(|it| it.ifindex == lower && leaves_the_node(it, node_ips))
}

/// Whether the network of a device extends beyond the Node. Unlike an uplink, the device need not have an address.
fn leaves_the_node(device: &Device, node_ips: &[IpAddr]) -> bool {
    is_of_node_network(device, node_ips)
        || matches!(device.kind, DeviceKind::Physical | DeviceKind::Other)
        || device.link.has_physical_port
}

/// Whether clients are on the device's own network, so that a Pod on that network reaches clients without the Node. A
/// device that is not hardware must have a Node address or the default route. For example, an Open vSwitch device with
/// an address that is not a Node address may connect a CNI's Pods to the Node.
fn is_of_node_network(device: &Device, node_ips: &[IpAddr]) -> bool {
    match choose_by_rules(device, node_ips) {
        Ok(UplinkReason::HasNodeAddress | UplinkReason::HasDefaultRoute) => device.kind != DeviceKind::Tunnel,
        Ok(_) => device.kind == DeviceKind::Physical,
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::devices::LinkFacts;

    const POD: &str = "192.0.2.77";
    const NODE_IP: &str = "192.0.2.10";

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn device(kind: DeviceKind, addresses: &[&str]) -> Device {
        Device { addresses: addresses.iter().map(|text| ip(text)).collect(), ..Device::new(7, "dev7", kind) }
    }

    fn found(device: &Device, route: Route) -> Option<String> {
        found_among(std::slice::from_ref(device), route)
    }

    fn found_among(devices: &[Device], route: Route) -> Option<String> {
        let mut routes = PodRoutes::default();
        routes.replace(devices, &[ip(NODE_IP)], [ip(POD)].into(), BTreeMap::from([(ip(POD), route)]));
        routes.on_node_network().remove(&ip(POD))
    }

    /// The uplink that is found for a Pod behind a macvlan or ipvlan device above `lower`.
    fn found_behind_shim(lower: Device) -> Option<String> {
        let lower = Device { ifindex: 2, name: "lower".to_owned(), ..lower };
        let shim = device(DeviceKind::Other, &["192.0.2.11"]);
        let link = LinkFacts { shares_network_of: Some(2), ..shim.link.clone() };
        found_among(&[lower, Device { link, ..shim }], DIRECT)
    }

    const DIRECT: Route = Route { ifindex: 7, has_gateway: false, mtu: None };

    /// The case of spidernet-io/spiderpool#2039: the Pod is on the network of an uplink.
    #[test]
    fn a_pod_on_the_network_of_an_uplink_is_found() {
        for kind in [DeviceKind::Physical, DeviceKind::Bridge, DeviceKind::Veth, DeviceKind::Other] {
            assert_eq!(found(&device(kind, &[NODE_IP]), DIRECT).as_deref(), Some("dev7"), "{kind:?}");
        }
        let second = device(DeviceKind::Physical, &["198.51.100.4"]);
        assert_eq!(found(&second, DIRECT).as_deref(), Some("dev7"), "a macvlan Pod on a second network card");
    }

    #[test]
    fn a_pod_behind_a_device_of_a_cni_is_not_on_the_nodes_network() {
        let table = [
            device(DeviceKind::Veth, &[]),
            device(DeviceKind::Bridge, &["10.244.1.1"]),
            device(DeviceKind::Tunnel, &["10.244.1.0"]),
            device(DeviceKind::Tunnel, &[NODE_IP]),
            // The device is a CNI's port of Open vSwitch, such as `antrea-gw0` or `ovn-k8s-mp0`.
            device(DeviceKind::Other, &["10.244.1.1"]),
        ];
        for device in table {
            assert_eq!(found(&device, DIRECT), None, "{device:?}");
        }
    }

    #[test]
    fn a_pod_behind_a_macvlan_or_ipvlan_device_is_on_the_network_of_the_device_below() {
        let bridge = device(DeviceKind::Bridge, &[]);
        let with_port = LinkFacts { has_physical_port: true, ..bridge.link.clone() };
        for lower in [
            device(DeviceKind::Physical, &[NODE_IP]),
            device(DeviceKind::Physical, &[]),
            // The device is a VLAN or a bond.
            device(DeviceKind::Other, &[]),
            // The device is the uplink of a Node that is a container.
            device(DeviceKind::Veth, &[NODE_IP]),
            Device { link: with_port, ..bridge },
        ] {
            assert_eq!(found_behind_shim(lower.clone()).as_deref(), Some("lower"), "{lower:?}");
        }
    }

    #[test]
    fn a_pod_behind_a_macvlan_device_of_a_network_inside_the_node_is_not_on_the_nodes_network() {
        for kind in [DeviceKind::Dummy, DeviceKind::Veth, DeviceKind::Bridge] {
            assert_eq!(found_behind_shim(device(kind, &[])), None, "{kind:?}");
        }
    }

    /// The AWS VPC CNI, the Azure CNI and Cilium's ENI mode give Pods addresses of the Node's subnet, but connect each
    /// Pod by a veth pair.
    #[test]
    fn a_pod_behind_a_veth_pair_with_an_address_of_the_nodes_subnet_is_not_on_the_nodes_network() {
        let uplink = Device { ifindex: 2, ..device(DeviceKind::Physical, &[NODE_IP]) };
        let pair = Device { peer_is_elsewhere: true, ..device(DeviceKind::Veth, &[]) };
        assert_eq!(found_among(&[uplink, pair], DIRECT), None);
    }

    #[test]
    fn the_default_route_in_place_of_a_missing_route_does_not_count() {
        let uplink = Device { has_default_route: true, ..device(DeviceKind::Physical, &[NODE_IP]) };
        assert_eq!(found(&uplink, Route { has_gateway: true, ..DIRECT }), None);
        assert_eq!(found(&uplink, Route { ifindex: 8, ..DIRECT }), None);
    }

    #[test]
    fn each_address_is_looked_up_once_and_forgotten_with_its_pod() {
        let mut routes = PodRoutes::default();
        let (first, second) = (ip(POD), ip("192.0.2.78"));
        assert_eq!(routes.retain(&[first].into()), [first].into());
        routes.add([first].into(), BTreeMap::from([(first, DIRECT)]));
        assert_eq!(routes.retain(&[first, second].into()), [second].into());
        assert_eq!(routes.retain(&BTreeSet::new()), BTreeSet::new());
        assert_eq!(routes.retain(&[first].into()), [first].into(), "another Pod may have the address");
    }
}
