// SPDX-License-Identifier: Apache-2.0
//! The rules of NPL's nftables table as netlink attributes, and parsers for rules that are read from the kernel.

use rtnetlink::packet_core::DefaultNla;

use super::{
    uapi::{self, attribute, expression as of, value},
    wire::{attributes, bytes, find, nest, number, text},
};
use crate::core::{
    devices::reply_routing::{Mark, Marking},
    model::{Family, NodePort, settings::PortRange},
};

/// The layout of the addresses of an IP family, in packet headers and in the sets of NPL's nftables table.
#[derive(Debug)]
pub(super) struct Shape {
    pub(super) family: Family,
    pub(super) set: &'static str,
    nfproto: u8,
    /// Offset in bytes of the source address in the IP header. The destination address follows the source address.
    source: u32,
    /// Length in bytes of an address.
    pub(super) length: u32,
    pub(super) key_type: u32,
}

const V4: Shape = Shape {
    family: Family::V4,
    set: "endpoints_v4",
    nfproto: uapi::NFPROTO_IPV4,
    source: 12,
    length: 4,
    key_type: uapi::key_type::IPV4_ADDRESS,
};

const V6: Shape = Shape {
    family: Family::V6,
    set: "endpoints_v6",
    nfproto: uapi::NFPROTO_IPV6,
    source: 8,
    length: 16,
    key_type: uapi::key_type::IPV6_ADDRESS,
};

pub(super) const SHAPES: [&Shape; 2] = [&V4, &V6];

/// Whether a rule reads a packet's source address and port, or its destination address and port.
#[derive(Debug, Clone, Copy)]
enum End {
    Source,
    Destination,
}

/// Builds the rule `ip saddr . meta l4proto . th sport @endpoints_v4 snat ip to ip saddr`, or the corresponding rule
/// for IPv6. The rule applies source NAT that translates the source address to itself. The kernel then applies no
/// masquerade rule to the connection.
pub(super) fn keeps_source(shape: &Shape) -> Vec<DefaultNla> {
    let translation = [
        number(of::NAT_TYPE, value::SOURCE_NAT),
        number(of::NAT_FAMILY, shape.nfproto.into()),
        number(of::NAT_ADDRESS, value::REGISTER),
    ];
    let mut rule = is_of_family(shape).to_vec();
    rule.extend(is_endpoint(shape, End::Source));
    rule.extend([address(shape, End::Source), expression("nat", &translation)]);
    rule
}

/// Builds the rule `iif DEVICE ct mark & MASK != MARK ip daddr . meta l4proto . th dport @endpoints_v4 ct mark set ct
/// mark & ~MASK | MARK`, or the corresponding rule for IPv6.
///
/// The rule compares the mark first, because the lookup in the set takes longer. The rule also matches packets of
/// existing connections, so that UDP flows that began before the rule was installed get the mark.
pub(super) fn marks(marking: &Marking) -> Vec<DefaultNla> {
    let shape = if marking.family == Family::V4 { &V4 } else { &V6 };
    let (set, mask) = (marking.mark.value(), marking.mark.mask());
    let mut rule = is_of_family(shape).to_vec();
    rule.extend([meta(value::REGISTER, value::META_IIF), compare(value::EQUAL, &marking.ifindex.to_ne_bytes())]);
    rule.extend([mark_to_register(), bitwise(mask, 0), compare(value::NOT_EQUAL, &set.to_ne_bytes())]);
    rule.extend(is_endpoint(shape, End::Destination));
    rule.extend([mark_to_register(), bitwise(!mask, set), mark_from_register()]);
    rule
}

/// A rule of the chain `forwarded`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ForwardRule {
    /// Accepts packets that a bridge forwards between its ports. The value is the ifindex of the bridge.
    AcceptBridged(u32),
    /// Drops IPv6 packets from an address and protocol of the set [`NODE_SOURCES`] and a port of this range.
    DropForged(PortRange),
}

