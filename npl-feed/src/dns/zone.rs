// SPDX-License-Identifier: Apache-2.0
//! Computes the answer to a DNS query from a snapshot, without I/O.

use std::net::IpAddr;

use hickory_server::proto::{
    op::ResponseCode,
    rr::{
        Name, RData, Record, RecordType,
        rdata::{NS, SOA, SRV},
    },
};
use npl_agent::core::model::Family;

use super::names::{self, Place};
use crate::core::{
    snapshot::{Group, Snapshot},
    work::{self, Operation},
};

/// The TTL of all DNS records in seconds. The TTL is short, because members may change at any time.
const TTL: u32 = 1;
/// The refresh, retry and expiry intervals of the SOA record, in seconds. The values of these intervals do not matter,
/// because the zone has no secondary server.
const REFRESH: i32 = 60;

/// The DNS records of one section of an answer.
pub(super) type Section = Vec<Record>;

/// The answer to a DNS query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) code: ResponseCode,
    pub(super) answers: Section,
    /// The records of the authority section: the SOA record of a negative answer.
    pub(super) authority: Section,
    /// The records of the additional section: the address records of SRV targets.
    pub(super) additional: Section,
    /// Whether the answer would exceed the size that the client accepts, and therefore contains no record.
    pub(super) is_truncated: bool,
}

impl Answer {
    pub(super) const fn failed(code: ResponseCode) -> Self {
        Self { code, answers: Vec::new(), authority: Vec::new(), additional: Vec::new(), is_truncated: false }
    }
}

/// The DNS zone that the feed serves.
#[derive(Debug, Clone)]
pub struct Zone {
    name: Name,
}

impl Zone {
    /// Creates a zone from its name. The name is stored as an absolute name in lower case.
    pub fn new(name: &Name) -> Self {
        let mut name = name.to_lowercase();
        name.set_fqdn(true);
        Self { name }
    }

    /// Computes the answer to a query of class IN. If the SRV records of the answer exceed `limit` bytes, the answer is
    /// truncated.
    pub(super) fn answer(&self, snapshot: &Snapshot, name: &Name, kind: RecordType, limit: usize) -> Answer {
        let Some(place) = names::read(name, &self.name) else { return Answer::failed(ResponseCode::Refused) };
        if matches!(kind, RecordType::AXFR | RecordType::IXFR) {
            return Answer::failed(ResponseCode::Refused);
        }
        let (exists, answers) = match place {
            Place::Apex => (true, self.apex(snapshot, name, kind)),
            Place::Port { namespace, service, protocol, port } => {
                let group = snapshot.port_of(&namespace, &service, protocol, &port);
                if let Some(group) = group.filter(|_| matches!(kind, RecordType::SRV | RecordType::ANY)) {
                    return self.members(snapshot, name, group, limit);
                }
                (group.is_some(), Vec::new())
            }
            Place::Protocol { namespace, service, protocol } => {
                let exists = snapshot.service(&namespace, &service).any(|group| group.key.protocol == protocol);
                (exists, Vec::new())
            }
            Place::Service { namespace, service } => {
                (snapshot.service(&namespace, &service).next().is_some(), Vec::new())
            }
            Place::Namespace(namespace) => (snapshot.has_namespace(&namespace), Vec::new()),
            Place::Address { ip, port } => {
                let exists = snapshot.has_address(ip, port);
                let is_asked = kind == record_type(ip) || kind == RecordType::ANY;
                (exists, if exists && is_asked { vec![address(name.clone(), ip)] } else { Vec::new() })
            }
            Place::Addresses => (true, Vec::new()),
            Place::Nothing => (false, Vec::new()),
        };
        let code = if exists { ResponseCode::NoError } else { ResponseCode::NXDomain };
        self.complete(snapshot, Answer { answers, ..Answer::failed(code) })
    }

    /// Adds the SOA record to a negative answer.
    fn complete(&self, snapshot: &Snapshot, answer: Answer) -> Answer {
        let authority = if answer.answers.is_empty() { self.soa(snapshot, self.name.clone()) } else { Vec::new() };
        Answer { authority, ..answer }
    }

