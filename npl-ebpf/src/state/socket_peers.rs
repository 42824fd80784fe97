// SPDX-License-Identifier: GPL-2.0-only
//! Keeps a list of the peers of each local client's socket. When the socket is closed, a program removes the socket
//! reverse NAT entries of the listed peers. [`npl_common::socket_rnat`] describes the entries of the list.

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

/// Evaluates `$step` for each position of a further peer, until `$step` is true. The loop is unrolled: without
/// `CAP_PERFMON`, the verifier of Linux 6.12 also follows mispredicted branches, and therefore cannot prove that a loop
/// ends.
macro_rules! until_any_position {
    (|$position:ident| $step:expr) => {
        until_any_position!($position, $step, 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    ($position:ident, $step:expr, $($each:literal)*) => {{
        const { assert!([$($each),*].len() == LISTED_PEERS as usize, "the list must contain every position") };
        false $(|| { let $position = $each; $step })*
    }};
}

/// Adds a peer to the list of a socket, unless the list contains the peer or is full.
#[inline(never)]
pub fn add<F: Family>(peer: &SocketFlow<F>) {
    let _is_listed = until_any_position!(|position| add_at(peer, position));
}

/// Adds a peer at a position of the list if the position is free. Returns whether the position now contains the peer.
#[inline(never)]
fn add_at<F: Family>(peer: &SocketFlow<F>, position: u32) -> bool {
    let key = list_entry(peer.socket, position);
    match F::socket_rnat(&key) {
        None => {
            F::insert_socket_rnat(&key, &peer.pod);
            true
        }
        Some(listed) => listed.is_same(&peer.pod),
    }
}

/// Removes the socket reverse NAT entries of a closed socket from the map of one IP family, and the socket's list. An
/// IPv6 socket that sends to IPv4-mapped addresses has entries in the IPv4 map.
#[inline(always)]
pub fn release<F: Family>(socket: u64) {
    let _has_last_pod = release_at::<F>(socket, LAST_POD);
    let _is_at_end = until_any_position!(|position| !release_at::<F>(socket, position));
}

/// Removes the entry of the peer at this position, and the entry of the list. Returns false if the position is free.
#[inline(never)]
fn release_at<F: Family>(socket: u64, position: u32) -> bool {
    let key = list_entry(socket, position);
    // The entry is looked up before the removal, because most sockets have no entry, and a removal takes a lock even if
    // there is no entry.
    let Some(pod) = F::socket_rnat(&key) else { return false };
    F::remove_socket_rnat(&SocketFlow { socket, pod });
    F::remove_socket_rnat(&key);
    true
}

/// Returns the key of an entry of a socket's list.
#[inline(always)]
fn list_entry<F: Family>(socket: u64, position: u32) -> SocketFlow<F> {
    // The address in the key repeats one word. If the address consisted of the position and zero bytes, the compiler
    // would call `memset`, and the verifier rejects this call if the loader lacks `CAP_PERFMON`.
    let word = (socket as u32).wrapping_add(position);
    SocketFlow { socket, pod: SocketAddr { addr: F::of_repeated(word), port: 0 } }
}
