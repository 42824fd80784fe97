// SPDX-License-Identifier: Apache-2.0
//! Loads and pins the programs. An agent reuses the pinned programs of an earlier agent of the same build, because the
//! kernel's verification of the programs takes most of the time that an agent needs to start.
//!
//! A pinned program is reused if its type is the expected type, its name is empty or the expected name, and it uses
//! only maps that are pinned now. If one of these conditions is not met, the agent loads the program again and replaces
//! the pin.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::fd::{AsFd as _, OwnedFd},
    path::PathBuf,
};

use aya::{
    Ebpf, EbpfLoader,
    maps::{MapData, MapInfo, ProgramArray},
    programs::{Program, ProgramFd, SchedClassifier, Xdp},
};
use npl_common::names::{
    GLOBAL_DIRECT_READS, MAP_SLOW_PATH, PINNED_MAPS, PROG_EGRESS, PROG_INGRESS, PROG_XDP, PROG_XDP_FRAGS, PROGRAMS,
    SLOW_PATH_PROGRAMS, SOCKET_PROGRAMS, SlowPath, SocketProgram,
};
use tracing::{debug, info};

use super::{
    error::DatapathError,
    object::{self, ProgramKind, digest, embedded_object},
    pins::{Pins, names_in, pin_error, remove_folder, unpin},
    preflight,
    socket_program::LoadedSocketProgram,
    sys,
    tables::open,
};
use crate::{
    core::{
        repairs::{RepairJournal, RepairedObject},
        sizes::TableSizes,
    },
    process::memory,
};

/// The programs that every Node needs. A program that is not in this list, such as a program for devices without a
/// link-layer header, is loaded when a device needs it.
const ALWAYS: [&str; 2] = [PROG_EGRESS, PROG_INGRESS];
/// The part of a build's name that denotes [`Variant::Unmitigated`].
const UNMITIGATED: &str = "unmitigated";
/// The section of the object file with the programs' constants. Each time the object is loaded, aya creates a map from
/// this section.
const CONSTANTS: &str = ".rodata";

/// How the programs were loaded. The kernel, and the capabilities of the process that loads the programs, determine
/// which variants are possible. The fastest variant comes first, the slowest last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Variant {
    /// Loaded with `CAP_PERFMON`: the programs have no speculation barriers, and access packets directly.
    Unmitigated,
    /// Loaded without `CAP_PERFMON`: the kernel adds a speculation barrier after nearly every store to the stack.
    Mitigated,
    /// Loaded where the verifier rejects direct packet access, as kernels before Linux 6.6 do without `CAP_PERFMON`.
    /// The programs read packets by a helper function.
    ByHelper,
}

/// The loaded programs of this agent's build. A program is loaded when a device needs it for the first time.
#[derive(Debug)]
pub(super) struct Programs {
    pins: Pins,
    sizes: TableSizes,
    variant: Variant,
    /// The name of the build's directory: the digest of the object, and the variant.
    pub(super) build: String,
    /// The ids of the maps that a reused program may use.
    known_maps: BTreeSet<u32>,
    classifiers: BTreeMap<&'static str, SchedClassifier>,
    sockets: BTreeMap<&'static str, LoadedSocketProgram>,
    xdp: Option<Xdp>,
    /// The parsed object file, from the first load of a program until [`Self::release_unused`].
    object: Option<Ebpf>,
    /// Whether the constants map of `object` is pinned.
    has_pinned_constants: bool,
    /// Whether programs of other builds may still be pinned.
    has_other_builds: bool,
    /// The slow-path programs, by their index in the map `npl_slow`.
    slow_paths: BTreeMap<u32, SchedClassifier>,
    /// The pinned maps, and the pinned programs and constants of this build, by path. Because the agent holds these
    /// objects, it can pin an object again whose pin other software has removed.
    held: BTreeMap<PathBuf, OwnedFd>,
}

