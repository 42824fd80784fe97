// SPDX-License-Identifier: Apache-2.0
//! The embedded object file with the kernel programs, and the types of these programs.

use std::path::Path;

use aya::{
    maps::{MapData, MapInfo},
    programs::{CgroupSock, CgroupSockAddr, CgroupSockAttachType, ProgramError, ProgramFd, SchedClassifier, Xdp},
};
use aya_obj::{Object, ProgramSection, generated::bpf_prog_type, programs::XdpAttachType};
use npl_common::names::{MAP_FLOW_V4, MAP_FLOW_V6, MAP_UDP_FLOW_V4, MAP_UDP_FLOW_V6, PINNED_MAPS, SOCKET_PROGRAMS};
use ring::digest::{SHA256, digest as hash};
use tracing::{info, warn};

use super::{
    error::DatapathError,
    pins::{Pins, pin_error, unpin},
    predecessor, sys,
};
use crate::core::{pages, sizes::TableSizes};

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/npl.bpf.o"));

/// The embedded object file of the kernel programs, built by `cargo xtask build-ebpf`.
///
/// # Errors
///
/// If the agent was built without an object file.
pub fn embedded_object() -> Result<&'static [u8], DatapathError> {
    if OBJECT.is_empty() { Err(DatapathError::NoObject) } else { Ok(OBJECT) }
}

/// The first 64 bits of an object's SHA-256 digest. These bits name the directory of the object's pinned programs. 64
/// bits are enough, because only agents of this Node write to the directory, so an attacker cannot exploit a collision.
pub(super) fn digest(object: &[u8]) -> String {
    let first = hash(&SHA256, object).as_ref().first_chunk().copied().unwrap_or_default();
    format!("{:016x}", u64::from_be_bytes(first))
}

/// The part of the log line that states what happens to a map's elements when the agent replaces the map by a map with
/// a different size or different flags.
fn replacement_effect(name: &str) -> &'static str {
    if predecessor::is_copied(name) {
        "a new map replaces the pinned map, whose elements are copied"
    } else {
        "an empty map replaces the pinned map; the programs or the agent write the elements again"
    }
}

/// Moves or removes pinned maps that differ from the object file, because aya would use these maps without a check. A
/// map with a different type or layout is removed. A map with a different number of elements or different flags is
/// moved, and so is a flow table with the flows of all protocols; a new map takes the place of the moved map. The agent
/// later copies mappings, allowed sources, conntrack entries and socket reverse NAT entries from the moved maps to the
/// new maps ([`predecessor::is_copied`]). If a map cannot be opened, for lack of file descriptors or permissions, the
/// function returns an error, because the map may contain all mappings.
pub(super) fn discard_incompatible_maps(pins: &Pins, object: &[u8], sizes: &TableSizes) -> Result<(), DatapathError> {
    let parsed = Object::parse(object).map_err(DatapathError::Parse)?;
    for name in PINNED_MAPS {
        let path = pins.map(name);
        if !path.exists() {
            continue;
        }
        let wanted = parsed.maps.get(*name).ok_or(DatapathError::Missing(name))?;
        let wanted_entries = sizes.max_entries(name).unwrap_or_else(|| wanted.max_entries());
        let pinned = match sys::open_pin(&path) {
            Err(source) if !path.is_dir() => return Err(pin_error("open", &path, source)),
            pinned => pinned,
        };
        let info = pinned.ok().and_then(|fd| MapData::from_fd(fd).ok()?.info().ok());
        let has_layout = |info: &MapInfo| {
            info.map_type().ok().map(|kind| kind as u32) == Some(wanted.map_type())
                && info.key_size() == wanted.key_size()
                && info.value_size() == wanted.value_size()
        };
        let has_size = |info: &MapInfo| info.max_entries() == wanted_entries && info.map_flags() == wanted.map_flags();
        // In earlier builds of this ABI version, one flow table contains the flows of all protocols. The agent moves
        // this table, and later copies each entry to the table of the entry's protocol. If an agent was killed between
        // these steps, the moved table still exists, and the pinned table is already a table of one protocol.
        let of_udp = match *name {
            MAP_FLOW_V4 => Some(MAP_UDP_FLOW_V4),
            MAP_FLOW_V6 => Some(MAP_UDP_FLOW_V6),
            _ => None,
        };
        let has_all_protocols =
            of_udp.is_some_and(|udp| !pins.map(udp).exists() && !pins.replaced_maps().join(name).exists());
        match info.filter(has_layout) {
            Some(info) if has_size(&info) && !has_all_protocols => {}
            Some(info) => {
                let (pinned, wanted) = (info.max_entries(), wanted_entries);
                info!(
                    map = *name,
                    pinned,
                    wanted,
                    "the pinned map has a different size, different flags, or the flows of all protocols: {}",
                    replacement_effect(name)
                );
                predecessor::keep_for_copying(pins, name)?;
            }
            None => {
                warn!(
                    see = pages::url(pages::ABI_UPGRADE),
                    map = *name,
                    "the pinned map has a different type or layout than this agent uses: an empty map replaces the \
                     pinned map, so open connections may have to reconnect"
                );
                unpin(&path)?;
            }
        }
    }
    Ok(())
}

