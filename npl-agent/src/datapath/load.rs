// SPDX-License-Identifier: Apache-2.0
//! Loads the object over whatever an earlier agent left pinned.

use std::{collections::BTreeMap, path::Path};

use aya::{
    Ebpf, EbpfLoader,
    maps::{MapData, ProgramArray},
    programs::{ProgramError, ProgramFd, SchedClassifier},
};
use aya_obj::Object;
use npl_common::{
    config::Config,
    names::{
        ABI_VERSION, GLOBAL_DIRECT_READS, MAP_REST, PINNED_MAPS, PROG_EGRESS, PROG_INGRESS, PROGRAMS, REST_PROGRAMS,
    },
};
use tracing::{debug, info, warn};

use super::{
    attach::{Hooks, program},
    error::DatapathError,
    mappings::MappingWriter,
    object::embedded_object,
    pins::{Pins, unpin},
    preflight,
    tables::{Tables, open},
};
use crate::core::{
    model::{Backend, Frontend},
    settings::PortRange,
};

/// The loaded programs and their maps.
#[derive(Debug)]
pub struct Datapath {
    /// The programs on their devices.
    pub hooks: Hooks,
    /// The maps.
    pub tables: Tables,
    writer: MappingWriter,
}

impl Datapath {
    /// Checks the machine, adopts what is pinned, and loads the programs. Attaches nothing yet: links of an earlier
    /// agent go on with the earlier programs until [`Hooks::attach`] replaces them.
    ///
    /// # Errors
    ///
    /// Whatever is missing, or the kernel's refusal.
    pub fn open(bpffs: &Path) -> Result<Self, DatapathError> {
        preflight::check(bpffs)?;
        let object = embedded_object()?;
        let pins = Pins::new(bpffs);
        pins.create()?;
        discard_incompatible(&pins, object)?;
        let ebpf = load(&pins, object)?;
        let tables = Tables::open(&pins)?;
        Ok(Self { hooks: Hooks::new(ebpf, pins), tables, writer: MappingWriter::default() })
    }

    /// Every mapping that the kernel holds; endpoints that do not fit them are put right on the way.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn mappings(&mut self) -> Result<BTreeMap<Frontend, Backend>, DatapathError> {
        self.writer.refresh(&mut self.tables)
    }

    /// Writes a mapping; an existing one of the same frontend is replaced at once.
    ///
    /// # Errors
    ///
    /// If the kernel refuses, or the backend is not of the frontend's family.
    pub fn upsert_mapping(&mut self, frontend: Frontend, backend: Backend) -> Result<(), DatapathError> {
        self.writer.upsert(&mut self.tables, frontend, backend)
    }

    /// Removes a mapping; one that is not there is as good as removed.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn remove_mapping(&mut self, frontend: Frontend) -> Result<(), DatapathError> {
        self.writer.remove(&mut self.tables, frontend)
    }

    /// Forgets the flows of endpoints that were removed since the last call.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn purge_flows(&mut self) -> Result<(), DatapathError> {
        self.writer.purge_flows(&mut self.tables)
    }

    /// Tells the programs which ports can be mapped: the configured ones, and those of mappings that still drain.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn configure(&mut self, range: PortRange, seed: impl FnOnce() -> u64) -> Result<(), DatapathError> {
        let old = self.tables.config()?;
        let (mut port_min, mut port_max) = (range.start().0, range.end().0);
        for frontend in self.tables.entries()?.into_keys() {
            port_min = port_min.min(frontend.node_port.0);
            port_max = port_max.max(frontend.node_port.0);
        }
        // Half-open flows are found by the seed, so it stays over a restart.
        let seed = if old.abi == ABI_VERSION { old.seed } else { seed() };
        self.tables.set_config(Config { seed, port_min, port_max, flags: 0, abi: ABI_VERSION, pad: 0, ..old })
    }
}

