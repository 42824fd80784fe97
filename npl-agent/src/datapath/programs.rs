// SPDX-License-Identifier: Apache-2.0
//! Loads programs and pins them, or reuses those that an earlier agent of the same build has pinned. Loading takes the
//! longest part of a start, since the verifier checks every program.
//!
//! A pinned program is reused if its type, name and maps are right. Otherwise it is loaded again.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::fd::AsFd as _,
    path::Path,
};

use aya::{
    Ebpf, EbpfLoader,
    maps::{MapData, MapInfo, ProgramArray},
    programs::{CgroupSockAddr, Program, ProgramFd, SchedClassifier, Xdp},
};
use npl_common::names::{
    GLOBAL_DIRECT_READS, MAP_SLOW_PATH, PINNED_MAPS, PROG_EGRESS, PROG_INGRESS, PROG_XDP, PROG_XDP_FRAGS, PROGRAMS,
    SLOW_PATH_PROGRAMS, SOCKET_PROGRAMS, SocketProgram, slow_path_of,
};
use tracing::{debug, info};

use super::{
    error::DatapathError,
    object::{self, Kind, digest, embedded_object},
    pins::{Pins, pin_error, unpin},
    preflight, sys,
    tables::open,
};
use crate::process::memory;

/// The programs that every Node needs. Those for devices without Ethernet headers are loaded when such a device
/// appears.
const ALWAYS: [&str; 2] = [PROG_EGRESS, PROG_INGRESS];
/// The name of [`Variant::Unmitigated`].
const UNMITIGATED: &str = "unmitigated";
/// The section of constants, of which every load creates a map.
const CONSTANTS: &str = ".rodata";

/// The variants of the programs, by the capabilities at loading and by the verifier; the fastest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Variant {
    /// Loaded with `CAP_PERFMON`: no barriers, and packets are read by pointers.
    Unmitigated,
    /// Loaded without it: the kernel adds a barrier against speculation after nearly every store to the stack.
    Mitigated,
    /// Loaded without it before Linux 6.6: as [`Self::Mitigated`], and packets are read by a helper.
    ByHelper,
}

/// The programs of this agent's build that were needed so far.
#[derive(Debug)]
pub(super) struct Programs {
    pins: Pins,
    variant: Variant,
    /// The name of the build's folder.
    build: String,
    /// The ids of the maps that a program may use.
    known_maps: BTreeSet<u32>,
    classifiers: BTreeMap<&'static str, SchedClassifier>,
    sockets: BTreeMap<&'static str, CgroupSockAddr>,
    /// The XDP program.
    xdp: Option<Xdp>,
    /// The object; kept from the first load until all programs are attached.
    object: Option<Ebpf>,
    /// Whether the constants of this object are pinned.
    has_pinned_constants: bool,
    /// Whether programs of other builds may still be pinned.
    has_predecessors: bool,
}

impl Programs {
    /// Reuses the programs of an earlier agent, or loads them.
    ///
    /// # Errors
    ///
    /// The kernel's refusal.
    pub(super) fn open(pins: &Pins) -> Result<Self, DatapathError> {
        let digest = digest(embedded_object()?);
        // A program that was loaded with more capabilities than this agent has is reused.
        let (known, loadable): (&[Variant], [Variant; 2]) = if has_perfmon() {
            (&[Variant::Unmitigated], [Variant::Unmitigated, Variant::ByHelper])
        } else {
            (&[Variant::Unmitigated, Variant::Mitigated, Variant::ByHelper], [Variant::Mitigated, Variant::ByHelper])
        };
        for variant in known {
            let mut programs = Self::new(pins, &digest, *variant);
            if programs.adopt_hooks()? {
                return Ok(programs);
            }
        }
        let [mut by_pointers, mut by_helper] = loadable.map(|variant| Self::new(pins, &digest, variant));
        match by_pointers.load_hooks() {
            Err(error) if error.is_verifier_refusal() => {
                debug!(%error, "the verifier rejects programs that read packets by pointers");
                by_pointers.discard()?;
                by_helper.load_hooks().map_err(DatapathError::or_missing_perfmon)?;
                info!(
                    "programs read packets by a helper, which is slower: before Linux 6.6, the fast variant \
                     needs CAP_PERFMON"
                );
                Ok(by_helper)
            }
            loaded => loaded.map(|()| by_pointers),
        }
    }

