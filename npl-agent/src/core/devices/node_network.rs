// SPDX-License-Identifier: Apache-2.0
//! Finds Pods on the Node's own network (macvlan, ipvlan, an underlay bridge). Such Pods answer clients directly, so
//! their replies bypass the Node and its reverse NAT. The client then receives replies from an address that it does not
//! know.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use super::{Device, DeviceKind, UplinkReason, choose_by_rules, redirect::Route};

/// The Pods on the same network as an uplink of the Node, each with the name of the uplink.
pub type PodsOnNodeNetwork = BTreeMap<IpAddr, String>;

/// The routes to the Pods of the Node, as last looked up.
#[derive(Debug, Default)]
pub struct PodRoutes {
    /// The addresses whose routes were looked up.
    known: BTreeSet<IpAddr>,
    /// The routes; addresses without a route are absent.
    routes: BTreeMap<IpAddr, Route>,
    /// The uplinks whose network may contain Pods, by their index.
    uplinks: BTreeMap<u32, String>,
}

impl PodRoutes {
    /// Replaces all routes and devices.
    pub fn replace(
        &mut self,
        devices: &[Device],
        node_ips: &[IpAddr],
        known: BTreeSet<IpAddr>,
        routes: BTreeMap<IpAddr, Route>,
    ) {
        let has_clients = |device: &&Device| is_of_node_network(device, node_ips);
        self.uplinks = devices.iter().filter(has_clients).map(|device| (device.ifindex, device.name.clone())).collect();
        (self.known, self.routes) = (known, routes);
    }

    /// Adds the routes to further addresses.
    pub fn add(&mut self, known: BTreeSet<IpAddr>, routes: BTreeMap<IpAddr, Route>) {
        self.known.extend(known);
        self.routes.extend(routes);
    }

    /// Removes all addresses except these, and returns the addresses whose routes were not looked up yet.
    pub fn retain(&mut self, addresses: &BTreeSet<IpAddr>) -> BTreeSet<IpAddr> {
        self.known.retain(|addr| addresses.contains(addr));
        self.routes.retain(|addr, _| addresses.contains(addr));
        addresses.difference(&self.known).copied().collect()
    }

    /// The Pods on the network of an uplink. A route with a gateway does not count: while a CNI replaces the routes to
    /// its Pods, the look-up returns the default route.
    pub fn on_node_network(&self) -> PodsOnNodeNetwork {
        let direct = self.routes.iter().filter(|(_, route)| !route.has_gateway);
        direct.filter_map(|(addr, route)| Some((*addr, self.uplinks.get(&route.ifindex)?.clone()))).collect()
    }
}

/// Whether clients may be on the network of this device, so that a Pod on the same network reaches them without the
/// Node. A device of another kind with an address, such as a port of Open vSwitch, may connect a CNI's Pods to the
/// Node.
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

    const POD: &str = "192.0.2.77";
    const NODE_IP: &str = "192.0.2.10";

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn device(kind: DeviceKind, addresses: &[&str]) -> Device {
        Device { addresses: addresses.iter().map(|text| ip(text)).collect(), ..Device::new(7, "dev7", kind) }
    }

    fn found(device: &Device, route: Route) -> Option<String> {
        let mut routes = PodRoutes::default();
        routes.replace(
            std::slice::from_ref(device),
            &[ip(NODE_IP)],
            [ip(POD)].into(),
            BTreeMap::from([(ip(POD), route)]),
        );
        routes.on_node_network().remove(&ip(POD))
    }

    const DIRECT: Route = Route { ifindex: 7, has_gateway: false, mtu: None };

    /// Reported as spidernet-io/spiderpool#2039.
    #[test]
    fn a_pod_on_the_network_of_an_uplink_is_found() {
        for kind in [DeviceKind::Physical, DeviceKind::Bridge, DeviceKind::Veth, DeviceKind::Other] {
            assert_eq!(found(&device(kind, &[NODE_IP]), DIRECT).as_deref(), Some("dev7"), "{kind:?}");
        }
        let second = device(DeviceKind::Physical, &["198.51.100.4"]);
        assert_eq!(found(&second, DIRECT).as_deref(), Some("dev7"), "macvlan on a second card");
    }

    #[test]
    fn a_pod_behind_a_device_of_a_cni_is_not_on_the_nodes_network() {
        let table = [
            device(DeviceKind::Veth, &[]),
            device(DeviceKind::Bridge, &["10.244.1.1"]),
            device(DeviceKind::Tunnel, &["10.244.1.0"]),
            device(DeviceKind::Tunnel, &[NODE_IP]),
            // `antrea-gw0` and `ovn-k8s-mp0` are ports of Open vSwitch.
            device(DeviceKind::Other, &["10.244.1.1"]),
        ];
        for device in table {
            assert_eq!(found(&device, DIRECT), None, "{device:?}");
        }
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