impl Programs {
    /// Reuses the pinned programs of an earlier agent if they meet the conditions in the comment of this module;
    /// otherwise loads the fastest variant of the programs that the kernel accepts.
    ///
    /// # Errors
    ///
    /// If the kernel rejects every variant that this process can load, or a map cannot be opened.
    pub(super) fn open(pins: &Pins, sizes: TableSizes) -> Result<Self, DatapathError> {
        let digest = digest(embedded_object()?);
        let has_perfmon = has_perfmon();
        for variant in Variant::reusable(has_perfmon) {
            let mut programs = Self::new(pins, sizes, &digest, *variant);
            if programs.adopt_hooks()? {
                return Ok(programs);
            }
        }
        #[cfg(feature = "trace")]
        if !has_perfmon {
            return Err(DatapathError::TraceNeedsPerfmon);
        }
        let (fastest, fallback) = Variant::loadable(has_perfmon);
        let mut programs = Self::new(pins, sizes, &digest, fastest);
        match (programs.load_hooks(), fallback) {
            (Err(error), Some(variant)) if error.is_verifier_refusal() => {
                debug!(%error, "the verifier rejected direct packet access; the agent loads slower programs");
                programs.discard()?;
                let mut programs = Self::new(pins, sizes, &digest, variant);
                programs.load_hooks().map_err(DatapathError::or_missing_perfmon)?;
                info!(
                    "the kernel rejects direct packet access without CAP_PERFMON, so the programs read packets by a \
                     slower helper function; `npl-agent load`, in an init container with this capability, loads the \
                     faster programs"
                );
                Ok(programs)
            }
            (loaded, _) => loaded.map(|()| programs),
        }
    }

    fn new(pins: &Pins, sizes: TableSizes, digest: &str, variant: Variant) -> Self {
        Self {
            pins: pins.clone(),
            sizes,
            variant,
            build: format!("{digest}_{}", variant.as_str()),
            known_maps: BTreeSet::new(),
            classifiers: BTreeMap::new(),
            sockets: BTreeMap::new(),
            xdp: None,
            object: None,
            has_pinned_constants: false,
            has_other_builds: true,
            slow_paths: BTreeMap::new(),
            held: BTreeMap::new(),
        }
    }

