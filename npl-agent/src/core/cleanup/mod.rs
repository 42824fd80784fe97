// SPDX-License-Identifier: Apache-2.0
//! Plans which kernel state `npl-agent cleanup` removes. The cleanup executes this plan, and `cleanup --dry-run` prints
//! the same plan.

use std::{collections::BTreeMap, path::PathBuf};

use serde::Serialize;

use super::devices::{
    Direction,
    attachments::{AttachmentOwner, Side, owner_of_filter},
};

/// The kind of an object that the cleanup removes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RemovalKind {
    /// The pinned link of an XDP program. The kernel detaches the program when the pin is removed.
    XdpLink,
    /// A TC filter of a clsact qdisc.
    TcFilter,
    /// A clsact qdisc that NPL added, and that has no filter of other software.
    Qdisc,
    /// NPL's nftables table.
    NftablesTable,
    /// The pinned TCX link of a TC program.
    TcLink,
    /// The pinned link of a cgroup program.
    CgroupLink,
    /// A pinned program.
    Program,
    /// A pinned map.
    Map,
    /// A file below NPL's directory of pins whose path has no known meaning. The cleanup removes this file, too.
    Pin,
    /// A directory of the BPF file system. Some of these directories are empty: the agent stores facts in their names,
    /// because a BPF file system cannot hold regular files.
    Directory,
}

impl RemovalKind {
    /// The name of the kind in tables, the same as in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::XdpLink => "xdp-link",
            Self::TcFilter => "tc-filter",
            Self::Qdisc => "qdisc",
            Self::NftablesTable => "nftables-table",
            Self::TcLink => "tc-link",
            Self::CgroupLink => "cgroup-link",
            Self::Program => "program",
            Self::Map => "map",
            Self::Pin => "pin",
            Self::Directory => "directory",
        }
    }
}

/// The path, filter or ifindex by which the cleanup finds an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RemovalTarget {
    /// A file of the BPF file system.
    Pin(PathBuf),
    /// A directory of the BPF file system. The cleanup removes the content of the directory before it removes the
    /// directory.
    Directory(PathBuf),
    /// A TC filter.
    Filter(TcFilter),
    /// The clsact qdisc of the device with this ifindex.
    Qdisc(u32),
    /// NPL's nftables table.
    Table,
}

/// One object that the cleanup removes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Removal {
    /// The kind of the object.
    pub kind: RemovalKind,
    /// The name of the device, or its ifindex if the device does not exist any more; `None` if the object belongs to no
    /// device.
    pub device: Option<String>,
    /// The hook, such as `ingress` or `connect4`; `None` if the object is attached to no hook.
    pub hook: Option<String>,
    /// The path of a pin or directory; the program, priority and handle of a filter; the kind of a qdisc; the family and
    /// name of a table.
    pub name: String,
    /// The path, filter or ifindex by which the cleanup finds the object.
    #[serde(skip)]
    pub target: RemovalTarget,
}

/// The meaning of a path below NPL's directory of pins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PinMeaning {
    /// The TCX link of the device with this ifindex.
    TcLink(u32, Direction),
    /// The XDP link of the device with this ifindex.
    XdpLink(u32),
    /// The link of a cgroup hook.
    CgroupLink(String),
    /// A program.
    Program,
    /// A map.
    Map,
    /// A directory.
    Directory,
    /// The path has no known meaning.
    Unknown,
}

/// A file or directory below NPL's directory of pins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PinEntry {
    /// The absolute path.
    pub path: PathBuf,
    /// The meaning of the path.
    pub meaning: PinMeaning,
}

/// A TC filter of a device, as the kernel reports it. For each priority, the kernel also reports an entry with the
/// handle (0, 0), which is no filter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcFilter {
    /// The ifindex of the device.
    pub ifindex: u32,
    /// The direction of the packets.
    pub side: Side,
    /// The kind of the filter, such as `bpf`.
    pub kind: String,
    /// The priority of the filter.
    pub priority: u16,
    /// The major and minor number of the handle.
    pub handle: (u16, u16),
    /// The name of the program of a BPF filter.
    pub program: Option<String>,
}

impl TcFilter {
    const fn is_header(&self) -> bool {
        matches!(self.handle, (0, 0))
    }

    fn shares_priority(&self, other: &Self) -> bool {
        (self.ifindex, self.side, self.priority) == (other.ifindex, other.side, other.priority)
    }
}

/// The kernel state from which the plan is computed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KernelState {
    /// Names of devices, by ifindex.
    pub devices: BTreeMap<u32, String>,
    /// The ifindex of every device with a clsact qdisc that NPL has recorded as its own.
    pub own_qdiscs: Vec<u32>,
    /// All filters on all devices.
    pub filters: Vec<TcFilter>,
    /// The family and name of NPL's nftables table; `None` if the table does not exist.
    pub table: Option<&'static str>,
    /// The content of NPL's directory of pins, and this directory itself unless the directory is a mount point, because
    /// a mount point cannot be removed. Each directory follows its content.
    pub pins: Vec<PinEntry>,
}

