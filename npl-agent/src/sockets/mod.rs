// SPDX-License-Identifier: Apache-2.0
//! Reservations: a bound socket for each node port, so that no other process can use it.
//!
//! A TCP socket is bound without `listen` and without `SO_REUSEADDR`: every other bind fails, and a client of an
//! unmapped port gets an RST from the kernel.
//!
//! If the kernel has not loaded SCTP, an SCTP port is held without a socket, since no other process can have one
//! either. The agent does not load SCTP, to keep the Node's attack surface small.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{Ipv4Addr, Ipv6Addr},
    os::fd::{AsRawFd as _, OwnedFd},
};

use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, SockFlag, SockProtocol, SockType, SockaddrIn, SockaddrIn6, bind, setsockopt, socket, sockopt,
    },
};

use crate::core::model::{Family, Frontend, NodePort, Protocol};

/// The protocols that the kernel has loaded, one per line.
const PROTOCOLS: &str = "/proc/net/protocols";

/// Why a port could not be reserved.
#[derive(Debug, thiserror::Error)]
pub enum ReserveError {
    /// Another process uses it.
    #[error("reserve node port {0}: another process has it")]
    Taken(Frontend),
    /// The kernel refused.
    #[error("reserve node port {frontend}")]
    Refused {
        /// The port.
        frontend: Frontend,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

/// The reserved ports.
#[derive(Debug, Default)]
pub struct Reservations {
    /// `None` for an SCTP port while the kernel has not loaded SCTP.
    held: BTreeMap<Frontend, Option<OwnedFd>>,
}

impl Reservations {
    /// The reserved ports. Drops those that are held without a socket once the kernel has loaded SCTP, so that they are
    /// reserved again.
    pub fn observe(&mut self) -> BTreeSet<Frontend> {
        if self.held.values().any(Option::is_none) && kernel_knows_sctp() {
            self.held.retain(|_, socket| socket.is_some());
        }
        self.held.keys().copied().collect()
    }

    /// Reserves a port; a reserved port stays reserved.
    ///
    /// # Errors
    ///
    /// If another process uses the port, or the kernel refuses for another reason.
    pub fn reserve(&mut self, frontend: Frontend) -> Result<(), ReserveError> {
        if self.held.contains_key(&frontend) {
            return Ok(());
        }
        if frontend.protocol == Protocol::Sctp && !kernel_knows_sctp() {
            self.held.insert(frontend, None);
            return Ok(());
        }
        let socket = bound_socket(frontend).map_err(|errno| {
            if errno == Errno::EADDRINUSE {
                ReserveError::Taken(frontend)
            } else {
                ReserveError::Refused { frontend, source: errno.into() }
            }
        })?;
        self.held.insert(frontend, Some(socket));
        Ok(())
    }

    /// Closes a port's socket.
    pub fn release(&mut self, frontend: Frontend) {
        self.held.remove(&frontend);
    }
}

/// Whether SCTP is built in or loaded; asking for a socket would load it. If the list cannot be read, the agent asks
/// for a socket.
fn kernel_knows_sctp() -> bool {
    std::fs::read_to_string(PROTOCOLS).map_or(true, |list| list.lines().any(|line| line.starts_with("SCTP ")))
}

fn bound_socket(frontend: Frontend) -> Result<OwnedFd, Errno> {
    let family = match frontend.family {
        Family::V4 => AddressFamily::Inet,
        Family::V6 => AddressFamily::Inet6,
    };
    let (kind, protocol) = match frontend.protocol {
        Protocol::Tcp => (SockType::Stream, Some(SockProtocol::Tcp)),
        Protocol::Udp => (SockType::Datagram, Some(SockProtocol::Udp)),
        // nix has no constant for SCTP, and the kernel chooses it only if it is named.
        Protocol::Sctp => return sctp_socket(frontend),
    };
    let fd = socket(family, kind, SockFlag::SOCK_CLOEXEC, protocol)?;
    if frontend.protocol == Protocol::Udp {
        // Datagrams to an unmapped port are never read: keep the kernel from queueing them.
        setsockopt(&fd, sockopt::RcvBuf, &1)?;
    }
    bind_wildcard(&fd, frontend.family, frontend.node_port)?;
    Ok(fd)
}

#[expect(unsafe_code, reason = "nix cannot name SCTP")]
fn sctp_socket(frontend: Frontend) -> Result<OwnedFd, Errno> {
    use std::os::fd::FromRawFd as _;
    let family = match frontend.family {
        Family::V4 => libc::AF_INET,
        Family::V6 => libc::AF_INET6,
    };
    // SAFETY: a system call without pointers.
    let fd =
        Errno::result(unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, libc::IPPROTO_SCTP) })?;
    // SAFETY: a descriptor that was just opened and that nobody else owns.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    bind_wildcard(&fd, frontend.family, frontend.node_port)?;
    Ok(fd)
}

fn bind_wildcard(fd: &OwnedFd, family: Family, port: NodePort) -> Result<(), Errno> {
    match family {
        Family::V4 => {
            bind(fd.as_raw_fd(), &SockaddrIn::from(std::net::SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port.0)))
        }
        Family::V6 => {
            // The same number may be reserved for IPv4 separately.
            setsockopt(fd, sockopt::Ipv6V6Only, &true)?;
            let any = std::net::SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, port.0, 0, 0);
            bind(fd.as_raw_fd(), &SockaddrIn6::from(any))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use super::{Reservations, ReserveError};
    use crate::core::model::{Family, Frontend, NodePort, Protocol};

    /// A port that is free now.
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
    fn protocols_are_reserved_apart_and_a_taken_port_is_said_to_be() {
        let holder = UdpSocket::bind("0.0.0.0:0").unwrap();
        let port = holder.local_addr().unwrap().port();
        let mut reservations = Reservations::default();
        let error = reservations.reserve(frontend(port, Protocol::Udp)).unwrap_err();
        assert!(matches!(error, ReserveError::Taken(_)), "{error}");
        assert!(reservations.observe().is_empty());
    }

    /// With a socket if the kernel has loaded SCTP, and without otherwise.
    #[test]
    fn an_sctp_port_is_reserved_whatever_the_kernel_knows() {
        let mut reservations = Reservations::default();
        let frontend = frontend(free_port(), Protocol::Sctp);
        reservations.reserve(frontend).unwrap();
        assert_eq!(reservations.observe().into_iter().collect::<Vec<_>>(), [frontend]);
        assert_eq!(reservations.held[&frontend].is_some(), super::kernel_knows_sctp());
        reservations.release(frontend);
        assert!(reservations.observe().is_empty());
    }

    #[test]
    fn reserving_twice_is_reserving_once() {
        let port = free_port();
        let mut reservations = Reservations::default();
        for _ in 0..2 {
            reservations.reserve(frontend(port, Protocol::Tcp)).unwrap();
        }
        assert_eq!(reservations.observe().len(), 1);
    }
}
