// SPDX-License-Identifier: Apache-2.0
//! Attaches the TC programs to devices, and detaches them.
//!
//! Since Linux 6.6, each program has a pinned TCX link at the head of the hook or, for the program that observes
//! packets to Pods, at the tail of the hook. To replace a program, the agent updates the program's link in place.
//! Before Linux 6.6, each program is a filter of a clsact qdisc, with a handle that contains the ABI version. The agent
//! attaches the programs at every resync: an attached program stays as it is, and a program that other software has
//! removed is attached again.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
};

use aya::{
    programs::{
        ProgramError, SchedClassifier, TcAttachType, Xdp,
        links::{FdLink, Link as _, LinkError},
        tc::{self, NlOptions, SchedClassifierLink, TcAttachOptions, TcError, TcHandle},
    },
    sys::SyscallError,
};
use aya_obj::generated::bpf_attach_type;
use npl_common::names::{
    ABI_VERSION, PROG_EGRESS_OFFLOAD, PROG_INGRESS_OFFLOAD, PROG_INGRESS_REDIRECT, PROG_PODS_OFFLOAD,
    PROG_PODS_REDIRECT, PROG_TO_PODS,
};

use super::{
    error::DatapathError,
    own_programs::OwnPrograms,
    pins::{Pins, pin_error, unpin},
    predecessor, preflight,
    programs::Programs,
    sys::{self, LinkFacts},
};
use crate::core::{
    devices::{
        Device, Direction,
        attachments::{self, STAND_IN_HANDLE, filter_handle},
        plan::AttachedHooks,
        redirect::Forwarding,
    },
    repairs::{RepairJournal, RepairedObject},
};

/// The TC handle of this ABI version's filters. The handle distinguishes these filters from other filters of the same
/// priority.
const OWN_HANDLE: TcHandle = handle_of(ABI_VERSION);
/// The handle of the temporary filter, which translates packets while the agent moves NPL's filter ahead of other
/// filters.
const STAND_IN: TcHandle = TcHandle::new(STAND_IN_HANDLE.0, STAND_IN_HANDLE.1);

/// NPL's loaded programs, and their attachments to devices and cgroups.
#[derive(Debug)]
pub struct Hooks {
    pub(super) programs: Programs,
    pub(super) pins: Pins,
    tcx: bool,
    /// The objects that this process has attached, to recognize objects that other software has removed.
    pub(super) own: OwnAttachments,
    pub(super) repairs: RepairJournal,
}

/// The objects that this process has attached or adopted. If an object of this list is missing, or has another program,
/// other software has removed or changed the object.
#[derive(Debug, Default)]
pub(super) struct OwnAttachments {
    /// The TC hooks, each with its program.
    tc: BTreeMap<(u32, Direction), &'static str>,
    /// The devices with the XDP program.
    pub(super) xdp: BTreeSet<u32>,
    /// The cgroups, by inode number, with the hooks of the socket programs.
    pub(super) sockets: BTreeSet<(u64, &'static str)>,
}

/// What [`replace`] found and did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Replaced {
    /// The link has the program.
    Unchanged,
    /// The link had another program, and has the program now.
    Updated,
    /// The link is no link of this hook, or is detached.
    No,
}

impl Hooks {
    pub(super) fn new(programs: Programs, pins: Pins, repairs: RepairJournal) -> Self {
        Self { programs, pins, tcx: preflight::has_tcx(), own: OwnAttachments::default(), repairs }
    }

    /// Makes this agent attach its programs as filters of a clsact qdisc, as before Linux 6.6, even if the kernel has
    /// TCX.
    pub const fn use_filters(&mut self) {
        self.tcx = false;
    }

