// SPDX-License-Identifier: Apache-2.0
//! Clients of the echo server. Each client opens its socket in a given network namespace, and every wait has a
//! deadline.

mod load;
mod sctp;
mod transfer;

use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

pub use self::load::{Failure, Load, Report, Request};
pub use self::sctp::{has_sctp, open_sctp};
pub use self::transfer::{Direction, Transfer, TransferReport, transfer};
use crate::echo::pattern::{Digest, Pattern};
use crate::echo::{Answer, PADDED, Protocol};
use crate::netns::Netns;
use crate::poll;

const REQUEST_LIMIT: Duration = Duration::from_secs(2);

/// The time limit of a request: two seconds, extended on slow or loaded machines ([`poll::extended`]).
pub fn request_limit() -> Duration {
    poll::extended(REQUEST_LIMIT)
}

/// The time limit of a request under load, far above response times on a loaded machine. A request without a response
/// by then counts as lost.
pub(crate) const LOAD_LIMIT: Duration = Duration::from_secs(10);

/// The time limit for the reaction to a duplicate: the DSACK for a retransmitted segment, or the response to a repeated
/// UDP request. The peer sends the reaction as soon as the duplicate arrives.
const DUPLICATE_LIMIT: Duration = Duration::from_secs(1);

/// The time after which a client repeats a UDP request, longer on slow machines.
const RETRY_AFTER: Duration = Duration::from_millis(200);

/// A response to a UDP request. The client repeats the request while no response arrives in time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UdpAnswer {
    /// The server's response.
    pub answer: Answer,
    /// The number of requests sent; 1 if the first response arrived in time.
    pub attempts: u32,
    /// The time from the first request to the first response.
    pub took: Duration,
    /// Whether a request or its response was lost. A response that was only late is not lost.
    pub has_lost: bool,
}

/// The options of a UDP request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpOptions {
    /// Whether datagrams have a checksum; if not, the checksum field is zero (IPv4 only).
    pub checksum: bool,
    /// The maximum number of datagrams that the client sends until the server answers one.
    pub attempts: u32,
}

impl Default for UdpOptions {
    fn default() -> Self {
        Self { checksum: true, attempts: 10 }
    }
}

/// Sends one request over TCP.
pub fn tcp_request(from: &Netns, server: SocketAddr, question: &str) -> Result<Answer> {
    request(from, Protocol::Tcp, server, question)
}

/// Opens a TCP connection; [`request_limit`] applies to each read and write.
pub fn tcp_connect(from: &Netns, server: SocketAddr) -> Result<TcpStream> {
    from.run(|| open_tcp(server, request_limit()))?.with_context(|| format!("open a connection from {}", from.name()))
}

/// Opens a connection as [`tcp_connect`] does, but in the namespace of the calling thread and with the time limit
/// `limit`.
pub(crate) fn open_tcp(server: SocketAddr, limit: Duration) -> Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&server, limit).with_context(|| format!("connect to {server}"))?;
    stream.set_read_timeout(Some(limit)).context("set a read timeout")?;
    stream.set_write_timeout(Some(limit)).context("set a write timeout")?;
    stream.set_nodelay(true).context("set TCP_NODELAY")?;
    Ok(stream)
}

/// Sends one request over an open connection.
pub fn tcp_ask(mut stream: &TcpStream, question: &str) -> Result<Answer> {
    let line = format!("{question}\n");
    stream.write_all(line.as_bytes()).context("send the request")?;
    let mut reply = String::new();
    BufReader::new(stream.take(64 * 1024)).read_line(&mut reply).context("wait for the response")?;
    ensure!(!reply.is_empty(), "the connection was closed without a response");
    let answer: Answer = serde_json::from_str(&reply).with_context(|| format!("parse the response `{reply}`"))?;
    ensure!(
        answer.digest == Digest::of(line.as_bytes()).to_string(),
        "the request was corrupted on its way: {answer:?}"
    );
    Ok(answer)
}

