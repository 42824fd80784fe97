// SPDX-License-Identifier: Apache-2.0
//! Reserves node ports: the agent binds a socket to each node port, so that no other process can use the port.
//!
//! A TCP socket is bound without `SO_REUSEADDR`, so no other process can bind the port. The agent does not call
//! `listen`, so the kernel still answers a SYN to a port without a mapping with an RST.
//!
//! As long as the kernel has not loaded SCTP, no process can have bound an SCTP port, so the agent reserves SCTP ports
//! without a socket. Opening an SCTP socket would load the kernel module and enlarge the Node's attack surface.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use socket2::{Domain, Socket, Type};

use crate::core::model::{Family, Frontend, Protocol};

/// The file with the kernel's list of socket protocols, one protocol in each line.
const PROTOCOLS: &str = "/proc/net/protocols";

/// Why a node port could not be reserved.
#[derive(Debug, thiserror::Error)]
pub enum ReserveError {
    /// Another process has bound the port. The agent allocates another port.
    #[error("reserve node port {0}: another process has bound this port")]
    Taken(Frontend),
    /// The kernel refused to open or bind the socket for a reason other than `EADDRINUSE`, for example because the
    /// limit of open files is reached.
    #[error("reserve node port {frontend}")]
    Refused {
        /// The node port, with its protocol and IP family.
        frontend: Frontend,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// The reserved node ports.
#[derive(Debug, Default)]
pub struct Reservations {
    /// The socket of each port; `None` for an SCTP port while the kernel has no SCTP.
    reserved: BTreeMap<Frontend, Option<Socket>>,
}

impl Reservations {
    /// Returns the reserved ports. Once the kernel has loaded SCTP, an SCTP port without a socket is no longer
    /// returned, so that the agent reserves the port again with a socket.
    pub fn observe(&mut self) -> BTreeSet<Frontend> {
        if self.reserved.values().any(Option::is_none) && has_sctp() {
            self.reserved.retain(|_, socket| socket.is_some());
        }
        self.reserved.keys().copied().collect()
    }

    /// Reserves a node port by binding a socket. Has no effect if the port is already reserved.
    ///
    /// # Errors
    ///
    /// If another process has bound the port, or if the kernel refuses the socket for a different reason.
    pub fn reserve(&mut self, frontend: Frontend) -> Result<(), ReserveError> {
        if self.reserved.contains_key(&frontend) {
            return Ok(());
        }
        if frontend.protocol == Protocol::Sctp && !has_sctp() {
            self.reserved.insert(frontend, None);
            return Ok(());
        }
        let socket = bound_socket(frontend).map_err(|source| {
            if source.kind() == io::ErrorKind::AddrInUse {
                ReserveError::Taken(frontend)
            } else {
                ReserveError::Refused { frontend, source }
            }
        })?;
        self.reserved.insert(frontend, Some(socket));
        Ok(())
    }

    /// Closes the socket of a node port, so that processes other than the agent can bind the port.
    pub fn release(&mut self, frontend: Frontend) {
        self.reserved.remove(&frontend);
    }
}

/// Returns whether the kernel has SCTP, built in or as a loaded module. If the list of protocols cannot be read,
/// returns true, so the agent opens an SCTP socket.
fn has_sctp() -> bool {
    std::fs::read_to_string(PROTOCOLS).map_or(true, |list| list.lines().any(|line| line.starts_with("SCTP ")))
}

/// Returns a new socket that is bound to the node port at the wildcard address.
fn bound_socket(frontend: Frontend) -> io::Result<Socket> {
    let (domain, wildcard): (_, IpAddr) = match frontend.family {
        Family::V4 => (Domain::IPV4, Ipv4Addr::UNSPECIFIED.into()),
        Family::V6 => (Domain::IPV6, Ipv6Addr::UNSPECIFIED.into()),
    };
    let (kind, protocol) = match frontend.protocol {
        Protocol::Tcp => (Type::STREAM, socket2::Protocol::TCP),
        Protocol::Udp => (Type::DGRAM, socket2::Protocol::UDP),
        Protocol::Sctp => (Type::STREAM, socket2::Protocol::from(libc::IPPROTO_SCTP)),
    };
    let socket = Socket::new(domain, kind, Some(protocol))?;
    if frontend.protocol == Protocol::Udp {
        // The receive buffer gets the smallest size, because no process reads from the socket. The socket receives only
        // datagrams that match no mapping.
        socket.set_recv_buffer_size(1)?;
    }
    if frontend.family == Family::V6 {
        // The socket is for IPv6 only, because a separate socket reserves the port number for IPv4.
        socket.set_only_v6(true)?;
    }
    socket.bind(&SocketAddr::new(wildcard, frontend.node_port.0).into())?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use super::{Reservations, ReserveError};
    use crate::core::model::{Family, Frontend, NodePort, Protocol};

    /// Returns a port that is unused at the time of the call.
    fn free_port() -> u16 {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
    }

    fn frontend(port: u16, protocol: Protocol) -> Frontend {
        Frontend { family: Family::V4, node_port: NodePort(port), protocol }
    }

    #[test]
    fn a_reserved_port_cannot_be_bound_and_refuses_connections() {
        let port = free_port();
        let mut reservations = Reservations::default();
        reservations.reserve(frontend(port, Protocol::Tcp)).unwrap();
        assert!(TcpListener::bind(("127.0.0.1", port)).is_err());
        let refused = TcpStream::connect(("127.0.0.1", port)).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
        reservations.release(frontend(port, Protocol::Tcp));
        assert!(TcpListener::bind(("127.0.0.1", port)).is_ok());
    }

    #[test]
    fn a_port_that_another_process_has_bound_is_reported_as_taken() {
        let holder = UdpSocket::bind("0.0.0.0:0").unwrap();
        let port = holder.local_addr().unwrap().port();
        let mut reservations = Reservations::default();
        let error = reservations.reserve(frontend(port, Protocol::Udp)).unwrap_err();
        assert!(matches!(error, ReserveError::Taken(_)), "{error}");
        assert!(reservations.observe().is_empty());
    }

    #[test]
    fn an_sctp_port_is_reserved_with_a_socket_only_if_the_kernel_has_sctp() {
        let mut reservations = Reservations::default();
        let frontend = frontend(free_port(), Protocol::Sctp);
        reservations.reserve(frontend).unwrap();
        assert_eq!(reservations.observe().into_iter().collect::<Vec<_>>(), [frontend]);
        assert_eq!(reservations.reserved[&frontend].is_some(), super::has_sctp());
        reservations.release(frontend);
        assert!(reservations.observe().is_empty());
    }

    #[test]
    fn reserving_a_port_twice_succeeds() {
        let port = free_port();
        let mut reservations = Reservations::default();
        for _ in 0..2 {
            reservations.reserve(frontend(port, Protocol::Tcp)).unwrap();
        }
        assert_eq!(reservations.observe().len(), 1);
    }
}
