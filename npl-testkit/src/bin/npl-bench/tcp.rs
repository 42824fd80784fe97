// SPDX-License-Identifier: Apache-2.0
//! Selects the processors for both ends of a measured TCP connection, and opens the connection.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::num::NonZero;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use anyhow::{Context as _, Result};
use nix::unistd::Pid;
use npl_testkit::{process, traffic};
use socket2::{Domain, Socket, Type};

/// The processors of client and Pod are fixed, as if both were separate machines. Without fixed processors, the
/// scheduler's decisions would affect the results more than the measured path does.
pub(crate) const CLIENT_CPU: usize = 0;
pub(crate) const SERVER_CPU: usize = 1;

/// The client's ports: more than the connections that the client opens in the 60 s of `TIME_WAIT`.
const PORTS: RangeInclusive<u16> = 10_000..=59_999;

/// Pins a thread to a processor. On a machine with one processor, client and Pod share this processor.
pub(crate) fn keep_on(thread: Pid, cpu: usize) -> Result<()> {
    process::keep_on(thread, cpu % thread::available_parallelism().map_or(1, NonZero::get))
}

/// Pins the calling thread, and threads that it starts later, to a processor.
pub(crate) fn stay_on(cpu: usize) -> Result<()> {
    keep_on(Pid::from_raw(0), cpu)
}

/// Connects from the least recently used client port. Connections from the same client port that differ only in the
/// node port would have the same flow tuple at the Pod.
pub(crate) fn connect(server: SocketAddr) -> Result<TcpStream> {
    static CONNECTIONS: AtomicU32 = AtomicU32::new(0);
    let port = port(CONNECTIONS.fetch_add(1, Ordering::Relaxed));
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).context("open a socket")?;
    socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)).into()).with_context(|| format!("bind to {port}"))?;
    socket.connect_timeout(&server.into(), traffic::request_limit()).context("connect")?;
    let stream = TcpStream::from(socket);
    set_up(&stream)?;
    Ok(stream)
}

/// Returns the client port of the connection with this number. A port is used again only after all other ports.
fn port(connection: u32) -> u16 {
    let index = connection % u32::try_from(PORTS.len()).unwrap_or(u32::MAX);
    PORTS.start() + u16::try_from(index).unwrap_or_default()
}

/// Disables Nagle's algorithm and limits the time of reads.
pub(crate) fn set_up(stream: &TcpStream) -> Result<()> {
    stream.set_nodelay(true).context("set TCP_NODELAY")?;
    stream.set_read_timeout(Some(traffic::request_limit())).context("set a read timeout")
}

#[cfg(test)]
mod tests {
    use super::{PORTS, port};

    #[test]
    fn a_port_is_reused_only_after_all_others() {
        let ports: Vec<u16> = (0..150_000).map(port).collect();
        assert!(ports.chunks(50_000).all(|round| round.iter().copied().eq(PORTS)));
    }
}
