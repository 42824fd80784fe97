// SPDX-License-Identifier: Apache-2.0
//! Creates, updates, reads and removes NPL's nftables table.

use std::{
    collections::BTreeSet,
    io,
    net::{IpAddr, Ipv6Addr},
    ops::ControlFlow,
};

use nix::errno::Errno;
use rtnetlink::packet_core::DefaultNla;

use super::{
    rules::{self, ForwardRule, NODE_SOURCES, SHAPES, Shape},
    uapi::{self, attribute, key_type, message},
    wire::{Connection, Message, attributes, bytes, find, nest, number, text},
};
use crate::core::{
    devices::{forged_sources::ForgedSources, reply_routing::Marking},
    model::{Family, Protocol, settings::PortRange},
};

/// The name of NPL's nftables table, without the family `inet`.
pub(super) const TABLE: &str = "npl";
/// Maximum number of set elements in one message. The number is limited, because a netlink attribute holds at most
/// 65,535 bytes.
const MAX_ELEMENTS: usize = 1000;

/// The Pod endpoint of a mapping: the source address, protocol and source port of the Pod's replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PodEndpoint {
    pub(super) addr: IpAddr,
    pub(super) protocol: Protocol,
    /// The Pod port in host byte order.
    pub(super) port: u16,
}

/// The content of NPL's nftables table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Content {
    /// The elements of the table's sets, in which the rules look up the addresses and ports of packets.
    pub(super) endpoints: BTreeSet<PodEndpoint>,
    /// Whether the table has the chain `replies`, which exempts replies from masquerading.
    pub(super) keeps_sources: bool,
    /// The connection marks that the rules of the chain `requests` set.
    pub(super) markings: BTreeSet<Marking>,
    /// The forged sources of the packets that the rules of the chain `forwarded` drop; `None` without the chain.
    pub(super) dropped: Option<Dropped>,
}

/// The forwarded packets that the table drops, because they have a forged source: a node address with a node port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Dropped {
    pub(super) range: PortRange,
    pub(super) sources: ForgedSources,
}

/// A base chain of the table.
struct Chain {
    name: &'static str,
    kind: &'static str,
    hook: u32,
    priority: i32,
}

/// The chain `replies`. With the priority 99, the chain runs before chains with the priority `srcnat` (100), in which
/// other software masquerades.
const REPLIES: Chain = Chain { name: "replies", kind: "nat", hook: uapi::POST_ROUTING, priority: 99 };
/// The chain `requests`. With the priority `mangle` (-150), the chain runs after kernel conntrack and before the
/// routing decision.
const REQUESTS: Chain = Chain { name: "requests", kind: "filter", hook: uapi::PRE_ROUTING, priority: -150 };

/// The chain `forwarded`. With a priority below `filter` (0), the chain runs before IPVS translates replies of Services,
/// at the same hook with the priority 98.
const FORWARDED: Chain = Chain { name: "forwarded", kind: "filter", hook: uapi::FORWARD, priority: -10 };

impl PodEndpoint {
    /// Returns the endpoint as a set key: address, protocol and port in network byte order, each padded to four bytes.
    pub(super) fn key(&self) -> Vec<u8> {
        let [high, low] = self.port.to_be_bytes();
        let tail = [self.protocol.number(), 0, 0, 0, high, low, 0, 0];
        match self.addr {
            IpAddr::V4(addr) => [&addr.octets()[..], &tail].concat(),
            IpAddr::V6(addr) => [&addr.octets()[..], &tail].concat(),
        }
    }

