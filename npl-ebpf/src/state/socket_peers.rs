// SPDX-License-Identifier: GPL-2.0-only
//! Lists the peers for which a local client's socket has socket reverse NAT entries, so that the program that runs when
//! the socket is closed can remove the entries. [`npl_common::socket_rnat`] describes the entries of the list.

use npl_common::socket_rnat::{LAST_POD, LISTED_PEERS};

use super::{maps::Family, tuple::SocketFlow};
use crate::net::family::SocketAddr;

/// Returns the Pod to which a socket last connected or sent through a mapping.
#[inline(always)]
pub fn last_pod<F: Family>(socket: u64) -> Option<SocketAddr<F>> {
    F::socket_rnat(&list_entry(socket, LAST_POD))
}

/// Records the Pod to which a socket now connects or sends through a mapping. If the socket used another Pod before,
/// adds the other Pod to the list.
#[inline(always)]
pub fn set_last_pod<F: Family>(flow: &SocketFlow<F>) {
    let key = list_entry(flow.socket, LAST_POD);
    if let Some(pod) = F::socket_rnat(&key)
        && !pod.is_same(&flow.pod)
    {
        add(&SocketFlow { socket: flow.socket, pod });
    }
    F::insert_socket_rnat(&key, &flow.pod);
}

/// Adds a peer to the list of a socket, unless the list contains the peer or is full.
#[inline(never)]
pub fn add<F: Family>(peer: &SocketFlow<F>) {
    for position in 1..=LISTED_PEERS {
        let key = list_entry(peer.socket, position);
        match F::socket_rnat(&key) {
            None => return F::insert_socket_rnat(&key, &peer.pod),
            Some(listed) if listed.is_same(&peer.pod) => return,
            Some(_) => {}
        }
    }
}

/// Removes the socket reverse NAT entries of a closed socket from the map of one IP family, and the socket's list. An
/// IPv6 socket that sends to IPv4-mapped addresses has entries in the IPv4 map.
#[inline(always)]
pub fn release<F: Family>(socket: u64) {
    // An entry is looked up before the removal, because most sockets have no entry, and a removal takes a lock even if
    // there is no entry.
    for position in LAST_POD..=LISTED_PEERS {
        let key = list_entry(socket, position);
        if let Some(pod) = F::socket_rnat(&key) {
            F::remove_socket_rnat(&SocketFlow { socket, pod });
            F::remove_socket_rnat(&key);
        } else if position != LAST_POD {
            return;
        }
    }
}

/// Returns the key of an entry of a socket's list.
#[inline(always)]
fn list_entry<F: Family>(socket: u64, position: u32) -> SocketFlow<F> {
    // To write the position and zeros, or the zero bytes of an unspecified IPv6 address, the compiler would call
    // `memset`, which the verifier rejects without `CAP_PERFMON`. The address in the key therefore repeats one word.
    let word = (socket as u32).wrapping_add(position);
    SocketFlow { socket, pod: SocketAddr { addr: F::of_repeated(word), port: 0 } }
}
