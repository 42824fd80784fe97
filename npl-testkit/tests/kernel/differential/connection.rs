// SPDX-License-Identifier: Apache-2.0
//! Connections between a client and a Pod, as scripts that kernel conntrack can follow.

use std::net::{IpAddr, SocketAddr};

use npl_agent::core::model::{Family, Protocol};
use npl_testkit::packet::sctp_chunks::{
    ABORT, COOKIE_ACK, COOKIE_ECHO, DATA, INIT, INIT_ACK, SHUTDOWN, SHUTDOWN_ACK, SHUTDOWN_COMPLETE,
};
use npl_testkit::packet::tcp_flags::{ACK, FIN, RST, SYN};
use npl_testkit::packet::{Icmp, Packet, SCTP_TAG, Transport};

use super::exception::Exception;
use super::node_pair::{Endpoint, SERVICES, backend, node_addresses};
use super::packet_fields::PacketFields;

/// Frames that an endpoint sends through both Nodes, and the allowed difference between the results, if any.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) from: Endpoint,
    /// The frame, or several frames that are the fragments of one datagram.
    pub(super) frames: Vec<Vec<u8>>,
    pub(super) exception: Option<Exception>,
    /// Index into [`SERVICES`], and index into the result of [`node_addresses`]: the NAT address that the client uses.
    pub(super) service: usize,
    pub(super) address: usize,
}

impl Step {
    /// Creates a step of the first service, through the Node's first address.
    pub(super) const fn new(from: Endpoint, frames: Vec<Vec<u8>>) -> Self {
        Self { from, frames, exception: None, service: 0, address: 0 }
    }

    /// The endpoint that receives the frames.
    pub(super) fn receiver(&self) -> Endpoint {
        match self.from {
            Endpoint::Client => Endpoint::Pod(SERVICES[self.service].pod),
            Endpoint::Pod(_) => Endpoint::Client,
        }
    }
}

/// A connection: UDP flow, TCP connection or SCTP association.
#[derive(Clone, Debug)]
pub(super) struct Connection {
    pub(super) family: Family,
    pub(super) protocol: Protocol,
    /// Index into [`SERVICES`].
    pub(super) service: usize,
    /// Index into the result of [`node_addresses`]: the node address that the client uses.
    pub(super) address: usize,
    pub(super) opening: Opening,
    pub(super) actions: Vec<Action>,
    pub(super) ending: Ending,
}

/// How a TCP connection or an SCTP association starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opening {
    Handshake,
    /// The first packet is a SYN or INIT, which the client retransmits; a SYN also has the flags `ECE` and `CWR`.
    Negotiated,
    /// The first packet is from the middle of the stream. Kernel conntrack accepts such a packet as the start of a TCP
    /// connection, but not of an SCTP association, which therefore starts as with [`Self::Negotiated`].
    MidStream,
    Refused,
}

/// How the connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    None,
    Closed(Sender),
    Reset(Sender),
    /// The connection is closed, and opened again from the same client port.
    Reopened(Sender),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sender {
    Client,
    Pod,
}

/// An action of one endpoint during a connection.
#[derive(Clone, Debug)]
pub(super) enum Action {
    /// Sends data; `flags` are some of `PSH`, `URG`, `ECE` and `CWR`.
    Send { sender: Sender, bytes: u16, flags: u8, fields: PacketFields },
    /// Sends the sender's last packet again.
    Retransmit(Sender),
    /// Sends an ICMP error about the other endpoint's last packet. The error quotes this packet's IP header and
    /// `quoted` bytes from the transport header on.
    SendError { sender: Sender, kind: usize, quoted: u16, is_router: bool, fields: PacketFields },
}

impl Sender {
    fn other(self) -> Self {
        if self == Self::Client { Self::Pod } else { Self::Client }
    }

    const fn index(self) -> usize {
        self as usize
    }
}

/// Types and codes of ICMP errors.
const ERRORS_V4: [(u8, u8); 7] = [(3, 0), (3, 1), (3, 3), (3, 4), (4, 0), (11, 0), (12, 0)];
const ERRORS_V6: [(u8, u8); 7] = [(1, 0), (1, 4), (2, 0), (3, 0), (4, 1), (5, 0), (100, 0)];
/// Number of error kinds, the same in each family.
pub(super) const ERRORS: usize = ERRORS_V4.len();