    pub(super) fn read(key: &[u8]) -> Option<Self> {
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

/// Creates the table with this content, or replaces an existing table. One transaction creates the table, its sets,
/// chains and rules; later transactions add the elements of the sets ([`update`]).
pub(super) fn replace(connection: &Connection, content: &Content) -> io::Result<()> {
    let table = |command| Message::new(command, vec![text(attribute::TABLE, TABLE)]);
    // The transaction first creates the table if the table is absent, because deleting an absent table fails. Then the
    // transaction deletes the table and creates it anew.
    let anew = [table(message::NEW_TABLE), table(message::DEL_TABLE), table(message::NEW_TABLE)];
    let mut commands = Vec::from(anew);
    commands.extend((1..).zip(SHAPES).map(|(id, shape)| new_set(id, shape)));
    if content.keeps_sources {
        commands.push(new_chain(&REPLIES));
        commands.extend(SHAPES.map(|shape| new_rule(&REPLIES, &rules::keeps_source(shape))));
    }
    if !content.markings.is_empty() {
        commands.push(new_chain(&REQUESTS));
        commands.extend(content.markings.iter().map(|marking| new_rule(&REQUESTS, &rules::marks(marking))));
    }
    if let Some(dropped) = &content.dropped {
        commands.extend([new_node_sources(), dropped.elements(), new_chain(&FORWARDED)]);
        commands.extend(dropped.rules().into_iter().map(|rule| new_rule(&FORWARDED, &rule.expressions())));
    }
    connection.commit(commands)?;
    update(connection, &content.endpoints, &BTreeSet::new())
}

impl Dropped {
    fn rules(&self) -> Vec<ForwardRule> {
        let bridges = self.sources.bridges.iter().map(|bridge| ForwardRule::AcceptBridged(*bridge));
        bridges.chain([ForwardRule::DropForged(self.range)]).collect()
    }

    /// Builds the message that adds each address with each protocol to the set [`NODE_SOURCES`].
    fn elements(&self) -> Message {
        let keys =
            self.sources.addresses.iter().flat_map(|addr| Protocol::ALL.map(|protocol| node_source(*addr, protocol)));
        let elements: Vec<_> = keys
            .map(|key| {
                let key = nest(attribute::ELEMENT_KEY, &[bytes(attribute::DATA_VALUE, &key)]);
                nest(attribute::IN_LIST, &[key])
            })
            .collect();
        let set = [text(attribute::TABLE, TABLE), text(attribute::ELEMENTS_SET, NODE_SOURCES)];
        let all = nest(attribute::ELEMENTS, &elements);
        Message::new(message::NEW_ELEMENT, set.into_iter().chain([all]).collect())
    }

    /// Reads the chain `forwarded` and its set; `None` if one of them is absent, or is not of the form that [`replace`]
    /// creates.
    fn read(connection: &Connection) -> io::Result<Option<Self>> {
        let mut rules = Vec::new();
        list_rules(connection, &FORWARDED, |rule| rules.push(ForwardRule::read(rule)))?;
        let Some(rules) = rules.into_iter().collect::<Option<Vec<_>>>() else { return Ok(None) };
        let mut keys: BTreeSet<Vec<u8>> = BTreeSet::new();
        if list_keys(connection, NODE_SOURCES, |key| keys.extend([key.to_vec()]))?.is_none() {
            return Ok(None);
        }
        let addr = |key: &Vec<u8>| Some(Ipv6Addr::from(*key.first_chunk::<16>()?));
        let addresses: BTreeSet<_> = keys.iter().filter_map(addr).collect();
        let bridges = rules.iter().filter_map(|rule| match rule {
            ForwardRule::AcceptBridged(bridge) => Some(*bridge),
            ForwardRule::DropForged(_) => None,
        });
        let Some(ForwardRule::DropForged(range)) = rules.last() else { return Ok(None) };
        let found = Self { range: *range, sources: ForgedSources { addresses, bridges: bridges.collect() } };
        let is_whole = rules == found.rules() && keys.len() == found.sources.addresses.len() * Protocol::ALL.len();
        Ok(is_whole.then_some(found))
    }
}

/// Returns a key of the set [`NODE_SOURCES`]: address and protocol, padded to four bytes.
fn node_source(addr: Ipv6Addr, protocol: Protocol) -> Vec<u8> {
    [&addr.octets()[..], &[protocol.number(), 0, 0, 0]].concat()
}

/// Adds the endpoints `new` to the table's sets, and removes the endpoints `gone` from the sets.
pub(super) fn update(
    connection: &Connection,
    new: &BTreeSet<PodEndpoint>,
    gone: &BTreeSet<PodEndpoint>,
) -> io::Result<()> {
    let messages = elements(message::DEL_ELEMENT, gone).into_iter().chain(elements(message::NEW_ELEMENT, new));
    // Each message is a separate transaction, because all messages in one transaction might not fit into the socket
    // buffer.
    messages.into_iter().try_for_each(|message| connection.commit(vec![message]))
}

/// Removes the table. Returns whether the table existed.
pub(super) fn remove(connection: &Connection) -> io::Result<bool> {
    let removed = connection.commit(vec![Message::new(message::DEL_TABLE, vec![text(attribute::TABLE, TABLE)])]);
    if_there(removed).map(|removed| removed.is_some())
}

/// Returns whether the table exists, even if its content differs from the content that [`replace`] creates.
pub(super) fn exists() -> io::Result<bool> {
    let Some(connection) = if_known(Connection::open())? else { return Ok(false) };
    let mut found = false;
    let listed = connection.list(Message::new(message::GET_TABLE, Vec::new()), |table| {
        found |= find(table, attribute::TABLE).and_then(|name| name.strip_suffix(&[0])) == Some(TABLE.as_bytes());
        if found { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    if_known(listed).map(|_| found)
}

/// Reads the table; `None` if the table is absent, or if it is not of the form that [`replace`] creates.
pub(super) fn read(connection: &Connection) -> io::Result<Option<Content>> {
    let mut endpoints = BTreeSet::new();
    for shape in SHAPES {
        if list_keys(connection, shape.set, |key| endpoints.extend(PodEndpoint::read(key)))?.is_none() {
            return Ok(None);
        }
    }
    let (mut kept, mut markings) = (0, Vec::new());
    list_rules(connection, &REPLIES, |_| kept += 1)?;
    list_rules(connection, &REQUESTS, |rule| markings.push(rules::read_marking(rule)))?;
    let Some(markings) = markings.into_iter().collect() else { return Ok(None) };
    let is_whole = kept == 0 || kept == SHAPES.len();
    let dropped = Dropped::read(connection)?;
    Ok(is_whole.then_some(Content { endpoints, keeps_sources: kept > 0, markings, dropped }))
}

/// Calls `on_key` with the key of each element of a set. `None` if the set does not exist.
fn list_keys(connection: &Connection, set: &str, mut on_key: impl FnMut(&[u8])) -> io::Result<Option<()>> {
    let of_set = vec![text(attribute::TABLE, TABLE), text(attribute::ELEMENTS_SET, set)];
    let listed = connection.list(Message::new(message::GET_ELEMENT, of_set), |object| {
        let elements = find(object, attribute::ELEMENTS).unwrap_or_default();
        let key = |element| find(find(element, attribute::ELEMENT_KEY)?, attribute::DATA_VALUE);
        attributes(elements).filter_map(|(_, element)| key(element)).for_each(&mut on_key);
        ControlFlow::Continue(())
    });
    if_there(listed)
}

/// Calls `on_rule` with each rule of a chain; an absent chain has no rules.
fn list_rules(connection: &Connection, chain: &Chain, mut on_rule: impl FnMut(&[u8])) -> io::Result<()> {
    let of_chain = vec![text(attribute::TABLE, TABLE), text(attribute::RULE_CHAIN, chain.name)];
    let listed = connection.list(Message::new(message::GET_RULE, of_chain), |rule| {
        on_rule(rule);
        ControlFlow::Continue(())
    });
    if_there(listed).map(drop)
}

/// Returns whether other software has a source NAT chain; `None` if the kernel has no nftables. The search stops at the
/// first source NAT chain, because a Node may have ten thousand chains.
pub(super) fn has_foreign_source_nat() -> io::Result<Option<bool>> {
    let mut found = false;
    let Some(connection) = if_known(Connection::open())? else { return Ok(None) };
    let listed = connection.list(Message::new(message::GET_CHAIN, Vec::new()).of_any_family(), |chain| {
        let has =
            |kind, value: &str| find(chain, kind).is_some_and(|it| it.strip_suffix(&[0]) == Some(value.as_bytes()));
        let hook = find(chain, attribute::CHAIN_HOOK).and_then(|hook| find(hook, attribute::HOOK_NUMBER));
        let is_last = hook == Some(&uapi::POST_ROUTING.to_be_bytes()[..]);
        found |= is_last && has(attribute::CHAIN_TYPE, "nat") && !has(attribute::TABLE, TABLE);
        if found { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    Ok(if_known(listed)?.map(|()| found))
}

/// Returns whether the error means that the kernel has no nftables. nfnetlink returns `EINVAL` for an unknown
/// subsystem. A kernel without nfnetlink, or a sandbox, returns an error when the netlink socket is opened.
pub(super) fn is_unknown(error: &io::Error) -> bool {
    const ABSENT: [Errno; 4] = [Errno::EINVAL, Errno::EOPNOTSUPP, Errno::EPROTONOSUPPORT, Errno::EAFNOSUPPORT];
    error.raw_os_error().is_some_and(|code| ABSENT.contains(&Errno::from_raw(code)))
}

/// Returns `None` if the error means that the kernel has no nftables ([`is_unknown`]). Any different error is returned
/// unchanged.
pub(super) fn if_known<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if is_unknown(&error) => Ok(None),
        other => other.map(Some),
    }
}

/// Returns `None` if the error means that the object does not exist (ENOENT). Any different error is returned
/// unchanged.
pub(super) fn if_there<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

fn new_set(id: u32, shape: &Shape) -> Message {
    let parts = [shape.key_type, key_type::PROTOCOL, key_type::PORT];
    set_of(id, shape.set, &parts, shape.length + 4 + 4)
}

/// The id of the set [`NODE_SOURCES`] in a transaction, above the ids of the sets of endpoints.
const NODE_SOURCES_ID: u32 = 3;

fn new_node_sources() -> Message {
    set_of(NODE_SOURCES_ID, NODE_SOURCES, &[key_type::IPV6_ADDRESS, key_type::PROTOCOL], 16 + 4)
}

/// Builds the message that creates a set. `parts` are the data types of the parts of its keys, and `length` is the
/// length of a key in bytes.
fn set_of(id: u32, name: &str, parts: &[u32], length: u32) -> Message {
    let key_type = parts.iter().fold(0, |all, part| all << key_type::BITS | part);
    let attributes = vec![
        text(attribute::TABLE, TABLE),
        text(attribute::SET_NAME, name),
        number(attribute::SET_FLAGS, 0),
        number(attribute::SET_KEY_TYPE, key_type),
        number(attribute::SET_KEY_LENGTH, length),
        number(attribute::SET_ID, id),
    ];
    Message::new(message::NEW_SET, attributes)
}

fn new_chain(chain: &Chain) -> Message {
    let priority = bytes(attribute::HOOK_PRIORITY, &chain.priority.to_be_bytes());
    let attributes = vec![
        text(attribute::TABLE, TABLE),
        text(attribute::CHAIN_NAME, chain.name),
        nest(attribute::CHAIN_HOOK, &[number(attribute::HOOK_NUMBER, chain.hook), priority]),
        number(attribute::CHAIN_POLICY, uapi::ACCEPT),
        text(attribute::CHAIN_TYPE, chain.kind),
    ];
    Message::new(message::NEW_CHAIN, attributes)
}

fn new_rule(chain: &Chain, expressions: &[DefaultNla]) -> Message {
    let of_chain = [text(attribute::TABLE, TABLE), text(attribute::RULE_CHAIN, chain.name)];
    let attributes = of_chain.into_iter().chain([nest(attribute::RULE_EXPRESSIONS, expressions)]);
    Message::new(message::NEW_RULE, attributes.collect())
}

/// Builds the messages that apply `command` to these endpoints in the sets of both IP families.
fn elements(command: u16, endpoints: &BTreeSet<PodEndpoint>) -> Vec<Message> {
    let mut messages = Vec::new();
    for shape in SHAPES {
        let is_its = |endpoint: &&PodEndpoint| Family::of(endpoint.addr) == shape.family;
        let element = |endpoint: &PodEndpoint| {
            let key = nest(attribute::ELEMENT_KEY, &[bytes(attribute::DATA_VALUE, &endpoint.key())]);
            nest(attribute::IN_LIST, &[key])
        };
        let all: Vec<_> = endpoints.iter().filter(is_its).map(element).collect();
        messages.extend(all.chunks(MAX_ELEMENTS).map(|some| {
            let set = [text(attribute::TABLE, TABLE), text(attribute::ELEMENTS_SET, shape.set)];
            Message::new(command, set.into_iter().chain([nest(attribute::ELEMENTS, some)]).collect())
        }));
    }
    messages
}

#[cfg(test)]
mod tests {
    use std::io;

    use nix::errno::Errno;

    use super::if_known;

    #[test]
    fn every_answer_of_a_kernel_without_nftables_means_that_there_is_none() {
        let known = |errno: Errno| if_known::<()>(Err(io::Error::from_raw_os_error(errno as i32)));
        for errno in [Errno::EINVAL, Errno::EOPNOTSUPP, Errno::EPROTONOSUPPORT, Errno::EAFNOSUPPORT] {
            assert_eq!(known(errno).unwrap(), None, "{errno}");
        }
        for errno in [Errno::EPERM, Errno::ENOBUFS, Errno::EBUSY] {
            assert_eq!(known(errno).unwrap_err().raw_os_error(), Some(errno as i32));
        }
        assert_eq!(if_known(Ok(7)).unwrap(), Some(7));
    }
}