/// Computes what the cleanup removes, in the order of the removal: XDP links, filters, qdiscs and the nftables table,
/// then all other pins of every ABI version. `programs` contains the names of NPL's programs.
///
/// XDP programs are detached first, because the TC program on egress must translate the replies to requests that the
/// XDP program has translated.
pub fn plan(state: &KernelState, programs: &[&str]) -> Vec<Removal> {
    let (xdp, pins): (Vec<_>, Vec<_>) =
        state.pins.iter().partition(|entry| matches!(entry.meaning, PinMeaning::XdpLink(_)));
    let own: Vec<&TcFilter> = state.filters.iter().filter(|filter| is_own(filter, programs)).collect();
    let qdiscs = state.own_qdiscs.iter().filter(|ifindex| becomes_unused(**ifindex, state, &own));
    let table = state.table.map(|name| Removal {
        kind: RemovalKind::NftablesTable,
        device: None,
        hook: None,
        name: name.to_owned(),
        target: RemovalTarget::Table,
    });
    let of_pin = |entry: &PinEntry| pin_removal(entry, state);
    xdp.into_iter()
        .map(of_pin)
        .chain(own.iter().map(|filter| filter_removal(filter, state)))
        .chain(qdiscs.map(|ifindex| qdisc_removal(*ifindex, state)))
        .chain(table)
        .chain(pins.into_iter().map(of_pin))
        .collect()
}

/// Whether a filter is NPL's. A filter with a priority and handle of NPL is NPL's, even if its program has no name. A
/// filter whose program has the name of an NPL program is also NPL's, because earlier builds may have used another
/// handle.
fn is_own(filter: &TcFilter, programs: &[&str]) -> bool {
    let TcFilter { kind, priority, handle, program, .. } = filter;
    let has_name = kind == "bpf" && program.as_deref().is_some_and(|name| programs.contains(&name));
    let owner = owner_of_filter(kind, *priority, *handle, program.as_deref());
    !filter.is_header() && (has_name || owner == Some(AttachmentOwner::Npl))
}

/// Whether the device still exists, and its clsact qdisc has no filter once NPL's filters are removed. The kernel
/// removes the entry of a priority together with the last filter of the priority.
fn becomes_unused(ifindex: u32, state: &KernelState, own: &[&TcFilter]) -> bool {
    let mut others = state.filters.iter().filter(|filter| filter.ifindex == ifindex && !own.contains(filter));
    let is_header_of_own =
        |header: &TcFilter| header.is_header() && own.iter().any(|filter| filter.shares_priority(header));
    state.devices.contains_key(&ifindex) && others.all(is_header_of_own)
}

fn filter_removal(filter: &TcFilter, state: &KernelState) -> Removal {
    let TcFilter { ifindex, side, priority, handle: (major, minor), program, .. } = filter;
    let program = program.as_deref().unwrap_or("a program without a name");
    Removal {
        kind: RemovalKind::TcFilter,
        device: Some(device(*ifindex, state)),
        hook: Some(hook_of(*side).to_owned()),
        name: format!("{program}, priority {priority}, handle {:#x}", (u32::from(*major) << 16) | u32::from(*minor)),
        target: RemovalTarget::Filter(filter.clone()),
    }
}

fn qdisc_removal(ifindex: u32, state: &KernelState) -> Removal {
    Removal {
        kind: RemovalKind::Qdisc,
        device: Some(device(ifindex, state)),
        hook: None,
        name: "clsact".to_owned(),
        target: RemovalTarget::Qdisc(ifindex),
    }
}

fn pin_removal(entry: &PinEntry, state: &KernelState) -> Removal {
    let (kind, ifindex, hook) = match &entry.meaning {
        PinMeaning::TcLink(ifindex, direction) => (RemovalKind::TcLink, Some(*ifindex), Some(direction.as_str())),
        PinMeaning::XdpLink(ifindex) => (RemovalKind::XdpLink, Some(*ifindex), Some("xdp")),
        PinMeaning::CgroupLink(hook) => (RemovalKind::CgroupLink, None, Some(hook.as_str())),
        PinMeaning::Program => (RemovalKind::Program, None, None),
        PinMeaning::Map => (RemovalKind::Map, None, None),
        PinMeaning::Directory => (RemovalKind::Directory, None, None),
        PinMeaning::Unknown => (RemovalKind::Pin, None, None),
    };
    let path = entry.path.clone();
    Removal {
        kind,
        device: ifindex.map(|ifindex| device(ifindex, state)),
        hook: hook.map(str::to_owned),
        name: path.display().to_string(),
        target: if kind == RemovalKind::Directory { RemovalTarget::Directory(path) } else { RemovalTarget::Pin(path) },
    }
}

fn device(ifindex: u32, state: &KernelState) -> String {
    state.devices.get(&ifindex).cloned().unwrap_or_else(|| format!("ifindex {ifindex}"))
}

const fn hook_of(side: Side) -> &'static str {
    match side {
        Side::Ingress => "ingress",
        Side::Egress => "egress",
    }
}

#[cfg(test)]
mod tests;
