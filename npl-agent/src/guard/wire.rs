// SPDX-License-Identifier: Apache-2.0
//! nftables by netlink, as far as the guard needs it. Numbers in attributes are in network order.

use std::{io, ops::ControlFlow};

use rtnetlink::{packet_core::DefaultNla, sys::protocols::NETLINK_NETFILTER};

use super::uapi;
use crate::netlink::raw::{self, Message};

pub(super) fn number(kind: u16, value: u32) -> DefaultNla {
    raw::bytes(kind, &value.to_be_bytes())
}

/// About a table for both families; the command is one of [`uapi::message`].
pub(super) const fn message(command: u16, attributes: Vec<DefaultNla>) -> Message {
    Message { kind: uapi::SUBSYSTEM << 8 | command, header: [uapi::NFPROTO_INET, 0, 0, 0], attributes }
}

/// The same about the tables of all families.
pub(super) fn of_any_family(command: u16) -> Message {
    Message { header: [uapi::NFPROTO_UNSPEC, 0, 0, 0], ..message(command, Vec::new()) }
}

/// What begins or ends a transaction of nftables'.
fn of_transaction(kind: u16) -> Message {
    let [high, low] = uapi::SUBSYSTEM.to_be_bytes();
    Message { kind, header: [uapi::NFPROTO_UNSPEC, 0, high, low], attributes: Vec::new() }
}

/// A socket that talks to nftables.
#[derive(Debug)]
pub(super) struct Connection(raw::Connection);

impl Connection {
    pub(super) fn open() -> io::Result<Self> {
        raw::Connection::open(NETLINK_NETFILTER).map(Self)
    }

    /// As [`raw::Connection::commit`].
    pub(super) fn commit(&self, commands: Vec<Message>) -> io::Result<()> {
        self.0.commit([uapi::BATCH_BEGIN, uapi::BATCH_END].map(of_transaction), commands)
    }

    /// As [`raw::Connection::list`].
    pub(super) fn list(&self, command: Message, on_object: impl FnMut(&[u8]) -> ControlFlow<()>) -> io::Result<()> {
        self.0.list(command, on_object)
    }
}
