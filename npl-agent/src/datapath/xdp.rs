// SPDX-License-Identifier: Apache-2.0
//! Attaches the XDP program, which translates requests before the TC programs run. The TC programs stay attached, and
//! translate the packets that the XDP program passes unchanged.
//!
//! Some drivers reset their queues, and lose packets, when a program is attached or detached. The agent therefore pins
//! the link, so that the program stays attached when the agent restarts, and replaces the program only by a different
//! program.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::fd::{AsFd as _, OwnedFd},
};

use aya::programs::{ProgramError, Xdp};
use npl_common::{config::PRE_TC_DEVICE_VALUE, names::MAP_PRE_TC_DEVICE};

use super::{
    attach::{Hooks, Replaced, attach_error, failed, os_error, restore_renamed_link},
    error::DatapathError,
    next_hops::Table,
    pins::{Pins, pin_error, unpin},
    sys::{self, LinkFacts},
    tables::Tables,
};
use crate::core::{
    devices::{Device, xdp::XdpReason},
    repairs::{RepairJournal, RepairedObject},
};

/// The map `npl_pre_tc_devs`: the ifindexes of devices whose packets may already be translated when the TC program
/// runs.
#[derive(Debug)]
pub(super) struct PreTcDevices(Table<u32, u32>);

impl PreTcDevices {
    pub(super) fn open(pins: &Pins, repairs: &RepairJournal) -> Result<Self, DatapathError> {
        Table::open(pins, MAP_PRE_TC_DEVICE, repairs).map(Self)
    }

    /// Writes the ifindexes to the map, and sets the flag in the configuration that makes the TC programs read the map.
    pub(super) fn write(&mut self, devices: &BTreeSet<u32>, tables: &mut Tables) -> Result<(), DatapathError> {
        devices.iter().try_for_each(|ifindex| self.0.set(*ifindex, PRE_TC_DEVICE_VALUE))?;
        tables.change_config(|config| config.with_pre_tc_devices(!devices.is_empty()))?;
        self.0.retain(|ifindex, _| devices.contains(ifindex))
    }
}

impl Hooks {
    /// The ifindexes of devices to which NPL's XDP program is attached.
    pub fn xdp_devices(&self) -> Result<BTreeSet<u32>, DatapathError> {
        Ok(self.pins.xdp_links()?.into_iter().collect())
    }

    /// Detaches the XDP program from all devices except `devices`: see [`Datapath::retain_xdp`].
    ///
    /// [`Datapath::retain_xdp`]: super::load::Datapath::retain_xdp
    pub(super) fn retain_xdp(&mut self, devices: &BTreeSet<u32>) -> Vec<DatapathError> {
        self.own.xdp.retain(|ifindex| devices.contains(ifindex));
        let links = match self.pins.xdp_links() {
            Ok(links) => links,
            Err(error) => return vec![error],
        };
        let unwanted = links.into_iter().filter(|ifindex| !devices.contains(ifindex));
        unwanted.filter_map(|ifindex| unpin(&self.pins.xdp_link(ifindex)).err()).collect()
    }

    /// Attaches the XDP program: see [`Datapath::attach_xdp`].
    ///
    /// [`Datapath::attach_xdp`]: super::load::Datapath::attach_xdp
    pub(super) fn attach_xdp(&mut self, device: &Device) -> Result<(), DatapathError> {
        let result = self.attach_or_replace(device);
        // This call frees the memory of the loader, but unpins no program, because programs of other builds may still
        // be attached to devices.
        self.programs.release_unused(true)?;
        if result.is_err() {
            unpin(&self.pins.xdp_link(device.ifindex))?;
        }
        result
    }

    fn attach_or_replace(&mut self, device: &Device) -> Result<(), DatapathError> {
        let pin = self.pins.xdp_link(device.ifindex);
        let (name, program) = self.programs.load_xdp()?;
        let refused = attach_error(name, device);
        let id = program.info().map_err(&refused)?.id();
        let is_own = |facts: &LinkFacts| facts.program == id && facts.is_of_driver(device.ifindex);
        let was_renamed = restore_renamed_link(&self.pins, &pin, is_own)?;
        match sys::open_pin(&pin) {
            Ok(link) => {
                let replaced = replace(&link, (program, id), device.ifindex).map_err(&refused)?;
                if replaced != Replaced::No {
                    self.record_xdp(device, name, replaced == Replaced::Unchanged && !was_renamed);
                    return Ok(());
                }
                unpin(&pin)?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(pin_error("open", &pin, source)),
        }
        let program = program.fd().map_err(&refused)?.as_fd();
        let link =
            sys::create_xdp_link(program, device.ifindex).map_err(failed("bpf_link_create")).map_err(&refused)?;
        sys::pin(link.as_fd(), &pin).map_err(|source| pin_error("pin link", &pin, source))?;
        self.record_xdp(device, name, false);
        Ok(())
    }

    fn record_xdp(&mut self, device: &Device, program: &str, was_intact: bool) {
        let is_known = !self.own.xdp.insert(device.ifindex);
        if is_known && !was_intact {
            self.repairs.record(RepairedObject::XdpLink, format_args!("{program} of {}", device.name));
        }
    }

    /// Records, for `npl-agent status`, why XDP translates the requests that a device receives, or why TC translates
    /// them instead.
    ///
    /// # Errors
    ///
    /// If a directory cannot be written.
    pub fn note_reasons(&self, reasons: &BTreeMap<u32, XdpReason>) -> Result<(), DatapathError> {
        self.pins.write_xdp_reasons(&reasons.iter().map(|(ifindex, reason)| (*ifindex, reason.key())).collect())
    }

    /// Records for `npl-agent status` and `doctor` whether `--forwarding redirect` is refused.
    ///
    /// # Errors
    ///
    /// If the directory that records the refusal cannot be created or removed.
    pub fn note_redirect_refusal(&self, is_refused: bool) -> Result<(), DatapathError> {
        let mark = self.pins.redirect_refused_mark();
        if is_refused {
            fs::create_dir_all(&mark).map_err(|source| pin_error("create", &mark, source))
        } else {
            unpin(&mark)
        }
    }
}

impl DatapathError {
    /// Why the XDP program could not be attached, derived from the error.
    pub fn xdp_reason(&self) -> XdpReason {
        let Self::Attach { source, .. } = self else { return XdpReason::KernelRefuses };
        match os_error(source) {
            Some(libc::EBUSY | libc::EEXIST) => XdpReason::Occupied,
            _ => XdpReason::DriverRefuses,
        }
    }
}

/// Makes `program`, which has this id, the program of the link, if the link has a different program.
fn replace(link: &OwnedFd, (program, id): (&Xdp, u32), ifindex: u32) -> Result<Replaced, ProgramError> {
    let facts = sys::link_facts(link.as_fd()).map_err(failed("bpf_link_get_info"))?;
    if !facts.is_of_driver(ifindex) {
        return Ok(Replaced::No);
    }
    if facts.program != id {
        let program = program.fd()?.as_fd();
        sys::replace_program(link.as_fd(), program).map_err(failed("bpf_link_update"))?;
        return Ok(Replaced::Updated);
    }
    Ok(Replaced::Unchanged)
}
