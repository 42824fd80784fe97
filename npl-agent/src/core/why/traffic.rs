// SPDX-License-Identifier: Apache-2.0
//! Builds the last two links of a chain: whether packets were translated, and why packets were not translated. The
//! command `why` builds these two links from the kernel's counters; the agent provides the preceding links.

use npl_common::{reason::Reason, stats::MappingStats};

use super::{Chain, Holds, Link, LinkReport};
use crate::core::pages;

/// The traffic of a node port.
#[derive(Debug, Clone, Copy)]
pub struct Traffic<'a> {
    /// The counters of the mapping; `None` if the kernel has no mapping.
    pub stats: Option<MappingStats>,
    /// The time in milliseconds since the last packet of any established flow of the mapping; `None` if there is no
    /// established flow.
    pub last_packet_millis: Option<u64>,
    /// The number of packets of the whole Node that the programs counted under each reason.
    pub reasons: &'a [(Reason, u64)],
}

/// Appends the links about traffic. If a node port has no traffic, the link is not broken, because it is possible that
/// no client has sent a packet yet.
pub fn add_traffic(chain: &mut Chain, traffic: &Traffic<'_>) {
    let is_broken = chain.first_broken().is_some();
    if chain.frontend.is_none() || chain.links.last().is_some_and(|link| link.link != Link::Device) {
        return;
    }
    chain.links.push(last_packet(traffic, is_broken));
    chain.links.push(last_refusal(traffic.reasons));
}

fn last_packet(traffic: &Traffic<'_>, is_broken: bool) -> LinkReport {
    let Some(MappingStats { request_packets, reply_packets, .. }) = traffic.stats else {
        return LinkReport::info(Link::LastPacket, "the kernel has no mapping, so it counts no packets");
    };
    let age = traffic.last_packet_millis.map(|millis| format!(", the last one {} s ago", millis / 1_000));
    let age = age.unwrap_or_default();
    let text = format!("{request_packets} request packets and {reply_packets} reply packets{age}");
    match (request_packets, reply_packets) {
        (0, _) => LinkReport::info(
            Link::LastPacket,
            "no client has sent a packet to the node port: compare the members of the load balancer with the annotation",
        ),
        (_, 0) => {
            let text =
                format!("{text}: the Pod does not answer, or its replies leave through a device without the programs");
            LinkReport::broken(Link::LastPacket, text, pages::NO_CONNECTION)
        }
        _ if is_broken => LinkReport::info(Link::LastPacket, text),
        _ => LinkReport::ok(Link::LastPacket, text),
    }
}

fn last_refusal(reasons: &[(Reason, u64)]) -> LinkReport {
    let near = [Reason::NoMapping, Reason::SourceRefused, Reason::UntrackedReply, Reason::RewriteFailed];
    let counted: Vec<String> = reasons
        .iter()
        .filter(|(reason, count)| near.contains(reason) && *count > 0)
        .map(|(reason, count)| format!("{} {count}", reason.name()))
        .collect();
    let text = if counted.is_empty() {
        let names: Vec<&str> = near.iter().map(|reason| reason.name()).collect();
        format!("the programs of this Node have counted no packet under the reasons {}", names.join(", "))
    } else {
        format!("packets of the whole Node, by reason: {}", counted.join(", "))
    };
    LinkReport { link: Link::LastRefusal, holds: Holds::Info, found: text, page: Some(pages::REASONS.to_owned()) }
}
