// SPDX-License-Identifier: Apache-2.0
//! Tests that packets without a flow, such as those of a flood, overwrite half-open entries only in the cache region
//! for packets of their kind: handshakes or datagrams.

use std::net::SocketAddr;
use std::ops::Range;

use npl_common::conntrack::Phase;
use npl_common::half_open::{self, REPLY_CACHE_ELEMENTS, SLOTS, WORDS};
use npl_testkit::packet::Packet;
use npl_testkit::packet::sctp_chunks::{ABORT, COOKIE_ECHO, DATA, INIT, SHUTDOWN};
use npl_testkit::packet::tcp_flags::{ACK, FIN, PSH, RST, SYN};

use super::scene::*;
use crate::lab::Lab;

const HANDSHAKES: Range<u32> = SLOTS..REPLY_CACHE_ELEMENTS;
const DATAGRAMS: Range<u32> = REPLY_CACHE_ELEMENTS..WORDS;
/// The number of clients of each flood. The clients' flows have different hashes, so a flood that uses a region writes
/// to many slots of this region.
const CLIENTS: u16 = 256;

/// A kind of packet of which a flood consists, and the region for its half-open entries; `None` if this kind of packet
/// creates no half-open entry.
type Kind = (fn(SocketAddr) -> Packet, Option<Range<u32>>);

const KINDS: [Kind; 11] = [
    (|client| tcp(client, node(), SYN, b""), Some(HANDSHAKES)),
    (|client| tcp(client, node(), SYN | ACK, b""), None),
    (|client| tcp(client, node(), ACK | PSH, b"data"), Some(HANDSHAKES)),
    (|client| tcp(client, node(), FIN | ACK, b""), Some(HANDSHAKES)),
    (|client| tcp(client, node(), RST, b""), None),
    (|client| tcp(client, node(), 0, b""), None),
    (|client| udp(client, node(), b"query"), Some(DATAGRAMS)),
    (|client| sctp(client, node(), INIT, b""), Some(HANDSHAKES)),
    (|client| sctp(client, node(), DATA, b"data"), Some(HANDSHAKES)),
    (|client| sctp(client, node(), COOKIE_ECHO, b"cookie"), Some(HANDSHAKES)),
    (|client| sctp(client, node(), SHUTDOWN, b""), Some(HANDSHAKES)),
];

/// Fills every slot with the entry of another established flow, and sends a flood of each kind. A flood may overwrite
/// entries only in its own region.
#[test]
fn floods_of_packets_without_a_flow_overwrite_no_entries_of_other_kinds() {
    with_mappings(|lab| {
        let others: Vec<u64> = (0..WORDS)
            .map(|slot| half_open::entry(u64::from(slot + 1) << 40, Phase::ESTABLISHED, 0, NODE_PORT))
            .collect();
        for (index, word) in (0..).zip(&others) {
            lab.set_half_open_word(flow(Tcp), index, *word);
        }
        for (number, (packet, region)) in KINDS.into_iter().enumerate() {
            for port in 1024..1024 + CLIENTS {
                lab.ingress(&packet((client_ip(), port).into()));
            }
            let changed = restore(lab, &others);
            let has_foreign = changed.iter().any(|slot| !region.as_ref().is_some_and(|own| own.contains(slot)));
            assert!(!has_foreign, "kind {number}: {changed:?}");
            assert_eq!(changed.is_empty(), region.is_none(), "kind {number}: expected region {region:?}");
        }
        lab.ingress(&sctp(client(), node(), ABORT, b""));
        assert_eq!(restore(lab, &others), [0; 0]);
    });
}

/// Writes the original words to all slots that have changed, and returns these slots.
fn restore(lab: &mut Lab, originals: &[u64]) -> Vec<u32> {
    let words = lab.half_open_words(flow(Tcp));
    let is_changed = |(_, (word, original)): &(u32, (&u64, &u64))| word != original;
    let changed: Vec<u32> = (0..).zip(words.iter().zip(originals)).filter(is_changed).map(|(slot, _)| slot).collect();
    for slot in &changed {
        lab.set_half_open_word(flow(Tcp), *slot, originals[*slot as usize]);
    }
    changed
}

/// Once a UDP flow is established, by the second datagram of the client or of the Pod, the flow's datagram slot is free
/// for other flows.
#[test]
fn established_datagram_flow_has_no_half_open_entry() {
    for last_is_client in [true, false] {
        with_mappings(|lab| {
            lab.ingress(&udp(client(), node(), b"question"));
            lab.egress(&udp(pod(), client(), b"answer"));
            let half_open = lab.datagram_slot(flow(Udp)).map(half_open::phase);
            assert_eq!((half_open, lab.own_slot(flow(Udp))), (Some(Phase::REPLIED), None));
            if last_is_client {
                lab.ingress(&udp(client(), node(), b"question"));
            } else {
                lab.egress(&udp(pod(), client(), b"answer"));
            }
            let established = lab.own_slot(flow(Udp)).map(half_open::phase);
            assert_eq!((lab.datagram_slot(flow(Udp)), established), (None, Some(Phase::ESTABLISHED)));
            assert!(lab.flow(flow(Udp)).is_some());
        });
    }
}
