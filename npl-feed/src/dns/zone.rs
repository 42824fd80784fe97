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
use crate::core::snapshot::{Group, Member, Snapshot};

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
}

impl Answer {
    pub(super) const fn failed(code: ResponseCode) -> Self {
        Self { code, answers: Vec::new(), authority: Vec::new(), additional: Vec::new() }
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

    /// Computes the answer to a query of class IN.
    pub(super) fn answer(&self, snapshot: &Snapshot, name: &Name, kind: RecordType) -> Answer {
        let Some(place) = names::read(name, &self.name) else { return Answer::failed(ResponseCode::Refused) };
        let (exists, answers, additional) = match place {
            Place::Apex => (true, self.apex(snapshot, name, kind), Vec::new()),
            Place::Port { namespace, service, protocol, port } => {
                match snapshot.port_of(&namespace, &service, protocol, &port) {
                    Some(group) if matches!(kind, RecordType::SRV | RecordType::ANY) => {
                        let (answers, additional) = self.members(name, group);
                        (true, answers, additional)
                    }
                    Some(_) => (true, Vec::new(), Vec::new()),
                    None => (false, Vec::new(), Vec::new()),
                }
            }
            Place::Protocol { namespace, service, protocol } => {
                let exists = snapshot.service(&namespace, &service).any(|group| group.key.protocol == protocol);
                (exists, Vec::new(), Vec::new())
            }
            Place::Service { namespace, service } => {
                (snapshot.service(&namespace, &service).next().is_some(), Vec::new(), Vec::new())
            }
            Place::Namespace(namespace) => {
                (snapshot.groups().any(|group| *group.key.service.namespace == *namespace), Vec::new(), Vec::new())
            }
            Place::Address { ip, port } => {
                let is_named = |member: &Member| member.address == ip && port.is_none_or(|port| member.port == port);
                let exists = snapshot.groups().any(|group| group.members.iter().any(is_named));
                let is_asked = kind == record_type(ip) || kind == RecordType::ANY;
                (exists, if exists && is_asked { vec![address(name.clone(), ip)] } else { Vec::new() }, Vec::new())
            }
            Place::Addresses => (true, Vec::new(), Vec::new()),
            Place::Nothing => (false, Vec::new(), Vec::new()),
        };
        let authority = if answers.is_empty() { self.soa(snapshot, self.name.clone()) } else { Vec::new() };
        let code = if exists { ResponseCode::NoError } else { ResponseCode::NXDomain };
        Answer { code, answers, authority, additional }
    }

    /// Returns an SRV record for each ready member, and the address records of the SRV records' targets.
    fn members(&self, name: &Name, group: &Group) -> (Section, Section) {
        let named = group.ready().filter_map(|member| {
            let target = names::of_member(member.address, member.port, &self.name).ok()?;
            let srv = SRV::new(0, member.weight, member.port, target.clone());
            Some((Record::from_rdata(name.clone(), TTL, RData::SRV(srv)), address(target, member.address)))
        });
        named.unzip()
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "the zone has two types of records at its apex")]
    fn apex(&self, snapshot: &Snapshot, name: &Name, kind: RecordType) -> Section {
        match kind {
            RecordType::SOA => self.soa(snapshot, name.clone()),
            RecordType::NS => {
                let server = self.server().map(|server| Record::from_rdata(name.clone(), TTL, RData::NS(NS(server))));
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
        vec![Record::from_rdata(owner, TTL, RData::SOA(soa))]
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
    Record::from_rdata(name, TTL, data)
}

/// Returns an upper bound of the encoded size of a section, in bytes. The owners of the first [`COMPRESSED_OWNERS`] SRV
/// records take only two bytes each, because they are encoded as compression pointers to the question's name.
pub(super) fn size(section: &Section) -> usize {
    const POINTER: usize = 2;
    let sizes = section.iter().enumerate().map(|(number, record)| {
        let is_compressed = number < COMPRESSED_OWNERS && matches!(record.data, RData::SRV(_));
        FIXED + size_of_data(&record.data) + if is_compressed { POINTER } else { size_of_name(&record.name) }
    });
    sizes.sum()
}

/// The size in bytes of the fields that every record has: type, class, TTL and length of data.
const FIXED: usize = 10;

/// The number of records with compressed owners at the beginning of a message. hickory compresses 120 names, one of
/// which is the question's.
const COMPRESSED_OWNERS: usize = 119;

#[expect(clippy::wildcard_enum_match_arm, reason = "the zone has no other types of records")]
fn size_of_data(data: &RData) -> usize {
    match data {
        RData::SRV(srv) => 6 + size_of_name(&srv.target),
        RData::A(_) => 4,
        RData::AAAA(_) => 16,
        RData::SOA(soa) => size_of_name(&soa.mname) + size_of_name(&soa.rname) + 20,
        _ => 255,
    }
}

/// hickory's length of a name does not include the label of the root.
fn size_of_name(name: &Name) -> usize {
    name.len() + 1
}
