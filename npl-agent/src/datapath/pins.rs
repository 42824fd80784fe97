// SPDX-License-Identifier: Apache-2.0
//! The paths of all pins.
//!
//! ```text
//! <bpffs>/npl/                   removed by `npl-agent cleanup`
//! └── v1/                        one folder per ABI version
//!     ├── npl_config … npl_reason    maps, by their names
//!     ├── links/<ifindex>_in         TCX links; before Linux 6.6, empty folders that stand for filters
//!     ├── links/<ifindex>_out
//!     ├── links/<ifindex>_pods       on Pods' devices: records what the host's stack has forwarded
//!     ├── links/<ifindex>_xdp        XDP links
//!     ├── links/<cgroup>_connect4 …  links of a cgroup, by its inode number
//!     ├── xdp/<ifindex>_<reason>     empty folder: why XDP or TC translates the device's requests
//!     ├── clsact/<ifindex>           empty folder: NPL has created the device's clsact qdisc (before Linux 6.6)
//!     └── programs/<build>/          one folder per build and variant of the programs
//!         ├── npl_ingress …              programs that were needed, by their names
//!         └── constants_0 …              maps of their constants, one for each time that programs were loaded
//! ```

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use npl_common::names::{ABI_VERSION, LINK_DIR, PIN_ROOT, PROGRAM_DIR, SOCKET_PROGRAMS};

use super::error::DatapathError;
pub use crate::core::devices::Direction;

const CLSACT_DIR: &str = "clsact";
const XDP_REASON_DIR: &str = "xdp";
/// The suffix of pinned XDP links.
const XDP_SUFFIX: &str = "xdp";
/// The prefix of pinned maps of constants.
const CONSTANTS: &str = "constants_";

/// The suffix of a pin.
const fn suffix(direction: Direction) -> &'static str {
    match direction {
        Direction::Ingress => "in",
        Direction::Egress => "out",
        Direction::ToPods => "pods",
    }
}

/// The paths of one BPF file system.
#[derive(Debug, Clone)]
pub struct Pins {
    root: PathBuf,
    version: PathBuf,
}

impl Pins {
    /// The paths below a mounted BPF file system.
    pub fn new(bpffs: &Path) -> Self {
        let root = bpffs.join(PIN_ROOT);
        let version = root.join(format!("v{ABI_VERSION}"));
        Self { root, version }
    }

    /// `<bpffs>/npl`.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// `<bpffs>/npl/v<ABI>`.
    pub fn version(&self) -> &Path {
        &self.version
    }

    /// A map's pin.
    pub fn map(&self, name: &str) -> PathBuf {
        self.version.join(name)
    }

    /// The pin of a device's TCX link.
    pub fn link(&self, ifindex: u32, direction: Direction) -> PathBuf {
        self.version.join(LINK_DIR).join(format!("{ifindex}_{}", suffix(direction)))
    }

    /// The pin of a device's XDP link.
    pub fn xdp_link(&self, ifindex: u32) -> PathBuf {
        self.version.join(LINK_DIR).join(format!("{ifindex}_{XDP_SUFFIX}"))
    }

    /// The pin of a cgroup's link, by the cgroup's inode number.
    pub fn socket_link(&self, cgroup: u64, hook: &str) -> PathBuf {
        self.version.join(LINK_DIR).join(format!("{cgroup}_{hook}"))
    }

    /// The mark of a device whose clsact qdisc NPL has created.
    pub fn clsact_mark(&self, ifindex: u32) -> PathBuf {
        self.version.join(CLSACT_DIR).join(ifindex.to_string())
    }

    /// The folder of the programs of one build.
    pub fn programs_of(&self, build: &str) -> PathBuf {
        self.version.join(PROGRAM_DIR).join(build)
    }

    /// A program's pin.
    pub fn program(&self, build: &str, name: &str) -> PathBuf {
        self.programs_of(build).join(name)
    }

    /// The pin of a map of the programs' constants.
    pub(super) fn constants(&self, build: &str, number: u32) -> PathBuf {
        self.programs_of(build).join(format!("{CONSTANTS}{number}"))
    }

    /// Creates the folders.
    pub fn create(&self) -> Result<(), DatapathError> {
        for dir in [LINK_DIR, CLSACT_DIR, XDP_REASON_DIR].map(|name| self.version.join(name)) {
            fs::create_dir_all(&dir).map_err(|source| pin_error("create", &dir, source))?;
        }
        Ok(())
    }