/// The name of the set with the sources of node ports: each IPv6 address of the Node with each protocol.
pub(super) const NODE_SOURCES: &str = "node_sources_v6";

impl ForwardRule {
    /// Builds the rule `iif BRIDGE oif BRIDGE accept`, or the rule `meta nfproto ipv6 th sport START-END ip6 saddr . meta
    /// l4proto @node_sources_v6 drop`.
    ///
    /// The second rule compares the port first: few packets have a source port of the range.
    pub(super) fn expressions(self) -> Vec<DefaultNla> {
        match self {
            Self::AcceptBridged(bridge) => {
                let is_it = compare(value::EQUAL, &bridge.to_ne_bytes());
                let (iif, oif) = (meta(value::REGISTER, value::META_IIF), meta(value::REGISTER, value::META_OIF));
                vec![iif, is_it.clone(), oif, is_it, verdict(uapi::ACCEPT)]
            }
            Self::DropForged(range) => {
                let behind = value::REGISTER + V6.length / 4;
                let lookup = [text(of::LOOKUP_SET, NODE_SOURCES), number(of::LOOKUP_KEY, value::REGISTER)];
                let mut rule = is_of_family(&V6).to_vec();
                rule.extend([
                    payload(value::REGISTER, value::TRANSPORT_HEADER, 0, 2),
                    compare(value::GREATER_OR_EQUAL, &range.start().0.to_be_bytes()),
                    compare(value::LESS_OR_EQUAL, &range.end().0.to_be_bytes()),
                    address(&V6, End::Source),
                    meta(behind, value::META_L4PROTO),
                    expression("lookup", &lookup),
                    verdict(uapi::DROP),
                ]);
                rule
            }
        }
    }

    /// Parses a rule; `None` if the rule is not of a form that [`Self::expressions`] builds.
    pub(super) fn read(rule: &[u8]) -> Option<Self> {
        let read = Expressions::read(rule)?;
        let port = |at| Some(u16::from_be_bytes(read.data(at, "cmp", of::COMPARED_WITH)?.try_into().ok()?));
        let (found, code) = if read.0.len() == Self::AcceptBridged(0).expressions().len() {
            let (iif, oif) = (read.number(1, "cmp", of::COMPARED_WITH)?, read.number(3, "cmp", of::COMPARED_WITH)?);
            (Self::AcceptBridged(Some(iif).filter(|_| iif == oif)?), uapi::ACCEPT)
        } else {
            read.named(7, "lookup")?;
            (Self::DropForged(PortRange::new(NodePort(port(3)?), NodePort(port(4)?))?), uapi::DROP)
        };
        let is_whole = read.0.len() == found.expressions().len() && read.verdict()? == code;
        is_whole.then_some(found)
    }
}

/// The expressions of a rule, which are read from the kernel: each with its name and its data.
struct Expressions<'r>(Vec<(&'r [u8], &'r [u8])>);

impl<'r> Expressions<'r> {
    fn read(rule: &'r [u8]) -> Option<Self> {
        let made = |(_, expression)| {
            let name = find(expression, of::NAME)?.strip_suffix(&[0])?;
            Some((name, find(expression, of::DATA)?))
        };
        attributes(find(rule, attribute::RULE_EXPRESSIONS)?).map(made).collect::<Option<_>>().map(Self)
    }

    /// The data of an expression; `None` if the expression at this position has another name.
    fn named(&self, at: usize, name: &str) -> Option<&'r [u8]> {
        self.0.get(at).filter(|(found, _)| *found == name.as_bytes()).map(|(_, data)| *data)
    }

    fn data(&self, at: usize, name: &str, kind: u16) -> Option<&'r [u8]> {
        find(find(self.named(at, name)?, kind)?, attribute::DATA_VALUE)
    }

    fn number(&self, at: usize, name: &str, kind: u16) -> Option<u32> {
        self.data(at, name, kind)?.try_into().ok().map(u32::from_ne_bytes)
    }

    /// The verdict of the last expression.
    fn verdict(&self) -> Option<u32> {
        let immediate = self.named(self.0.len().checked_sub(1)?, "immediate")?;
        let verdict = find(find(immediate, of::IMMEDIATE_DATA)?, attribute::DATA_VERDICT)?;
        find(verdict, attribute::VERDICT_CODE)?.try_into().ok().map(u32::from_be_bytes)
    }
}