    /// Returns an answer with an SRV record for each ready member, and with the address records of the SRV records'
    /// targets. If the SRV records do not fit, the answer has none of them, because a client would treat missing SRV
    /// records as removed members. If only the address records do not fit, the answer has no address records and does
    /// not count as truncated (TC), because the client can query the addresses. The feed stops building records as soon
    /// as the records no longer fit, so that a query with a forged source address costs little.
    fn members(&self, snapshot: &Snapshot, name: &Name, group: &Group, limit: usize) -> Answer {
        let mut answer = Answer::failed(ResponseCode::NoError);
        let mut free = limit.saturating_sub(HEADER_QUESTION_AND_OPT + size_of_name(name));
        let mut targets = Vec::new();
        for member in group.ready() {
            let Ok(target) = names::of_member(member.address, member.port, &self.name) else { continue };
            let data = RData::SRV(SRV::new(0, member.weight, member.port, target.clone()));
            let srv = record(name.clone(), data);
            // hickory writes each owner in full before it replaces the owner by a compression pointer, so the full
            // owner must also fit.
            let rest = free.checked_sub(size(&srv, answer.answers.len())).filter(|_| free >= size_of_name(name));
            let Some(rest) = rest else {
                return Answer { is_truncated: true, ..Answer::failed(ResponseCode::NoError) };
            };
            free = rest;
            answer.answers.push(srv);
            targets.push((target, member.address));
        }
        for (target, ip) in targets {
            let address = address(target, ip);
            let Some(rest) = free.checked_sub(size(&address, COMPRESSED_OWNERS)) else {
                answer.additional.clear();
                break;
            };
            free = rest;
            answer.additional.push(address);
        }
        self.complete(snapshot, answer)
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "the zone has two types of records at its apex")]
    fn apex(&self, snapshot: &Snapshot, name: &Name, kind: RecordType) -> Section {
        match kind {
            // An answer to a query for any type may lack some types, but must not deny the name's records (RFC 8482).
            RecordType::SOA | RecordType::ANY => self.soa(snapshot, name.clone()),
            RecordType::NS => {
                let server = self.server().map(|server| record(name.clone(), RData::NS(NS(server))));
                server.into_iter().collect()
            }
            _ => Vec::new(),
        }
    }

    fn server(&self) -> Option<Name> {
        Name::from_labels(["ns"]).and_then(|server| server.append_domain(&self.name)).ok()
    }

    /// Returns the SOA record, whose serial is derived from the snapshot's digest. The serial may decrease. A decrease
    /// is harmless, because no secondary server copies the zone.
    fn soa(&self, snapshot: &Snapshot, owner: Name) -> Section {
        let Some(server) = self.server() else { return Vec::new() };
        let Ok(contact) = Name::from_labels(["hostmaster"]).and_then(|name| name.append_domain(&self.name)) else {
            return Vec::new();
        };
        let soa = SOA::new(server, contact, snapshot.version().serial(), REFRESH, REFRESH, REFRESH, TTL);
        vec![record(owner, RData::SOA(soa))]
    }
}

fn record_type(ip: IpAddr) -> RecordType {
    match Family::of(ip) {
        Family::V4 => RecordType::A,
        Family::V6 => RecordType::AAAA,
    }
}

fn address(name: Name, ip: IpAddr) -> Record {
    let data = match ip {
        IpAddr::V4(ip) => RData::A(ip.into()),
        IpAddr::V6(ip) => RData::AAAA(ip.into()),
    };
    record(name, data)
}

fn record(owner: Name, data: RData) -> Record {
    work::count(Operation::Record, 1);
    Record::from_rdata(owner, TTL, data)
}

/// The size in bytes of a message's header, of the question's type and class, and of the OPT record.
const HEADER_QUESTION_AND_OPT: usize = 12 + 4 + 11;

/// Returns an upper bound of the encoded size in bytes of the record with this index in a message. hickory encodes the
/// owner of the first SRV record in full, and the owners of the following SRV records as compression pointers of two
/// bytes.
fn size(record: &Record, index: usize) -> usize {
    const POINTER: usize = 2;
    let is_compressed = (1..COMPRESSED_OWNERS).contains(&index) && matches!(record.data, RData::SRV(_));
    FIXED + size_of_data(&record.data) + if is_compressed { POINTER } else { size_of_name(&record.name) }
}

/// The size in bytes of the fields that every record has: type, class, TTL and length of data.
const FIXED: usize = 10;

/// The number of names that hickory compresses in a message. The first of these names is encoded in full.
const COMPRESSED_OWNERS: usize = 120;

#[expect(clippy::wildcard_enum_match_arm, reason = "only the sizes of these types are needed")]
fn size_of_data(data: &RData) -> usize {
    match data {
        RData::SRV(srv) => 6 + size_of_name(&srv.target),
        RData::A(_) => 4,
        RData::AAAA(_) => 16,
        _ => 255,
    }
}

/// hickory's length of a name does not include the label of the root.
fn size_of_name(name: &Name) -> usize {
    name.len() + 1
}