/// A type of kernel programs, such as XDP programs, with the operations that the agent performs on programs of this
/// type.
pub(super) trait ProgramKind: Sized {
    /// The kernel's constant for this type of programs.
    const TYPE: bpf_prog_type;

    fn from_pin(path: &Path, name: &str) -> Result<Self, ProgramError>;
    fn load(&mut self) -> Result<(), ProgramError>;
    fn fd(&self) -> Result<&ProgramFd, ProgramError>;
}

impl ProgramKind for SchedClassifier {
    const TYPE: bpf_prog_type = bpf_prog_type::BPF_PROG_TYPE_SCHED_CLS;

    fn from_pin(path: &Path, _name: &str) -> Result<Self, ProgramError> {
        Self::from_pin(path)
    }

    fn load(&mut self) -> Result<(), ProgramError> {
        self.load()
    }

    fn fd(&self) -> Result<&ProgramFd, ProgramError> {
        self.fd()
    }
}

impl ProgramKind for Xdp {
    const TYPE: bpf_prog_type = bpf_prog_type::BPF_PROG_TYPE_XDP;

    fn from_pin(path: &Path, _name: &str) -> Result<Self, ProgramError> {
        Self::from_pin(path, XdpAttachType::Interface)
    }

    fn load(&mut self) -> Result<(), ProgramError> {
        self.load()
    }

    fn fd(&self) -> Result<&ProgramFd, ProgramError> {
        self.fd()
    }
}

impl ProgramKind for CgroupSockAddr {
    const TYPE: bpf_prog_type = bpf_prog_type::BPF_PROG_TYPE_CGROUP_SOCK_ADDR;

    fn from_pin(path: &Path, name: &str) -> Result<Self, ProgramError> {
        let which = SOCKET_PROGRAMS.iter().find(|program| program.name == name);
        // aya needs the attach type to open a pinned program. aya-obj derives the attach type from the name of the
        // program's section, as aya does when it loads a program from an object.
        let section = which.and_then(|program| format!("cgroup/{}", program.hook).parse().ok());
        let Some(ProgramSection::CgroupSockAddr { attach_type }) = section else {
            return Err(ProgramError::UnexpectedProgramType);
        };
        Self::from_pin(path, attach_type)
    }

    fn load(&mut self) -> Result<(), ProgramError> {
        self.load()
    }

    fn fd(&self) -> Result<&ProgramFd, ProgramError> {
        self.fd()
    }
}

impl ProgramKind for CgroupSock {
    const TYPE: bpf_prog_type = bpf_prog_type::BPF_PROG_TYPE_CGROUP_SOCK;

    fn from_pin(path: &Path, _name: &str) -> Result<Self, ProgramError> {
        Self::from_pin(path, CgroupSockAttachType::SockRelease)
    }

    fn load(&mut self) -> Result<(), ProgramError> {
        self.load()
    }

    fn fd(&self) -> Result<&ProgramFd, ProgramError> {
        self.fd()
    }
}
