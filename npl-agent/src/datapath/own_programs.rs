// SPDX-License-Identifier: Apache-2.0
//! Distinguishes NPL's programs on devices from programs of other software. A program belongs to NPL if its id is the
//! id of a program that NPL has pinned.

use std::{
    collections::BTreeSet,
    io,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
};

use aya_obj::generated::bpf_attach_type::{self, BPF_NETKIT_PRIMARY, BPF_TCX_EGRESS, BPF_TCX_INGRESS};
use tracing::debug;

use super::{pins::Pins, sys};
use crate::core::devices::attachments::{AttachmentOwner, DeviceAttachments};

/// The ids of all programs that agents of any ABI version have pinned.
#[derive(Debug)]
pub struct OwnPrograms(BTreeSet<u32>);

impl OwnPrograms {
    /// The ids of the programs that are pinned on a BPF file system.
    pub fn of(bpffs: &Path) -> Self {
        Self::read(&Pins::new(bpffs))
    }

    /// Reads the ids of the pinned programs. A pinned program that cannot be read counts as a program of other
    /// software.
    pub(super) fn read(pins: &Pins) -> Self {
        let others = pins.other_versions().unwrap_or_default();
        let id = |pin: PathBuf| sys::program_facts(sys::open_pin(&pin).ok()?.as_fd()).ok().map(|facts| facts.id);
        Self(others.iter().chain([pins]).flat_map(programs_of).filter_map(id).collect())
    }

    /// Returns the owner of each program on a device's TCX and netkit hooks, in the order in which the programs run.
    /// `None` if the kernel cannot list the programs.
    pub fn programs_on(&self, ifindex: u32) -> Option<DeviceAttachments> {
        let ingress = self.owners(ifindex, BPF_TCX_INGRESS)?;
        let mut egress = self.owners(ifindex, BPF_TCX_EGRESS)?;
        egress.extend(self.owners(ifindex, BPF_NETKIT_PRIMARY)?);
        Some(DeviceAttachments { queues: BTreeSet::new(), ingress, egress })
    }

    fn owners(&self, ifindex: u32, hook: bpf_attach_type) -> Option<Vec<AttachmentOwner>> {
        let owner =
            |id: &u32| if self.0.contains(id) { AttachmentOwner::Npl } else { AttachmentOwner::Other(name(*id)) };
        match sys::programs_on(ifindex, hook) {
            Ok(ids) => Some(ids.iter().map(owner).collect()),
            Err(error) if has_no_such_hook(&error) => Some(Vec::new()),
            Err(error) => {
                debug!(
                    ifindex,
                    %error,
                    "cannot list the programs on a device; packets to Pods behind this device are not redirected"
                );
                None
            }
        }
    }
}

/// The name of the program with this id. Without `CAP_SYS_ADMIN`, the name cannot be read, and the result contains the
/// program's id.
fn name(id: u32) -> String {
    let facts = sys::open_program(id).and_then(|program| sys::program_facts(program.as_fd()));
    let name = facts.ok().and_then(|facts| String::from_utf8(facts.name).ok()).filter(|name| !name.is_empty());
    name.unwrap_or_else(|| format!("program {id}"))
}

/// The pins of all programs of one ABI version.
fn programs_of(pins: &Pins) -> Vec<PathBuf> {
    let of_build = |build: &String| {
        let names = pins.program_names(build).unwrap_or_default();
        names.into_iter().map(|name| pins.program(build, &name)).collect::<Vec<_>>()
    };
    pins.builds().unwrap_or_default().iter().flat_map(of_build).collect()
}

/// Whether the error means that the hook does not exist, because the kernel has no such hook, devices of this kind have
/// no such hook, or the device was removed.
fn has_no_such_hook(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENXIO | libc::ENODEV))
}