/// The endpoints' addresses, and the NAT address that the client uses.
struct Addresses {
    client: SocketAddr,
    node: SocketAddr,
    pod: SocketAddr,
    pod_endpoint: Endpoint,
}

impl Addresses {
    /// Source and destination of a sender's packets.
    const fn of(&self, sender: Sender) -> (SocketAddr, SocketAddr) {
        match sender {
            Sender::Client => (self.client, self.node),
            Sender::Pod => (self.pod, self.client),
        }
    }

    /// Returns the endpoint that a sender's frames leave from.
    const fn endpoint(&self, sender: Sender) -> Endpoint {
        match sender {
            Sender::Client => Endpoint::Client,
            Sender::Pod => self.pod_endpoint,
        }
    }
}

/// The last packet that a sender has sent.
#[derive(Clone)]
struct SentPacket {
    frames: Vec<Vec<u8>>,
    /// The packet, or its first fragment, as the other endpoint received it.
    arrived: Vec<u8>,
}

/// Builds the steps of a connection: the frames that each endpoint sends.
struct Writer<'t> {
    connection: &'t Connection,
    addresses: Addresses,
    /// The next sequence number of the client and of the Pod.
    sequence: [u32; 2],
    /// The last packet of the client and of the Pod.
    last: [Option<SentPacket>; 2],
    steps: Vec<Step>,
}

/// Returns the steps of a connection, from a client at this address and port.
pub(super) fn steps(connection: &Connection, client: SocketAddr) -> Vec<Step> {
    let service = &SERVICES[connection.service];
    let addresses = Addresses {
        client,
        node: (node_addresses(connection.family)[connection.address], service.node_port).into(),
        pod: backend(connection.family, service),
        pod_endpoint: Endpoint::Pod(service.pod),
    };
    let mut writer =
        Writer { connection, addresses, sequence: [0x1000_0000, 0xffff_fff0], last: [None, None], steps: Vec::new() };
    writer.open(connection.opening);
    if connection.opening != Opening::Refused || connection.protocol == Protocol::Udp {
        connection.actions.iter().for_each(|action| writer.action(action));
        writer.end(connection.ending);
    }
    writer.steps
}

