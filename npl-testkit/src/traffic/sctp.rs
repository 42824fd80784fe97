// SPDX-License-Identifier: Apache-2.0
//! SCTP with one-to-one sockets, which have the same read and write interface as TCP sockets.

use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, Result};
use socket2::{Domain, Protocol, Socket, Type};

/// Creates a one-to-one socket. The kernel then loads its SCTP module if necessary.
pub(crate) fn socket(domain: Domain) -> std::io::Result<Socket> {
    Socket::new(domain, Type::STREAM, Some(Protocol::from(libc::IPPROTO_SCTP)))
}

/// Whether the kernel supports SCTP sockets.
pub fn has_sctp() -> bool {
    socket(Domain::IPV4).is_ok()
}

/// Opens an association with a server, in the namespace of the calling thread. `limit` also applies to each read and
/// write.
pub fn open_sctp(server: SocketAddr, limit: Duration) -> Result<TcpStream> {
    let socket = socket(Domain::for_address(server)).context("open an SCTP socket")?;
    socket.connect_timeout(&server.into(), limit).with_context(|| format!("open an association with {server}"))?;
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    Ok(stream)
}
