// SPDX-License-Identifier: Apache-2.0
//! The sources that may use a mapping: the allow-list of a Service, and the parser for the list's text.

use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

use super::{Backend, Family, list_entry};

/// The maximum number of ranges that are enforced for one Service. The agent ignores further ranges of the list.
pub const MAX_RANGES: usize = 256;

/// A CIDR range of source addresses. Bits after the prefix are zero, so that equal ranges have one representation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceRange {
    first: IpAddr,
    length: u8,
}

/// The error for a text that is neither an address nor a CIDR range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not an address or a range: give 192.0.2.7, 192.0.2.0/24 or 2001:db8::/32")]
pub struct UnknownRange;

impl FromStr for SourceRange {
    type Err = UnknownRange;

    fn from_str(text: &str) -> Result<Self, UnknownRange> {
        Self::read(text).ok_or(UnknownRange)
    }
}

impl SourceRange {
    /// Returns the range that has this prefix length and contains the address; `None` if the length exceeds the number
    /// of bits of the address.
    pub fn new(ip: IpAddr, length: u8) -> Option<Self> {
        let first = match ip {
            IpAddr::V4(ip) => {
                let rest = u32::BITS.checked_sub(length.into())?;
                Ipv4Addr::from(ip.to_bits() & u32::MAX.checked_shl(rest).unwrap_or_default()).into()
            }
            IpAddr::V6(ip) => {
                let rest = u128::BITS.checked_sub(length.into())?;
                Ipv6Addr::from(ip.to_bits() & u128::MAX.checked_shl(rest).unwrap_or_default()).into()
            }
        };
        Some(Self { first, length })
    }

    /// The lowest address of the range.
    pub const fn first(self) -> IpAddr {
        self.first
    }

    /// The prefix length of the range.
    pub const fn length(self) -> u8 {
        self.length
    }

    /// The IP family of the range.
    pub const fn family(self) -> Family {
        Family::of(self.first)
    }

    /// Whether this range contains an address.
    pub fn contains(self, ip: IpAddr) -> bool {
        Self::new(ip, self.length) == Some(self)
    }

    /// Whether this range contains all addresses of `other`.
    fn covers(self, other: Self) -> bool {
        self.length <= other.length && Self::new(other.first, self.length) == Some(self)
    }

    /// Parses `ADDRESS/LENGTH`, or an address alone. A range of IPv4-mapped IPv6 addresses becomes an IPv4 range,
    /// because packets from these addresses are IPv4 packets.
    pub(super) fn read(text: &str) -> Option<Self> {
        let (ip, length) = match text.split_once('/') {
            Some((ip, length)) => (ip, Some(list_entry::number::<u8>(length)?)),
            None => (text, None),
        };
        match ip.parse().ok()? {
            IpAddr::V6(ip) => match (ip.to_ipv4_mapped(), length.unwrap_or(128).checked_sub(96)) {
                (Some(ip), Some(length)) => Self::new(ip.into(), length),
                _ => Self::new(ip.into(), length.unwrap_or(128)),
            },
            ip @ IpAddr::V4(_) => Self::new(ip, length.unwrap_or(32)),
        }
    }
}

impl fmt::Display for SourceRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.length)
    }
}

/// The sources that may use a mapping.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sources {
    /// Clients with any source address are allowed.
    Anyone,
    /// Clients with a source address in one of these ranges are allowed. No range contains another range of the set. An
    /// empty set allows no client.
    Only(BTreeSet<SourceRange>),
}

impl Sources {
    /// Returns the sources that a mapping in the kernel allows. `ranges` are the ranges in the kernel's map; the ranges
    /// count only if the mapping's flag `is_restricted` is set.
    pub fn of(backend: Backend, ranges: impl IntoIterator<Item = SourceRange>) -> Self {
        if backend.is_restricted { ranges.into_iter().collect() } else { Self::Anyone }
    }

    /// Whether only certain sources are allowed.
    pub const fn is_restricted(&self) -> bool {
        matches!(self, Self::Only(_))
    }

    /// The allowed ranges; no range if every source is allowed.
    pub fn ranges(&self) -> impl Iterator<Item = SourceRange> {
        let ranges = if let Self::Only(ranges) = self { Some(ranges) } else { None };
        ranges.into_iter().flatten().copied()
    }

    /// Returns the sources of one IP family. Ranges of the other family are left out, because they allow no client of
    /// this family.
    #[must_use]
    pub fn of_family(&self, family: Family) -> Self {
        match self {
            Self::Anyone => Self::Anyone,
            Self::Only(_) => Self::Only(self.ranges().filter(|range| range.family() == family).collect()),
        }
    }

    /// Returns the union of both sets of sources.
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        if self.is_restricted() && other.is_restricted() {
            self.ranges().chain(other.ranges()).collect()
        } else {
            Self::Anyone
        }
    }
}

impl FromIterator<SourceRange> for Sources {
    /// Creates the sources that consist of these ranges, without ranges that another range contains.
    fn from_iter<I: IntoIterator<Item = SourceRange>>(ranges: I) -> Self {
        let all: BTreeSet<SourceRange> = ranges.into_iter().collect();
        let mut kept: BTreeSet<SourceRange> = BTreeSet::new();
        // In sorted order, a range precedes all ranges that it contains. So only the range that was kept last can
        // contain `range`.
        for range in all {
            if !kept.last().is_some_and(|last| last.covers(range)) {
                kept.insert(range);
            }
        }
        Self::Only(kept)
    }
}

/// A Service's list of allowed sources, and the errors in the list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowList {
    /// The sources that the list allows.
    pub sources: Sources,
    /// The first list entry that cannot be parsed, if any.
    pub unreadable: Option<Unreadable>,
    /// The number of list entries with other ranges than the first [`MAX_RANGES`] different ranges; the agent ignores
    /// these entries.
    pub beyond: usize,
}

/// A list entry that cannot be parsed, and therefore allows no client.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Unreadable {
    /// The position of the entry in the list, counted from 1.
    pub position: usize,
    /// The first 48 characters of the entry.
    pub entry: String,
    /// The number of further entries of the list that cannot be parsed.
    pub others: usize,
}

impl AllowList {
    /// The allow-list of a Service that has no annotation with allowed sources: every source is allowed.
    pub const ABSENT: Self = Self { sources: Sources::Anyone, unreadable: None, beyond: 0 };

    /// Parses a comma-separated list of ranges. An error in the list allows no additional source: only ranges that the
    /// list names are allowed.
    pub fn read(text: &str) -> Self {
        let mut ranges = BTreeSet::new();
        let mut list = Self::ABSENT;
        for (position, entry) in list_entry::entries(text) {
            if let Some(range) = SourceRange::read(entry) {
                if ranges.len() < MAX_RANGES {
                    ranges.insert(range);
                } else if !ranges.contains(&range) {
                    list.beyond += 1;
                }
            } else if let Some(first) = &mut list.unreadable {
                first.others += 1;
            } else {
                list.unreadable = Some(Unreadable { position, entry: list_entry::excerpt(entry), others: 0 });
            }
        }
        Self { sources: ranges.into_iter().collect(), ..list }
    }
}

#[cfg(test)]
#[path = "../tests/sources.rs"]
mod tests;
