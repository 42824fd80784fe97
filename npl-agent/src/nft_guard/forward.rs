// SPDX-License-Identifier: Apache-2.0
//! For `npl-agent doctor`: reads the chains of the Node's firewall that process forwarded packets.

use std::{collections::BTreeMap, io, ops::ControlFlow};

use super::{
    table::{TABLE, if_known, if_there},
    uapi::{self, attribute, expression as of, message, value},
    wire::{Connection, Message, attributes, find, text},
};
use crate::core::doctor::forward_chains::{BaseChain, Condition, Field, ForwardChains, Rule, Table, Verdict};

/// The nftables families whose chains process forwarded IP packets.
const FAMILIES: [(u8, &str); 3] =
    [(uapi::NFPROTO_INET, "inet"), (uapi::NFPROTO_IPV4, "ip"), (uapi::NFPROTO_IPV6, "ip6")];
/// The maximum number of chains whose rules are read. The number is limited, because some firewalls have thousands of
/// chains.
const MAX_CHAINS: usize = 500;
/// The prefixes of the names that the kernel gives to anonymous sets and maps. An anonymous set or map belongs to a
/// single rule.
const ANONYMOUS: [&str; 2] = ["__set", "__map"];

/// Reads the filter chains of the forward hook, and all chains to which rules jump from these chains, directly or
/// through other chains. Reads the rules of at most [`MAX_CHAINS`] chains.
///
/// # Errors
///
/// If the kernel returns an error.
pub(super) fn read() -> io::Result<ForwardChains> {
    let mut found = ForwardChains::default();
    for (family, family_name) in FAMILIES {
        let chains = Message::new(message::GET_CHAIN, Vec::new()).of_family(family);
        let listed = Connection::open().and_then(|connection| {
            connection.list(chains, |chain| {
                found.base.extend(base_chain(family_name, chain));
                ControlFlow::Continue(())
            })
        });
        if if_known(listed)?.is_none() {
            return Ok(found);
        }
    }
    let mut wanted: Vec<_> = found.base.iter().map(|chain| (chain.table.clone(), chain.name.clone())).collect();
    while let Some(next) = wanted.pop() {
        if found.rules.len() >= MAX_CHAINS || found.rules.contains_key(&next) {
            continue;
        }
        let (table, chain) = &next;
        let rules = read_rules(table, chain)?;
        wanted.extend(rules.iter().filter_map(|rule| match &rule.verdict {
            Verdict::Jump(to) | Verdict::Goto(to) => Some((table.clone(), to.clone())),
            Verdict::Accept | Verdict::Refuse | Verdict::Return => None,
        }));
        found.rules.insert(next, rules);
    }
    Ok(found)
}

fn name(object: &[u8], kind: u16) -> Option<String> {
    let text = find(object, kind)?.strip_suffix(&[0])?;
    String::from_utf8(text.to_vec()).ok()
}

fn number(object: &[u8], kind: u16) -> Option<u32> {
    find(object, kind)?.try_into().ok().map(u32::from_be_bytes)
}

pub(super) fn base_chain(family: &'static str, chain: &[u8]) -> Option<BaseChain> {
    let hook = number(find(chain, attribute::CHAIN_HOOK)?, attribute::HOOK_NUMBER)?;
    let is_filter = name(chain, attribute::CHAIN_TYPE)? == "filter";
    // NPL's own chain drops only packets with forged sources.
    let is_own = family == "inet" && name(chain, attribute::TABLE)? == TABLE;
    (hook == uapi::FORWARD && is_filter && !is_own).then_some(())?;
    Some(BaseChain {
        table: Table { family, name: name(chain, attribute::TABLE)? },
        name: name(chain, attribute::CHAIN_NAME)?,
        drops_by_default: number(chain, attribute::CHAIN_POLICY) == Some(uapi::DROP),
    })
}

