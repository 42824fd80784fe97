// SPDX-License-Identifier: Apache-2.0
//! The netlink messages and attributes of nftables and kernel conntrack that the agent uses. Numbers in these
//! attributes are in network byte order.

use std::{io, ops::ControlFlow};

use nix::sys::{
    socket::{setsockopt, sockopt::ReceiveTimeout},
    time::TimeVal,
};
use rtnetlink::{
    packet_core::{
        DefaultNla, Emitable as _, NLA_F_NESTED, NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_REQUEST, NetlinkBuffer,
        NetlinkDeserializable, NetlinkHeader, NetlinkMessage, NetlinkPayload, NetlinkSerializable, NlasIterator,
    },
    sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER},
};

use super::uapi;

/// Time limit for an answer of the kernel. The answer is delayed if the kernel first has to complete a transaction of
/// other software.
const ANSWER_TIMEOUT: TimeVal = TimeVal::new(10, 0);

/// Returns an attribute with raw bytes.
pub(super) fn bytes(kind: u16, value: &[u8]) -> DefaultNla {
    DefaultNla::new(kind, value.to_vec())
}

/// Returns an attribute with a string, to which a zero byte is appended as the kernel expects.
pub(super) fn text(kind: u16, value: &str) -> DefaultNla {
    DefaultNla::new(kind, [value.as_bytes(), &[0]].concat())
}

/// Returns an attribute with a number in network byte order.
pub(super) fn number(kind: u16, value: u32) -> DefaultNla {
    DefaultNla::new(kind, value.to_be_bytes().to_vec())
}

/// Returns an attribute that contains other attributes.
pub(super) fn nest(kind: u16, inner: &[DefaultNla]) -> DefaultNla {
    let mut value = vec![0; inner.buffer_len()];
    inner.emit(&mut value);
    DefaultNla::new(kind | NLA_F_NESTED, value)
}

/// A message to nftables or kernel conntrack, or the message that begins or ends a transaction of nftables.
#[derive(Debug)]
pub(super) struct Message {
    kind: u16,
    family: u8,
    /// The subsystem in a message that begins or ends a transaction; zero in all other messages.
    subsystem: u16,
    attributes: Vec<DefaultNla>,
}

impl Message {
    /// Creates a message for tables of the family `inet`. `command` is a constant of [`uapi::message`].
    pub(super) const fn new(command: u16, attributes: Vec<DefaultNla>) -> Self {
        Self { kind: uapi::SUBSYSTEM << 8 | command, family: uapi::NFPROTO_INET, subsystem: 0, attributes }
    }

    /// Creates a message of kernel conntrack, for connections of all families. `command` is a constant of
    /// [`uapi::conntrack`].
    pub(super) const fn of_conntrack(command: u16, attributes: Vec<DefaultNla>) -> Self {
        let kind = uapi::conntrack::SUBSYSTEM << 8 | command;
        Self { kind, family: uapi::NFPROTO_UNSPEC, subsystem: 0, attributes }
    }

    /// Returns the message, changed to apply to tables of all families.
    pub(super) fn of_any_family(self) -> Self {
        self.of_family(uapi::NFPROTO_UNSPEC)
    }

    /// Returns the message, changed to apply to tables of the family `family`.
    pub(super) fn of_family(self, family: u8) -> Self {
        Self { family, ..self }
    }

    const fn of_transaction(kind: u16) -> Self {
        Self { kind, family: uapi::NFPROTO_UNSPEC, subsystem: uapi::SUBSYSTEM, attributes: Vec::new() }
    }
}

impl NetlinkSerializable for Message {
    fn message_type(&self) -> u16 {
        self.kind
    }

    fn buffer_len(&self) -> usize {
        size_of::<[u8; 4]>() + self.attributes.as_slice().buffer_len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        let [high, low] = self.subsystem.to_be_bytes();
        let (head, attributes) = buffer.split_at_mut(size_of::<[u8; 4]>());
        head.copy_from_slice(&[self.family, 0, high, low]);
        self.attributes.as_slice().emit(attributes);
    }
}

/// The attributes of an answer, without the four-byte header (`nfgenmsg`) before them.
#[derive(Debug)]
struct Answer(Vec<u8>);

impl NetlinkDeserializable for Answer {
    type Error = io::Error;

    fn deserialize(_header: &NetlinkHeader, payload: &[u8]) -> io::Result<Self> {
        payload.get(size_of::<[u8; 4]>()..).map(|rest| Self(rest.to_vec())).ok_or_else(truncated)
    }
}

/// A netlink socket for nftables and kernel conntrack.
#[derive(Debug)]
pub(super) struct Connection(Socket);

