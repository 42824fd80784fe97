// SPDX-License-Identifier: Apache-2.0
//! The programs, by their pins: an agent uses those that an earlier one of the same build left, and loads what is
//! missing. Loading is the longest part of a start, since the kernel checks every program anew.
//!
//! A pinned program is taken over if it is of the right type and name, as far as the kernel was told one, and uses no
//! maps but those that are pinned now.
//! Whatever does not fit is loaded again in its place.

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
    GLOBAL_DIRECT_READS, MAP_REST, PINNED_MAPS, PROG_EGRESS, PROG_INGRESS, PROG_XDP, PROG_XDP_FRAGS, PROGRAMS,
    REST_PROGRAMS, SOCKET_PROGRAMS, SocketProgram, rest_of,
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

/// What every Node needs. The programs for devices without link-layer headers, which few Nodes have, wait for such a
/// device.
const ALWAYS: [&str; 2] = [PROG_EGRESS, PROG_INGRESS];
/// How [`Variant::Unmitigated`] is named.
const UNMITIGATED: &str = "unmitigated";
/// The object's section of constants, a map of its own in every loaded copy.
const CONSTANTS: &str = ".rodata";

/// What comes of the programs, by the rights of whoever loads them and the kernel's verifier; the fastest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Variant {
    /// Loaded with `CAP_PERFMON`: as they are. They read packets by pointers.
    Unmitigated,
    /// Loaded without: the kernel puts a barrier behind nearly every store to the stack, against speculation.
    Mitigated,
    /// Before Linux 6.6 without that right: as [`Self::Mitigated`], and they read packets by a helper.
    ByHelper,
}

/// The programs of this agent's build, as far as they were needed yet.
#[derive(Debug)]
pub(super) struct Programs {
    pins: Pins,
    variant: Variant,
    /// Tells the pins of this build from those of others.
    build: String,
    /// The maps that a program may use, by their ids.
    known_maps: BTreeSet<u32>,
    classifiers: BTreeMap<&'static str, SchedClassifier>,
    sockets: BTreeMap<&'static str, CgroupSockAddr>,
    /// For drivers.
    xdp: Option<Xdp>,
    /// The object, from the first program that had to be loaded until all are where they belong.
    object: Option<Ebpf>,
    /// Whether the constants of this object are pinned.
    has_pinned_constants: bool,
    /// Whether programs of other builds may still be pinned.
    has_predecessors: bool,
}

impl Programs {
    /// Takes over the programs of an earlier agent, or else loads them as the kernel lets us.
    ///
    /// # Errors
    ///
    /// The kernel's refusal.
    pub(super) fn open(pins: &Pins) -> Result<Self, DatapathError> {
        let digest = digest(embedded_object()?);
        // What was loaded with more rights than this agent has is taken over all the same.
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

    /// Loads whatever an agent on this machine may ask for one day; the names of all, or why one of them does not load.
    pub(super) fn load_all(&mut self) -> Vec<Result<&'static str, DatapathError>> {
        let mut loaded: Vec<_> = PROGRAMS.iter().map(|name| self.load_classifier(name).map(|_| *name)).collect();
        loaded.extend(SOCKET_PROGRAMS.iter().map(|which| self.load_socket_program(which).map(|_| which.name)));
        loaded.push(self.load_xdp().map(|(name, _)| name));
        self.object = None;
        loaded
    }

    /// Whether they are without barriers against speculation.
    pub(super) fn are_unmitigated(&self) -> bool {
        self.variant == Variant::Unmitigated
    }

    /// A program for devices, ready to run: that to which it jumps with what is unusual is in its place.
    pub(super) fn load_classifier(&mut self, name: &'static str) -> Result<&mut SchedClassifier, DatapathError> {
        if !self.classifiers.contains_key(name) {
            if let Some(index) = rest_of(name) {
                let program = self.adopt_or_load(REST_PROGRAMS[index as usize])?;
                self.place_slow_path(index, &program)?;
            }
            let program = self.adopt_or_load(name)?;
            self.classifiers.insert(name, program);
        }
        self.classifiers.get_mut(name).ok_or(DatapathError::Missing(name))
    }

    /// A program for the sockets of a cgroup.
    pub(super) fn load_socket_program(&mut self, which: &SocketProgram) -> Result<&mut CgroupSockAddr, DatapathError> {
        let name = which.name;
        if !self.sockets.contains_key(name) {
            let program = self.adopt_or_load(name)?;
            self.sockets.insert(name, program);
        }
        self.sockets.get_mut(name).ok_or(DatapathError::Missing(name))
    }

