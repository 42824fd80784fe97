// SPDX-License-Identifier: Apache-2.0
//! The guard's table: what is in it, how it is made and read back.

use std::{collections::BTreeSet, io, net::IpAddr, ops::ControlFlow};

use rtnetlink::packet_core::DefaultNla;

use super::{
    uapi::{self, attribute, expression, key_type, message, value},
    wire::{Connection, Message, attributes, bytes, find, nest, number, text},
};
use crate::core::model::{Family, Protocol};

pub(super) const TABLE: &str = "npl";
const CHAIN: &str = "replies";
/// Ahead of everybody's `srcnat`, which is 100.
const PRIORITY: i32 = 99;
/// Elements in one message: an attribute has 65 535 bytes at most.
const TOGETHER: usize = 1000;

/// Where replies come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Endpoint {
    pub(super) addr: IpAddr,
    pub(super) protocol: Protocol,
    /// Host order.
    pub(super) port: u16,
}

/// How a family's addresses lie in headers and sets.
#[derive(Debug)]
struct Shape {
    family: Family,
    set: &'static str,
    nfproto: u8,
    /// Offset of the source address in the header.
    source: u32,
    /// Bytes of an address.
    length: u32,
    key_type: u32,
}

const V4: Shape = Shape {
    family: Family::V4,
    set: "endpoints_v4",
    nfproto: uapi::NFPROTO_IPV4,
    source: 12,
    length: 4,
    key_type: key_type::IPV4_ADDRESS,
};

const V6: Shape = Shape {
    family: Family::V6,
    set: "endpoints_v6",
    nfproto: uapi::NFPROTO_IPV6,
    source: 8,
    length: 16,
    key_type: key_type::IPV6_ADDRESS,
};

const SHAPES: [&Shape; 2] = [&V4, &V6];

impl Endpoint {
    /// Address, protocol and port, each of which takes whole words.
    fn key(&self) -> Vec<u8> {
        let [high, low] = self.port.to_be_bytes();
        let tail = [self.protocol.number(), 0, 0, 0, high, low, 0, 0];
        match self.addr {
            IpAddr::V4(addr) => [&addr.octets()[..], &tail].concat(),
            IpAddr::V6(addr) => [&addr.octets()[..], &tail].concat(),
        }
    }

    fn read(key: &[u8]) -> Option<Self> {
        let (addr, tail) = key.split_last_chunk::<8>()?;
        let addr = match addr.len() {
            4 => IpAddr::from(<[u8; 4]>::try_from(addr).ok()?),
            16 => IpAddr::from(<[u8; 16]>::try_from(addr).ok()?),
            _ => return None,
        };
        let [protocol, _, _, _, high, low, _, _] = *tail;
        Some(Self { addr, protocol: Protocol::from_number(protocol)?, port: u16::from_be_bytes([high, low]) })
    }
}

/// Makes the table with these endpoints, in the place of one that may be there.
pub(super) fn replace(connection: &Connection, endpoints: &BTreeSet<Endpoint>) -> io::Result<()> {
    let table = |command| Message::new(command, vec![text(attribute::TABLE, TABLE)]);
    // To be deleted, it has to be there.
    let anew = [table(message::NEW_TABLE), table(message::DEL_TABLE), table(message::NEW_TABLE)];
    let mut commands = Vec::from(anew);
    commands.extend((1..).zip(SHAPES).map(|(id, shape)| new_set(id, shape)));
    commands.push(new_chain());
    commands.extend(SHAPES.map(new_rule));
    connection.commit(commands)?;
    update(connection, endpoints, &BTreeSet::new())
}

/// Adds some endpoints and takes others out.
pub(super) fn update(connection: &Connection, new: &BTreeSet<Endpoint>, gone: &BTreeSet<Endpoint>) -> io::Result<()> {
    let messages = elements(message::DEL_ELEMENT, gone).into_iter().chain(elements(message::NEW_ELEMENT, new));
    // A transaction of all might not fit into the socket.
    messages.into_iter().try_for_each(|message| connection.commit(vec![message]))
}

/// Takes the table away; whether it was there.
pub(super) fn remove(connection: &Connection) -> io::Result<bool> {
    let removed = connection.commit(vec![Message::new(message::DEL_TABLE, vec![text(attribute::TABLE, TABLE)])]);
    if_there(removed).map(|removed| removed.is_some())
}

/// The endpoints in the table; nothing if it is not there, or not whole.
pub(super) fn read(connection: &Connection) -> io::Result<Option<BTreeSet<Endpoint>>> {
    let mut endpoints = BTreeSet::new();
    for shape in SHAPES {
        let set = vec![text(attribute::TABLE, TABLE), text(attribute::ELEMENTS_SET, shape.set)];
        let listed = connection.list(Message::new(message::GET_ELEMENT, set), |object| {
            let elements = find(object, attribute::ELEMENTS).unwrap_or_default();
            let key = |element| find(find(element, attribute::ELEMENT_KEY)?, attribute::DATA_VALUE);
            endpoints.extend(attributes(elements).filter_map(|(_, element)| Endpoint::read(key(element)?)));
            ControlFlow::Continue(())
        });
        if if_there(listed)?.is_none() {
            return Ok(None);
        }
    }
    let mut rules = 0;
    let chain = vec![text(attribute::TABLE, TABLE), text(attribute::RULE_CHAIN, CHAIN)];
    let listed = connection.list(Message::new(message::GET_RULE, chain), |_| {
        rules += 1;
        ControlFlow::Continue(())
    });
    let is_whole = if_there(listed)?.is_some() && rules == SHAPES.len();
    Ok(is_whole.then_some(endpoints))
}

