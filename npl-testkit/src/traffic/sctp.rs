// SPDX-License-Identifier: Apache-2.0
//! SCTP by one-to-one sockets, which are read and written as TCP's are.

use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, Result};
use socket2::{Domain, Protocol, Socket, Type};

/// A socket of one association. The kernel loads SCTP for it where it can.
pub(crate) fn socket(domain: Domain) -> std::io::Result<Socket> {
    Socket::new(domain, Type::STREAM, Some(Protocol::from(libc::IPPROTO_SCTP)))
}

/// Whether the kernel makes such sockets.
pub fn has_sctp() -> bool {
    socket(Domain::IPV4).is_ok()
}

/// An association with a server, in the namespace of the calling thread; `limit` is also that of each read and write.
pub fn open_sctp(server: SocketAddr, limit: Duration) -> Result<TcpStream> {
    let socket = socket(Domain::for_address(server)).context("open an SCTP socket")?;
    socket.connect_timeout(&server.into(), limit).with_context(|| format!("associate with {server}"))?;
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    Ok(stream)
}
