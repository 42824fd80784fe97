// SPDX-License-Identifier: Apache-2.0
//! The sources that may use a mapping: the allow-list of a Service, and the parser for the list's text.

use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

use super::{Backend, Family};

/// The maximum number of ranges that are enforced for one Service; later ranges allow no client.
pub const MAX_RANGES: usize = 256;
/// The maximum length, in characters, of an unparsable entry in a message; the rest of the entry is cut off.
const SHOWN_CHARS: usize = 48;

/// A CIDR range. Bits after the prefix are zero, so that equal ranges have one representation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceRange {
    first: IpAddr,
    length: u8,
}

/// The text is neither an address nor a range.
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
    /// The range with this prefix length that contains the address; `None` if the length exceeds the bits of an
    /// address.
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

    /// The lowest address.
    pub const fn first(self) -> IpAddr {
        self.first
    }

    /// The prefix length.
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

    /// Whether this range contains the other range.
    fn covers(self, other: Self) -> bool {
        self.length <= other.length && Self::new(other.first, self.length) == Some(self)
    }

    /// Parses `ADDRESS/LENGTH`, or an address alone. A range of IPv4-mapped IPv6 addresses becomes an IPv4 range,
    /// because the datapath sees IPv4 packets.
    pub(super) fn read(text: &str) -> Option<Self> {
        let (ip, length) = match text.split_once('/') {
            Some((ip, length)) => (ip, Some(read_length(length)?)),
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

/// Parses digits without a leading zero; other spellings are likely mistakes.
fn read_length(text: &str) -> Option<u8> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    if is_number { text.parse().ok() } else { None }
}

impl fmt::Display for SourceRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.length)
    }
}

/// The sources that may use a mapping.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sources {
    /// Every source is allowed.
    Anyone,
    /// Sources in one of these ranges. No range contains another range. If there is no range, no source is allowed.
    Only(BTreeSet<SourceRange>),
}

impl Sources {
    /// The sources of a mapping in the kernel, from the mapping's flag `is_restricted` and the ranges in the map.
    pub fn of(backend: Backend, ranges: impl IntoIterator<Item = SourceRange>) -> Self {
        if backend.is_restricted { ranges.into_iter().collect() } else { Self::Anyone }
    }

    /// Whether some sources are excluded.
    pub const fn is_restricted(&self) -> bool {
        matches!(self, Self::Only(_))
    }

    /// The ranges, if the mapping is restricted.
    pub fn ranges(&self) -> impl Iterator<Item = SourceRange> {
        let ranges = if let Self::Only(ranges) = self { Some(ranges) } else { None };
        ranges.into_iter().flatten().copied()
    }

    /// The ranges of one family. Ranges of the other family allow no client of this family.
    #[must_use]
    pub fn of_family(&self, family: Family) -> Self {
        match self {
            Self::Anyone => Self::Anyone,
            Self::Only(_) => Self::Only(self.ranges().filter(|range| range.family() == family).collect()),
        }
    }

    /// The union of both lists of sources.
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
    /// The sources in these ranges.
    fn from_iter<I: IntoIterator<Item = SourceRange>>(ranges: I) -> Self {
        let all: BTreeSet<SourceRange> = ranges.into_iter().collect();
        let mut kept: BTreeSet<SourceRange> = BTreeSet::new();
        // In sorted order, a range comes before all ranges that it contains. So only the last kept range may contain
        // the next one.
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
    /// The first entry that cannot be parsed.
    pub unreadable: Option<Unreadable>,
    /// The number of entries beyond [`MAX_RANGES`].
    pub beyond: usize,
}

/// An entry that cannot be parsed and allows no client.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Unreadable {
    /// The position in the list, from 1.
    pub position: usize,
    /// The beginning of the entry's text.
    pub entry: String,
    /// How many other entries cannot be parsed.
    pub others: usize,
}

impl AllowList {
    /// The list of a Service without the annotation.
    pub const ABSENT: Self = Self { sources: Sources::Anyone, unreadable: None, beyond: 0 };

    /// Parses a comma-separated list of ranges. Errors never allow additional sources: only ranges that the list names
    /// are allowed.
    pub fn read(text: &str) -> Self {
        let mut ranges = BTreeSet::new();
        let mut list = Self::ABSENT;
        let entries = (1..).zip(text.split(',').map(str::trim)).filter(|(_, entry)| !entry.is_empty());
        for (position, entry) in entries {
            if ranges.len() == MAX_RANGES {
                list.beyond += 1;
            } else if let Some(range) = SourceRange::read(entry) {
                ranges.insert(range);
            } else if let Some(first) = &mut list.unreadable {
                first.others += 1;
            } else {
                let entry = entry.chars().take(SHOWN_CHARS).collect();
                list.unreadable = Some(Unreadable { position, entry, others: 0 });
            }
        }
        Self { sources: ranges.into_iter().collect(), ..list }
    }
}

#[cfg(test)]
#[path = "../tests/sources.rs"]
mod tests;
