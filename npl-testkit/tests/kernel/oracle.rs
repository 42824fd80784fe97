// SPDX-License-Identifier: Apache-2.0
//! The kernel's own address translation, by nftables: what it makes of a packet is right.

use std::fmt::Write as _;
use std::net::SocketAddr;

use npl_agent::core::model::{Family, Protocol};
use npl_testkit::netns::Netns;

/// What it translates.
pub(crate) const PROTOCOLS: [Protocol; 3] = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp];

/// A node port at one of the Node's addresses, and the Pod port that it leads to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Translation {
    pub(crate) protocol: Protocol,
    pub(crate) node: SocketAddr,
    pub(crate) pod: SocketAddr,
}

/// Loads the same translations that our mappings make, as maps that the kernel looks destinations up in.
pub(crate) fn install(node: &Netns, translations: &[Translation]) {
    for family in Family::ALL {
        let ip = if family == Family::V4 { "ip" } else { "ip6" };
        let mut rules = String::new();
        for protocol in PROTOCOLS {
            let mut elements = String::new();
            let of_both = |it: &&Translation| it.protocol == protocol && Family::of(it.node.ip()) == family;
            for Translation { node, pod, .. } in translations.iter().filter(of_both) {
                write!(elements, "{} . {} : {} . {}, ", node.ip(), node.port(), pod.ip(), pod.port()).unwrap();
            }
            if !elements.is_empty() {
                writeln!(rules, "    dnat {ip} to {ip} daddr . {protocol} dport map {{ {elements} }}").unwrap();
            }
        }
        let table = format!(
            "table {ip} npl_oracle {{
  chain prerouting {{
    type nat hook prerouting priority dstnat;
{rules}  }}
}}"
        );
        node.nft(&table).unwrap();
    }
}

/// Has it translate what it would leave alone because something else is wrong with it, which is the receiver's to judge.
pub(crate) fn be_liberal(node: &Netns) {
    for (setting, value) in [("checksum", "0"), ("tcp_be_liberal", "1"), ("tcp_loose", "1")] {
        node.sysctl(&format!("net/netfilter/nf_conntrack_{setting}"), value).unwrap();
    }
}