    /// How the agent attaches TC programs: by BPF links (`tcx`) or by filters of a clsact qdisc (`clsact`).
    pub const fn mechanism(&self) -> &'static str {
        if self.tcx { "tcx" } else { "clsact" }
    }

    /// Whether programs are attached as filters of a clsact qdisc, not by TCX links.
    pub const fn are_filters(&self) -> bool {
        !self.tcx
    }

    /// The ids of all programs that NPL has pinned. The agent recognizes NPL's programs on a device by these ids.
    pub fn own_programs(&self) -> OwnPrograms {
        OwnPrograms::read(&self.pins)
    }

    /// Loads the programs that only this forwarding mode needs. The agent calls this function at start, so that the
    /// agent exits at once if the kernel rejects one of these programs.
    ///
    /// # Errors
    ///
    /// If the kernel rejects a program.
    pub fn prepare(&mut self, forwarding: Forwarding) -> Result<(), DatapathError> {
        let names: &[_] = match forwarding {
            Forwarding::Stack => &[],
            Forwarding::Redirect => &[PROG_INGRESS_REDIRECT, PROG_PODS_REDIRECT],
            Forwarding::Offload => &[PROG_INGRESS_OFFLOAD, PROG_EGRESS_OFFLOAD, PROG_PODS_OFFLOAD, PROG_TO_PODS],
        };
        names.iter().try_for_each(|name| self.load_program(name).map(drop))
    }

    /// Loads and pins every program that an agent on this Node may need. Returns, for each program, its name or the
    /// error with which it could not be loaded.
    pub fn load_all(&mut self) -> Vec<Result<&'static str, DatapathError>> {
        self.programs.load_all()
    }

    /// Whether the programs were loaded with `CAP_PERFMON`, so that they have no speculation barriers.
    pub fn are_unmitigated(&self) -> bool {
        self.programs.are_unmitigated()
    }

    /// Loads a TC program for `BPF_PROG_TEST_RUN`, which needs no device.
    ///
    /// # Errors
    ///
    /// If the object has no program of this name, or the kernel rejects the program.
    pub fn load_program(&mut self, name: &'static str) -> Result<&mut SchedClassifier, DatapathError> {
        self.programs.load_classifier(name)
    }

    /// Loads the XDP program for `BPF_PROG_TEST_RUN`, which needs no device.
    ///
    /// # Errors
    ///
    /// If the kernel rejects the program.
    pub fn load_xdp_program(&mut self) -> Result<&mut Xdp, DatapathError> {
        self.programs.load_xdp().map(|(_, program)| program)
    }

    /// The TC hooks to which this agent, or an earlier agent of the same ABI version, has attached programs.
    ///
    /// # Errors
    ///
    /// If the pins cannot be listed.
    pub fn attached_hooks(&self) -> Result<AttachedHooks, DatapathError> {
        Ok(self.pins.links()?.into_iter().collect())
    }

    /// Attaches a program like [`Datapath::attach`](super::load::Datapath::attach), but does not change the order of
    /// the hook's filters.
    pub(super) fn attach(
        &mut self,
        device: &Device,
        direction: Direction,
        program: &'static str,
    ) -> Result<(), DatapathError> {
        if !self.tcx {
            return self.attach_clsact(device, direction, program);
        }
        match self.attach_tcx(device, direction, program) {
            // A kernel since Linux 6.6 may have been built without TCX. In this case, the agent attaches filters.
            Err(DatapathError::Attach { source, .. }) if is_unsupported(&source) => {
                self.tcx = false;
                self.attach_clsact(device, direction, program)
            }
            other => other,
        }
    }

    /// Records that the agent has attached its program to a hook. If this process had attached the same program before,
    /// `was_intact` states whether the program was still attached; other software has removed it otherwise.
    fn record_attached(
        &mut self,
        object: RepairedObject,
        (device, direction): (&Device, Direction),
        program: &'static str,
        was_intact: bool,
    ) {
        let former = self.own.tc.insert((device.ifindex, direction), program);
        if former == Some(program) && !was_intact {
            self.repairs.record(object, format_args!("{program} at {} of {}", direction.as_str(), device.name));
        }
    }

    /// Moves NPL's filter of a hook ahead of all other filters, without an interruption of translation. Among filters
    /// of the same priority, the kernel runs the last added filter first, so NPL's filter is removed and added again.
    /// The added filter has the same handle as before, so that the next agent finds the filter. TCX links are not
    /// moved.
    ///
    /// # Errors
    ///
    /// If the kernel rejects the filter.
    pub(super) fn move_to_head(
        &mut self,
        device: &Device,
        direction: Direction,
        program: &'static str,
    ) -> Result<(), DatapathError> {
        if self.tcx {
            return Ok(());
        }
        // If an earlier agent was killed before it had removed the temporary filter, this filter already exists.
        match self.add_filter(device, direction, program, STAND_IN) {
            Err(error) if !is_present(&error) => return Err(error),
            Ok(()) | Err(_) => {}
        }
        // For a packet on which another filter runs at this moment, the kernel may already have passed the position of
        // the temporary filter. This packet still needs the old filter.
        sys::wait_for_packets_in_hooks();
        remove_filter(&device.name, direction, OWN_HANDLE);
        self.add_filter(device, direction, program, OWN_HANDLE)?;
        sys::wait_for_packets_in_hooks();
        remove_filter(&device.name, direction, STAND_IN);
        Ok(())
    }

    /// Whether the filter of another ABI version may run before this version's filter on a hook, because both filters
    /// exist. After a rollback to this version, the other version's filter was added last, and the kernel runs the last
    /// added filter first.
    ///
    /// # Errors
    ///
    /// If the pins cannot be listed.
    pub(super) fn may_be_behind_predecessor(&self, ifindex: u32, direction: Direction) -> Result<bool, DatapathError> {
        if self.tcx || is_last(direction) || !self.pins.link(ifindex, direction).is_dir() {
            return Ok(false);
        }
        let others = self.pins.other_versions()?;
        Ok(others.iter().any(|other| other.link(ifindex, direction).is_dir()))
    }

    fn add_filter(
        &mut self,
        device: &Device,
        side: Direction,
        name: &'static str,
        handle: TcHandle,
    ) -> Result<(), DatapathError> {
        let program = self.programs.load_classifier(name)?;
        let options = NlOptions { priority: priority(side), handle, classid: None };
        let added = program.attach_with_options(&device.name, attach_type(side), TcAttachOptions::Netlink(options));
        let link = added.and_then(|id| program.take_link(id)).map_err(attach_error(name, device))?;
        leave_attached(link);
        Ok(())
    }

    /// Detaches NPL's program from a hook. `device` is `None` if the device no longer exists.
    ///
    /// # Errors
    ///
    /// If the pin cannot be removed.
    pub fn detach(&mut self, ifindex: u32, direction: Direction, device: Option<&Device>) -> Result<(), DatapathError> {
        self.own.tc.remove(&(ifindex, direction));
        if let Some(device) = device.filter(|_| !self.tcx) {
            detach_filter(&device.name, direction, ABI_VERSION);
        }
        unpin(&self.pins.link(ifindex, direction))
    }

    /// Frees the memory of the program loader. If `are_others_used` is false, also unpins the programs of other builds,
    /// because then none of these programs is attached to a device.
    ///
    /// # Errors
    ///
    /// If the pins of other builds cannot be removed.
    pub fn release_unused_programs(&mut self, are_others_used: bool) -> Result<(), DatapathError> {
        self.programs.release_unused(are_others_used)
    }

    fn attach_tcx(&mut self, device: &Device, direction: Direction, name: &'static str) -> Result<(), DatapathError> {
        let pin = self.pins.link(device.ifindex, direction);
        let refused = attach_error(name, device);
        let program = self.programs.load_classifier(name)?;
        let id = program.info().map_err(&refused)?.id();
        let is_own = |facts: &LinkFacts| facts.program == id && facts.is_of_hook(device.ifindex, hook(direction));
        let was_renamed = restore_renamed_link(&self.pins, &pin, is_own)?;
        let mut is_moved = false;
        match sys::open_pin(&pin) {
            Ok(link) => {
                is_moved = predecessor::is_ahead_of(&self.pins, &link, (device.ifindex, direction))?;
                if !is_moved {
                    let replaced = replace(&link, (program, id), device.ifindex, direction).map_err(&refused)?;
                    if replaced != Replaced::No {
                        let is_intact = replaced == Replaced::Unchanged && !was_renamed;
                        self.record_attached(RepairedObject::TcxLink, (device, direction), name, is_intact);
                        return Ok(());
                    }
                }
                unpin(&pin)?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(io_error) => {
                let source = LinkError::SyscallError(SyscallError { call: "bpf_obj_get", io_error });
                return Err(DatapathError::Link {
                    operation: "open",
                    program: name,
                    interface: device.name.clone(),
                    source,
                });
            }
        }
        let program = program.fd().map_err(&refused)?.as_fd();
        let link = sys::create_tcx_link(program, device.ifindex, hook(direction), is_last(direction))
            .map_err(failed("bpf_link_create"))
            .map_err(&refused)?;
        sys::pin(link.as_fd(), &pin).map_err(|source| pin_error("pin link", &pin, source))?;
        self.record_attached(RepairedObject::TcxLink, (device, direction), name, is_moved);
        Ok(())
    }

    fn attach_clsact(&mut self, device: &Device, side: Direction, name: &'static str) -> Result<(), DatapathError> {
        self.refuse_ingress_queue(device)?;
        let is_new_qdisc = self.ensure_clsact(device, name)?;
        let is_known = Direction::ALL.iter().any(|side| self.own.tc.contains_key(&(device.ifindex, *side)));
        if is_new_qdisc && is_known {
            self.repairs.record(RepairedObject::Qdisc, format_args!("clsact of {}", device.name));
        }
        let program = self.programs.load_classifier(name)?;
        let direction = attach_type(side);
        let existing = filter(&device.name, side, OWN_HANDLE)
            .map_err(|error| attach_error(name, device)(ProgramError::from(TcError::from(error))))?;
        let options = NlOptions { priority: priority(side), handle: OWN_HANDLE, classid: None };
        let replaced = program.attach_to_link(existing);
        let was_present = replaced.is_ok();
        let id = replaced.or_else(|_not_there| {
            program.attach_with_options(&device.name, direction, TcAttachOptions::Netlink(options))
        });
        let link = id.and_then(|id| program.take_link(id)).map_err(attach_error(name, device))?;
        leave_attached(link);
        remove_filter(&device.name, side, STAND_IN);
        self.remove_unpinned_filters(&device.name, side)?;
        // A filter cannot be pinned, so an empty directory records for `npl-agent status` and the next agent that the
        // filter is attached.
        let mark = self.pins.link(device.ifindex, side);
        fs::create_dir_all(&mark).map_err(|source| pin_error("create", &mark, source))?;
        self.record_attached(RepairedObject::Filter, (device, side), name, was_present);
        Ok(())
    }

    /// Removes filters of earlier ABI versions for which no pin exists. A filter without a pin remains if an agent was
    /// killed before it had recorded the filter, or if an earlier build attached the filter under the handle that now
    /// belongs to a different ABI version.
    fn remove_unpinned_filters(&self, interface: &str, side: Direction) -> Result<(), DatapathError> {
        let others = self.pins.other_versions()?;
        for abi in (1..ABI_VERSION).filter(|abi| others.iter().all(|other| other.abi() != *abi)) {
            remove_filter(interface, side, handle_of(abi));
        }
        Ok(())
    }

    /// Returns an error for a device with an `ingress` qdisc: the qdisc occupies the handle of clsact, and would run
    /// egress filters on ingress packets.
    fn refuse_ingress_queue(&self, device: &Device) -> Result<(), DatapathError> {
        if !device.link.has_ingress_queue {
            return Ok(());
        }
        // The `ingress` qdisc has replaced clsact, and the kernel has removed the filters together with clsact. Only
        // the directories that record the filters are left.
        Direction::ALL.into_iter().try_for_each(|side| unpin(&self.pins.link(device.ifindex, side)))?;
        Err(DatapathError::IngressQueue { interface: device.name.clone() })
    }

    /// Adds a clsact qdisc if the device has none. Records that NPL added the qdisc, so that `npl-agent cleanup`
    /// removes the qdisc. Returns whether the qdisc is new.
    fn ensure_clsact(&self, device: &Device, name: &'static str) -> Result<bool, DatapathError> {
        let mark = self.pins.clsact_mark(device.ifindex);
        // The record is written first: if the agent were killed between the addition and the record, the qdisc would
        // stay on the device after a cleanup.
        let is_new_mark = !device.link.has_clsact && !mark.is_dir();
        let create = || fs::create_dir_all(&mark).map_err(|source| pin_error("create", &mark, source));
        if is_new_mark {
            create()?;
        }
        match tc::qdisc_add_clsact(&device.name) {
            // Other software may have removed the qdisc that the last survey found.
            Ok(()) => create().map(|()| true),
            Err(error) => {
                if is_new_mark {
                    unpin(&mark)?;
                }
                let is_present =
                    matches!(&error, TcError::NetlinkError(error) if error.raw_os_error() == Some(libc::EEXIST));
                if is_present { Ok(false) } else { Err(attach_error(name, device)(ProgramError::from(error))) }
            }
        }
    }
}

