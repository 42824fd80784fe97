// SPDX-License-Identifier: Apache-2.0
//! The addresses of a topology. Clients and the Node have addresses from ranges that are reserved for documentation,
//! and Pods have addresses from a private range.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The Node's addresses on its first uplink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeAddresses {
    /// The IPv4 address 192.0.2.10.
    pub v4: Ipv4Addr,
    /// The IPv6 address `2001:db8:0:1::10`.
    pub v6: Ipv6Addr,
}

impl Default for NodeAddresses {
    fn default() -> Self {
        Self { v4: Ipv4Addr::new(192, 0, 2, 10), v6: Ipv6Addr::new(0x2001, 0xdb8, 0, 1, 0, 0, 0, 0x10) }
    }
}

/// The source addresses of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientAddresses {
    /// An IPv4 address outside the Node's subnet.
    pub v4: Ipv4Addr,
    /// An IPv6 address outside the Node's subnet.
    pub v6: Ipv6Addr,
}

impl ClientAddresses {
    /// Returns both addresses.
    pub fn ips(&self) -> [IpAddr; 2] {
        [self.v4.into(), self.v6.into()]
    }

    pub(super) fn first() -> Self {
        Self { v4: Ipv4Addr::new(198, 51, 100, 2), v6: Ipv6Addr::new(0x2001, 0xdb8, 0, 2, 0, 0, 0, 2) }
    }

    pub(super) fn second() -> Self {
        Self { v4: Ipv4Addr::new(203, 0, 113, 2), v6: Ipv6Addr::new(0x2001, 0xdb8, 0, 3, 0, 0, 0, 2) }
    }
}

/// A Pod's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodAddresses {
    /// The IPv4 address of the nth Pod: 10.244.0.0 plus n.
    pub v4: Ipv4Addr,
    /// The IPv6 address of the nth Pod: `fd00:10:244::` plus n.
    pub v6: Ipv6Addr,
}

impl PodAddresses {
    /// Returns the addresses of the `n`th Pod.
    pub(super) fn nth(n: u16) -> Self {
        let [high, low] = n.to_be_bytes();
        Self { v4: Ipv4Addr::new(10, 244, high, low), v6: Ipv6Addr::new(0xfd00, 0x10, 0x244, 0, 0, 0, 0, n) }
    }
}

/// `ip` commands for both ends of an uplink, with [`DEVICE`] as a placeholder for the device name.
pub(super) struct Uplink {
    node: &'static str,
    client: &'static str,
}

const DEVICE: &str = "{device}";

impl Uplink {
    pub(super) fn node_lines(&self, device: &str) -> String {
        self.node.replace(DEVICE, device)
    }

    pub(super) fn client_lines(&self, device: &str) -> String {
        self.client.replace(DEVICE, device)
    }
}

/// The Node's IPv4 gateway, as in [`FIRST_UPLINK`].
pub(super) const GATEWAY: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// The first client's uplink. The client's end has the gateway's address in addition to the client's own address.
pub(super) const FIRST_UPLINK: Uplink = Uplink {
    node: "addr add 192.0.2.10/24 dev {device}
addr add 2001:db8:0:1::10/64 dev {device} nodad
route replace default via 192.0.2.1 dev {device}
route replace default via 2001:db8:0:1::1 dev {device}",
    client: "addr add 192.0.2.1/24 dev {device}
addr add 198.51.100.2/32 dev {device}
addr add 2001:db8:0:1::1/64 dev {device} nodad noprefixroute
addr add 2001:db8:0:2::2/128 dev {device} nodad
route replace 192.0.2.0/24 dev {device} src 198.51.100.2
route replace default via 192.0.2.10 dev {device} src 198.51.100.2
route replace 2001:db8:0:1::/64 dev {device} src 2001:db8:0:2::2
route replace default via 2001:db8:0:1::10 dev {device} src 2001:db8:0:2::2",
};

/// A second network. Through this network, clients also reach the addresses that the Node has on its first uplink.
pub(super) const SECOND_UPLINK: Uplink = Uplink {
    node: "addr add 203.0.113.10/24 dev {device}
addr add 2001:db8:0:3::10/64 dev {device} nodad",
    client: "addr add 203.0.113.2/24 dev {device}
addr add 2001:db8:0:3::2/64 dev {device} nodad
route add default via 203.0.113.10 dev {device}
route add default via 2001:db8:0:3::10 dev {device}",
};

/// Returns the range that contains only this address, such as `192.0.2.1/32`.
pub fn host_prefix(address: IpAddr) -> String {
    format!("{address}/{}", if address.is_ipv4() { 32 } else { 128 })
}