fn read_rules(table: &Table, chain: &str) -> io::Result<Vec<Rule>> {
    let family = FAMILIES.iter().find(|(_, name)| *name == table.family).map_or(uapi::NFPROTO_INET, |it| it.0);
    let of_chain = vec![text(attribute::TABLE, &table.name), text(attribute::RULE_CHAIN, chain)];
    let mut drafts = Vec::new();
    let listed = Connection::open()?.list(Message::new(message::GET_RULE, of_chain).of_family(family), |rule| {
        drafts.push(Draft::read(rule));
        ControlFlow::Continue(())
    });
    if_there(listed)?;
    let mut rules = Vec::new();
    for draft in drafts {
        let names = draft.sets().into_iter().filter(|name| ANONYMOUS.iter().any(|it| name.starts_with(it)));
        let mut sets = BTreeMap::new();
        for set in names {
            let of_set = vec![text(attribute::TABLE, &table.name), text(attribute::ELEMENTS_SET, &set)];
            let mut elements = Vec::new();
            let listed =
                Connection::open()?.list(Message::new(message::GET_ELEMENT, of_set).of_family(family), |object| {
                    elements.extend(read_elements(object));
                    ControlFlow::Continue(())
                });
            if if_there(listed)?.is_some() {
                sets.insert(set, elements);
            }
        }
        rules.extend(draft.finish(&sets));
    }
    Ok(rules)
}

/// An element of an anonymous set or map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Element {
    /// The key of the element; `None` in a set of ranges, because a range has no single key.
    key: Option<Vec<u8>>,
    verdict: Option<Verdict>,
}

pub(super) fn read_elements(object: &[u8]) -> Vec<Element> {
    let all = find(object, attribute::ELEMENTS).unwrap_or_default();
    let mut elements: Vec<Element> = Vec::new();
    let mut has_ranges = false;
    for (_, element) in attributes(all) {
        has_ranges |= number(element, attribute::ELEMENT_FLAGS).is_some_and(|flags| flags != 0)
            || find(element, attribute::ELEMENT_KEY_END).is_some();
        let key = find(element, attribute::ELEMENT_KEY).and_then(|key| find(key, attribute::DATA_VALUE));
        let verdict = find(element, attribute::ELEMENT_DATA).and_then(verdict);
        elements.push(Element { key: key.map(<[u8]>::to_vec), verdict });
    }
    if has_ranges {
        for element in &mut elements {
            element.key = None;
        }
    }
    elements
}

/// Returns the verdict in a data attribute; `None` for the verdict `continue` and for data that is not a verdict.
fn verdict(data: &[u8]) -> Option<Verdict> {
    let verdict = find(data, attribute::DATA_VERDICT)?;
    let code = number(verdict, attribute::VERDICT_CODE)?.cast_signed();
    let chain = || name(verdict, attribute::VERDICT_CHAIN);
    match code {
        0 => Some(Verdict::Refuse),
        1 => Some(Verdict::Accept),
        value::JUMP => chain().map(Verdict::Jump),
        value::GOTO => chain().map(Verdict::Goto),
        value::RETURN => Some(Verdict::Return),
        _ => None,
    }
}

/// An expression of a rule that looks up a packet field in a set or map.
#[derive(Debug, Clone)]
struct Lookup {
    set: String,
    field: Field,
    mask: Vec<u8>,
    is_negated: bool,
    is_map: bool,
}

/// A rule that is only partly converted, because it may refer to sets whose elements have not been read yet.
#[derive(Debug, Default)]
pub(super) struct Draft {
    /// For each register: the packet field in the register, and the mask that was applied to the field.
    registers: BTreeMap<u32, (Field, Vec<u8>)>,
    conditions: Vec<Condition>,
    lookups: Vec<Lookup>,
    verdict: Option<Verdict>,
}

impl Draft {
    pub(super) fn read(rule: &[u8]) -> Self {
        let mut draft = Self::default();
        for (_, expression) in attributes(find(rule, attribute::RULE_EXPRESSIONS).unwrap_or_default()) {
            let data = find(expression, of::DATA).unwrap_or_default();
            draft.apply(&name(expression, of::NAME).unwrap_or_default(), data);
        }
        draft
    }

