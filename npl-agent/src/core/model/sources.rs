// SPDX-License-Identifier: Apache-2.0
//! Who may use a mapping: the allow-list of a Service, as somebody wrote it and as it is meant.

use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use super::{Backend, Family};

/// Ranges that are taken of one Service; those beyond let nobody in.
pub const MAX_RANGES: usize = 256;
/// Of an entry that cannot be read, users are shown so many characters.
const SHOWN_CHARS: usize = 48;

/// The addresses that begin with the same bits. The others are zero, so that a range has one form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceRange {
    first: IpAddr,
    length: u8,
}

impl SourceRange {
    /// The range of so many bits around an address; nothing if its family has not as many.
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

    /// How many bits its addresses have in common.
    pub const fn length(self) -> u8 {
        self.length
    }

    /// The family of its addresses.
    pub const fn family(self) -> Family {
        Family::of(self.first)
    }

    /// Whether it is all of the other one, or more.
    fn covers(self, other: Self) -> bool {
        self.length <= other.length && Self::new(other.first, self.length) == Some(self)
    }

    /// `ADDRESS/LENGTH`, or an address alone. An IPv4 range in IPv6 clothes is the IPv4 range: the datapath sees packets
    /// of that family.
    fn read(text: &str) -> Option<Self> {
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

/// Digits alone, and no zero in front: where one wrote more, something else was meant.
fn read_length(text: &str) -> Option<u8> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    if is_number { text.parse().ok() } else { None }
}

impl fmt::Display for SourceRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.length)
    }
}

/// Who may use a mapping.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sources {
    /// Everybody.
    Anyone,
    /// Whoever is in one of these ranges, of which none is part of another; of none, nobody.
    Only(BTreeSet<SourceRange>),
}

impl Sources {
    /// Of a mapping that is as the kernel has it, with the ranges that are there for it.
    pub fn of(backend: Backend, ranges: impl IntoIterator<Item = SourceRange>) -> Self {
        if backend.is_restricted { ranges.into_iter().collect() } else { Self::Anyone }
    }

    /// Whether not everybody may.
    pub const fn is_restricted(&self) -> bool {
        matches!(self, Self::Only(_))
    }

    /// The ranges, where they decide.
    pub fn ranges(&self) -> impl Iterator<Item = SourceRange> {
        let ranges = if let Self::Only(ranges) = self { Some(ranges) } else { None };
        ranges.into_iter().flatten().copied()
    }

    /// As far as a family goes. Ranges of the other one let nobody in.
    #[must_use]
    pub fn of_family(&self, family: Family) -> Self {
        match self {
            Self::Anyone => Self::Anyone,
            Self::Only(_) => Self::Only(self.ranges().filter(|range| range.family() == family).collect()),
        }
    }

    /// Whoever may by the one or by the other.
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
    /// Whoever is in one of these.
    fn from_iter<I: IntoIterator<Item = SourceRange>>(ranges: I) -> Self {
        let all: BTreeSet<SourceRange> = ranges.into_iter().collect();
        let mut kept: BTreeSet<SourceRange> = BTreeSet::new();
        // In order, a range comes after those that are more of it, and next to the last of them.
        for range in all {
            if !kept.last().is_some_and(|last| last.covers(range)) {
                kept.insert(range);
            }
        }
        Self::Only(kept)
    }
}

/// A Service's list, and what was wrong with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowList {
    /// Whom it lets in.
    pub sources: Sources,
    /// The first entry that cannot be read.
    pub unreadable: Option<Unreadable>,
    /// Entries beyond [`MAX_RANGES`].
    pub beyond: usize,
}

/// An entry that lets nobody in.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Unreadable {
    /// Which one it is, counted from 1.
    pub position: usize,
    /// Its beginning.
    pub entry: String,
    /// How many more there are.
    pub others: usize,
}

impl AllowList {
    /// What a Service means that says nothing.
    pub const ABSENT: Self = Self { sources: Sources::Anyone, unreadable: None, beyond: 0 };

    /// Reads a value: ranges with commas between them. Whatever it is, it lets in those whom it names and nobody else.
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