    fn new(pins: &Pins, digest: &str, variant: Variant) -> Self {
        Self {
            pins: pins.clone(),
            variant,
            build: format!("{digest}_{}", variant.as_str()),
            known_maps: BTreeSet::new(),
            classifiers: BTreeMap::new(),
            sockets: BTreeMap::new(),
            xdp: None,
            object: None,
            has_pinned_constants: false,
            has_predecessors: true,
        }
    }

    /// Loads every program that an agent on this Node may use; returns the name of each, or its error.
    pub(super) fn load_all(&mut self) -> Vec<Result<&'static str, DatapathError>> {
        let mut loaded: Vec<_> = PROGRAMS.iter().map(|name| self.load_classifier(name).map(|_| *name)).collect();
        loaded.extend(SOCKET_PROGRAMS.iter().map(|which| self.load_socket_program(which).map(|_| which.name)));
        loaded.push(self.load_xdp().map(|(name, _)| name));
        self.object = None;
        loaded
    }

    /// Whether the programs have no barriers against speculation.
    pub(super) fn are_unmitigated(&self) -> bool {
        self.variant == Variant::Unmitigated
    }

    /// Loads a TC program and, ahead of it, the slow path that it tail-calls.
    pub(super) fn load_classifier(&mut self, name: &'static str) -> Result<&mut SchedClassifier, DatapathError> {
        if !self.classifiers.contains_key(name) {
            if let Some(index) = slow_path_of(name) {
                let program = self.adopt_or_load(SLOW_PATH_PROGRAMS[index as usize])?;
                self.place_slow_path(index, &program)?;
            }
            let program = self.adopt_or_load(name)?;
            self.classifiers.insert(name, program);
        }
        self.classifiers.get_mut(name).ok_or(DatapathError::Missing(name))
    }

    /// Loads a program for the sockets of a cgroup.
    pub(super) fn load_socket_program(&mut self, which: &SocketProgram) -> Result<&mut CgroupSockAddr, DatapathError> {
        let name = which.name;
        if !self.sockets.contains_key(name) {
            let program = self.adopt_or_load(name)?;
            self.sockets.insert(name, program);
        }
        self.sockets.get_mut(name).ok_or(DatapathError::Missing(name))
    }

    /// Loads the XDP program for this kernel, and returns it with its name.
    pub(super) fn load_xdp(&mut self) -> Result<(&'static str, &mut Xdp), DatapathError> {
        let name = if preflight::has_xdp_frags() { PROG_XDP_FRAGS } else { PROG_XDP };
        let program = match self.xdp.take() {
            Some(program) => program,
            None => self.adopt_or_load(name)?,
        };
        Ok((name, self.xdp.insert(program)))
    }

    /// Frees the memory that loading took and, unless `is_still_used`, the programs of other builds.
    pub(super) fn settle(&mut self, is_still_used: bool) -> Result<(), DatapathError> {
        if self.object.take().is_some() {
            memory::give_back();
        }
        if is_still_used || !self.has_predecessors {
            return Ok(());
        }
        for build in self.pins.builds()?.iter().filter(|build| **build != self.build) {
            debug!(build, "programs of another build are removed");
            remove_folder(&self.pins.programs_of(build))?;
        }
        self.has_predecessors = false;
        Ok(())
    }

    /// Reuses the programs that every Node needs: all or none.
    fn adopt_hooks(&mut self) -> Result<bool, DatapathError> {
        let Some(known_maps) = self.look_for_maps()? else { return Ok(false) };
        self.known_maps = known_maps;
        let mut slow_paths = Vec::new();
        for hook in ALWAYS {
            let slow_path = slow_path_of(hook).map(|index| (index, self.adopt(SLOW_PATH_PROGRAMS[index as usize])));
            let (Some((index, Some(slow_path))), Some(program)) = (slow_path, self.adopt(hook)) else {
                self.classifiers.clear();
                return Ok(false);
            };
            slow_paths.push((index, slow_path));
            self.classifiers.insert(hook, program);
        }
        for (index, slow_path) in slow_paths {
            self.place_slow_path(index, &slow_path)?;
        }
        info!(build = self.build, "programs of an earlier agent are reused");
        Ok(true)
    }

    /// Loads the programs that every Node needs, and removes older pins of this build.
    fn load_hooks(&mut self) -> Result<(), DatapathError> {
        self.discard()?;
        for hook in ALWAYS {
            self.load_classifier(hook)?;
        }
        info!(build = self.build, "programs loaded");
        if self.variant != Variant::Unmitigated {
            info!(
                "the programs contain the kernel's barriers against speculation, since they were loaded without \
                 CAP_PERFMON: each packet takes some 0.3 µs longer. Run `npl-agent load` in an init container with \
                 that capability, as deploy/npl.yaml does"
            );
        }
        Ok(())
    }

    fn discard(&self) -> Result<(), DatapathError> {
        remove_folder(&self.pins.programs_of(&self.build))
    }

    fn adopt_or_load<K: Kind>(&mut self, name: &'static str) -> Result<K, DatapathError>
    where
        for<'a> &'a mut K: TryFrom<&'a mut Program>,
    {
        match self.adopt(name) {
            Some(program) => Ok(program),
            None => self.load(name),
        }
    }

    /// The pinned program of a name, if it is the one that this agent would load.
    fn adopt<K: Kind>(&self, name: &'static str) -> Option<K> {
        let program = K::from_pin(&self.pins.program(&self.build, name), name).ok()?;
        let facts = sys::program_facts(program.fd().ok()?.as_fd()).ok()?;
        // aya sets a program's name only with a capability for tracing, which the agent does not have.
        let is_named = facts.name.is_empty() || facts.name == name.as_bytes();
        let is_npl = facts.kind == K::TYPE as u32 && is_named;
        let fits = is_npl && facts.maps.iter().all(|id| self.known_maps.contains(id));
        if !fits {
            debug!(name, ?facts, "pinned program is of another kind or build; it is loaded again");
        }
        fits.then_some(program)
    }

    /// Loads a program and pins it.
    fn load<K: Kind>(&mut self, name: &'static str) -> Result<K, DatapathError>
    where
        for<'a> &'a mut K: TryFrom<&'a mut Program>,
    {
        let refused = |source| DatapathError::LoadProgram { name, source: Box::new(source) };
        let program: Result<&mut K, _> = program_of(self.load_object()?, name)?.try_into();
        program.map_err(|_other_type| DatapathError::Missing(name))?.load().map_err(refused)?;
        // After the load: a device whose program is rejected is tried again and again, and each time would pin a map.
        self.pin_constants()?;
        let pin = self.pins.program(&self.build, name);
        unpin(&pin)?;
        let program = program_of(self.load_object()?, name)?;
        program.pin(&pin).map_err(|error| pin_error("pin program", &pin, io::Error::other(error)))?;
        K::from_pin(&pin, name).map_err(refused)
    }

    /// Opens the object over the pinned maps, and replaces maps of another layout.
    fn load_object(&mut self) -> Result<&mut Ebpf, DatapathError> {
        let object = match self.object.take() {
            Some(object) => object,
            None => self.open_object()?,
        };
        Ok(self.object.insert(object))
    }

    fn open_object(&mut self) -> Result<Ebpf, DatapathError> {
        let bytes = embedded_object()?;
        object::discard_incompatible_maps(&self.pins, bytes)?;
        let mut loader = EbpfLoader::new();
        let has_direct_reads = u8::from(self.variant != Variant::ByHelper);
        loader.override_global(GLOBAL_DIRECT_READS, &has_direct_reads, true);
        for name in PINNED_MAPS {
            loader.map_pin_path(name, self.pins.map(name));
        }
        let object = loader.load(bytes).map_err(DatapathError::Load)?;
        self.has_pinned_constants = false;
        self.known_maps = self.look_for_maps()?.unwrap_or_default();
        Ok(object)
    }

    /// Pins the constants, so that the next agent recognizes the programs' maps.
    fn pin_constants(&mut self) -> Result<(), DatapathError> {
        if self.has_pinned_constants {
            return Ok(());
        }
        let folder = self.pins.programs_of(&self.build);
        fs::create_dir_all(&folder).map_err(|source| pin_error("create", &folder, source))?;
        let free = (0..u32::MAX).map(|number| self.pins.constants(&self.build, number)).find(|pin| !pin.exists());
        let pin = free.ok_or(DatapathError::Missing(CONSTANTS))?;
        let constants = self.load_object()?.map(CONSTANTS).ok_or(DatapathError::Missing(CONSTANTS))?;
        constants.pin(&pin).map_err(|error| pin_error("pin constants", &pin, io::Error::other(error)))?;
        self.has_pinned_constants = true;
        Ok(())
    }

    /// Checks that the maps of this agent are the pinned ones.
    pub(super) fn check_maps(&self) -> Result<(), DatapathError> {
        PINNED_MAPS.iter().try_for_each(|name| {
            let pin = self.pins.map(name);
            match MapInfo::from_pin(&pin) {
                Ok(info) if self.known_maps.contains(&info.id()) => Ok(()),
                Ok(_) => Err(DatapathError::PinLost(pin)),
                Err(_) if !pin.exists() => Err(DatapathError::PinLost(pin)),
                Err(source) => Err(DatapathError::OpenMap { name, source }),
            }
        })
    }

    /// The ids of the pinned maps, those of this build included; `None` unless all exist.
    fn look_for_maps(&self) -> Result<Option<BTreeSet<u32>>, DatapathError> {
        let of_all = PINNED_MAPS.iter().map(|name| self.pins.map(name));
        let of_build = self.pins.constants_of(&self.build)?;
        let ids = of_all.chain(of_build).map(|pin| MapInfo::from_pin(pin).ok().map(|info| info.id()));
        Ok(ids.collect())
    }

    /// Places a slow path where the programs of its hook tail-call it, those of earlier agents included.
    fn place_slow_path(&self, index: u32, slow_path: &SchedClassifier) -> Result<(), DatapathError> {
        let name = SLOW_PATH_PROGRAMS[index as usize];
        let program: &ProgramFd =
            slow_path.fd().map_err(|source| DatapathError::LoadProgram { name, source: Box::new(source) })?;
        let mut jumps: ProgramArray<MapData> = open(&self.pins, MAP_SLOW_PATH)?;
        jumps.set(index, program, 0).map_err(DatapathError::map("write", MAP_SLOW_PATH))
    }
}

impl Variant {
    /// The name in folders.
    const fn as_str(self) -> &'static str {
        match self {
            Self::Unmitigated => UNMITIGATED,
            Self::Mitigated => "mitigated",
            Self::ByHelper => "helper",
        }
    }
}

/// Whether the programs in this build's folder have no barriers against speculation.
pub fn is_unmitigated(build: &str) -> bool {
    build.rsplit('_').next() == Some(UNMITIGATED)
}

/// Whether this process has `CAP_PERFMON`.
fn has_perfmon() -> bool {
    preflight::rights().is_some_and(|rights| rights.perfmon)
}

/// A program of the object.
fn program_of<'a>(object: &'a mut Ebpf, name: &'static str) -> Result<&'a mut Program, DatapathError> {
    object.program_mut(name).ok_or(DatapathError::Missing(name))
}

fn remove_folder(folder: &Path) -> Result<(), DatapathError> {
    match fs::remove_dir_all(folder) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(pin_error("remove", folder, source)),
        _ => Ok(()),
    }
}