/// Parses the marking that a rule sets; `None` if the rule is not of the form that [`marks`] builds.
pub(super) fn read_marking(rule: &[u8]) -> Option<Marking> {
    let read = Expressions::read(rule)?;
    let nfproto = read.data(1, "cmp", of::COMPARED_WITH)?;
    let shape = SHAPES.into_iter().find(|shape| [shape.nfproto] == nfproto)?;
    let ifindex = read.number(3, "cmp", of::COMPARED_WITH)?;
    let mask = read.number(5, "bitwise", of::BITWISE_MASK)?;
    let mark = Mark::new(read.number(6, "cmp", of::COMPARED_WITH)?, mask)?;
    let marking = Marking { family: shape.family, ifindex, mark };
    let sets = (read.number(12, "bitwise", of::BITWISE_MASK)?, read.number(12, "bitwise", of::BITWISE_XOR)?);
    (read.0.len() == marks(&marking).len() && sets == (!mark.mask(), mark.value())).then_some(marking)
}

fn is_of_family(shape: &Shape) -> [DefaultNla; 2] {
    [meta(value::REGISTER, value::META_NFPROTO), compare(value::EQUAL, &[shape.nfproto])]
}

/// Builds the expressions that match a packet whose address, protocol and port are in the set of endpoints.
fn is_endpoint(shape: &Shape, end: End) -> [DefaultNla; 4] {
    let behind = value::REGISTER + shape.length / 4;
    let port = match end {
        End::Source => 0,
        End::Destination => 2,
    };
    let lookup = [text(of::LOOKUP_SET, shape.set), number(of::LOOKUP_KEY, value::REGISTER)];
    [
        address(shape, end),
        meta(behind, value::META_L4PROTO),
        payload(behind + 1, value::TRANSPORT_HEADER, port, 2),
        expression("lookup", &lookup),
    ]
}

fn address(shape: &Shape, end: End) -> DefaultNla {
    let offset = match end {
        End::Source => shape.source,
        End::Destination => shape.source + shape.length,
    };
    payload(value::REGISTER, value::NETWORK_HEADER, offset, shape.length)
}

fn expression(name: &str, data: &[DefaultNla]) -> DefaultNla {
    nest(attribute::IN_LIST, &[text(of::NAME, name), nest(of::DATA, data)])
}

fn meta(to: u32, key: u32) -> DefaultNla {
    expression("meta", &[number(of::META_TO, to), number(of::META_KEY, key)])
}

fn payload(to: u32, base: u32, offset: u32, length: u32) -> DefaultNla {
    let (to, base) = (number(of::PAYLOAD_TO, to), number(of::PAYLOAD_BASE, base));
    expression("payload", &[to, base, number(of::PAYLOAD_OFFSET, offset), number(of::PAYLOAD_LENGTH, length)])
}

fn compare(how: u32, with: &[u8]) -> DefaultNla {
    let with = nest(of::COMPARED_WITH, &[bytes(attribute::DATA_VALUE, with)]);
    expression("cmp", &[number(of::COMPARED, value::REGISTER), number(of::COMPARED_HOW, how), with])
}

/// Builds the expression `register = (register & mask) ^ flipped`.
fn bitwise(mask: u32, flipped: u32) -> DefaultNla {
    let operand = |kind, operand: u32| nest(kind, &[bytes(attribute::DATA_VALUE, &operand.to_ne_bytes())]);
    let registers = [number(of::BITWISE_FROM, value::REGISTER), number(of::BITWISE_TO, value::REGISTER)];
    let operands = [operand(of::BITWISE_MASK, mask), operand(of::BITWISE_XOR, flipped)];
    let data: Vec<_> = registers.into_iter().chain([number(of::BITWISE_LENGTH, 4)]).chain(operands).collect();
    expression("bitwise", &data)
}