/// Whether NPL's program on a hook runs after the programs of other software. A program that translates packets runs
/// first, so that other software sees translated packets. The program that observes which packets the kernel stack
/// forwards runs last, so that packets that other software drops do not count as forwarded.
pub(super) const fn is_last(direction: Direction) -> bool {
    matches!(direction, Direction::ToPods)
}

/// The TCX hook of a direction.
pub(super) const fn hook(direction: Direction) -> bpf_attach_type {
    match direction {
        Direction::Ingress => bpf_attach_type::BPF_TCX_INGRESS,
        Direction::Egress | Direction::ToPods => bpf_attach_type::BPF_TCX_EGRESS,
    }
}

const fn priority(direction: Direction) -> u16 {
    if is_last(direction) { attachments::LAST } else { attachments::FIRST }
}

/// Creates aya's link object for a filter of NPL. The filter need not exist in the kernel.
fn filter(interface: &str, direction: Direction, handle: TcHandle) -> io::Result<SchedClassifierLink> {
    SchedClassifierLink::attached(interface, attach_type(direction), priority(direction), handle, None)
}

/// Removes the filter of an ABI version and the temporary filter. Returns whether at least one of the two filters
/// existed.
pub(super) fn detach_filter(interface: &str, direction: Direction, abi: u32) -> bool {
    let removed = [handle_of(abi), STAND_IN].map(|handle| remove_filter(interface, direction, handle));
    removed.contains(&true)
}

