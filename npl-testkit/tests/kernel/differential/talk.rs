// SPDX-License-Identifier: Apache-2.0
//! Conversations between a client and a Pod, as scripts that connection tracking can follow.

use std::net::{IpAddr, SocketAddr};

use npl_agent::core::model::{Family, Protocol};
use npl_testkit::packet::sctp_chunks::{
    ABORT, COOKIE_ACK, COOKIE_ECHO, DATA, INIT, INIT_ACK, SHUTDOWN, SHUTDOWN_ACK, SHUTDOWN_COMPLETE,
};
use npl_testkit::packet::tcp_flags::{ACK, FIN, RST, SYN};
use npl_testkit::packet::{Icmp, Packet, SCTP_TAG, Transport};

use super::dress::Dress;
use super::exception::Exception;
use super::twin::{End, SERVICES, node_addresses, pod_end};

/// Frames that somebody sends, and whether what comes of them may differ.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) from: End,
    /// Of more than one, all are of one datagram.
    pub(super) frames: Vec<Vec<u8>>,
    pub(super) exception: Option<Exception>,
    /// Of [`SERVICES`]: what it belongs to, if to any, and which of the Node's addresses the client knows that by.
    pub(super) service: usize,
    pub(super) address: usize,
}

impl Step {
    /// Of the first service, by the Node's first address.
    pub(super) const fn new(from: End, frames: Vec<Vec<u8>>) -> Self {
        Self { from, frames, exception: None, service: 0, address: 0 }
    }

    /// The other end.
    pub(super) fn receiver(&self) -> End {
        match self.from {
            End::Client => End::Pod(SERVICES[self.service].pod),
            End::Pod(_) => End::Client,
        }
    }
}

/// A conversation.
#[derive(Clone, Debug)]
pub(super) struct Talk {
    pub(super) family: Family,
    pub(super) protocol: Protocol,
    /// Of [`SERVICES`].
    pub(super) service: usize,
    /// Of the Node's addresses.
    pub(super) address: usize,
    pub(super) opening: Opening,
    pub(super) lines: Vec<Line>,
    pub(super) ending: Ending,
}

/// How a TCP connection or an SCTP association begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opening {
    Handshake,
    /// With a repeated first packet, of TCP with `ECE` and `CWR`.
    Negotiated,
    /// The first that is seen is a segment in the middle. Connection tracking takes no association up there.
    Midway,
    Refused,
}

/// How it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    None,
    Closed(Speaker),
    Reset(Speaker),
    /// Closed, and opened again from the same port.
    Reopened(Speaker),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Speaker {
    Client,
    Pod,
}

/// What somebody does during a conversation.
#[derive(Clone, Debug)]
pub(super) enum Line {
    /// Sends data; `flags` are some of `PSH`, `URG`, `ECE` and `CWR`.
    Say { by: Speaker, bytes: u16, flags: u8, dress: Dress },
    /// Sends the last packet once more.
    Repeat(Speaker),
    /// Complains about the last packet of the other, of which it quotes so many bytes behind the header.
    Complain { by: Speaker, kind: usize, quoted: u16, is_router: bool, dress: Dress },
}

impl Speaker {
    fn other(self) -> Self {
        if self == Self::Client { Self::Pod } else { Self::Client }
    }

    const fn index(self) -> usize {
        self as usize
    }
}

/// Types and codes of errors.
const ERRORS_V4: [(u8, u8); 7] = [(3, 0), (3, 1), (3, 3), (3, 4), (4, 0), (11, 0), (12, 0)];
const ERRORS_V6: [(u8, u8); 7] = [(1, 0), (1, 4), (2, 0), (3, 0), (4, 1), (5, 0), (100, 0)];
/// How many kinds of errors there are in each family.
pub(super) const ERRORS: usize = ERRORS_V4.len();

/// The two ends' addresses, and the one that the client knows the Pod by.
struct Ends {
    client: SocketAddr,
    node: SocketAddr,
    pod: SocketAddr,
    pod_link: End,
}

impl Ends {
    /// Source and destination of what somebody sends.
    const fn of(&self, by: Speaker) -> (SocketAddr, SocketAddr) {
        match by {
            Speaker::Client => (self.client, self.node),
            Speaker::Pod => (self.pod, self.client),
        }
    }

    /// Where somebody's frames come from.
    const fn link(&self, by: Speaker) -> End {
        match by {
            Speaker::Client => End::Client,
            Speaker::Pod => self.pod_link,
        }
    }
}

/// What somebody has said.
#[derive(Clone)]
struct Said {
    frames: Vec<Vec<u8>>,
    /// The packet as the other one got it, or the first piece of it.
    arrived: Vec<u8>,
}

/// A conversation that becomes steps.
struct Writer<'t> {
    talk: &'t Talk,
    ends: Ends,
    /// The next sequence number of each.
    sequence: [u32; 2],
    /// What each has said last.
    last: [Option<Said>; 2],
    steps: Vec<Step>,
}