    /// The program for drivers that is made for this kernel, and its name.
    pub(super) fn load_xdp(&mut self) -> Result<(&'static str, &mut Xdp), DatapathError> {
        let name = if preflight::has_xdp_frags() { PROG_XDP_FRAGS } else { PROG_XDP };
        let program = match self.xdp.take() {
            Some(program) => program,
            None => self.adopt_or_load(name)?,
        };
        Ok((name, self.xdp.insert(program)))
    }

    /// All programs are where they belong: what loading took is given back, and so are programs of other builds, unless
    /// something of theirs `is_still_used`.
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

    /// Takes over what every Node needs; all of it or nothing.
    fn adopt_hooks(&mut self) -> Result<bool, DatapathError> {
        let Some(known_maps) = self.look_for_maps()? else { return Ok(false) };
        self.known_maps = known_maps;
        let mut slow_paths = Vec::new();
        for hook in ALWAYS {
            let slow_path = rest_of(hook).map(|index| (index, self.adopt(REST_PROGRAMS[index as usize])));
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

    /// Loads what every Node needs, and leaves nothing of what an earlier agent has pinned for this build.
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

    /// The pinned program of a name, if it is what this agent would load.
    fn adopt<K: Kind>(&self, name: &'static str) -> Option<K> {
        let program = K::from_pin(&self.pins.program(&self.build, name), name).ok()?;
        let facts = sys::program_facts(program.fd().ok()?.as_fd()).ok()?;
        // aya names programs only if it may load one for tracing, which takes more than the agent is given.
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
        // Not before: a device whose program is refused is tried again and again.
        self.pin_constants()?;
        let pin = self.pins.program(&self.build, name);
        unpin(&pin)?;
        let program = program_of(self.load_object()?, name)?;
        program.pin(&pin).map_err(|error| pin_error("pin program", &pin, io::Error::other(error)))?;
        K::from_pin(&pin, name).map_err(refused)
    }

    /// The object over the pinned maps. One of them that does not fit is replaced.
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

    /// The next agent knows the programs' constants by their pin, as it knows their other maps.
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

    /// Checks that the maps of this agent are those that are pinned.
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

    /// The ids of the maps that are pinned, for this build and for all; nothing unless all are there.
    fn look_for_maps(&self) -> Result<Option<BTreeSet<u32>>, DatapathError> {
        let of_all = PINNED_MAPS.iter().map(|name| self.pins.map(name));
        let of_build = self.pins.constants_of(&self.build)?;
        let ids = of_all.chain(of_build).map(|pin| MapInfo::from_pin(pin).ok().map(|info| info.id()));
        Ok(ids.collect())
    }

    /// Has the programs of a hook jump to their rest; so do those of an earlier agent from then on.
    fn place_slow_path(&self, index: u32, slow_path: &SchedClassifier) -> Result<(), DatapathError> {
        let name = REST_PROGRAMS[index as usize];
        let program: &ProgramFd =
            slow_path.fd().map_err(|source| DatapathError::LoadProgram { name, source: Box::new(source) })?;
        let mut jumps: ProgramArray<MapData> = open(&self.pins, MAP_REST)?;
        jumps.set(index, program, 0).map_err(DatapathError::map("write", MAP_REST))
    }
}

impl Variant {
    /// As in the names of folders.
    const fn as_str(self) -> &'static str {
        match self {
            Self::Unmitigated => UNMITIGATED,
            Self::Mitigated => "mitigated",
            Self::ByHelper => "helper",
        }
    }
}

/// Whether the programs of a build, by the name of its folder, are without barriers against speculation.
pub fn is_unmitigated(build: &str) -> bool {
    build.rsplit('_').next() == Some(UNMITIGATED)
}

/// Whether the verifier takes programs of this process as they are.
fn has_perfmon() -> bool {
    preflight::rights().is_some_and(|rights| rights.perfmon)
}

/// One of the object's programs.
fn program_of<'a>(object: &'a mut Ebpf, name: &'static str) -> Result<&'a mut Program, DatapathError> {
    object.program_mut(name).ok_or(DatapathError::Missing(name))
}

fn remove_folder(folder: &Path) -> Result<(), DatapathError> {
    match fs::remove_dir_all(folder) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(pin_error("remove", folder, source)),
        _ => Ok(()),
    }
}