    /// Loads and pins every program that an agent on this Node may need. Returns, for each program, its name or the
    /// error with which it could not be loaded.
    pub(super) fn load_all(&mut self) -> Vec<Result<&'static str, DatapathError>> {
        let mut loaded: Vec<_> = PROGRAMS.iter().map(|name| self.load_classifier(name).map(|_| *name)).collect();
        loaded.extend(SOCKET_PROGRAMS.iter().map(|which| self.load_socket_program(which).map(|_| which.name)));
        loaded.push(self.load_xdp().map(|(name, _)| name));
        self.object = None;
        loaded
    }

    /// Whether the programs have no speculation barriers.
    pub(super) fn are_unmitigated(&self) -> bool {
        self.variant == Variant::Unmitigated
    }

    /// Loads a TC program. First loads the slow-path programs that the TC program tail-calls.
    pub(super) fn load_classifier(&mut self, name: &'static str) -> Result<&mut SchedClassifier, DatapathError> {
        if !self.classifiers.contains_key(name) {
            for (index, slow_path) in SlowPath::programs_of(name) {
                let program = self.adopt_or_load(slow_path)?;
                self.set_slow_path(index, &program)?;
                self.slow_paths.insert(index, program);
            }
            let program = self.adopt_or_load(name)?;
            self.classifiers.insert(name, program);
        }
        self.classifiers.get_mut(name).ok_or(DatapathError::Missing(name))
    }

    /// Loads a socket program. Socket programs are attached to cgroups.
    pub(super) fn load_socket_program(
        &mut self,
        which: &SocketProgram,
    ) -> Result<&mut LoadedSocketProgram, DatapathError> {
        let name = which.name;
        if !self.sockets.contains_key(name) {
            let program = LoadedSocketProgram::open(self, which)?;
            self.sockets.insert(name, program);
        }
        self.sockets.get_mut(name).ok_or(DatapathError::Missing(name))
    }

    /// Loads the XDP program for this kernel version. Returns the program's name and the program.
    pub(super) fn load_xdp(&mut self) -> Result<(&'static str, &mut Xdp), DatapathError> {
        let name = if preflight::has_xdp_frags() { PROG_XDP_FRAGS } else { PROG_XDP };
        let program = match self.xdp.take() {
            Some(program) => program,
            None => self.adopt_or_load(name)?,
        };
        Ok((name, self.xdp.insert(program)))
    }

    /// Frees the memory of the loader. If `are_others_used` is false, also unpins the programs of other builds, because
    /// then none of these programs is attached.
    pub(super) fn release_unused(&mut self, are_others_used: bool) -> Result<(), DatapathError> {
        if self.object.take().is_some() {
            memory::give_back();
        }
        if are_others_used || !self.has_other_builds {
            return Ok(());
        }
        for build in self.pins.builds()?.iter().filter(|build| **build != self.build) {
            debug!(build, "removing the pinned programs of another build");
            remove_folder(&self.pins.programs_of(build))?;
        }
        self.has_other_builds = false;
        Ok(())
    }

    /// Reuses the pinned programs that every Node needs. Returns false if a program is missing or does not match, or if
    /// a pinned map does not have the size that the agent requires.
    fn adopt_hooks(&mut self) -> Result<bool, DatapathError> {
        let Some(maps) = self.read_maps()? else { return Ok(false) };
        let has_wanted_size = |(name, map): (&&str, &MapInfo)| {
            self.sizes.max_entries(name).is_none_or(|wanted| map.max_entries() == wanted)
        };
        if !PINNED_MAPS.iter().zip(&maps).all(has_wanted_size) {
            return Ok(false);
        }
        self.known_maps = ids(&maps);
        let mut slow_paths = Vec::new();
        for hook in ALWAYS {
            let adopted: Option<Vec<_>> =
                SlowPath::programs_of(hook).map(|(index, name)| Some((index, self.adopt(name)?))).collect();
            let (Some(adopted), Some(program)) = (adopted, self.adopt(hook)) else {
                self.classifiers.clear();
                return Ok(false);
            };
            slow_paths.extend(adopted);
            self.classifiers.insert(hook, program);
        }
        for (index, slow_path) in slow_paths {
            self.set_slow_path(index, &slow_path)?;
            self.slow_paths.insert(index, slow_path);
        }
        info!(build = self.build, "reusing the pinned programs of an earlier agent");
        Ok(true)
    }

    /// Loads the programs that every Node needs. Replaces all pins that an earlier agent created for this build.
    fn load_hooks(&mut self) -> Result<(), DatapathError> {
        self.discard()?;
        for hook in ALWAYS {
            self.load_classifier(hook)?;
        }
        info!(build = self.build, "loaded the programs");
        if self.variant != Variant::Unmitigated {
            info!(
                "the programs were loaded without CAP_PERFMON and have speculation barriers, which take 0.2 to \
                 0.3 µs of CPU time per translated packet; `npl-agent load`, in an init container with this \
                 capability, loads the programs without barriers"
            );
        }
        Ok(())
    }

    fn discard(&self) -> Result<(), DatapathError> {
        remove_folder(&self.pins.programs_of(&self.build))
    }

    /// Reuses the pinned program with this name if its type, name and maps match; otherwise loads and pins the program.
    pub(super) fn adopt_or_load<K: ProgramKind>(&mut self, name: &'static str) -> Result<K, DatapathError>
    where
        for<'a> &'a mut K: TryFrom<&'a mut Program>,
    {
        match self.adopt(name) {
            Some(program) => Ok(program),
            None => self.load(name),
        }
    }

    /// The pinned program with this name, if it matches the program that this agent would load.
    fn adopt<K: ProgramKind>(&self, name: &'static str) -> Option<K> {
        let program = K::from_pin(&self.pins.program(&self.build, name), name).ok()?;
        let facts = sys::program_facts(program.fd().ok()?.as_fd()).ok()?;
        // The name may be empty: aya names programs only if the process is allowed to load a tracing program, and the
        // agent lacks the capability for tracing programs.
        let is_named = facts.name.is_empty() || facts.name == name.as_bytes();
        let is_npl = facts.kind == K::TYPE as u32 && is_named;
        let fits = is_npl && facts.maps.iter().all(|id| self.known_maps.contains(id));
        if !fits {
            debug!(
                name,
                ?facts,
                "a pinned program has a different type or name, or uses other maps; the agent loads the program again"
            );
        }
        fits.then_some(program)
    }

    /// Loads and pins a program.
    fn load<K: ProgramKind>(&mut self, name: &'static str) -> Result<K, DatapathError>
    where
        for<'a> &'a mut K: TryFrom<&'a mut Program>,
    {
        let refused = |source| DatapathError::LoadProgram { name, source: Box::new(source) };
        let program: Result<&mut K, _> = program_of(self.load_object()?, name)?.try_into();
        program.map_err(|_other_type| DatapathError::Missing(name))?.load().map_err(refused)?;
        // The constants are pinned after the program has been loaded. If they were pinned before, each attempt to load
        // a rejected program would pin another map.
        self.pin_constants()?;
        let pin = self.pins.program(&self.build, name);
        unpin(&pin)?;
        let program = program_of(self.load_object()?, name)?;
        program.pin(&pin).map_err(|error| pin_error("pin program", &pin, io::Error::other(error)))?;
        K::from_pin(&pin, name).map_err(refused)
    }

    /// The parsed object, whose programs use the pinned maps. Pinned maps that differ from the object are replaced
    /// ([`object::discard_incompatible_maps`]).
    fn load_object(&mut self) -> Result<&mut Ebpf, DatapathError> {
        let object = match self.object.take() {
            Some(object) => object,
            None => self.open_object()?,
        };
        Ok(self.object.insert(object))
    }

    fn open_object(&mut self) -> Result<Ebpf, DatapathError> {
        let bytes = embedded_object()?;
        object::discard_incompatible_maps(&self.pins, bytes, &self.sizes)?;
        let mut loader = EbpfLoader::new();
        let has_direct_reads = u8::from(self.variant != Variant::ByHelper);
        loader.override_global(GLOBAL_DIRECT_READS, &has_direct_reads, true);
        for name in PINNED_MAPS {
            loader.map_pin_path(name, self.pins.map(name));
            if let Some(entries) = self.sizes.max_entries(name) {
                loader.map_max_entries(name, entries);
            }
        }
        #[cfg(feature = "trace")]
        super::trace::pin_maps(&mut loader, &self.pins, &self.build)?;
        let object = loader.load(bytes).map_err(DatapathError::Load)?;
        self.has_pinned_constants = false;
        self.read_known_maps()?;
        Ok(object)
    }

    /// Pins the map of constants, so that the next agent recognizes this map as a map of NPL's programs.
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
        self.read_known_maps()
    }

    /// Opens the pinned maps, and the pinned programs and constants of this build, that are not open yet. Ignores objects
    /// of other software that cannot be opened.
    pub(super) fn hold_pins(&mut self) -> Result<(), DatapathError> {
        let folder = self.pins.programs_of(&self.build);
        let of_build = names_in(&folder)?.into_iter().map(|name| folder.join(name));
        let pins: Vec<PathBuf> = PINNED_MAPS.iter().map(|name| self.pins.map(name)).chain(of_build).collect();
        for pin in pins {
            if !self.held.contains_key(&pin)
                && let Ok(object) = sys::open_pin(&pin)
            {
                self.held.insert(pin, object);
            }
        }
        Ok(())
    }

    /// Pins the objects of [`Self::hold_pins`] again whose pins were removed.
    pub(super) fn restore_pins(&mut self, repairs: &RepairJournal) -> Result<(), DatapathError> {
        for (pin, object) in self.held.iter().filter(|(pin, _)| !pin.exists()) {
            if let Some(folder) = pin.parent() {
                fs::create_dir_all(folder).map_err(|source| pin_error("create", folder, source))?;
            }
            sys::pin(object.as_fd(), pin).map_err(|source| pin_error("pin", pin, source))?;
            repairs.record(RepairedObject::Pin, pin.display());
        }
        self.hold_pins()
    }

    /// Writes the slow-path programs again that other software has removed from the map `npl_slow` or replaced.
    pub(super) fn restore_slow_paths(&self, repairs: &RepairJournal) -> Result<(), DatapathError> {
        let map = sys::open_pin(&self.pins.map(MAP_SLOW_PATH))
            .map_err(|source| pin_error("open", &self.pins.map(MAP_SLOW_PATH), source))?;
        for (index, program) in &self.slow_paths {
            let id = program.info().map(|info| info.id()).ok();
            if id.is_some() && sys::program_in(map.as_fd(), *index).ok() != id {
                self.set_slow_path(*index, program)?;
                repairs.record(RepairedObject::MapEntry, format_args!("{MAP_SLOW_PATH} {index}"));
            }
        }
        Ok(())
    }

    /// Checks that the pinned maps are the maps that this agent uses.
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

    /// The pinned maps in the order of [`PINNED_MAPS`], followed by the maps of this build's constants; `None` if a map
    /// is missing.
    fn read_maps(&self) -> Result<Option<Vec<MapInfo>>, DatapathError> {
        let of_all = PINNED_MAPS.iter().map(|name| self.pins.map(name));
        let of_build = self.pins.constants_of(&self.build)?;
        Ok(of_all.chain(of_build).map(|pin| MapInfo::from_pin(pin).ok()).collect())
    }

    /// Reads the ids of the maps that a reused program may use.
    fn read_known_maps(&mut self) -> Result<(), DatapathError> {
        self.known_maps = self.read_maps()?.map(|maps| ids(&maps)).unwrap_or_default();
        Ok(())
    }

    /// Sets the slow-path program that a hook's program tail-calls. Programs of an earlier agent that are still
    /// attached also tail-call this slow-path program from now on.
    fn set_slow_path(&self, index: u32, slow_path: &SchedClassifier) -> Result<(), DatapathError> {
        let name = SLOW_PATH_PROGRAMS[index as usize];
        let program: &ProgramFd =
            slow_path.fd().map_err(|source| DatapathError::LoadProgram { name, source: Box::new(source) })?;
        let mut jumps: ProgramArray<MapData> = open(&self.pins, MAP_SLOW_PATH)?;
        jumps.set(index, program, 0).map_err(DatapathError::map("write", MAP_SLOW_PATH))
    }
}