/// Sends one request over UDP and repeats it if there is no response.
pub fn udp_request(from: &Netns, server: SocketAddr, question: &[u8], options: UdpOptions) -> Result<UdpAnswer> {
    let (socket, start) = (udp_socket(from, server, options.checksum)?, Instant::now());
    for attempts in 1..=options.attempts {
        socket.send(question).with_context(|| format!("send a datagram to {server}"))?;
        if let Some(answer) = udp_receive(&socket, question, poll::extended(RETRY_AFTER))? {
            let took = start.elapsed();
            // The server answers each request that arrives, so one response follows for each repetition, unless a
            // request or a response was lost.
            let mut answered = 1;
            while answered < attempts && udp_receive(&socket, question, poll::extended(DUPLICATE_LIMIT))?.is_some() {
                answered += 1;
            }
            return Ok(UdpAnswer { answer, attempts, took, has_lost: answered < attempts });
        }
    }
    bail!("{server} did not answer {} datagrams", options.attempts)
}

/// Opens a UDP socket that is connected to `server`.
pub fn udp_socket(from: &Netns, server: SocketAddr, checksum: bool) -> Result<UdpSocket> {
    let open = || open_udp(server, checksum);
    from.run(open)?.with_context(|| format!("open a UDP socket to {server} in {}", from.name()))
}

/// Opens a socket as [`udp_socket`] does, in the namespace of the calling thread.
pub(crate) fn open_udp(server: SocketAddr, checksum: bool) -> std::io::Result<UdpSocket> {
    let any = if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0))?;
    if !checksum {
        send_without_checksum(&socket)?;
    }
    socket.connect(server)?;
    Ok(socket)
}

/// Sends one request over an open socket, without retransmission.
pub fn udp_ask(socket: &UdpSocket, question: &str) -> Result<Answer> {
    udp_ask_within(socket, question, request_limit())
}

/// Sends one request as [`udp_ask`] does, with another time limit.
pub(crate) fn udp_ask_within(socket: &UdpSocket, question: &str, limit: Duration) -> Result<Answer> {
    socket.send(question.as_bytes()).context("send a datagram")?;
    udp_receive(socket, question.as_bytes(), limit)?
        .with_context(|| format!("no response within {} s", limit.as_secs()))
}

/// Sends a request of `question_bytes` and expects a response of `answer_bytes`; large sizes cause fragmentation.
pub fn udp_exchange(from: &Netns, server: SocketAddr, question_bytes: usize, answer_bytes: usize) -> Result<Answer> {
    let mut question = format!("{PADDED} {answer_bytes} ").into_bytes();
    ensure!(
        question.len() <= question_bytes,
        "a request of {question_bytes} bytes is too short to state the response length"
    );
    let filler = question_bytes - question.len();
    Pattern::new(answer_bytes as u64, filler as u64).read_to_end(&mut question).context("fill the request")?;
    let socket = udp_socket(from, server, true)?;
    socket.send(&question).with_context(|| format!("send {question_bytes} bytes to {server}"))?;
    let (answer, length) = udp_receive_sized(&socket, &question, request_limit())?
        .with_context(|| format!("no response from {server} to a request of {question_bytes} bytes"))?;
    ensure!(length == answer_bytes, "the response has {length} bytes instead of {answer_bytes}");
    Ok(answer)
}

/// Waits for the response to `question` and skips responses to earlier requests.
pub fn udp_receive(socket: &UdpSocket, question: &[u8], limit: Duration) -> Result<Option<Answer>> {
    Ok(udp_receive_sized(socket, question, limit)?.map(|(answer, _length)| answer))
}

