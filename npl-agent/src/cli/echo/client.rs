// SPDX-License-Identifier: Apache-2.0
//! The client of the echo server.

use std::{
    io::{self, Read as _, Write as _},
    net::TcpStream,
    thread,
    time::Duration,
};

use socket2::{Domain, Socket};

use super::{Header, MAX_BYTES, MAX_NAME, framed, payload, read_framed, socket_kind};
use crate::core::{
    model::Protocol,
    path_test::{Observation, Probe, Reply},
};

/// The time limit of a connection attempt. Within this limit, the kernel sends a TCP SYN immediately, after one second
/// and after three seconds; since Linux 6.5, immediately and after each second.
const CONNECT: Duration = Duration::from_secs(4);
/// The time limit for the answer to a request on a connection.
const ANSWER: Duration = Duration::from_secs(4);
/// The time limits for the answer to a datagram. If no answer arrives within a limit, the datagram is sent again and
/// the next limit of this list applies.
const DATAGRAMS: [Duration; 3] = [Duration::from_millis(500), Duration::from_secs(1), Duration::from_millis(1_500)];

/// Sends all requests at the same time, and returns the results in the order of the requests.
pub(in crate::cli) fn ask_all(probes: &[Probe]) -> Vec<Observation> {
    thread::scope(|scope| {
        #[expect(clippy::needless_collect, reason = "all threads start before the first is joined")]
        let clients: Vec<_> =
            probes.iter().map(|probe| scope.spawn(move || Connection::open(*probe).observe())).collect();
        let failed = || Observation::NotSent("the client's thread panicked".to_owned());
        clients.into_iter().map(|client| client.join().unwrap_or_else(|_panic| failed())).collect()
    })
}

/// A socket that is connected to an echo server.
#[derive(Debug)]
pub(super) struct Connection {
    probe: Probe,
    /// The socket, or the failure to open the connection. After a failure, every request on this connection returns the
    /// failure as its result.
    socket: Result<Socket, Observation>,
}

impl Connection {
    pub(super) fn open(probe: Probe) -> Self {
        let domain = Domain::for_address(probe.address);
        let (kind, number) = socket_kind(probe.protocol);
        let not_sent = |error: io::Error| Observation::NotSent(format!("no {} socket: {error}", probe.protocol));
        let socket = Socket::new(domain, kind, Some(number)).map_err(not_sent).and_then(|socket| {
            let address = probe.address.into();
            let connected = socket.connect_timeout(&address, CONNECT);
            connected.map(|()| socket).map_err(|error| failure("connect", &error, false))
        });
        Self { probe, socket }
    }

    /// Sends a request, and waits for the answer.
    pub(super) fn observe(&self) -> Observation {
        let socket = match &self.socket {
            Ok(socket) => socket,
            Err(observation) => return observation.clone(),
        };
        let request = payload(self.probe.bytes);
        let answer = match self.probe.protocol {
            Protocol::Udp => ask_by_datagram(socket, &request),
            Protocol::Tcp | Protocol::Sctp => ask_by_stream(socket, &request),
        };
        match answer {
            // A stream is connected only after the host has replied to the connection attempt. Connecting a UDP socket
            // sends no packet, so the host may not have replied yet.
            Err(error) => failure("request", &error, self.probe.protocol != Protocol::Udp),
            Ok(answer) => read(socket, &answer, &request)
                .map_or_else(|| Observation::Refused("the answer is damaged".to_owned()), Observation::Answered),
        }
    }
}

fn ask_by_datagram(mut socket: &Socket, request: &[u8]) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; MAX_BYTES];
    let mut outcome = Err(io::ErrorKind::TimedOut.into());
    for limit in DATAGRAMS {
        socket.set_read_timeout(Some(limit))?;
        outcome = socket.write(request).and_then(|_sent| socket.read(&mut buffer));
        if outcome.is_ok() {
            break;
        }
    }
    buffer.truncate(outcome?);
    Ok(buffer)
}

fn ask_by_stream(mut socket: &Socket, request: &[u8]) -> io::Result<Vec<u8>> {
    socket.set_read_timeout(Some(ANSWER))?;
    socket.write_all(&framed(request))?;
    read_framed(socket)
}

fn read(socket: &Socket, answer: &[u8], request: &[u8]) -> Option<Reply> {
    let header = answer.strip_suffix(request)?;
    let Header { pod, seen } = serde_json::from_slice(header).ok()?;
    // The answer may come from a server that is not an echo server. The Pod's name in the answer is printed to a
    // terminal, so only the characters of valid Pod names are accepted.
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
    if pod.len() > MAX_NAME || !pod.chars().all(is_name) {
        return None;
    }
    let local = socket.local_addr().ok().and_then(|address| address.as_socket()).map(|address| address.ip());
    Some(Reply { pod, seen, local: local.filter(|ip| !ip.is_unspecified()) })
}

/// Returns the result of a request for which a system call failed. `has_replied` states whether the host has already
/// replied to a packet of this connection.
fn failure(phase: &str, error: &io::Error, has_replied: bool) -> Observation {
    if has_replied || error.kind() == io::ErrorKind::ConnectionRefused {
        Observation::Refused(reason(phase, error))
    } else {
        Observation::NoAnswer(reason(phase, error))
    }
}

/// Describes why there is no answer. The kernel reports an exceeded time limit by one of two errors; both get the same
/// text.
fn reason(phase: &str, error: &io::Error) -> String {
    let is = |kinds: &[io::ErrorKind]| kinds.contains(&error.kind());
    if is(&[io::ErrorKind::TimedOut, io::ErrorKind::WouldBlock]) {
        format!("{phase}: no answer")
    } else if is(&[io::ErrorKind::ConnectionRefused]) {
        format!("{phase}: connection refused")
    } else if is(&[io::ErrorKind::UnexpectedEof]) {
        format!("{phase}: the server closed the connection")
    } else {
        format!("{phase}: {error}")
    }
}

/// Returns whether a host answers a TCP connection attempt, by accepting or refusing the connection.
pub(in crate::cli) fn is_reachable(address: std::net::SocketAddr) -> bool {
    match TcpStream::connect_timeout(&address, CONNECT) {
        Ok(_connected) => true,
        Err(error) => error.kind() == io::ErrorKind::ConnectionRefused,
    }
}