    fn apply(&mut self, expression: &str, data: &[u8]) {
        match expression {
            "meta" if find(data, of::META_FROM).is_none() => {
                let field = number(data, of::META_KEY).map_or(Field::Other, meta_field);
                self.load(number(data, of::META_TO), field);
            }
            "ct" if find(data, of::CT_FROM).is_none() => {
                let field = number(data, of::CT_KEY).map_or(Field::Other, ct_field);
                self.load(number(data, of::CT_TO), field);
            }
            "payload" if find(data, of::PAYLOAD_FROM).is_none() => {
                self.load(number(data, of::PAYLOAD_TO), header_field(data));
            }
            "bitwise" => self.mask(data),
            "cmp" => self.compare(data),
            "lookup" => self.look_up(data),
            "immediate" => self.verdict = find(data, of::IMMEDIATE_DATA).and_then(verdict).or(self.verdict.take()),
            "reject" => self.verdict = Some(Verdict::Refuse),
            "match" => self.conditions.extend(xtables_match(data)),
            "target" if name(data, of::XTABLES_NAME).is_some_and(|it| it == "REJECT") => {
                self.verdict = Some(Verdict::Refuse);
            }
            // These expressions give no verdict and do not restrict which packets the rule matches, so they are
            // ignored.
            "counter" | "log" | "notrack" | "target" | "meta" | "ct" | "payload" => {}
            _ => self.conditions.push(Condition::unclear()),
        }
    }

    fn load(&mut self, register: Option<u32>, field: Field) {
        self.registers.extend(register.map(|register| (normal(register), (field, Vec::new()))));
    }

    fn content(&self, register: Option<u32>) -> (Field, Vec<u8>) {
        let content = register.and_then(|register| self.registers.get(&normal(register)));
        content.cloned().unwrap_or((Field::Other, Vec::new()))
    }

    fn mask(&mut self, data: &[u8]) {
        let operand = |kind| find(find(data, kind)?, attribute::DATA_VALUE).map(<[u8]>::to_vec);
        let (field, former) = self.content(number(data, of::BITWISE_FROM));
        let is_plain = former.is_empty() && operand(of::BITWISE_XOR).is_some_and(|it| it.iter().all(|byte| *byte == 0));
        let content = match operand(of::BITWISE_MASK) {
            Some(mask) if is_plain => (field, mask),
            _ => (Field::Other, Vec::new()),
        };
        self.registers.extend(number(data, of::BITWISE_TO).map(|register| (normal(register), content)));
    }

    fn compare(&mut self, data: &[u8]) {
        let (field, mask) = self.content(number(data, of::COMPARED));
        let with = find(data, of::COMPARED_WITH).and_then(|it| find(it, attribute::DATA_VALUE));
        let is_negated = match number(data, of::COMPARED_HOW) {
            Some(value::EQUAL) => false,
            Some(value::NOT_EQUAL) => true,
            _ => return self.conditions.push(Condition::unclear()),
        };
        let values = with.map(<[u8]>::to_vec).into_iter().collect();
        self.conditions.push(Condition { field, mask, values, is_negated });
    }

    fn look_up(&mut self, data: &[u8]) {
        let (field, mask) = self.content(number(data, of::LOOKUP_KEY));
        let is_negated = number(data, of::LOOKUP_FLAGS).is_some_and(|flags| flags != 0);
        let is_map = find(data, of::LOOKUP_TO).is_some();
        let set = name(data, of::LOOKUP_SET).unwrap_or_default();
        self.lookups.push(Lookup { set, field, mask, is_negated, is_map });
    }

    pub(super) fn sets(&self) -> Vec<String> {
        self.lookups.iter().map(|lookup| lookup.set.clone()).collect()
    }