const fn handle_of(abi: u32) -> TcHandle {
    let (major, minor) = filter_handle(abi);
    TcHandle::new(major, minor)
}

/// Removes the filter of NPL with this handle. Returns whether the filter existed.
fn remove_filter(interface: &str, direction: Direction, handle: TcHandle) -> bool {
    filter(interface, direction, handle).is_ok_and(|link| link.detach().is_ok())
}

/// Whether the error means that the kernel already has a filter with this handle.
fn is_present(error: &DatapathError) -> bool {
    let DatapathError::Attach { source, .. } = error else { return false };
    let ProgramError::TcError(TcError::NetlinkError(error)) = &**source else { return false };
    error.raw_os_error() == Some(libc::EEXIST)
}

pub(super) const fn attach_type(direction: Direction) -> TcAttachType {
    match direction {
        Direction::Ingress => TcAttachType::Ingress,
        Direction::Egress | Direction::ToPods => TcAttachType::Egress,
    }
}

/// Makes `program`, which has this id, the program of the link, if the link has a different program.
fn replace(
    link: &OwnedFd,
    (program, id): (&SchedClassifier, u32),
    ifindex: u32,
    direction: Direction,
) -> Result<Replaced, ProgramError> {
    let hook = hook(direction);
    let facts = sys::link_facts(link.as_fd()).map_err(failed("bpf_link_get_info"))?;
    if !facts.is_of_hook(ifindex, hook) {
        return Ok(Replaced::No);
    }
    let mut replaced = Replaced::Unchanged;
    if facts.program != id {
        replaced = Replaced::Updated;
        match sys::replace_program(link.as_fd(), program.fd()?.as_fd()).map_err(failed("bpf_link_update")) {
            Err(error) if is_severed(&error) => return Ok(Replaced::No),
            updated => updated?,
        }
    }
    // The kernel reports the ifindex of a link but not the network namespace. A device that was moved to another
    // namespace may have the ifindex of this device. If the kernel can list the programs of this device's hook, the
    // link therefore counts as this device's link only if the list contains the program.
    let is_listed = sys::programs_on(ifindex, hook).map_or(true, |programs| programs.contains(&id));
    Ok(if is_listed { replaced } else { Replaced::No })
}

