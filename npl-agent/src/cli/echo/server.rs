// SPDX-License-Identifier: Apache-2.0
//! The echo server, with one thread for each listening socket and one for each connection.

use std::{
    io::{self, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::Context as _;
use socket2::{Domain, Socket, Type};

use super::{Header, MAGIC, MAX_BYTES, framed, read_framed, socket_kind};
use crate::{
    cli::note,
    config::echo_args::{EchoServeArgs, Listen},
    core::model::Protocol,
};

/// The time after which an idle connection is closed.
const IDLE: Duration = Duration::from_mins(2);
/// The maximum number of open connections to one listening socket. The number is limited, because any client of the
/// node port can connect.
const MAX_CONNECTIONS: usize = 32;
/// The backlog of a listening socket: the number of connections that the kernel queues until the server accepts them.
const BACKLOG: i32 = 64;

/// Runs the echo server until the process is killed.
#[expect(clippy::infinite_loop, reason = "the Pod's deletion ends the process")]
pub(super) fn serve(args: &EchoServeArgs) -> anyhow::Result<()> {
    start(args)?;
    loop {
        thread::park();
    }
}

/// Starts a thread for each listening socket, and returns the ports of the sockets. If the kernel has no SCTP, opens no
/// socket for SCTP.
pub(super) fn start(args: &EchoServeArgs) -> anyhow::Result<Vec<u16>> {
    let name: Arc<str> = args.name.as_str().into();
    let mut ports = Vec::new();
    for Listen { protocol, port } in args.listen.iter().copied() {
        let socket = match bind(protocol, port) {
            Err(error) if protocol == Protocol::Sctp => {
                note(&format!("the kernel offers no SCTP: {error}"));
                continue;
            }
            bound => bound.with_context(|| format!("bind port {port}/{protocol}"))?,
        };
        ports.extend(socket.local_addr()?.as_socket().map(|address| address.port()));
        let name = Arc::clone(&name);
        if protocol == Protocol::Udp {
            thread::spawn(move || answer_datagrams(&socket.into(), &name));
        } else {
            thread::spawn(move || accept(&socket.into(), &name));
        }
    }
    Ok(ports)
}

/// Opens a socket for both IP families, or for IPv4 if the Pod has no IPv6.
fn bind(protocol: Protocol, port: u16) -> io::Result<Socket> {
    let open = |domain, ip: IpAddr| -> io::Result<Socket> {
        let (kind, number) = socket_kind(protocol);
        let socket = Socket::new(domain, kind, Some(number))?;
        if domain == Domain::IPV6 {
            socket.set_only_v6(false)?;
        }
        socket.bind(&SocketAddr::new(ip, port).into())?;
        if kind == Type::STREAM {
            socket.listen(BACKLOG)?;
        }
        Ok(socket)
    };
    open(Domain::IPV6, Ipv6Addr::UNSPECIFIED.into())
        .or_else(|_no_ipv6| open(Domain::IPV4, Ipv4Addr::UNSPECIFIED.into()))
}

#[expect(clippy::infinite_loop, reason = "the Pod's deletion ends the process")]
fn answer_datagrams(socket: &UdpSocket, name: &str) {
    let mut buffer = vec![0; MAX_BYTES];
    loop {
        let Ok((length, client)) = socket.recv_from(&mut buffer) else { continue };
        if let Some(answer) = buffer.get(..length).and_then(|payload| answer(name, client, payload)) {
            // A failure is ignored, because the client repeats a request that is not answered.
            drop(socket.send_to(&answer, client));
        }
    }
}

#[expect(clippy::infinite_loop, reason = "the Pod's deletion ends the process")]
fn accept(listener: &TcpListener, name: &Arc<str>) {
    let connections = Arc::new(());
    loop {
        let Ok((stream, client)) = listener.accept() else { continue };
        if Arc::strong_count(&connections) > MAX_CONNECTIONS {
            continue;
        }
        let (name, counted) = (Arc::clone(name), Arc::clone(&connections));
        thread::spawn(move || {
            // Errors are ignored, because the client may close the connection at any time.
            drop(answer_stream(&stream, client, &name));
            drop(counted);
        });
    }
}

fn answer_stream(mut stream: &TcpStream, client: SocketAddr, name: &str) -> io::Result<()> {
    stream.set_read_timeout(Some(IDLE))?;
    loop {
        let answer = answer(name, client, &read_framed(stream)?).ok_or(io::ErrorKind::InvalidData)?;
        stream.write_all(&framed(&answer))?;
    }
}

/// Returns the answer to a request; `None` if the payload does not begin with [`MAGIC`].
fn answer(name: &str, client: SocketAddr, payload: &[u8]) -> Option<Vec<u8>> {
    // A socket for both IP families reports IPv4 clients as IPv4-mapped IPv6 addresses, so the address is converted.
    let header = Header { pod: name.to_owned(), seen: client.ip().to_canonical() };
    let mut answer = payload.starts_with(MAGIC).then(|| serde_json::to_vec(&header).ok())??;
    answer.push(b'\n');
    answer.extend_from_slice(payload);
    Some(answer)
}