    /// Converts the draft to rules: to one rule, or to one rule for each element of the verdict map in which the rule
    /// looks up its verdict. A rule without a verdict is left out.
    pub(super) fn finish(mut self, sets: &BTreeMap<String, Vec<Element>>) -> Vec<Rule> {
        let mut rules = Vec::new();
        for Lookup { set, field, mask, is_negated, is_map } in std::mem::take(&mut self.lookups) {
            let condition = |keys: Option<Vec<Vec<u8>>>| match keys {
                Some(values) => Condition { field: field.clone(), mask: mask.clone(), values, is_negated },
                None => Condition::unclear(),
            };
            match (sets.get(&set), is_map) {
                (Some(elements), false) => {
                    self.conditions.push(condition(elements.iter().map(|element| element.key.clone()).collect()));
                }
                (Some(elements), true) => rules.extend(elements.iter().filter_map(|element| {
                    let is_element = condition(element.key.clone().map(|key| vec![key]));
                    let conditions = [self.conditions.clone(), vec![is_element]].concat();
                    Some(Rule { conditions, verdict: element.verdict.clone()? })
                })),
                (None, false) => self.conditions.push(Condition::unclear()),
                // The elements of a named verdict map are not read, so the rule counts as a rule that may accept the
                // packet.
                (None, true) => {
                    let conditions = [self.conditions.clone(), vec![Condition::unclear()]].concat();
                    rules.push(Rule { conditions, verdict: Verdict::Accept });
                }
            }
        }
        let conditions = self.conditions;
        rules.extend(self.verdict.map(|verdict| Rule { conditions, verdict }));
        rules
    }
}

/// Returns the number of the 4-byte register at which `register` begins. `NFT_REG_1` to `NFT_REG_4` are 16-byte
/// registers.
const fn normal(register: u32) -> u32 {
    match register {
        1..=4 => value::REGISTER + (register - 1) * 4,
        _ => register,
    }
}

const fn meta_field(key: u32) -> Field {
    match key {
        value::META_MARK => Field::Mark,
        value::META_IIF => Field::InIndex,
        value::META_OIF => Field::OutIndex,
        value::META_IIFNAME => Field::InName,
        value::META_OIFNAME => Field::OutName,
        value::META_NFPROTO => Field::Protocol,
        value::META_L4PROTO => Field::Transport,
        _ => Field::Other,
    }
}

const fn ct_field(key: u32) -> Field {
    match key {
        value::CT_STATE => Field::State,
        value::CT_STATUS => Field::Status,
        _ => Field::Other,
    }
}

fn header_field(data: &[u8]) -> Field {
    let position = || {
        let offset = usize::try_from(number(data, of::PAYLOAD_OFFSET)?).ok()?;
        let length = usize::try_from(number(data, of::PAYLOAD_LENGTH)?).ok()?;
        match (number(data, of::PAYLOAD_BASE)?, offset, length) {
            (value::NETWORK_HEADER, ..) => Some(Field::Header { offset, length }),
            // The destination port has the same offset in the headers of TCP, UDP and SCTP.
            (value::TRANSPORT_HEADER, 2, 2) => Some(Field::DestinationPort),
            _ => None,
        }
    };
    position().unwrap_or(Field::Other)
}

/// Converts an iptables match, which `iptables-nft` stores in iptables' binary form, to a condition; `None` for a
/// comment.
fn xtables_match(data: &[u8]) -> Option<Condition> {
    let info = find(data, of::XTABLES_INFO).unwrap_or_default();
    let known = match name(data, of::XTABLES_NAME)?.as_str() {
        "comment" => return None,
        "conntrack" => conntrack_match(info),
        "mark" => mark_match(info),
        _ => None,
    };
    Some(known.unwrap_or_else(Condition::unclear))
}

