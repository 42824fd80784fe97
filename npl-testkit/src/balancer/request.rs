// SPDX-License-Identifier: Apache-2.0
//! Sends one request of a balancer and classifies the result.

use std::io::{self, ErrorKind};
use std::net::IpAddr;

use anyhow::{Context, Result};

use super::members::Member;
use super::report::Kind;
use crate::echo::{Answer, Protocol};
use crate::netns::Netns;
use crate::poll;
use crate::traffic::{self, LOAD_LIMIT};

/// Sends a request to a member from the namespace of the calling thread. Returns `None` for a correct response.
pub(super) fn ask(member: &Member, clients: &[IpAddr], question: &str) -> Option<(Kind, String)> {
    let answer = match send(member, question) {
        Ok(answer) => answer,
        Err(err) => return Some((kind_of(&err), format!("{err:#}"))),
    };
    let seen = answer.client.ip();
    if answer.pod != member.pod {
        return Some((Kind::Wrong, format!("{} responded", answer.pod)));
    }
    (!clients.contains(&seen)).then(|| (Kind::Wrong, format!("the Pod observed the client address {seen}")))
}

fn send(member: &Member, question: &str) -> Result<Answer> {
    let limit = LOAD_LIMIT * poll::patience();
    match member.protocol {
        Protocol::Tcp => traffic::tcp_ask(&traffic::open_tcp(member.server, limit)?, question),
        Protocol::Sctp => traffic::tcp_ask(&traffic::open_sctp(member.server, limit)?, question),
        Protocol::Udp => {
            let socket = traffic::open_udp(member.server, true).context("open a UDP socket")?;
            traffic::udp_ask_within(&socket, question, limit)
        }
    }
}

fn kind_of(err: &anyhow::Error) -> Kind {
    let mut causes = err.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    if causes.any(|cause| cause.kind() == ErrorKind::ConnectionRefused) { Kind::Refused } else { Kind::Lost }
}

/// Returns the number of TCP segments that were retransmitted in a namespace. A retransmission shows a lost packet even
/// if the request succeeded.
pub(super) fn resent_segments(netns: &Netns) -> Result<u64> {
    netns.counter("Tcp", "RetransSegs")
}
