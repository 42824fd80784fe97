// SPDX-License-Identifier: Apache-2.0
//! Serves DNS by UDP, in place of hickory's own UDP server, which sends each answer from the address that the kernel
//! selects. On a machine with several addresses, this address may differ from the address to which the client sent the
//! query, and the client then drops the answer.

use std::{
    io::{self, IoSlice, IoSliceMut},
    net::{Ipv6Addr, SocketAddr},
    os::fd::AsRawFd as _,
};

use hickory_server::net::xfer::Protocol;
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, sendmsg, setsockopt, sockopt,
};
use npl_agent::core::pages;
use tokio::{io::Interest, net::UdpSocket, time::sleep};
use tracing::{debug, warn};

use super::{Handler, INTERFACE};
use crate::listen::ACCEPT_PAUSE;

/// The maximum size of a query in bytes. The kernel cuts longer datagrams to this size.
const LONGEST_QUERY: usize = 4096;

/// The local address to which a client has sent a query, in the format of the control message in which the kernel
/// reports the address.
#[derive(Debug, Clone, Copy)]
enum LocalAddress {
    V4(libc::in_pktinfo),
    V6(libc::in6_pktinfo),
}

/// Makes the kernel report the local address to which each query was sent.
pub(super) fn request_local_addresses(socket: &UdpSocket) -> io::Result<()> {
    let is_v4 = socket.local_addr()?.is_ipv4();
    let set = if is_v4 {
        setsockopt(socket, sockopt::Ipv4PacketInfo, &true)
    } else {
        setsockopt(socket, sockopt::Ipv6RecvPacketInfo, &true)
    };
    set.map_err(io::Error::from)
}

/// Answers one query after the other until the future is dropped. Because a single task answers all queries, a flood of
/// queries takes at most one of the feed's threads.
pub(super) async fn serve(socket: UdpSocket, handler: Handler) -> ! {
    let mut buffer = vec![0; LONGEST_QUERY];
    loop {
        let (length, peer, local) = match socket.async_io(Interest::READABLE, || receive(&socket, &mut buffer)).await {
            Ok(received) => received,
            Err(error) => {
                warn!(see = pages::url(pages::FEED_FAILURES), interface = INTERFACE, %error, "a datagram could not be received; the feed continues to receive datagrams");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let query = buffer.get(..length).unwrap_or_default();
        let Some(answer) = handler.respond(query, peer, Protocol::Udp) else { continue };
        if let Err(error) = socket.async_io(Interest::WRITABLE, || send(&socket, &answer, peer, local.as_ref())).await {
            debug!(%peer, %error, "a DNS answer could not be sent");
        }
    }
}

/// Receives a query. Returns the query's length, the client's address, and the local address to which the client sent
/// the query.
fn receive(socket: &UdpSocket, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr, Option<LocalAddress>)> {
    let mut slices = [IoSliceMut::new(buffer)];
    let mut control = nix::cmsg_space!(libc::in6_pktinfo);
    let message =
        recvmsg::<SockaddrStorage>(socket.as_raw_fd(), &mut slices, Some(&mut control), MsgFlags::MSG_DONTWAIT)?;
    let local = message.cmsgs()?.find_map(|control| local_address(&control));
    let peer = message.address.as_ref().and_then(socket_address);
    let peer = peer.ok_or_else(|| io::Error::other("the kernel reports no address of the client"))?;
    Ok((message.bytes, peer, local))
}

fn socket_address(address: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = address.as_sockaddr_in().map(|it| SocketAddr::V4((*it).into()));
    v4.or_else(|| address.as_sockaddr_in6().map(|it| SocketAddr::V6((*it).into())))
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the socket requests no other control messages")]
fn local_address(message: &ControlMessageOwned) -> Option<LocalAddress> {
    match message {
        // The interface index 0 lets the route to the client determine the device, because the query may have arrived
        // by another device.
        ControlMessageOwned::Ipv4PacketInfo(info) => {
            Some(LocalAddress::V4(libc::in_pktinfo { ipi_ifindex: 0, ..*info }))
        }
        ControlMessageOwned::Ipv6PacketInfo(info) => {
            // A link-local address is valid only together with its device.
            let is_link_local = Ipv6Addr::from(info.ipi6_addr.s6_addr).is_unicast_link_local();
            let ipi6_ifindex = if is_link_local { info.ipi6_ifindex } else { 0 };
            Some(LocalAddress::V6(libc::in6_pktinfo { ipi6_ifindex, ..*info }))
        }
        _ => None,
    }
}

fn send(socket: &UdpSocket, answer: &[u8], peer: SocketAddr, local: Option<&LocalAddress>) -> io::Result<usize> {
    let control = match local {
        Some(LocalAddress::V4(info)) => Some(ControlMessage::Ipv4PacketInfo(info)),
        Some(LocalAddress::V6(info)) => Some(ControlMessage::Ipv6PacketInfo(info)),
        None => None,
    };
    let (slices, peer) = ([IoSlice::new(answer)], SockaddrStorage::from(peer));
    Ok(sendmsg(socket.as_raw_fd(), &slices, control.as_slice(), MsgFlags::MSG_DONTWAIT, Some(&peer))?)
}