/// Converts a `struct xt_conntrack_mtinfo3` to a condition. Returns `None` unless the match compares only the state or
/// only the status.
fn conntrack_match(info: &[u8]) -> Option<Condition> {
    /// The offset in bytes of the two-byte field `match_flags`. The two-byte fields `invert_flags`, `state_mask` and
    /// `status_mask` follow.
    const FLAGS: usize = 146;
    const STATE: u16 = 1;
    const STATUS: u16 = 1 << 6;
    /// The bits of the virtual states `SNAT` and `DNAT`. These bits are removed, because they are not in the
    /// connection's state: the kernel derives the two virtual states from the connection's status.
    const VIRTUAL_STATES: u16 = 1 << 6 | 1 << 7;
    let field = |number: usize| {
        let bytes = info.get(FLAGS + 2 * number..)?.first_chunk()?;
        Some(u16::from_ne_bytes(*bytes))
    };
    let (flags, inverted, states, statuses) = (field(0)?, field(1)?, field(2)?, field(3)?);
    let (field, bits) = match flags {
        STATE => (Field::State, states & !VIRTUAL_STATES),
        STATUS => (Field::Status, statuses),
        _ => return None,
    };
    Some(bits_are_set(field, bits.into(), inverted & flags != 0))
}

/// Converts a `struct xt_mark_mtinfo1` to a condition; `None` if the data is too short.
fn mark_match(info: &[u8]) -> Option<Condition> {
    let (mark, rest) = info.split_first_chunk::<4>()?;
    let (mask, rest) = rest.split_first_chunk::<4>()?;
    let is_negated = *rest.first()? != 0;
    Some(Condition { field: Field::Mark, mask: mask.to_vec(), values: vec![mark.to_vec()], is_negated })
}

/// Returns the condition that at least one of `bits` is set or, if `is_negated`, that none of `bits` is set.
fn bits_are_set(field: Field, bits: u32, is_negated: bool) -> Condition {
    Condition { field, mask: bits.to_ne_bytes().to_vec(), values: vec![vec![0; 4]], is_negated: !is_negated }
}

#[cfg(test)]
mod tests {
    use rtnetlink::packet_core::{DefaultNla, Emitable as _};

    use super::{
        super::wire::{bytes, nest, number},
        *,
    };

    fn rule(expressions: &[(&str, Vec<DefaultNla>)]) -> Vec<u8> {
        let made = |(name, data): &(&str, Vec<DefaultNla>)| {
            nest(attribute::IN_LIST, &[text(of::NAME, name), nest(of::DATA, data)])
        };
        encode(&[nest(attribute::RULE_EXPRESSIONS, &expressions.iter().map(made).collect::<Vec<_>>())])
    }

    fn encode(attributes: &[DefaultNla]) -> Vec<u8> {
        let mut buffer = vec![0; attributes.buffer_len()];
        attributes.emit(&mut buffer);
        buffer
    }

    fn data(kind: u16, value: &[u8]) -> DefaultNla {
        nest(kind, &[bytes(attribute::DATA_VALUE, value)])
    }

    fn verdict_of(kind: u16, code: i32, chain: Option<&str>) -> DefaultNla {
        let chain = chain.map(|chain| text(attribute::VERDICT_CHAIN, chain));
        let code = number(attribute::VERDICT_CODE, code.cast_unsigned());
        nest(kind, &[nest(attribute::DATA_VERDICT, &[code].into_iter().chain(chain).collect::<Vec<_>>())])
    }

    fn immediate(code: i32, chain: Option<&str>) -> (&'static str, Vec<DefaultNla>) {
        ("immediate", vec![verdict_of(of::IMMEDIATE_DATA, code, chain)])
    }

    fn finished(expressions: &[(&str, Vec<DefaultNla>)], sets: &[(&str, Vec<u8>)]) -> Vec<Rule> {
        let sets = sets.iter().map(|(name, object)| ((*name).to_owned(), read_elements(object)));
        Draft::read(&rule(expressions)).finish(&sets.collect())
    }

