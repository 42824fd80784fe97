// SPDX-License-Identifier: Apache-2.0
//! Serves DNS: the name `_PORT._PROTOCOL.SERVICE.NAMESPACE.ZONE` has an SRV record for each ready member of a Service
//! port.

mod names;
mod tcp;
mod udp;
mod zone;

#[cfg(test)]
mod fuzz_tests;
#[cfg(test)]
mod limits_tests;
#[cfg(test)]
mod tests;

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, Once},
};

use hickory_server::{
    net::xfer::Protocol,
    proto::{
        op::{Edns, Header, Message, MessageType, Metadata, OpCode, ResponseCode},
        rr::{DNSClass, Name, Record},
        serialize::binary::{BinDecodable as _, BinDecoder, BinEncoder},
    },
    server::Request,
    zone_handler::MessageResponseBuilder,
};
use ipnet::IpNet;
use npl_agent::core::pages;
use tokio::{
    net::{TcpListener, UdpSocket},
    task::{JoinError, JoinSet},
};

use self::zone::Answer;
pub use self::{names::of_port, zone::Zone};
use crate::{
    access,
    follow::Published,
    status::{ClientRefusal, Status},
};

/// The name of the DNS interface, as the value of the label `interface` in metrics.
const INTERFACE: &str = "dns";
/// The maximum size in bytes of a UDP answer. If an answer is larger, the client has to repeat the query by TCP. DNS
/// software uses this size by default: an answer of this size is not fragmented, and a query with a forged source
/// address causes only a small answer.
const LARGEST_DATAGRAM: u16 = 1232;
/// The size in bytes of a UDP answer that every client accepts.
const SMALLEST_DATAGRAM: u16 = 512;
/// Ensures that the warning about an answer above the size limit of DNS by TCP is logged only once.
static WARNED: Once = Once::new();
/// The maximum number of attempts to find a port that is free for both UDP and TCP.
const PORT_ATTEMPTS: usize = 100;

/// The UDP socket and the TCP socket of the DNS server.
#[derive(Debug)]
pub struct Sockets {
    udp: UdpSocket,
    tcp: TcpListener,
}

impl Sockets {
    /// Binds a UDP and a TCP socket to an address. Port 0 selects a port that is free for both protocols.
    ///
    /// # Errors
    ///
    /// Returns an error if the address is in use or not configured on this machine.
    pub async fn bind(address: SocketAddr) -> io::Result<Self> {
        Self::bind_with(address, async |address| UdpSocket::bind(address).await).await
    }

    async fn bind_with(
        address: SocketAddr,
        bind_udp: impl AsyncFn(SocketAddr) -> io::Result<UdpSocket>,
    ) -> io::Result<Self> {
        let mut attempt = 1;
        loop {
            let udp = bind_udp(address).await?;
            udp::request_local_addresses(&udp)?;
            match TcpListener::bind(udp.local_addr()?).await {
                // The kernel has selected a port that is free for UDP. If the port is in use for TCP, the loop binds
                // again, so that the kernel selects another port.
                Err(error) if address.port() == 0 && is_in_use(&error) && attempt < PORT_ATTEMPTS => attempt += 1,
                tcp => return Ok(Self { udp, tcp: tcp? }),
            }
        }
    }

    /// Returns the address to which both sockets are bound.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel does not report the address.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.udp.local_addr()
    }
}

fn is_in_use(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::AddrInUse
}

/// Answers DNS queries by UDP and TCP until the future is dropped. `most_connections` is the maximum number of TCP
/// connections.
///
/// # Errors
///
/// Returns an error if the task of the UDP server panics. A failure to receive a datagram or to accept a connection is
/// only logged.
pub async fn serve(
    sockets: Sockets,
    zone: Name,
    allowed: &[IpNet],
    published: Published,
    status: Arc<Status>,
    most_connections: usize,
) -> Result<(), JoinError> {
    status.create_dns_counter(code_name(ResponseCode::ServFail));
    let handler = Handler { zone: Zone::new(&zone), allowed: allowed.into(), published, status };
    let (mut udp, udp_handler) = (JoinSet::new(), handler.clone());
    udp.spawn(async move { udp::serve(sockets.udp, udp_handler).await });
    tokio::select! {
        Some(ended) = udp.join_next() => ended,
        never = tcp::serve(sockets.tcp, handler, most_connections) => never,
    }
}

/// Answers DNS queries from the latest snapshot.
#[derive(Debug, Clone)]
struct Handler {
    zone: Zone,
    allowed: Arc<[IpNet]>,
    published: Published,
    status: Arc<Status>,
}