impl Writer<'_> {
    fn open(&mut self, opening: Opening) {
        use Sender::{Client, Pod};
        match self.connection.protocol {
            Protocol::Udp => return self.send_segment(Client, 0, b"first", &PacketFields::PLAIN),
            Protocol::Sctp => return self.open_association(opening),
            Protocol::Tcp => {}
        }
        match opening {
            Opening::Handshake => self.handshake(0),
            Opening::Negotiated => {
                self.send_segment(Client, SYN | ECE | CWR, b"", &PacketFields::PLAIN);
                self.retransmit(Client);
                self.sequence[Client.index()] -= 1;
                self.handshake(ECE);
            }
            Opening::MidStream => self.send_segment(Client, ACK, b"in the middle", &PacketFields::PLAIN),
            Opening::Refused => {
                self.send_segment(Client, SYN, b"", &PacketFields::PLAIN);
                self.sequence[Pod.index()] = 0;
                self.send_segment(Pod, RST | ACK, b"", &PacketFields::PLAIN);
            }
        }
    }

    fn handshake(&mut self, flags: u8) {
        self.send_segment(Sender::Client, SYN | flags, b"", &PacketFields::PLAIN);
        self.send_segment(Sender::Pod, SYN | ACK | flags, b"", &PacketFields::PLAIN);
        self.send_segment(Sender::Client, ACK, b"", &PacketFields::PLAIN);
    }

    fn open_association(&mut self, opening: Opening) {
        use Sender::{Client, Pod};
        let init = [SCTP_TAG.to_be_bytes().as_slice(), &[1; 12]].concat();
        if opening != Opening::Handshake {
            self.send_chunk(Client, INIT, &init, &PacketFields::PLAIN);
        }
        if opening == Opening::Refused {
            return self.send_chunk(Pod, ABORT, b"", &PacketFields::PLAIN);
        }
        self.associate(&init);
    }

    fn associate(&mut self, init: &[u8]) {
        use Sender::{Client, Pod};
        for (sender, kind, content) in
            [(Client, INIT, init), (Pod, INIT_ACK, init), (Client, COOKIE_ECHO, &[3; 20]), (Pod, COOKIE_ACK, b"")]
        {
            self.send_chunk(sender, kind, content, &PacketFields::PLAIN);
        }
    }

    fn action(&mut self, action: &Action) {
        match action {
            Action::Send { sender, bytes, flags, fields } => {
                // Each byte depends on its offset, so that a misplaced fragment is detected.
                let data: Vec<u8> =
                    (0..*bytes).map(|at| (at ^ at >> 8 ^ fields.identification).to_le_bytes()[0]).collect();
                match self.connection.protocol {
                    Protocol::Sctp => self.send_chunk(*sender, DATA, &[&[0; 12], data.as_slice()].concat(), fields),
                    Protocol::Tcp | Protocol::Udp => self.send_segment(*sender, ACK | flags, &data, fields),
                }
            }
            Action::Retransmit(sender) => self.retransmit(*sender),
            Action::SendError { sender, kind, quoted, is_router, fields } => {
                self.send_error(*sender, *kind, *quoted, *is_router, fields);
            }
        }
    }

    fn end(&mut self, ending: Ending) {
        match self.connection.protocol {
            Protocol::Udp => return,
            Protocol::Sctp => return self.end_association(ending),
            Protocol::Tcp => {}
        }
        match ending {
            Ending::None => {}
            Ending::Closed(sender) => self.close(sender),
            Ending::Reset(sender) => self.send_segment(sender, RST | ACK, b"", &PacketFields::PLAIN),
            Ending::Reopened(sender) => {
                self.close(sender);
                self.sequence = self.sequence.map(|number| number.wrapping_add(0x10_0000));
                self.handshake(0);
            }
        }
    }

    fn end_association(&mut self, ending: Ending) {
        match ending {
            Ending::None => {}
            Ending::Reset(sender) => self.send_chunk(sender, ABORT, b"", &PacketFields::PLAIN),
            Ending::Closed(sender) | Ending::Reopened(sender) => {
                self.send_chunk(sender, SHUTDOWN, &[0; 4], &PacketFields::PLAIN);
                self.send_chunk(sender.other(), SHUTDOWN_ACK, b"", &PacketFields::PLAIN);
                self.send_chunk(sender, SHUTDOWN_COMPLETE, b"", &PacketFields::PLAIN);
            }
        }
        if matches!(ending, Ending::Reopened(_)) {
            self.associate(&[SCTP_TAG.to_be_bytes().as_slice(), &[2; 12]].concat());
        }
    }

    fn close(&mut self, sender: Sender) {
        for sender in [sender, sender.other()] {
            self.send_segment(sender, FIN | ACK, b"", &PacketFields::PLAIN);
            self.send_segment(sender.other(), ACK, b"", &PacketFields::PLAIN);
        }
    }

    fn send_segment(&mut self, sender: Sender, flags: u8, data: &[u8], fields: &PacketFields) {
        let (source, destination) = self.addresses.of(sender);
        let mut packet = if self.connection.protocol == Protocol::Udp {
            Packet::udp(source, destination, data)
        } else {
            Packet::tcp(source, destination, flags, data)
        };
        if let Transport::Tcp(tcp) = &mut packet.transport {
            tcp.sequence = self.sequence[sender.index()];
            tcp.acknowledgement = if flags & ACK == 0 { 0 } else { self.sequence[sender.other().index()] };
            tcp.options = match flags & (SYN | FIN) {
                SYN => vec![2, 4, 5, 0xb4, 1, 3, 3, 7, 4, 2],
                0 => vec![1, 1, 8, 10, 0, 0, 1, 1, 0, 0, 2, 2],
                _ => Vec::new(),
            };
            let counted = u32::try_from(data.len()).unwrap() + u32::from(flags & (SYN | FIN) != 0);
            self.sequence[sender.index()] = tcp.sequence.wrapping_add(counted);
        }
        self.send(sender, &packet, fields);
    }

    fn send_chunk(&mut self, sender: Sender, kind: u8, content: &[u8], fields: &PacketFields) {
        let (source, destination) = self.addresses.of(sender);
        self.send(sender, &Packet::sctp(source, destination, kind, content), fields);
    }

    fn send(&mut self, sender: Sender, packet: &Packet, fields: &PacketFields) {
        let Addresses { node, pod, .. } = self.addresses;
        let mut seen = packet.clone();
        if sender == Sender::Client {
            seen.set_destination(pod);
        } else {
            seen.set_source(node);
        }
        let endpoint = self.addresses.endpoint(sender);
        let frames = fields.frames(packet, endpoint);
        let arrived = PacketFields { trailer: 0, ..fields.clone() }
            .frames(&seen, endpoint)
            .swap_remove(first_fragment(fields, &frames));
        self.last[sender.index()] = Some(SentPacket { frames: frames.clone(), arrived: arrived[ETHERNET..].to_vec() });
        self.push(endpoint, frames, None);
    }

    fn retransmit(&mut self, sender: Sender) {
        if let Some(SentPacket { frames, .. }) = self.last[sender.index()].clone() {
            self.push(self.addresses.endpoint(sender), frames, None);
        }
    }

    fn send_error(&mut self, sender: Sender, kind: usize, quoted: u16, is_router: bool, fields: &PacketFields) {
        let Some(SentPacket { arrived: about, .. }) = &self.last[sender.other().index()] else { return };
        let (own, destination) = if sender == Sender::Client {
            (self.addresses.client.ip(), self.addresses.node.ip())
        } else {
            (self.addresses.pod.ip(), self.addresses.client.ip())
        };
        let (router, errors): (&str, _) = match (sender, self.connection.family) {
            (Sender::Client, Family::V4) => ("203.0.113.1", ERRORS_V4),
            (Sender::Client, Family::V6) => ("2001:db8:0:9::1", ERRORS_V6),
            (Sender::Pod, Family::V4) => ("10.244.9.1", ERRORS_V4),
            (Sender::Pod, Family::V6) => ("fd00:10:244:9::1", ERRORS_V6),
        };
        let from: IpAddr = if is_router { router.parse().unwrap() } else { own };
        let (kind, code) = errors[kind];
        let headers = transport_offset(about);
        let quote = &about[..about.len().min(headers + usize::from(quoted))];
        let error = Icmp { kind, code, rest: [0, 0, 5, 0x14], checksum: fields.checksum, payload: quote.to_vec() };
        let packet = Packet::new(from, destination, Transport::Icmp(error));
        let endpoint = self.addresses.endpoint(sender);
        let exception = Exception::of_quote(self.connection.protocol, quote.len() - headers);
        self.push(endpoint, fields.frames(&packet, endpoint), exception);
    }

    fn push(&mut self, from: Endpoint, frames: Vec<Vec<u8>>, exception: Option<Exception>) {
        let Connection { service, address, .. } = *self.connection;
        self.steps.push(Step { exception, service, address, ..Step::new(from, frames) });
    }
}

const ETHERNET: usize = 14;
const ECE: u8 = 0x40;
const CWR: u8 = 0x80;

/// Returns the index of the first fragment among the frames.
fn first_fragment(fields: &PacketFields, frames: &[Vec<u8>]) -> usize {
    use super::packet_fields::Order::{Ascending, Descending, FirstLast, LastFirst};
    match fields.fragmentation.map(|fragmentation| fragmentation.order) {
        None | Some(Ascending) => 0,
        Some(Descending | FirstLast) => frames.len() - 1,
        Some(LastFirst) => 1,
    }
}

/// Returns the offset of the transport header in a packet.
fn transport_offset(packet: &[u8]) -> usize {
    if packet[0] >> 4 == 4 {
        return usize::from(packet[0] & 0xf) * 4;
    }
    let (mut kind, mut at) = (packet[6], 40);
    while matches!(kind, 0 | 43 | 44 | 60) {
        let length = if kind == 44 { 8 } else { usize::from(packet[at + 1]) * 8 + 8 };
        (kind, at) = (packet[at], at + length);
    }
    at
}
