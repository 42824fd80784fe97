// SPDX-License-Identifier: Apache-2.0
//! The DNS server: `_PORT._PROTOCOL.SERVICE.NAMESPACE.ZONE` has an SRV record for each ready member.

mod names;
mod tcp;
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

use async_trait::async_trait;
use hickory_server::{
    Server,
    net::{NetError, runtime::Time, xfer::Protocol},
    proto::{
        op::{Edns, Header, HeaderCounts, MessageType, Metadata, OpCode, ResponseCode},
        rr::{DNSClass, Name, Record},
    },
    server::{Request, RequestHandler, ResponseHandler, ResponseInfo},
    zone_handler::MessageResponseBuilder,
};
use ipnet::IpNet;
use npl_agent::core::pages;
use tokio::net::{TcpListener, UdpSocket};

use self::zone::Answer;
pub use self::{names::of_port, zone::Zone};
use crate::{
    access,
    follow::Published,
    status::{ClientRefusal, Status},
};

/// The name of the DNS interface, as the value of the label `interface` in metrics.
const INTERFACE: &str = "dns";
/// The maximum size in bytes of a UDP answer to a client that accepts this size. If an answer is larger, the client has
/// to repeat the query by TCP.
const LARGEST_DATAGRAM: u16 = 8192;
/// The size in bytes of a UDP answer that every client accepts.
const SMALLEST_DATAGRAM: u16 = 512;
/// Ensures that the warning about an answer above the size limit of DNS by TCP is logged only once.
static WARNED: Once = Once::new();
/// The maximum number of ports that are tried until one is free for UDP and TCP.
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
/// Returns an error if the UDP server fails. A failed `accept` on the TCP socket is only logged.
pub async fn serve(
    sockets: Sockets,
    zone: Name,
    allowed: &[IpNet],
    published: Published,
    status: Arc<Status>,
    most_connections: usize,
) -> Result<(), NetError> {
    status.create_dns_counter(code_name(ResponseCode::ServFail));
    let handler = Handler { zone: Zone::new(&zone), allowed: allowed.into(), published, status };
    let mut udp = Server::new(handler.clone());
    udp.register_socket(sockets.udp);
    tokio::select! {
        ended = udp.block_until_done() => ended,
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
    fn answer(&self, request: &Request) -> Answer {
        let no_snapshot = || Answer::failed(ResponseCode::ServFail);
        // The feed does not use hickory's allow list, which admits all clients of an IP family for which it contains no
        // range.
        if !access::admits(&self.allowed, request.src().ip()) {
            self.status.count_refused(INTERFACE, ClientRefusal::Allow);
            return Answer::failed(ResponseCode::Refused);
        }
        if request.metadata.op_code != OpCode::Query || request.metadata.message_type != MessageType::Query {
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
        snapshot.map_or_else(no_snapshot, |snapshot| {
            self.zone.answer(&snapshot, info.query.original().name(), info.query.query_type())
        })
    }
}

#[async_trait]
impl RequestHandler for Handler {
    async fn handle_request<R: ResponseHandler, T: Time>(&self, request: &Request, mut handle: R) -> ResponseInfo {
        let mut answer = self.answer(request);
        self.status.count_dns(code_name(answer.code));
        let edns = request.edns.as_ref().map(|edns| {
            let mut own = Edns::new();
            own.set_version(0);
            own.set_max_payload(edns.max_payload().clamp(SMALLEST_DATAGRAM, LARGEST_DATAGRAM));
            own
        });
        let limit = edns.as_ref().map_or(SMALLEST_DATAGRAM, Edns::max_payload);
        let limit = if request.protocol() == Protocol::Udp { limit } else { u16::MAX };
        let mut is_truncated = fit(&mut answer, usize::from(limit));
        if is_truncated && request.protocol() == Protocol::Tcp {
            // The client cannot repeat the query by another protocol, and an empty answer would look like a Service
            // without members, so the feed answers with an error.
            WARNED.call_once(|| {
                tracing::warn!(
                    see = pages::url(pages::FEED_DNS),
                    peer = %request.src(),
                    "the members of a Service port do not fit into an answer by TCP, which has at most 64 KiB: the \
                     feed answers SERVFAIL; use xDS or HTTP for this Service"
                );
            });
            (answer.code, is_truncated) = (ResponseCode::ServFail, false);
        }
        let mut metadata = Metadata::response_from_request(&request.metadata);
        metadata.authoritative = answer.code == ResponseCode::NoError || answer.code == ResponseCode::NXDomain;
        metadata.response_code = answer.code;
        metadata.truncation = is_truncated;
        let mut builder = MessageResponseBuilder::from_message_request(request);
        if let Some(edns) = &edns {
            builder.edns(edns);
        }
        let none: [Record; 0] = [];
        let response = builder.build(metadata, &answer.answers, &none, &answer.authority, &answer.additional);
        match handle.send_response(response).await {
            Ok(info) => info,
            Err(error) => {
                tracing::debug!(%error, "a DNS answer could not be sent");
                ResponseInfo::from(Header { metadata, counts: HeaderCounts::default() })
            }
        }
    }
}

/// Shortens an answer to the size that the client accepts. Returns whether the client has to repeat the query by TCP.
/// If the address records of the additional section do not fit, all of them are omitted without the bit TC, because the
/// client can query the addresses. If the SRV records do not fit, all SRV records are omitted, because a client would
/// treat missing SRV records as removed members.
fn fit(answer: &mut Answer, limit: usize) -> bool {
    const HEADER_QUESTION_AND_OPT: usize = 12 + 255 + 4 + 11;
    let needed = HEADER_QUESTION_AND_OPT + zone::size(&answer.answers) + zone::size(&answer.authority);
    if needed > limit && !answer.answers.is_empty() {
        answer.answers.clear();
        answer.additional.clear();
        return true;
    }
    if needed + zone::size(&answer.additional) > limit {
        answer.additional.clear();
    }
    false
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