impl Handler {
    /// Returns the answer to a query; `None` if the message is too short for the header of a DNS message, or is itself
    /// an answer. The feed sends no answer to an answer, because two servers would then answer each other without end.
    fn respond(&self, query: &[u8], peer: SocketAddr, protocol: Protocol) -> Option<Vec<u8>> {
        let Header { metadata, .. } = Header::read(&mut BinDecoder::new(query)).ok()?;
        if metadata.message_type == MessageType::Response {
            return None;
        }
        let Ok(request) = Request::from_bytes(query.to_vec(), peer, protocol) else {
            let code = if self.admits(peer) { ResponseCode::FormErr } else { ResponseCode::Refused };
            self.status.count_dns(code_name(code));
            return Message::error_msg(metadata.id, metadata.op_code, code).to_vec().ok();
        };
        let edns = request.edns.as_ref().map(|asked| {
            let mut own = Edns::new();
            own.set_version(0);
            own.set_max_payload(LARGEST_DATAGRAM);
            own.set_dnssec_ok(asked.flags().dnssec_ok);
            own
        });
        let accepted = request.edns.as_ref().map_or(SMALLEST_DATAGRAM, Edns::max_payload);
        let is_udp = protocol == Protocol::Udp;
        let limit = if is_udp { accepted.clamp(SMALLEST_DATAGRAM, LARGEST_DATAGRAM) } else { u16::MAX };
        let mut answer = self.answer(&request, usize::from(limit));
        if answer.is_truncated && !is_udp {
            // The client cannot repeat the query by another protocol, and an empty answer would look like a Service
            // without members, so the feed answers with an error.
            WARNED.call_once(|| {
                let name = request.request_info().map(|info| info.query.original().name().to_string());
                tracing::warn!(
                    see = pages::url(pages::FEED_DNS),
                    %peer,
                    name = name.unwrap_or_default(),
                    "the members of a Service port do not fit into an answer by TCP, which has at most 64 KiB: the \
                     feed answers SERVFAIL; use xDS or HTTP for this Service"
                );
            });
            answer = Answer::failed(ResponseCode::ServFail);
        }
        self.status.count_dns(code_name(answer.code));
        encode(&request, &answer, edns.as_ref(), limit)
    }

    /// Returns whether the allow list contains the client, and counts a refused client. The feed does not use hickory's
    /// allow list, which admits all clients of an IP family if the list contains no range of this family.
    fn admits(&self, peer: SocketAddr) -> bool {
        let is_admitted = access::admits(&self.allowed, peer.ip());
        if !is_admitted {
            self.status.count_refused(INTERFACE, ClientRefusal::Allow);
        }
        is_admitted
    }

    fn answer(&self, request: &Request, limit: usize) -> Answer {
        if !self.admits(request.src()) {
            return Answer::failed(ResponseCode::Refused);
        }
        if request.metadata.op_code != OpCode::Query {
            return Answer::failed(ResponseCode::NotImp);
        }
        if request.edns.as_ref().is_some_and(|edns| edns.version() > 0) {
            return Answer::failed(ResponseCode::BADVERS);
        }
        let Ok(info) = request.request_info() else { return Answer::failed(ResponseCode::FormErr) };
        if !matches!(info.query.query_class(), DNSClass::IN | DNSClass::ANY) {
            return Answer::failed(ResponseCode::Refused);
        }
        let snapshot = self.published.borrow().clone();
        snapshot.map_or_else(
            || Answer::failed(ResponseCode::ServFail),
            |snapshot| self.zone.answer(&snapshot, info.query.original().name(), info.query.query_type(), limit),
        )
    }
}

fn encode(request: &Request, answer: &Answer, edns: Option<&Edns>, limit: u16) -> Option<Vec<u8>> {
    let mut metadata = Metadata::response_from_request(&request.metadata);
    metadata.authoritative = answer.code == ResponseCode::NoError || answer.code == ResponseCode::NXDomain;
    metadata.response_code = answer.code;
    metadata.truncation = answer.is_truncated;
    let mut builder = MessageResponseBuilder::from_message_request(request);
    if let Some(edns) = edns {
        builder.edns(edns);
    }
    let none: [Record; 0] = [];
    let response = builder.build(metadata, &answer.answers, &none, &answer.authority, &answer.additional);
    let mut bytes = Vec::with_capacity(usize::from(SMALLEST_DATAGRAM));
    let mut encoder = BinEncoder::new(&mut bytes);
    encoder.set_max_size(limit);
    match response.destructive_emit(&mut encoder) {
        Ok(_info) => Some(bytes),
        Err(error) => {
            tracing::debug!(%error, "a DNS answer could not be encoded");
            Message::error_msg(request.metadata.id, request.metadata.op_code, ResponseCode::ServFail).to_vec().ok()
        }
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the metric counts all further codes as one")]
fn code_name(code: ResponseCode) -> &'static str {
    match code {
        ResponseCode::NoError => "noerror",
        ResponseCode::NXDomain => "nxdomain",
        ResponseCode::ServFail => "servfail",
        ResponseCode::Refused => "refused",
        ResponseCode::FormErr => "formerr",
        _ => "other",
    }
}
