// SPDX-License-Identifier: Apache-2.0
//! `npl-agent echo`: the echo server and the client that run in the Pods of `kubectl npl test`.
//!
//! A request is a payload that begins with [`MAGIC`]. An answer is a line of JSON followed by the payload. On TCP and
//! SCTP, a request or an answer is preceded by its length in four bytes.

mod client;
mod server;

use std::{
    collections::BTreeSet,
    io::{self, BufRead as _, Read},
    net::IpAddr,
    thread,
};

use anyhow::Context as _;
use nix::ifaddrs::getifaddrs;
use serde::{Deserialize, Serialize};
use socket2::Type;

pub(super) use self::client::{ask_all, is_reachable};
use super::{print, print_json};
use crate::{config::echo_args::EchoCommand, core::model::Protocol};

/// The beginning of each request. The server does not answer a payload that begins differently.
const MAGIC: &[u8] = b"npl-echo ";
/// The maximum length in bytes of a payload and of an answer, so that each fits into one datagram.
const MAX_BYTES: usize = 60_000;
/// The maximum length of a Pod's name, in bytes.
const MAX_NAME: usize = 253;

/// The first line of an answer.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    pod: String,
    seen: IpAddr,
}

/// Runs one command of `npl-agent echo`: the echo server, a client of an echo server, or a client that sends one
/// request on an open connection for each line of standard input. Two other commands print the addresses of this
/// network namespace, or wait until the process is killed.
///
/// # Errors
///
/// If the server cannot bind its sockets, if the addresses or standard input cannot be read, or if standard output
/// cannot be written.
pub fn run(command: &EchoCommand) -> anyhow::Result<()> {
    match command {
        EchoCommand::Serve(args) => server::serve(args),
        EchoCommand::Ask { probes } => print_json(&ask_all(probes)),
        EchoCommand::Wait => wait(),
        EchoCommand::Addresses => print_json(&addresses()?),
        EchoCommand::Hold { probe } => {
            let connection = client::Connection::open(*probe);
            print(&(serde_json::to_string(&connection.observe())? + "\n"))?;
            for line in io::stdin().lock().lines() {
                line?;
                print(&(serde_json::to_string(&connection.observe())? + "\n"))?;
            }
            Ok(())
        }
    }
}

fn wait() -> ! {
    loop {
        thread::park();
    }
}

/// Returns the addresses of all network devices of this network namespace, except loopback addresses.
fn addresses() -> anyhow::Result<BTreeSet<IpAddr>> {
    let all = getifaddrs().context("read the addresses of the network devices")?;
    let addresses = all.filter_map(|it| {
        let address = it.address?;
        let v4 = address.as_sockaddr_in().map(|it| IpAddr::from(it.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|it| it.ip().into()))
    });
    Ok(addresses.filter(|ip| !ip.is_loopback()).collect())
}

/// Returns the socket type and the protocol number with which a socket of this protocol is created.
fn socket_kind(protocol: Protocol) -> (Type, socket2::Protocol) {
    let kind = if protocol == Protocol::Udp { Type::DGRAM } else { Type::STREAM };
    (kind, socket2::Protocol::from(i32::from(protocol.number())))
}

/// Encodes a message for a stream: the message's length in four bytes, followed by the message.
fn framed(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    [&length.to_be_bytes(), message].concat()
}

/// Reads a message from a stream.
fn read_framed(mut stream: impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
    let mut message = vec![0; Some(length).filter(|length| *length <= MAX_BYTES).ok_or(io::ErrorKind::InvalidData)?];
    stream.read_exact(&mut message)?;
    Ok(message)
}

/// Creates a payload of this length, which begins with [`MAGIC`].
fn payload(bytes: usize) -> Vec<u8> {
    let filler = (0_u8..=u8::MAX).cycle();
    MAGIC.iter().copied().chain(filler).take(bytes.clamp(MAGIC.len(), MAX_BYTES)).collect()
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use super::{client, server};
    use crate::{
        config::echo_args::{EchoServeArgs, Listen},
        core::{
            model::Protocol,
            path_test::{LARGE, Observation, Probe, Reply, SMALL},
        },
    };

    /// Starts an echo server, whose threads end with the test process.
    fn start(protocol: Protocol) -> SocketAddr {
        let args = EchoServeArgs { name: "echo-1".to_owned(), listen: vec![Listen { protocol, port: 0 }] };
        let [port] = server::start(&args).unwrap()[..] else { panic!("one port") };
        (Ipv4Addr::LOCALHOST, port).into()
    }

    fn answered() -> Observation {
        let ip = Ipv4Addr::LOCALHOST.into();
        Observation::Answered(Reply { pod: "echo-1".to_owned(), seen: ip, local: Some(ip) })
    }

    #[test]
    fn streams_and_datagrams_return_the_payload_the_name_and_the_clients_address() {
        let probes: Vec<Probe> = [(Protocol::Tcp, SMALL), (Protocol::Udp, SMALL), (Protocol::Udp, LARGE)]
            .map(|(protocol, bytes)| Probe { protocol, address: start(protocol), bytes })
            .into();
        assert_eq!(client::ask_all(&probes), [answered(), answered(), answered()]);
    }

    #[test]
    fn a_connection_carries_several_requests() {
        let address = start(Protocol::Tcp);
        let connection = client::Connection::open(Probe { protocol: Protocol::Tcp, address, bytes: SMALL });
        assert_eq!([connection.observe(), connection.observe()], [answered(), answered()]);
    }

    #[test]
    fn a_refused_connection_is_an_observation() {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        let observed = client::ask_all(&[Probe { protocol: Protocol::Tcp, address, bytes: SMALL }]);
        assert!(matches!(&observed[..], [Observation::Refused(reason)] if reason.contains("refused")), "{observed:?}");
    }
}