impl Variant {
    /// The variants of pinned programs that a process reuses. A process without `CAP_PERFMON` also reuses programs that
    /// `npl-agent load` has loaded with `CAP_PERFMON`.
    const fn reusable(has_perfmon: bool) -> &'static [Self] {
        if has_perfmon { &[Self::Unmitigated] } else { &[Self::Unmitigated, Self::Mitigated, Self::ByHelper] }
    }

    /// The fastest variant that a process can load, and the variant that the process loads if the verifier rejects the
    /// fastest variant. With `CAP_PERFMON`, every kernel accepts direct packet access, so a rejection has another cause,
    /// which also affects the programs that read packets by a helper function.
    const fn loadable(has_perfmon: bool) -> (Self, Option<Self>) {
        if has_perfmon { (Self::Unmitigated, None) } else { (Self::Mitigated, Some(Self::ByHelper)) }
    }

    /// The part of a build's name that denotes the variant.
    const fn as_str(self) -> &'static str {
        match self {
            Self::Unmitigated => UNMITIGATED,
            Self::Mitigated => "mitigated",
            Self::ByHelper => "helper",
        }
    }
}

/// Whether the programs of `build`, the name of a build's directory, have no speculation barriers.
pub fn is_unmitigated(build: &str) -> bool {
    build.rsplit('_').next() == Some(UNMITIGATED)
}