    /// Every pinned TCX link: device index and direction.
    pub fn links(&self) -> Result<Vec<(u32, Direction)>, DatapathError> {
        let mut links = Vec::new();
        for name in names_in(&self.version.join(LINK_DIR))? {
            let Some((ifindex, suffix)) = name.split_once('_') else { continue };
            let direction = Direction::ALL.into_iter().find(|direction| self::suffix(*direction) == suffix);
            if let (Ok(ifindex), Some(direction)) = (ifindex.parse(), direction) {
                links.push((ifindex, direction));
            }
        }
        links.sort_unstable();
        Ok(links)
    }

    /// Every device with a pinned XDP link.
    pub fn xdp_links(&self) -> Result<Vec<u32>, DatapathError> {
        let names = names_in(&self.version.join(LINK_DIR))?;
        let ifindex = |name: &String| name.split_once('_').filter(|(_, suffix)| *suffix == XDP_SUFFIX)?.0.parse().ok();
        Ok(names.iter().filter_map(ifindex).collect())
    }

    /// Why XDP or TC translates the requests of each device, as the reason's key.
    pub fn xdp_reasons(&self) -> Result<BTreeMap<u32, String>, DatapathError> {
        let names = names_in(&self.version.join(XDP_REASON_DIR))?;
        let reason = |name: &String| {
            let (ifindex, key) = name.split_once('_')?;
            Some((ifindex.parse().ok()?, key.to_owned()))
        };
        Ok(names.iter().filter_map(reason).collect())
    }

    /// Replaces [`Self::xdp_reasons`].
    pub(super) fn note_xdp_reasons(&self, reasons: &BTreeMap<u32, &str>) -> Result<(), DatapathError> {
        let folder = self.version.join(XDP_REASON_DIR);
        let wanted: Vec<String> = reasons.iter().map(|(ifindex, key)| format!("{ifindex}_{key}")).collect();
        for stale in names_in(&folder)?.iter().filter(|name| !wanted.contains(name)) {
            unpin(&folder.join(stale))?;
        }
        wanted
            .iter()
            .map(|name| folder.join(name))
            .try_for_each(|mark| fs::create_dir_all(&mark).map_err(|source| pin_error("create", &mark, source)))
    }

    /// Every pinned link of a cgroup: inode number and hook, in the order of attaching.
    pub fn socket_links(&self) -> Result<Vec<(u64, &'static str)>, DatapathError> {
        let names = names_in(&self.version.join(LINK_DIR))?;
        let of_hook = |hook: &'static str| {
            let cgroup = move |name: &String| name.split_once('_').filter(|(_, of)| *of == hook)?.0.parse().ok();
            names.iter().filter_map(cgroup).map(move |cgroup| (cgroup, hook))
        };
        Ok(SOCKET_PROGRAMS.iter().flat_map(|program| of_hook(program.hook)).collect())
    }

    /// Every build whose programs are pinned.
    pub fn builds(&self) -> Result<Vec<String>, DatapathError> {
        names_in(&self.version.join(PROGRAM_DIR))
    }

    /// The names of the pinned programs of a build.
    pub fn program_names(&self, build: &str) -> Result<Vec<String>, DatapathError> {
        let mut names = names_in(&self.programs_of(build))?;
        names.retain(|name| !name.starts_with(CONSTANTS));
        names.sort_unstable();
        Ok(names)
    }

    /// The pins of all maps of a build's constants.
    pub(super) fn constants_of(&self, build: &str) -> Result<Vec<PathBuf>, DatapathError> {
        let folder = self.programs_of(build);
        let names = names_in(&folder)?.into_iter().filter(|name| name.starts_with(CONSTANTS));
        Ok(names.map(|name| folder.join(name)).collect())
    }

    /// Every device whose clsact qdisc NPL has created.
    pub fn clsact_marks(&self) -> Result<Vec<u32>, DatapathError> {
        let names = names_in(&self.version.join(CLSACT_DIR))?;
        Ok(names.iter().filter_map(|name| name.parse().ok()).collect())
    }
}

/// Removes a pin, if it exists.
pub fn unpin(path: &Path) -> Result<(), DatapathError> {
    let result = if path.is_dir() { fs::remove_dir(path) } else { fs::remove_file(path) };
    match result {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(pin_error("remove", path, source)),
        _ => Ok(()),
    }
}

/// The names in a folder; empty if the folder does not exist.
pub(crate) fn names_in(dir: &Path) -> Result<Vec<String>, DatapathError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(source) if source.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(pin_error("list", dir, source)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|source| pin_error("list", dir, source))?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}

pub(crate) fn pin_error(operation: &'static str, path: &Path, source: io::Error) -> DatapathError {
    DatapathError::Pin { operation, path: path.to_owned(), source }
}
