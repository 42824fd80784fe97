// SPDX-License-Identifier: Apache-2.0
//! The echo server's sockets and threads.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};
use socket2::{Domain, Protocol as SocketProtocol, Socket, Type};

use super::pattern::Digest;
use super::{PADDED, Protocol, tcp};
use crate::poll;

/// The interval at which blocked threads check whether the server stops. The interval is long, so that hundreds of idle
/// servers cause little load.
const LOOK: Duration = Duration::from_millis(500);

/// The time after which an idle connection is closed, longer than the pauses of any test.
const CLIENT_PAUSE: Duration = Duration::from_mins(5);

/// The time limit for a child process to get from fork to execve, which closes its copies of this process's sockets.
const EXECUTION: Duration = Duration::from_secs(5);

/// The listen backlog: more connections than any test opens at the same time.
const BACKLOG: i32 = 1024;

/// A running echo server. Dropping this value stops the server.
#[derive(Debug)]
pub struct EchoServer {
    shared: Arc<Shared>,
    sockets: Vec<Socket>,
    threads: Vec<JoinHandle<()>>,
}

/// The identity that the server reports.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    pub(super) pod: String,
    pub(super) node: Option<String>,
}

#[derive(Debug)]
struct Shared {
    identity: Identity,
    stop: AtomicBool,
    connections: Mutex<Vec<Weak<TcpStream>>>,
}

impl EchoServer {
    /// Serves TCP and UDP on all `ports`, in the namespace of the calling thread.
    pub fn start(pod: &str, ports: &[u16]) -> Result<Self> {
        Self::start_on(pod, None, ports)
    }

    /// Starts a server as [`Self::start`] does, which also reports its Node.
    pub fn start_on(pod: &str, node: Option<&str>, ports: &[u16]) -> Result<Self> {
        let identity = Identity { pod: pod.to_owned(), node: node.map(str::to_owned) };
        let shared = Shared { identity, stop: AtomicBool::new(false), connections: Mutex::new(Vec::new()) };
        let mut server = Self { shared: Arc::new(shared), sockets: Vec::new(), threads: Vec::new() };
        for port in ports {
            server.serve(*port).with_context(|| format!("serve port {port} as {pod}"))?;
        }
        Ok(server)
    }

    /// Starts a server as [`Self::start`] does, for SCTP only.
    pub fn start_sctp(pod: &str, port: u16) -> Result<Self> {
        let mut server = Self::start(pod, &[])?;
        let listener = bind(Type::STREAM, Protocol::Sctp, port)?;
        server.sockets.push(listener.try_clone()?);
        server.listen(listener.into(), Protocol::Sctp);
        Ok(server)
    }

    fn serve(&mut self, port: u16) -> Result<()> {
        let (stream, datagram) = (bind(Type::STREAM, Protocol::Tcp, port)?, bind(Type::DGRAM, Protocol::Udp, port)?);
        self.sockets.extend([stream.try_clone()?, datagram.try_clone()?]);
        let datagrams: UdpSocket = datagram.into();
        self.listen(stream.into(), Protocol::Tcp);
        let shared = Arc::clone(&self.shared);
        self.threads.push(thread::spawn(move || answer_datagrams(&datagrams, &shared)));
        Ok(())
    }

    fn listen(&mut self, listener: TcpListener, protocol: Protocol) {
        let shared = Arc::clone(&self.shared);
        self.threads.push(thread::spawn(move || accept(&listener, &shared, protocol)));
    }
}

impl Drop for EchoServer {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for socket in &self.sockets {
            // The shutdown wakes blocked threads, even if it returns an error because the socket is not connected.
            drop(socket.shutdown(Shutdown::Both));
        }
        for connection in self.shared.connections.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            if let Some(stream) = connection.upgrade() {
                // An error means that the connection is already closed.
                drop(stream.shutdown(Shutdown::Both));
            }
        }
        for thread in self.threads.drain(..) {
            drop(thread.join());
        }
    }
}

fn bind(kind: Type, protocol: Protocol, port: u16) -> io::Result<Socket> {
    let protocol = match protocol {
        Protocol::Tcp => SocketProtocol::TCP,
        Protocol::Udp => SocketProtocol::UDP,
        Protocol::Sctp => SocketProtocol::from(libc::IPPROTO_SCTP),
    };
    let (domain, address) = match Socket::new(Domain::IPV6, kind, Some(protocol)) {
        Ok(_supported) => (Domain::IPV6, SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))),
        Err(_no_ipv6) => (Domain::IPV4, SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))),
    };
    let socket = Socket::new(domain, kind, Some(protocol))?;
    if domain == Domain::IPV6 {
        socket.set_only_v6(false)?;
    }
    // Connections in TIME_WAIT of a server that has just stopped may still use the port.
    socket.set_reuse_address(kind == Type::STREAM)?;
    socket.set_read_timeout(Some(LOOK))?;
    bind_once_free(&socket, address)?;
    if kind == Type::STREAM {
        socket.listen(BACKLOG)?;
    }
    Ok(socket)
}