/// What happens in a conversation of a client at this address and port.
pub(super) fn steps(talk: &Talk, client: SocketAddr) -> Vec<Step> {
    let service = &SERVICES[talk.service];
    let ends = Ends {
        client,
        node: (node_addresses(talk.family)[talk.address], service.node_port).into(),
        pod: pod_end(talk.family, service),
        pod_link: End::Pod(service.pod),
    };
    let mut writer = Writer { talk, ends, sequence: [0x1000_0000, 0xffff_fff0], last: [None, None], steps: Vec::new() };
    writer.open(talk.opening);
    if talk.opening != Opening::Refused || talk.protocol == Protocol::Udp {
        talk.lines.iter().for_each(|line| writer.line(line));
        writer.end(talk.ending);
    }
    writer.steps
}

impl Writer<'_> {
    fn open(&mut self, opening: Opening) {
        use Speaker::{Client, Pod};
        match self.talk.protocol {
            Protocol::Udp => return self.say(Client, 0, b"first", &Dress::PLAIN),
            Protocol::Sctp => return self.open_association(opening),
            Protocol::Tcp => {}
        }
        match opening {
            Opening::Handshake => self.shake_hands(0),
            Opening::Negotiated => {
                self.say(Client, SYN | ECE | CWR, b"", &Dress::PLAIN);
                self.repeat(Client);
                self.sequence[Client.index()] -= 1;
                self.shake_hands(ECE);
            }
            Opening::Midway => self.say(Client, ACK, b"in the middle", &Dress::PLAIN),
            Opening::Refused => {
                self.say(Client, SYN, b"", &Dress::PLAIN);
                self.sequence[Pod.index()] = 0;
                self.say(Pod, RST | ACK, b"", &Dress::PLAIN);
            }
        }
    }

    fn shake_hands(&mut self, flags: u8) {
        self.say(Speaker::Client, SYN | flags, b"", &Dress::PLAIN);
        self.say(Speaker::Pod, SYN | ACK | flags, b"", &Dress::PLAIN);
        self.say(Speaker::Client, ACK, b"", &Dress::PLAIN);
    }

    fn open_association(&mut self, opening: Opening) {
        use Speaker::{Client, Pod};
        let init = [SCTP_TAG.to_be_bytes().as_slice(), &[1; 12]].concat();
        if opening != Opening::Handshake {
            self.say_chunk(Client, INIT, &init, &Dress::PLAIN);
        }
        if opening == Opening::Refused {
            return self.say_chunk(Pod, ABORT, b"", &Dress::PLAIN);
        }
        self.associate(&init);
    }

    fn associate(&mut self, init: &[u8]) {
        use Speaker::{Client, Pod};
        for (by, kind, content) in
            [(Client, INIT, init), (Pod, INIT_ACK, init), (Client, COOKIE_ECHO, &[3; 20]), (Pod, COOKIE_ACK, b"")]
        {
            self.say_chunk(by, kind, content, &Dress::PLAIN);
        }
    }

    fn line(&mut self, line: &Line) {
        match line {
            Line::Say { by, bytes, flags, dress } => {
                // Each byte depends on its place, so that a piece in the wrong one is seen.
                let data: Vec<u8> = (0..*bytes).map(|at| (at ^ at >> 8 ^ dress.number).to_le_bytes()[0]).collect();
                match self.talk.protocol {
                    Protocol::Sctp => self.say_chunk(*by, DATA, &[&[0; 12], data.as_slice()].concat(), dress),
                    Protocol::Tcp | Protocol::Udp => self.say(*by, ACK | flags, &data, dress),
                }
            }
            Line::Repeat(by) => self.repeat(*by),
            Line::Complain { by, kind, quoted, is_router, dress } => {
                self.complain(*by, *kind, *quoted, *is_router, dress);
            }
        }
    }

    fn end(&mut self, ending: Ending) {
        match self.talk.protocol {
            Protocol::Udp => return,
            Protocol::Sctp => return self.end_association(ending),
            Protocol::Tcp => {}
        }
        match ending {
            Ending::None => {}
            Ending::Closed(by) => self.close(by),
            Ending::Reset(by) => self.say(by, RST | ACK, b"", &Dress::PLAIN),
            Ending::Reopened(by) => {
                self.close(by);
                self.sequence = self.sequence.map(|it| it.wrapping_add(0x10_0000));
                self.shake_hands(0);
            }
        }
    }

    fn end_association(&mut self, ending: Ending) {
        match ending {
            Ending::None => {}
            Ending::Reset(by) => self.say_chunk(by, ABORT, b"", &Dress::PLAIN),
            Ending::Closed(by) | Ending::Reopened(by) => {
                self.say_chunk(by, SHUTDOWN, &[0; 4], &Dress::PLAIN);
                self.say_chunk(by.other(), SHUTDOWN_ACK, b"", &Dress::PLAIN);
                self.say_chunk(by, SHUTDOWN_COMPLETE, b"", &Dress::PLAIN);
            }
        }
        if matches!(ending, Ending::Reopened(_)) {
            self.associate(&[SCTP_TAG.to_be_bytes().as_slice(), &[2; 12]].concat());
        }
    }

    fn close(&mut self, by: Speaker) {
        for speaker in [by, by.other()] {
            self.say(speaker, FIN | ACK, b"", &Dress::PLAIN);
            self.say(speaker.other(), ACK, b"", &Dress::PLAIN);
        }
    }

    fn say(&mut self, by: Speaker, flags: u8, data: &[u8], dress: &Dress) {
        let (source, destination) = self.ends.of(by);
        let mut packet = if self.talk.protocol == Protocol::Udp {
            Packet::udp(source, destination, data)
        } else {
            Packet::tcp(source, destination, flags, data)
        };
        if let Transport::Tcp(tcp) = &mut packet.transport {
            tcp.sequence = self.sequence[by.index()];
            tcp.acknowledgement = if flags & ACK == 0 { 0 } else { self.sequence[by.other().index()] };
            tcp.options = match flags & (SYN | FIN) {
                SYN => vec![2, 4, 5, 0xb4, 1, 3, 3, 7, 4, 2],
                0 => vec![1, 1, 8, 10, 0, 0, 1, 1, 0, 0, 2, 2],
                _ => Vec::new(),
            };
            let counted = u32::try_from(data.len()).unwrap() + u32::from(flags & (SYN | FIN) != 0);
            self.sequence[by.index()] = tcp.sequence.wrapping_add(counted);
        }
        self.send(by, &packet, dress);
    }

    fn say_chunk(&mut self, by: Speaker, kind: u8, content: &[u8], dress: &Dress) {
        let (source, destination) = self.ends.of(by);
        self.send(by, &Packet::sctp(source, destination, kind, content), dress);
    }

    fn send(&mut self, by: Speaker, packet: &Packet, dress: &Dress) {
        let Ends { node, pod, .. } = self.ends;
        let mut seen = packet.clone();
        if by == Speaker::Client {
            seen.set_destination(pod);
        } else {
            seen.set_source(node);
        }
        let link = self.ends.link(by);
        let frames = dress.frames(packet, link);
        let arrived =
            Dress { trailer: 0, ..dress.clone() }.frames(&seen, link).swap_remove(first_fragment(dress, &frames));
        self.last[by.index()] = Some(Said { frames: frames.clone(), arrived: arrived[ETHERNET..].to_vec() });
        self.push(link, frames, None);
    }

    fn repeat(&mut self, by: Speaker) {
        if let Some(Said { frames, .. }) = self.last[by.index()].clone() {
            self.push(self.ends.link(by), frames, None);
        }
    }

    fn complain(&mut self, by: Speaker, kind: usize, quoted: u16, is_router: bool, dress: &Dress) {
        let Some(Said { arrived: about, .. }) = &self.last[by.other().index()] else { return };
        let (own, sender) = if by == Speaker::Client {
            (self.ends.client.ip(), self.ends.node.ip())
        } else {
            (self.ends.pod.ip(), self.ends.client.ip())
        };
        let (router, errors): (&str, _) = match (by, self.talk.family) {
            (Speaker::Client, Family::V4) => ("203.0.113.1", ERRORS_V4),
            (Speaker::Client, Family::V6) => ("2001:db8:0:9::1", ERRORS_V6),
            (Speaker::Pod, Family::V4) => ("10.244.9.1", ERRORS_V4),
            (Speaker::Pod, Family::V6) => ("fd00:10:244:9::1", ERRORS_V6),
        };
        let from: IpAddr = if is_router { router.parse().unwrap() } else { own };
        let (kind, code) = errors[kind];
        let headers = transport_offset(about);
        let quote = &about[..about.len().min(headers + usize::from(quoted))];
        let error = Icmp { kind, code, rest: [0, 0, 5, 0x14], checksum: dress.checksum, payload: quote.to_vec() };
        let packet = Packet::new(from, sender, Transport::Icmp(error));
        let link = self.ends.link(by);
        let exception = Exception::of_quote(self.talk.protocol, quote.len() - headers);
        self.push(link, dress.frames(&packet, link), exception);
    }

    fn push(&mut self, from: End, frames: Vec<Vec<u8>>, exception: Option<Exception>) {
        let Talk { service, address, .. } = *self.talk;
        self.steps.push(Step { exception, service, address, ..Step::new(from, frames) });
    }
}

const ETHERNET: usize = 14;
const ECE: u8 = 0x40;
const CWR: u8 = 0x80;

/// Where the first fragment is among the frames.
fn first_fragment(dress: &Dress, frames: &[Vec<u8>]) -> usize {
    use super::dress::Order::{FirstLast, LastFirst, Reversed, Sent};
    match dress.cut.map(|cut| cut.order) {
        None | Some(Sent) => 0,
        Some(Reversed | FirstLast) => frames.len() - 1,
        Some(LastFirst) => 1,
    }
}

/// Where the ports are, in a packet of ours.
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