/// Removes pinned maps that do not fit the object: aya opens whatever is pinned under a name.
fn discard_incompatible(pins: &Pins, object: &[u8]) -> Result<(), DatapathError> {
    let parsed = Object::parse(object).map_err(DatapathError::Parse)?;
    for name in PINNED_MAPS {
        let path = pins.map(name);
        if !path.exists() {
            continue;
        }
        let wanted = parsed.maps.get(*name).ok_or(DatapathError::Missing(name))?;
        let info = MapData::from_pin(&path).and_then(|map| map.info()).ok();
        let fits = info.is_some_and(|info| {
            info.map_type().ok().map(|kind| kind as u32) == Some(wanted.map_type())
                && info.key_size() == wanted.key_size()
                && info.value_size() == wanted.value_size()
                && info.max_entries() == wanted.max_entries()
        });
        if !fits {
            warn!(map = *name, "pinned map does not fit this agent; it starts empty");
            unpin(&path)?;
        }
    }
    Ok(())
}

/// Loads the programs as the kernel lets us: with packets read by pointers, or else by its helper, which is slower.
fn load(pins: &Pins, object: &[u8]) -> Result<Ebpf, DatapathError> {
    match load_with(pins, object, true) {
        Err(error) if error.is_verifier_refusal() => {
            debug!(%error, "what the kernel said to packets read by pointers");
            let ebpf = load_with(pins, object, false).map_err(DatapathError::or_missing_perfmon)?;
            info!("this kernel lets programs read packets by a helper only, unless the agent has CAP_PERFMON too");
            Ok(ebpf)
        }
        loaded => loaded,
    }
}

fn load_with(pins: &Pins, object: &[u8], has_direct_reads: bool) -> Result<Ebpf, DatapathError> {
    let mut loader = EbpfLoader::new();
    let has_direct_reads = u8::from(has_direct_reads);
    loader.override_global(GLOBAL_DIRECT_READS, &has_direct_reads, true);
    for name in PINNED_MAPS {
        loader.map_pin_path(name, pins.map(name));
    }
    let mut ebpf = loader.load(object).map_err(DatapathError::Load)?;
    // Those for devices without link-layer headers, which few Nodes have, wait for such a device.
    for name in [PROG_EGRESS, PROG_INGRESS] {
        load_for_hook(pins, &mut ebpf, name)?;
    }
    Ok(ebpf)
}

/// Loads one of the programs of the hooks, if it is not; first that to which it jumps with what is unusual, and so do the
/// programs of an earlier agent from then on.
pub(super) fn load_for_hook(pins: &Pins, ebpf: &mut Ebpf, name: &'static str) -> Result<(), DatapathError> {
    let hook: &mut SchedClassifier = program(ebpf, name)?;
    if hook.fd().is_ok() {
        return Ok(());
    }
    let (index, rest) = (0..).zip(REST_PROGRAMS).nth(position(name)?).ok_or(DatapathError::Missing(name))?;
    let mut jumps: ProgramArray<MapData> = open(pins, MAP_REST)?;
    jumps.set(index, load_program(ebpf, rest)?, 0).map_err(DatapathError::map("write", MAP_REST))?;
    load_program(ebpf, name).map(drop)
}

fn load_program<'a>(ebpf: &'a mut Ebpf, name: &'static str) -> Result<&'a ProgramFd, DatapathError> {
    let program: &mut SchedClassifier = program(ebpf, name)?;
    expect_loaded(name, program.load())?;
    program.fd().map_err(|source| DatapathError::LoadProgram { name, source: Box::new(source) })
}

/// What loading a program came to; one that is loaded already is as good.
pub(super) fn expect_loaded(name: &'static str, result: Result<(), ProgramError>) -> Result<(), DatapathError> {
    match result {
        Ok(()) | Err(ProgramError::AlreadyLoaded) => Ok(()),
        Err(source) => Err(DatapathError::LoadProgram { name, source: Box::new(source) }),
    }
}

/// Where a program is among [`PROGRAMS`], and its rest among [`REST_PROGRAMS`].
fn position(name: &'static str) -> Result<usize, DatapathError> {
    PROGRAMS.iter().position(|ours| *ours == name).ok_or(DatapathError::Missing(name))
}