/// Binds the socket once the port is free. Between fork and execve, a child process holds copies of this process's
/// sockets, so a stopped server's port stays in use until the execve.
fn bind_once_free(socket: &Socket, address: SocketAddr) -> io::Result<()> {
    let mut outcome = Ok(());
    let is_settled = || {
        outcome = socket.bind(&address.into());
        outcome.as_ref().err().is_none_or(|error| error.kind() != io::ErrorKind::AddrInUse).then_some(())
    };
    // If the port does not become free, the caller gets the error of `bind`, which is more useful than the error of the
    // timeout.
    drop(poll::until("a free port", EXECUTION, is_settled));
    outcome
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>, protocol: Protocol) {
    while !shared.stop.load(Ordering::Relaxed) {
        let Ok((stream, _client)) = listener.accept() else { continue };
        // The timeout is set again, because the connection inherits the listener's timeout, which is too short for
        // clients on a loaded machine.
        if stream.set_read_timeout(Some(CLIENT_PAUSE)).is_err() {
            continue;
        }
        let stream = Arc::new(stream);
        {
            let mut connections = shared.connections.lock().unwrap_or_else(PoisonError::into_inner);
            connections.retain(|connection| connection.strong_count() > 0);
            connections.push(Arc::downgrade(&stream));
        }
        let shared = Arc::clone(shared);
        thread::spawn(move || {
            // An error is ignored, because a client may disconnect early.
            drop(tcp::serve(&stream, &shared.identity, protocol));
        });
    }
}

fn answer_datagrams(socket: &UdpSocket, shared: &Shared) {
    let mut buffer = vec![0; usize::from(u16::MAX)];
    while !shared.stop.load(Ordering::Relaxed) {
        let Ok((length, client)) = socket.recv_from(&mut buffer) else { continue };
        let Some(request) = buffer.get(..length) else { continue };
        if let Ok(mut line) = tcp::line(&shared.identity, client, Protocol::Udp, length as u64, Digest::of(request)) {
            if let Some(wanted) = wanted_length(request) {
                line.push_str(&" ".repeat(wanted.saturating_sub(line.len())));
            }
            // An error is ignored, because for the client, an error has the same effect as a lost response.
            drop(socket.send_to(line.as_bytes(), client));
        }
    }
}

/// Returns the response length that a datagram requests, if any.
fn wanted_length(request: &[u8]) -> Option<usize> {
    let mut words = request.split(|byte| *byte == b' ');
    if words.next()? != PADDED.as_bytes() {
        return None;
    }
    let length: u16 = std::str::from_utf8(words.next()?).ok()?.parse().ok()?;
    Some(length.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt as _;
    use std::process::Command;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::{fs, process, thread};

    use super::EchoServer;

    /// Returns a port that the kernel never chooses for the sockets of other tests. If the kernel has chosen a port for
    /// a client's socket, the port can stay in use for a minute (`TIME_WAIT`) after the client's process has exited.
    fn port_below_the_chosen_ones() -> u16 {
        let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
        let lowest: u16 = range.split_whitespace().next().unwrap().parse().unwrap();
        lowest - 1 - u16::try_from(process::id() % 500).unwrap()
    }

    /// A port can be bound again although other tests start programs at any time. Between fork and execve, each child
    /// process holds copies of this test's sockets.
    #[test]
    fn a_port_can_be_reused_while_child_processes_are_started() {
        let is_over = AtomicBool::new(false);
        let start_programs = || {
            while !is_over.load(Ordering::Relaxed) {
                let mut program = Command::new("true");
                #[expect(unsafe_code, reason = "with a pre_exec hook, the standard library forks")]
                // SAFETY: the hook does nothing.
                unsafe {
                    program.pre_exec(|| Ok(()));
                }
                assert!(program.status().unwrap().success());
            }
        };
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(start_programs);
            }
            let port = port_below_the_chosen_ones();
            let servers = (0..100).map(|_| EchoServer::start("next", &[port]).map(drop));
            let outcome: Result<Vec<()>, _> = servers.collect();
            is_over.store(true, Ordering::Relaxed);
            outcome.unwrap();
        });
    }
}