/// Builds the expression that ends the evaluation of the chain with a verdict.
fn verdict(code: u32) -> DefaultNla {
    let verdict = nest(attribute::DATA_VERDICT, &[number(attribute::VERDICT_CODE, code)]);
    let data = nest(of::IMMEDIATE_DATA, &[verdict]);
    expression("immediate", &[number(of::IMMEDIATE_TO, value::VERDICT), data])
}

fn mark_to_register() -> DefaultNla {
    expression("ct", &[number(of::CT_KEY, value::CT_MARK), number(of::CT_TO, value::REGISTER)])
}

fn mark_from_register() -> DefaultNla {
    expression("ct", &[number(of::CT_KEY, value::CT_MARK), number(of::CT_FROM, value::REGISTER)])
}

#[cfg(test)]
mod tests {
    use rtnetlink::packet_core::{DefaultNla, Emitable as _};

    use super::{Family, ForwardRule, Mark, Marking, SHAPES, attribute, keeps_source, marks, nest, read_marking};

    fn bytes(expressions: &[DefaultNla]) -> Vec<u8> {
        let rule = nest(attribute::RULE_EXPRESSIONS, expressions);
        let mut buffer = vec![0; rule.buffer_len()];
        rule.emit(&mut buffer);
        buffer
    }

    #[test]
    fn a_marking_rule_is_read_back_and_altered_rules_are_rejected() {
        for family in Family::ALL {
            let marking = Marking { family, ifindex: 7, mark: Mark::new(0x280, 0xf80).unwrap() };
            let rule = marks(&marking);
            assert_eq!(read_marking(&bytes(&rule)), Some(marking));
            for missing in 0..rule.len() {
                let (head, tail) = rule.split_at(missing);
                let rest = [head, &tail[1..]].concat();
                assert_eq!(read_marking(&bytes(&rest)), None, "without expression {missing}");
            }
            let other = marks(&Marking { mark: Mark::new(0x80, 0x80).unwrap(), ..marking });
            let mixed = [&rule[..11], &other[11..]].concat();
            assert_eq!(read_marking(&bytes(&mixed)), None, "the rule sets a different mark than it compares");
        }
        assert_eq!(read_marking(&bytes(&keeps_source(SHAPES[0]))), None);
        assert_eq!(ForwardRule::read(&bytes(&keeps_source(SHAPES[0]))), None);
        assert_eq!(read_marking(&[]), None);
    }

    #[test]
    fn a_rule_of_forwarded_packets_is_read_back_and_altered_rules_are_rejected() {
        let rules =
            [ForwardRule::AcceptBridged(7), ForwardRule::DropForged("61000-62000".parse().expect("a port range"))];
        for rule in rules {
            let expressions = rule.expressions();
            assert_eq!(ForwardRule::read(&bytes(&expressions)), Some(rule));
            for missing in 0..expressions.len() {
                let (head, tail) = expressions.split_at(missing);
                let rest = [head, &tail[1..]].concat();
                assert_eq!(ForwardRule::read(&bytes(&rest)), None, "{rule:?} without expression {missing}");
            }
        }
        let [accept, drop] = rules.map(ForwardRule::expressions);
        let other = ForwardRule::AcceptBridged(8).expressions();
        let mixed = [&accept[..3], &other[3..]].concat();
        assert_eq!(ForwardRule::read(&bytes(&mixed)), None, "the rule compares two devices");
        let reversed = [&drop[..8], &accept[4..]].concat();
        assert_eq!(ForwardRule::read(&bytes(&reversed)), None, "the rule accepts forged packets");
        assert_eq!(ForwardRule::read(&[]), None);
    }
}
