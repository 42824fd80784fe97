// SPDX-License-Identifier: Apache-2.0
//! iptables and nftables rules that translate node ports without NPL, and rules that enable kernel conntrack.

use std::fmt::Write as _;

use anyhow::Result;
use npl_testkit::netns::Netns;
use npl_testkit::tools;

use crate::testbed::Mappings;

/// Adds rules like Antrea's: one chain for all packets to the Node, with one rule per mapping.
pub(crate) fn add_iptables(node: &Netns, mappings: Mappings) -> Result<()> {
    let mut rules = String::from(
        "*nat\n\
         :ANTREA-NODE-PORT-LOCAL - [0:0]\n\
         -A PREROUTING -p all -m addrtype --dst-type LOCAL -j ANTREA-NODE-PORT-LOCAL\n\
         -A OUTPUT -p all -m addrtype --dst-type LOCAL -j ANTREA-NODE-PORT-LOCAL\n",
    );
    let (protocol, pod_ip) = (mappings.protocol, mappings.pod_ip);
    for (node_port, pod_port) in mappings.ports() {
        let rule =
            format!("-p {protocol} -m {protocol} --dport {node_port} -j DNAT --to-destination {pod_ip}:{pod_port}");
        writeln!(rules, "-A ANTREA-NODE-PORT-LOCAL {rule}")?;
    }
    rules.push_str("COMMIT\n");
    tools::output_with_input(&mut node.command("iptables-restore")?, &rules).map(drop)
}

/// Adds the most efficient nftables equivalent of the rules of [`add_iptables`] for packets from other machines: one
/// rule with a map lookup.
pub(crate) fn add_nftables(node: &Netns, mappings: Mappings) -> Result<()> {
    let mut elements = String::new();
    let (protocol, pod_ip) = (mappings.protocol, mappings.pod_ip);
    for (node_port, pod_port) in mappings.ports() {
        writeln!(elements, "{node_port} : {pod_ip} . {pod_port},")?;
    }
    let table = format!(
        "table ip node_ports {{
            map mappings {{
                type inet_service : ipv4_addr . inet_service
                elements = {{ {elements} }}
            }}
            chain prerouting {{
                type nat hook prerouting priority dstnat
                fib daddr type local dnat ip to {protocol} dport map @mappings
            }}
        }}"
    );
    node.nft(&table).map(drop)
}

/// Adds a rule like the first rule in the FORWARD chain of a typical CNI plug-in. The rule matches `ct state`, so the
/// rule enables kernel conntrack.
pub(crate) fn add_conntrack(node: &Netns) -> Result<()> {
    node.nft(
        "table ip cni {
            chain forward {
                type filter hook forward priority filter
                ct state established,related accept
            }
        }",
    )
    .map(drop)
}