/// Whether anybody else translates the sources of packets that leave; nothing where the kernel has no nftables. Of ten
/// thousand chains, whose first ones most often tell it, no more are read than it takes.
pub(super) fn others_translate() -> io::Result<Option<bool>> {
    let mut found = false;
    let listed = Connection::open()?.list(Message::new(message::GET_CHAIN, Vec::new()).of_any_family(), |chain| {
        let has =
            |kind, value: &str| find(chain, kind).is_some_and(|it| it.strip_suffix(&[0]) == Some(value.as_bytes()));
        let hook = find(chain, attribute::CHAIN_HOOK).and_then(|hook| find(hook, attribute::HOOK_NUMBER));
        let is_last = hook == Some(&uapi::POST_ROUTING.to_be_bytes()[..]);
        found |= is_last && has(attribute::CHAIN_TYPE, "nat") && !has(attribute::TABLE, TABLE);
        if found { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    Ok(if_known(listed)?.map(|()| found))
}

/// Nothing where the kernel has no nftables.
pub(super) fn if_known<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(None),
        other => other.map(Some),
    }
}

fn if_there<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

fn new_set(id: u32, shape: &Shape) -> Message {
    let parts = [shape.key_type, key_type::PROTOCOL, key_type::PORT];
    let key_type = parts.into_iter().fold(0, |all, part| all << key_type::BITS | part);
    let attributes = vec![
        text(attribute::TABLE, TABLE),
        text(attribute::SET_NAME, shape.set),
        number(attribute::SET_FLAGS, 0),
        number(attribute::SET_KEY_TYPE, key_type),
        number(attribute::SET_KEY_LENGTH, shape.length + 4 + 4),
        number(attribute::SET_ID, id),
    ];
    Message::new(message::NEW_SET, attributes)
}

fn new_chain() -> Message {
    let priority = bytes(attribute::HOOK_PRIORITY, &PRIORITY.to_be_bytes());
    let attributes = vec![
        text(attribute::TABLE, TABLE),
        text(attribute::CHAIN_NAME, CHAIN),
        nest(attribute::CHAIN_HOOK, &[number(attribute::HOOK_NUMBER, uapi::POST_ROUTING), priority]),
        number(attribute::CHAIN_POLICY, uapi::ACCEPT),
        text(attribute::CHAIN_TYPE, "nat"),
    ];
    Message::new(message::NEW_CHAIN, attributes)
}

/// `ip saddr . meta l4proto . th sport @endpoints_v4 snat ip to ip saddr`, and the same of IPv6.
fn new_rule(shape: &Shape) -> Message {
    use expression as of;
    let expression =
        |name, data: &[DefaultNla]| nest(attribute::IN_LIST, &[text(of::NAME, name), nest(of::DATA, data)]);
    let meta = |to, key| expression("meta", &[number(of::META_TO, to), number(of::META_KEY, key)]);
    let payload = |to, base, offset, length| {
        let (to, base) = (number(of::PAYLOAD_TO, to), number(of::PAYLOAD_BASE, base));
        expression("payload", &[to, base, number(of::PAYLOAD_OFFSET, offset), number(of::PAYLOAD_LENGTH, length)])
    };
    let source = || payload(value::REGISTER, value::NETWORK_HEADER, shape.source, shape.length);
    let behind = value::REGISTER + shape.length / 4;
    let family = nest(of::COMPARED_WITH, &[bytes(attribute::DATA_VALUE, &[shape.nfproto])]);
    let is_equal = [number(of::COMPARED, value::REGISTER), number(of::COMPARED_HOW, value::EQUAL), family];
    let translation = [
        number(of::NAT_TYPE, value::SOURCE_NAT),
        number(of::NAT_FAMILY, shape.nfproto.into()),
        number(of::NAT_ADDRESS, value::REGISTER),
    ];
    let expressions = [
        meta(value::REGISTER, value::META_NFPROTO),
        expression("cmp", &is_equal),
        source(),
        meta(behind, value::META_L4PROTO),
        payload(behind + 1, value::TRANSPORT_HEADER, 0, 2),
        expression("lookup", &[text(of::LOOKUP_SET, shape.set), number(of::LOOKUP_KEY, value::REGISTER)]),
        source(),
        expression("nat", &translation),
    ];
    let chain = [text(attribute::TABLE, TABLE), text(attribute::RULE_CHAIN, CHAIN)];
    let attributes = chain.into_iter().chain([nest(attribute::RULE_EXPRESSIONS, &expressions)]);
    Message::new(message::NEW_RULE, attributes.collect())
}

/// Commands about the elements of both sets.
fn elements(command: u16, endpoints: &BTreeSet<Endpoint>) -> Vec<Message> {
    let mut messages = Vec::new();
    for shape in SHAPES {
        let is_its = |endpoint: &&Endpoint| Family::of(endpoint.addr) == shape.family;
        let element = |endpoint: &Endpoint| {
            let key = nest(attribute::ELEMENT_KEY, &[bytes(attribute::DATA_VALUE, &endpoint.key())]);
            nest(attribute::IN_LIST, &[key])
        };
        let all: Vec<_> = endpoints.iter().filter(is_its).map(element).collect();
        messages.extend(all.chunks(TOGETHER).map(|some| {
            let set = [text(attribute::TABLE, TABLE), text(attribute::ELEMENTS_SET, shape.set)];
            Message::new(command, set.into_iter().chain([nest(attribute::ELEMENTS, some)]).collect())
        }));
    }
    messages
}