    #[test]
    fn a_chain_of_the_forward_hook_is_read_with_its_policy() {
        let chain = |hook: u32, kind: &str, policy: u32| {
            encode(&[
                text(attribute::TABLE, "filter"),
                text(attribute::CHAIN_NAME, "FORWARD"),
                nest(attribute::CHAIN_HOOK, &[number(attribute::HOOK_NUMBER, hook)]),
                number(attribute::CHAIN_POLICY, policy),
                text(attribute::CHAIN_TYPE, kind),
            ])
        };
        let read = |hook, kind, policy| base_chain("ip", &chain(hook, kind, policy));
        let found = read(uapi::FORWARD, "filter", uapi::DROP).unwrap();
        assert_eq!(
            (found.name.as_str(), found.table.name.as_str(), found.drops_by_default),
            ("FORWARD", "filter", true)
        );
        assert!(!read(uapi::FORWARD, "filter", uapi::ACCEPT).unwrap().drops_by_default);
        assert_eq!(read(uapi::POST_ROUTING, "filter", uapi::DROP), None);
        assert_eq!(read(uapi::FORWARD, "route", uapi::DROP), None);
    }

    #[test]
    fn conditions_of_native_rules_are_read() {
        let load = ("ct", vec![number(of::CT_TO, 1), number(of::CT_KEY, value::CT_STATUS)]);
        let mask = (
            "bitwise",
            vec![
                number(of::BITWISE_FROM, 1),
                number(of::BITWISE_TO, 1),
                data(of::BITWISE_MASK, &32_u32.to_ne_bytes()),
                data(of::BITWISE_XOR, &[0; 4]),
            ],
        );
        let differs =
            vec![number(of::COMPARED, 1), number(of::COMPARED_HOW, value::NOT_EQUAL), data(of::COMPARED_WITH, &[0; 4])];
        let read = finished(&[load, mask, ("cmp", differs), ("counter", Vec::new()), immediate(1, None)], &[]);
        let conditions = vec![bits_are_set(Field::Status, 32, false)];
        assert_eq!(read, [Rule { conditions, verdict: Verdict::Accept }], "ct status dnat accept");

        let load = ("meta", vec![number(of::META_TO, 1), number(of::META_KEY, value::META_IIFNAME)]);
        let is_eth = vec![
            number(of::COMPARED, value::REGISTER),
            number(of::COMPARED_HOW, value::EQUAL),
            data(of::COMPARED_WITH, b"eth"),
        ];
        let read = finished(&[load, ("cmp", is_eth), ("reject", Vec::new())], &[]);
        let is_named =
            Condition { field: Field::InName, mask: Vec::new(), values: vec![b"eth".to_vec()], is_negated: false };
        assert_eq!(read, [Rule { conditions: vec![is_named], verdict: Verdict::Refuse }], "iifname \"eth*\" reject");

        let read = finished(&[("fib", Vec::new()), immediate(value::JUMP, Some("next"))], &[]);
        let jump = Rule { conditions: vec![Condition::unclear()], verdict: Verdict::Jump("next".to_owned()) };
        assert_eq!(read, [jump]);
        assert_eq!(finished(&[("counter", Vec::new())], &[]), [], "a rule without a verdict");
    }

    #[test]
    fn the_protocol_and_the_destination_port_are_read() {
        let protocol = ("meta", vec![number(of::META_TO, 1), number(of::META_KEY, value::META_L4PROTO)]);
        let port = |offset| {
            let position = [
                (of::PAYLOAD_TO, 1),
                (of::PAYLOAD_BASE, value::TRANSPORT_HEADER),
                (of::PAYLOAD_OFFSET, offset),
                (of::PAYLOAD_LENGTH, 2),
            ];
            ("payload", position.map(|(kind, value)| number(kind, value)).into())
        };
        let is = |value: &[u8]| {
            let operator = number(of::COMPARED_HOW, value::EQUAL);
            ("cmp", vec![number(of::COMPARED, 1), operator, data(of::COMPARED_WITH, value)])
        };
        let fields = |port| {
            let read = finished(&[protocol.clone(), is(&[6]), port, is(&[0x1e, 0x61]), immediate(0, None)], &[]);
            read[0].conditions.iter().map(|condition| condition.field.clone()).collect::<Vec<_>>()
        };
        assert_eq!(fields(port(2)), [Field::Transport, Field::DestinationPort], "tcp dport 7777 drop");
        assert_eq!(fields(port(0)), [Field::Transport, Field::Other], "tcp sport 7777 drop");
    }