/// Waits as [`udp_receive`] does, and also returns the length of the response.
fn udp_receive_sized(socket: &UdpSocket, question: &[u8], limit: Duration) -> Result<Option<(Answer, usize)>> {
    let digest = Digest::of(question).to_string();
    let start = Instant::now();
    let mut buffer = vec![0; usize::from(u16::MAX)];
    loop {
        let left = limit.saturating_sub(start.elapsed());
        if left.is_zero() {
            return Ok(None);
        }
        socket.set_read_timeout(Some(left)).context("set a read timeout")?;
        match socket.recv(&mut buffer) {
            Ok(length) => {
                let reply = buffer.get(..length).unwrap_or_default();
                let answer: Answer = serde_json::from_slice(reply).context("parse the response")?;
                if answer.digest == digest {
                    return Ok(Some((answer, length)));
                }
            }
            // Receive again after an interruption, as `poll::uninterrupted` does, but only for the remaining time.
            Err(err) if err.kind() == ErrorKind::Interrupted => {}
            Err(err) if matches!(err.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => return Ok(None),
            Err(err) => return Err(err).context("wait for a response"),
        }
    }
}

/// Sends one request over `protocol` without repetition: a lost datagram is an error.
pub fn request(from: &Netns, protocol: Protocol, server: SocketAddr, question: &str) -> Result<Answer> {
    from.run(|| ask(protocol, server, question))?.with_context(|| format!("send a request from {}", from.name()))
}

/// Sends a request as [`request`] does, in the namespace of the calling thread.
pub fn ask(protocol: Protocol, server: SocketAddr, question: &str) -> Result<Answer> {
    ask_within(protocol, server, question, request_limit())
        .with_context(|| format!("send a request to {server} over {protocol}"))
}

/// Sends a request as [`ask`] does, with another time limit.
pub(crate) fn ask_within(protocol: Protocol, server: SocketAddr, question: &str, limit: Duration) -> Result<Answer> {
    match protocol {
        Protocol::Tcp => tcp_ask(&open_tcp(server, limit)?, question),
        Protocol::Udp => {
            let socket = open_udp(server, true).with_context(|| format!("open a UDP socket to {server}"))?;
            udp_ask_within(&socket, question, limit)
        }
        Protocol::Sctp => tcp_ask(&open_sctp(server, limit)?, question),
    }
}

/// Whether a segment of the client, its SYN included, was lost. The kernel also retransmits a segment whose
/// acknowledgment is late, for example after the machine was paused. The server reports a segment that arrived twice by
/// a DSACK (RFC 2883), so a segment was lost if the kernel has retransmitted more segments than DSACKs arrived. The
/// server answers a repeated SYN without a DSACK, so each repeated SYN counts as lost. Lost packets of the server do
/// not count.
pub fn has_lost_segments(stream: &TcpStream) -> std::io::Result<bool> {
    // A DSACK may arrive after the answer.
    let nothing_is_lost = || match segments(stream) {
        Ok(Segments { retransmitted, duplicates }) => (retransmitted <= duplicates).then_some(Ok(())),
        Err(error) => Some(Err(error)),
    };
    match poll::until("a DSACK of each retransmitted segment", DUPLICATE_LIMIT, nothing_is_lost) {
        Ok((outcome, _)) => outcome.map(|()| false),
        Err(_lost) => Ok(true),
    }
}

/// Counters of a TCP connection.
struct Segments {
    /// The segments, SYNs included, that the kernel has retransmitted.
    retransmitted: u32,
    /// The DSACKs that the peer has sent.
    duplicates: u32,
}

#[expect(unsafe_code, reason = "no library in use wraps TCP_INFO")]
fn segments(stream: &TcpStream) -> std::io::Result<Segments> {
    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut length = libc::socklen_t::try_from(size_of::<libc::tcp_info>()).map_err(std::io::Error::other)?;
    let value = info.as_mut_ptr().cast();
    // SAFETY: the socket is open, and the kernel writes at most `length` bytes to `info`, which outlives the call.
    let result =
        unsafe { libc::getsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, value, &raw mut length) };
    if result != 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: all fields are integers, and `info` was zeroed.
    let info = unsafe { info.assume_init() };
    Ok(Segments { retransmitted: info.tcpi_total_retrans, duplicates: info.tcpi_dsack_dups })
}

#[expect(unsafe_code, reason = "no library in use wraps SO_NO_CHECK")]
fn send_without_checksum(socket: &UdpSocket) -> std::io::Result<()> {
    let on: libc::c_int = 1;
    let length = libc::socklen_t::try_from(size_of_val(&on)).map_err(std::io::Error::other)?;
    // SAFETY: the socket is open, and the option's value is an int that outlives the call.
    let result = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_NO_CHECK, (&raw const on).cast(), length)
    };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}