/// Whether this process has `CAP_PERFMON`, so that the kernel loads its programs without speculation barriers.
fn has_perfmon() -> bool {
    preflight::rights().is_some_and(|rights| rights.perfmon)
}

fn ids(maps: &[MapInfo]) -> BTreeSet<u32> {
    maps.iter().map(MapInfo::id).collect()
}

/// The program with this name in the object file.
fn program_of<'a>(object: &'a mut Ebpf, name: &'static str) -> Result<&'a mut Program, DatapathError> {
    object.program_mut(name).ok_or(DatapathError::Missing(name))
}

#[cfg(test)]
mod tests {
    use super::Variant;

    /// The log lines about programs without `CAP_PERFMON` are true only if a process with this capability never loads
    /// these programs.
    #[test]
    fn a_process_with_perfmon_loads_and_reuses_only_programs_without_barriers() {
        assert_eq!(Variant::loadable(true), (Variant::Unmitigated, None));
        assert_eq!(Variant::reusable(true), [Variant::Unmitigated]);
    }

    #[test]
    fn a_process_without_perfmon_reuses_every_variant_and_loads_the_others() {
        assert_eq!(Variant::loadable(false), (Variant::Mitigated, Some(Variant::ByHelper)));
        assert_eq!(Variant::reusable(false), [Variant::Unmitigated, Variant::Mitigated, Variant::ByHelper]);
    }
}