/// If a link's pin is missing because other software has renamed the pin within the directory of links, gives the pin
/// its name back. A second link would otherwise be attached, and both programs would run. Returns whether a pin was
/// renamed.
pub(super) fn restore_renamed_link(
    pins: &Pins,
    pin: &Path,
    is_own: impl Fn(&LinkFacts) -> bool,
) -> Result<bool, DatapathError> {
    if pin.exists() {
        return Ok(false);
    }
    let has_link = |path: &PathBuf| {
        sys::open_pin(path).and_then(|link| sys::link_facts(link.as_fd())).is_ok_and(|facts| is_own(&facts))
    };
    let Some(renamed) = pins.unknown_links()?.into_iter().find(has_link) else { return Ok(false) };
    fs::rename(&renamed, pin).map_err(|source| pin_error("rename", &renamed, source))?;
    Ok(true)
}

/// Drops aya's link object of a filter, but leaves the filter attached. A plain drop would detach the filter. The
/// conversion to an [`FdLink`] fails for a filter, and consumes the link object without detaching the filter.
fn leave_attached(link: SchedClassifierLink) {
    drop(FdLink::try_from(link));
}

fn is_severed(error: &ProgramError) -> bool {
    os_error(error) == Some(libc::ENOLINK)
}

fn is_unsupported(error: &ProgramError) -> bool {
    matches!(os_error(error), Some(libc::EINVAL | libc::EOPNOTSUPP))
}

/// Returns a function that converts an I/O error of the system call `call` to a [`ProgramError`].
pub(super) fn failed(call: &'static str) -> impl FnOnce(io::Error) -> ProgramError {
    move |io_error| ProgramError::SyscallError(SyscallError { call, io_error })
}

pub(super) fn os_error(error: &ProgramError) -> Option<i32> {
    if let ProgramError::SyscallError(error) = error { error.io_error.raw_os_error() } else { None }
}

pub(super) fn attach_error(program: &'static str, device: &Device) -> impl Fn(ProgramError) -> DatapathError {
    let interface = device.name.clone();
    move |source| DatapathError::Attach { program, interface: interface.clone(), source: Box::new(source) }
}
