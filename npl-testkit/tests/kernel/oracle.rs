// SPDX-License-Identifier: Apache-2.0
//! The kernel's own NAT by nftables, as the reference for correct translation.

use std::fmt::Write as _;
use std::net::SocketAddr;

use npl_agent::core::model::{Family, Protocol};
use npl_testkit::netns::Netns;

/// Protocols that the reference translates.
pub(crate) const PROTOCOLS: [Protocol; 3] = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp];

/// One translation: a node port at one of the Node's addresses, and the Pod port.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Translation {
    pub(crate) protocol: Protocol,
    pub(crate) node: SocketAddr,
    pub(crate) pod: SocketAddr,
}

/// Loads translations as nftables maps, with the same entries as NPL's mappings.
pub(crate) fn install(node: &Netns, translations: &[Translation]) {
    for family in Family::ALL {
        let ip = if family == Family::V4 { "ip" } else { "ip6" };
        let mut rules = String::new();
        for protocol in PROTOCOLS {
            let mut elements = String::new();
            let is_included =
                |entry: &&Translation| entry.protocol == protocol && Family::of(entry.node.ip()) == family;
            for Translation { node, pod, .. } in translations.iter().filter(is_included) {
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

/// Makes kernel NAT also translate packets with a wrong checksum or an unknown TCP state. NPL translates such packets
/// too, and leaves both checks to the receiver.
pub(crate) fn be_liberal(node: &Netns) {
    for (setting, value) in [("checksum", "0"), ("tcp_be_liberal", "1"), ("tcp_loose", "1")] {
        node.sysctl(&format!("net/netfilter/nf_conntrack_{setting}"), value).unwrap();
    }
}
