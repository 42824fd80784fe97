// SPDX-License-Identifier: Apache-2.0
//! Sends one request of a balancer and classifies the result.

use std::io::{self, ErrorKind};
use std::net::IpAddr;

use anyhow::Result;

use super::members::Member;
use super::report::Kind;
use crate::netns::Netns;
use crate::poll;
use crate::traffic::{self, LOAD_LIMIT};

/// Sends a request to a member from the namespace of the calling thread. Returns `None` for a correct response.
pub(super) fn ask(member: &Member, clients: &[IpAddr], question: &str) -> Option<(Kind, String)> {
    let answer = match traffic::ask_within(member.protocol, member.server, question, poll::extended(LOAD_LIMIT)) {
        Ok(answer) => answer,
        Err(err) => return Some((kind_of(&err), format!("{err:#}"))),
    };
    let seen = answer.client.ip();
    if answer.pod != member.pod {
        return Some((Kind::Wrong, format!("{} responded", answer.pod)));
    }
    (!clients.contains(&seen)).then(|| (Kind::Wrong, format!("the Pod observed the client address {seen}")))
}

fn kind_of(err: &anyhow::Error) -> Kind {
    let mut causes = err.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    if causes.any(|cause| cause.kind() == ErrorKind::ConnectionRefused) { Kind::Refused } else { Kind::Lost }
}

/// Returns the number of TCP segments that were retransmitted in a namespace. A retransmission may indicate a lost
/// packet even if the request succeeded.
pub(super) fn resent_segments(netns: &Netns) -> Result<u64> {
    netns.counter("Tcp", "RetransSegs")
}
