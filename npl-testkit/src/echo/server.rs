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
use crate::netns::Netns;
use crate::poll;

/// How long a thread may sit in a system call before it looks whether it has to end, should nothing wake it. Hundreds of
/// servers on one machine are not to be a load by themselves.
const LOOK: Duration = Duration::from_millis(500);

/// How long a client may say nothing before its connection is closed.
const CLIENT_PAUSE: Duration = Duration::from_secs(30);

/// How long it may take until a program that was started is executed.
const EXECUTION: Duration = Duration::from_secs(5);

/// Waiting connections: more than any test opens at once.
const BACKLOG: i32 = 1024;

/// A running echo server, stopped on drop.
#[derive(Debug)]
pub struct EchoServer {
    shared: Arc<Shared>,
    sockets: Vec<Socket>,
    threads: Vec<JoinHandle<()>>,
}

/// What a server says of itself.
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
    /// Serves TCP and UDP on every one of `ports`, in the namespace of the calling thread.
    pub fn start(pod: &str, ports: &[u16]) -> Result<Self> {
        Self::start_on(pod, None, ports)
    }

    /// As [`Self::start`], by a server that knows its Node.
    pub fn start_on(pod: &str, node: Option<&str>, ports: &[u16]) -> Result<Self> {
        let identity = Identity { pod: pod.to_owned(), node: node.map(str::to_owned) };
        let shared = Shared { identity, stop: AtomicBool::new(false), connections: Mutex::new(Vec::new()) };
        let mut server = Self { shared: Arc::new(shared), sockets: Vec::new(), threads: Vec::new() };
        for port in ports {
            server.serve(*port).with_context(|| format!("serve port {port} as {pod}"))?;
        }
        Ok(server)
    }

    /// As [`Self::start`], inside `netns`.
    pub fn start_in(netns: &Netns, pod: &str, ports: &[u16]) -> Result<Self> {
        netns.run(|| Self::start(pod, ports))?
    }

    /// As [`Self::start_in`], for SCTP alone.
    pub fn start_sctp_in(netns: &Netns, pod: &str, port: u16) -> Result<Self> {
        netns.run(|| {
            let mut server = Self::start(pod, &[])?;
            let listener = bind(Type::STREAM, Protocol::Sctp, port)?;
            server.sockets.push(listener.try_clone()?);
            server.listen(listener.into(), Protocol::Sctp);
            Ok(server)
        })?
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
            // It wakes whoever waits, also where it says that a socket without a peer cannot be shut down.
            drop(socket.shutdown(Shutdown::Both));
        }
        for connection in self.shared.connections.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            if let Some(stream) = connection.upgrade() {
                // It may be closed already.
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
    // A server that was just stopped leaves connections in TIME_WAIT.
    socket.set_reuse_address(kind == Type::STREAM)?;
    socket.set_read_timeout(Some(LOOK))?;
    bind_once_free(&socket, address)?;
    if kind == Type::STREAM {
        socket.listen(BACKLOG)?;
    }
    Ok(socket)
}

/// A program that somebody starts is a copy of this process until it is executed, with the sockets of servers that were stopped
/// meanwhile: their ports are not free before.
fn bind_once_free(socket: &Socket, address: SocketAddr) -> io::Result<()> {
    let mut outcome = Ok(());
    let is_settled = || {
        outcome = socket.bind(&address.into());
        outcome.as_ref().err().is_none_or(|error| error.kind() != io::ErrorKind::AddrInUse).then_some(())
    };
    // What the kernel said last tells more than that the time is over.
    drop(poll::until("a free port", EXECUTION, is_settled));
    outcome
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>, protocol: Protocol) {
    while !shared.stop.load(Ordering::Relaxed) {
        let Ok((stream, _client)) = listener.accept() else { continue };
        // A connection inherits the listener's short time-out, in which a client on a loaded machine says nothing.
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
            // A client that goes away in the middle is no concern of the server.
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
            // The client asks again when the answer was lost.
            drop(socket.send_to(line.as_bytes(), client));
        }
    }
}

/// How long the answer to a datagram has to be, if it says so.
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
    use std::thread;

    use super::EchoServer;

    /// Tests start programs all the time, and each is a copy of the test with all of its sockets until it is executed.
    #[test]
    fn a_server_follows_another_by_its_port_whatever_is_started_meanwhile() {
        let is_over = AtomicBool::new(false);
        let start_programs = || {
            while !is_over.load(Ordering::Relaxed) {
                let mut program = Command::new("true");
                #[expect(unsafe_code, reason = "with it, the standard library makes a copy of the process")]
                // SAFETY: it does nothing.
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
            let first = EchoServer::start("first", &[0]).unwrap();
            let port = first.sockets[1].local_addr().unwrap().as_socket().unwrap().port();
            drop(first);
            let servers = (0..100).map(|_| EchoServer::start("next", &[port]).map(drop));
            let outcome: Result<Vec<()>, _> = servers.collect();
            is_over.store(true, Ordering::Relaxed);
            outcome.unwrap();
        });
    }
}