    fn set(elements: &[Vec<DefaultNla>]) -> Vec<u8> {
        let all: Vec<_> = elements.iter().map(|element| nest(attribute::IN_LIST, element)).collect();
        encode(&[nest(attribute::ELEMENTS, &all)])
    }

    #[test]
    fn anonymous_sets_and_verdict_maps_are_read_and_others_are_unclear() {
        let state = ("ct", vec![number(of::CT_TO, 1), number(of::CT_KEY, value::CT_STATE)]);
        let look_up = |name: &str| ("lookup", vec![text(of::LOOKUP_SET, name), number(of::LOOKUP_KEY, 1)]);
        let key = |value: u32| data(attribute::ELEMENT_KEY, &value.to_ne_bytes());
        let (established, related) = (2_u32, 4_u32);
        let both = set(&[vec![key(established)], vec![key(related)]]);
        let rule = [state.clone(), look_up("__set0"), immediate(1, None)];
        let values = [established, related].map(|it| it.to_ne_bytes().to_vec()).to_vec();
        let condition = Condition { field: Field::State, mask: Vec::new(), values, is_negated: false };
        assert_eq!(finished(&rule, &[("__set0", both)])[0].conditions, [condition]);
        assert_eq!(finished(&rule, &[])[0].conditions, [Condition::unclear()], "a set that was not read");
        let ranges = set(&[vec![key(0)], vec![key(9), number(attribute::ELEMENT_FLAGS, 1)]]);
        assert_eq!(finished(&rule, &[("__set0", ranges)])[0].conditions, [Condition::unclear()]);

        let drop = verdict_of(attribute::ELEMENT_DATA, 0, None);
        let map = set(&[vec![key(1), drop], vec![key(established), verdict_of(attribute::ELEMENT_DATA, 1, None)]]);
        let mut by_map = look_up("__map0");
        by_map.1.push(number(of::LOOKUP_TO, 0));
        let read = finished(&[state.clone(), by_map.clone()], &[("__map0", map)]);
        let verdicts: Vec<_> = read.iter().map(|rule| rule.verdict.clone()).collect();
        assert_eq!(verdicts, [Verdict::Refuse, Verdict::Accept]);
        let unread = finished(&[state, by_map], &[]);
        assert_eq!(unread, [Rule { conditions: vec![Condition::unclear()], verdict: Verdict::Accept }]);
    }

    #[test]
    fn matches_of_iptables_are_read() {
        let conntrack = |flags: u16, states: u16, statuses: u16| {
            let mut info = vec![0; 146];
            info.extend([flags, 0, states, statuses].iter().flat_map(|it| it.to_ne_bytes()));
            xtables_match(&encode(&[text(of::XTABLES_NAME, "conntrack"), bytes(of::XTABLES_INFO, &info)]))
        };
        assert_eq!(conntrack(1, 6, 0), Some(bits_are_set(Field::State, 6, false)), "--ctstate ESTABLISHED,RELATED");
        assert_eq!(conntrack(1, 128, 0), Some(bits_are_set(Field::State, 0, false)), "--ctstate DNAT matches nothing");
        assert_eq!(conntrack(3, 6, 0), Some(Condition::unclear()), "a further condition");
        let mark = [0x4000_u32.to_ne_bytes(), 0x4000_u32.to_ne_bytes(), [0; 4]].concat();
        let read = xtables_match(&encode(&[text(of::XTABLES_NAME, "mark"), bytes(of::XTABLES_INFO, &mark)])).unwrap();
        assert_eq!((read.field, read.values.len(), read.is_negated), (Field::Mark, 1, false));
        let named = |name| xtables_match(&encode(&[text(of::XTABLES_NAME, name)]));
        assert_eq!(named("comment"), None);
        assert_eq!(named("set"), Some(Condition::unclear()));
    }
}