impl Connection {
    pub(super) fn open() -> io::Result<Self> {
        let socket = Socket::new(NETLINK_NETFILTER)?;
        socket.connect(&SocketAddr::new(0, 0))?;
        setsockopt(&socket, ReceiveTimeout, &ANSWER_TIMEOUT)?;
        Ok(Self(socket))
    }

    /// Applies the commands in one transaction: the kernel applies all commands or none.
    ///
    /// # Errors
    ///
    /// The first error that the kernel returns, or a timeout if the kernel does not answer within 10 s.
    pub(super) fn commit(&self, commands: Vec<Message>) -> io::Result<()> {
        let begin = Message::of_transaction(uapi::BATCH_BEGIN);
        let end = Message::of_transaction(uapi::BATCH_END);
        let mut batch = serialized(begin, NLM_F_REQUEST, 0);
        let mut last = 0;
        for command in commands {
            last += 1;
            batch.extend(serialized(command, NLM_F_REQUEST | NLM_F_CREATE | NLM_F_ACK, last));
        }
        batch.extend(serialized(end, NLM_F_REQUEST, last + 1));
        self.0.send(&batch, 0)?;
        self.answers(|sequence| sequence == last, |_| ControlFlow::Continue(()))
    }

    /// Dumps all objects of a kind and calls `on_object` with the attributes of each object. If `on_object` returns
    /// `Break`, unread answers stay in the socket, and the caller must not use the connection again.
    ///
    /// # Errors
    ///
    /// If the kernel returns an error, or does not answer within 10 s.
    pub(super) fn list(&self, command: Message, on_object: impl FnMut(&[u8]) -> ControlFlow<()>) -> io::Result<()> {
        self.0.send(&serialized(command, NLM_F_REQUEST | NLM_F_DUMP, 1), 0)?;
        self.answers(|_| false, on_object)
    }

    /// Receives the kernel's answers until the acknowledgment of the last command, or until the end of a dump.
    fn answers(
        &self,
        is_last: impl Fn(u32) -> bool,
        mut on_object: impl FnMut(&[u8]) -> ControlFlow<()>,
    ) -> io::Result<()> {
        loop {
            // The call is repeated, because the kernel does not restart a system call with a receive timeout after a
            // signal such as SIGCHLD.
            let datagram = match self.0.recv_from_full() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                received => received?.0,
            };
            if read_datagram(&datagram, &is_last, &mut on_object)?.is_break() {
                return Ok(());
            }
        }
    }
}

/// Reads the messages of a datagram, and calls `on_object` with the attributes of each object. Returns `Break` after
/// the acknowledgment of the last command, after the end of a dump, or if `on_object` returns `Break`.
///
/// # Errors
///
/// If a message is an error of the kernel, or malformed.
pub(super) fn read_datagram(
    datagram: &[u8],
    is_last: &impl Fn(u32) -> bool,
    on_object: &mut impl FnMut(&[u8]) -> ControlFlow<()>,
) -> io::Result<ControlFlow<()>> {
    let mut rest = datagram;
    while !rest.is_empty() {
        let length = NetlinkBuffer::new_checked(rest).map_err(io::Error::other)?.length();
        let message: NetlinkMessage<Answer> = NetlinkMessage::deserialize(rest).map_err(io::Error::other)?;
        if let NetlinkPayload::Error(answer) = &message.payload {
            if answer.code.is_some() {
                return Err(answer.to_io());
            }
            if is_last(message.header.sequence_number) {
                return Ok(ControlFlow::Break(()));
            }
        } else if let NetlinkPayload::Done(_) = message.payload {
            return Ok(ControlFlow::Break(()));
        } else if let NetlinkPayload::InnerMessage(Answer(attributes)) = &message.payload
            && on_object(attributes).is_break()
        {
            return Ok(ControlFlow::Break(()));
        }
        rest = rest.get((length as usize).next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(ControlFlow::Continue(()))
}

fn serialized(message: Message, flags: u16, sequence: u32) -> Vec<u8> {
    let mut header = NetlinkHeader::default();
    header.flags = flags;
    header.sequence_number = sequence;
    let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
    message.finalize();
    let mut buffer = vec![0; message.buffer_len()];
    message.serialize(&mut buffer);
    buffer
}

/// Parses the attributes in a value, up to the first malformed attribute.
pub(super) fn attributes(value: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    NlasIterator::new(value).map_while(Result::ok).map(|attribute| {
        let (kind, length) = (attribute.kind(), attribute.value_length());
        (kind, attribute.into_inner().get(4..4 + length).unwrap_or_default())
    })
}

/// Returns the value of the first attribute of a kind.
pub(super) fn find(value: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(value).find(|(found, _)| *found == kind).map(|(_, value)| value)
}

fn truncated() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the kernel's answer is truncated")
}
