// SPDX-License-Identifier: Apache-2.0
//! Renders `reasons.md` from [`npl_common::reason`], with the typical cause of each reason and the action that an
//! operator can take.

use std::fmt::Write as _;

use npl_common::{names::MAP_REASON, reason::Reason};

use super::markdown::{anchor, code, heading, prose, table};

macro_rules! advice {
    ($( $reason:ident: cause $cause:literal, action $action:literal; )+) => {
        /// Returns the typical cause of a reason, and the action that an operator can take.
        const fn advice(reason: Reason) -> (&'static str, &'static str) {
            match reason { $( Reason::$reason => ($cause, $action), )+ }
        }
    };
}

advice! {
    NoMapping:
        cause "A load balancer with an outdated member, a port scan of the range, or a packet to a socket of the Node \
               that uses an unmapped port of the range.",
        action "Compare load balancer members with `npl-agent mappings`. A constant low rate is normal.";
    EarlyFragment:
        cause "A fragment arrived before the first fragment of its datagram.",
        action "None: NPL translates the saved copy of the fragment when the first fragment arrives. If datagrams are \
                lost while the counter grows, see [fragmented \
                UDP](../troubleshoot.md#published-but-clients-do-not-connect).";
    Truncated:
        cause "The packet ends before its transport header is complete.",
        action "None: the sender is faulty, or scans ports.";
    UntrackedReply:
        cause "A Pod replies to a client that connected to the Pod's address directly.",
        action "None, if clients connect to Pods directly on purpose. If clients use only node ports, see [Published, but clients do not connect](../troubleshoot.md#published-but-clients-do-not-connect).";
    TupleConflict:
        cause "A client uses one source port for two connections to the same Pod port: through two node ports, through two node addresses, or one connection through a node port and one directly.",
        action "Use only one Node address for each client port, and check the SNAT pools of the load balancer.";
    FlowTableFull:
        cause "The kernel did not add a new connection's entry to the flow table of the connection's protocol. This is rare, because a full table evicts the least recently used entry: the kernel refuses an entry only if a bucket is busy, or if every CPU's free elements are used up. The half-open cache keeps the flow's entry until other flows overwrite its slot.",
        action "Check the kernel's memory, and check in `npl-agent status` how full the flow tables are.";
    RewriteFailed:
        cause "The kernel had no memory to make the packet writable, or to overwrite the packet with a saved fragment.",
        action "Check the Node's memory.";
    BadQuote:
        cause "An ICMP error quotes too few bytes, a later fragment, or a packet whose source address differs from the destination of the error.",
        action "None: the router that sent the error is faulty, or the error is forged.";
    SctpFragment:
        cause "NPL cannot determine the length of a fragmented SCTP packet from its first fragment, because none of \
               the first six chunks extends beyond this fragment. The fragment also cannot wait in the reassembly \
               buffer for the last fragment, because the slot is occupied, or the frame is longer than 2024 bytes.",
        action "Lower the SCTP sender's MTU.";
    SourceRefused:
        cause "The source is not in `allowed-source-ranges` of any Service of the mapping.",
        action "If clients with this source should be admitted, add the source to the list. The list must contain the source address of the packets that arrive at the Node: behind SNAT, this is the load balancer's address.";
    HostConnection:
        cause "The packet belongs to a connection that the Node opened or masquerades with a source port of the range, to a connection that a process of the Node accepted on this port before the port had a mapping, or to a connection to a node port that rules of other software have accepted.",
        action "None: the packet correctly reaches the host.";
    Ipv6ExtensionHeaders:
        cause "The packet has more than six extension headers, an extension header that is cut off, or a source route with segments left.",
        action "None: the sender uses unusual headers, or scans ports.";
    UntrackedError:
        cause "The packet that an ICMP error quotes belongs to the Node's own traffic or to a flow that has ended, or the error is forged.",
        action "None. If path MTU discovery fails while this counter grows, check with a [trace build](../troubleshoot.md#trace-verdicts-on-one-node) which flow the errors quote.";
}

pub(super) fn body() -> String {
    let rows = Reason::ALL.iter().map(|reason| {
        let number = (*reason as u32).to_string();
        let link = format!("[{}]({})", code(reason.name()), anchor(reason.name()));
        vec![link, number, reason.packet().to_owned(), prose(reason.help())]
    });
    let table = table(&["reason", "number", "packet", "meaning"], rows);
    let mut text = format!(
        "`npl-agent status` and the metric [`npl_datapath_reason_packets_total`](metrics.md#npl_datapath_reason_packets_total) \
         show the counters by name; the map [`{MAP_REASON}`](maps.md) contains the counters by number.\n\
         Packets that no mapping could ever match are not counted, for example packets to a port outside of the node port \
         range. Of a fragmented datagram that is passed \
         unchanged, the first fragment is counted under its reason; a later fragment is counted only if it arrives before \
         the first fragment, as `early_fragment`.\n\
         A packet that is passed unchanged goes to the next program of the hook, and then to the host's stack. Each \
         reason has a section with the typical cause and the action.\n\n{table}"
    );
    for reason in Reason::ALL {
        let (cause, action) = advice(*reason);
        text += &heading(2, reason.name());
        let _infallible = writeln!(
            text,
            "{}\n\nPacket: {}.\n\nTypical cause: {cause}\n\nAction: {action}",
            prose(reason.help()),
            reason.packet()
        );
    }
    text
}
