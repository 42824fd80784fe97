// SPDX-License-Identifier: Apache-2.0
//! The paths of pinned maps, programs and links.
//!
//! ```text
//! <bpffs>/npl/                   removed by `npl-agent cleanup`
//! └── v2/                        one directory for each ABI version; an agent removes those of other versions
//!     ├── npl_config … npl_cnt_reason    maps, by name
//!     ├── replaced/npl_flow_v4 …     maps with another size or other flags, until their entries are copied
//!     ├── links/<ifindex>_in         ingress: a BPF link; before Linux 6.6 an empty directory that stands for a filter
//!     ├── links/<ifindex>_out        egress: a BPF link or an empty directory, as for ingress
//!     ├── links/<ifindex>_pods       egress of a Pod's device: observes which packets the kernel stack forwards
//!     ├── links/<ifindex>_xdp        BPF link of the XDP program
//!     ├── links/<cgroup>_connect4 …  BPF links of a cgroup, by its inode number
//!     ├── xdp/<ifindex>_<reason>     empty directory: why XDP or TC translates requests of the device
//!     ├── redirect_refused           empty directory: the agent refuses `--forwarding redirect`
//!     ├── clsact/<ifindex>           empty directory: NPL added the clsact qdisc of the device (before Linux 6.6)
//!     └── programs/<build>/          one directory for each object file and load variant
//!         ├── npl_ingress …              programs that were needed so far, by name
//!         └── constants_0 …              the programs' constants, one map for each load of the object
//! ```

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use npl_common::names::{ABI_VERSION, LINK_DIR, PIN_ROOT, PINNED_MAPS, PROGRAM_DIR, SOCKET_PROGRAMS};

use super::error::DatapathError;
use crate::core::cleanup::PinMeaning;
pub use crate::core::devices::Direction;

const CLSACT_DIR: &str = "clsact";
const XDP_REASON_DIR: &str = "xdp";
const REPLACED_DIR: &str = "replaced";
/// The suffix of the file name under which an XDP link is pinned.
const XDP_SUFFIX: &str = "xdp";
/// The prefix of the file name under which a map of program constants is pinned.
pub(super) const CONSTANTS: &str = "constants_";
/// The name of the ring buffer for the programs' logs. Only the trace build has this ring buffer.
pub(super) const LOGS: &str = "AYA_LOGS";

/// The suffix of the file name under which the TC link of a direction is pinned.
const fn suffix(direction: Direction) -> &'static str {
    match direction {
        Direction::Ingress => "in",
        Direction::Egress => "out",
        Direction::ToPods => "pods",
    }
}

/// The paths of NPL's pins on one BPF file system.
#[derive(Debug, Clone)]
pub struct Pins {
    root: PathBuf,
    version: PathBuf,
    abi: u32,
}

impl Pins {
    /// Determines the paths of NPL's pins on a mounted BPF file system, but creates no directory.
    pub fn new(bpffs: &Path) -> Self {
        Self::of_abi(bpffs.join(PIN_ROOT), ABI_VERSION)
    }

    fn of_abi(root: PathBuf, abi: u32) -> Self {
        let version = root.join(format!("v{abi}"));
        Self { root, version, abi }
    }

    /// The pin paths of every other ABI version that has pins on this file system, in descending order of the version.
    ///
    /// # Errors
    ///
    /// If the directory of NPL's pins cannot be listed.
    pub fn other_versions(&self) -> Result<Vec<Self>, DatapathError> {
        let names = names_in(&self.root)?;
        let mut versions: Vec<u32> = names.iter().filter_map(|name| name.strip_prefix('v')?.parse().ok()).collect();
        versions.retain(|abi| *abi != self.abi);
        versions.sort_unstable_by(|a, b| b.cmp(a));
        Ok(versions.into_iter().map(|abi| Self::of_abi(self.root.clone(), abi)).collect())
    }

    /// The ABI version of the pins at these paths.
    pub const fn abi(&self) -> u32 {
        self.abi
    }

    /// The directory of the pins of all ABI versions: `<bpffs>/npl`.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The directory of the pins of this ABI version: `<bpffs>/npl/v<ABI>`.
    pub fn version(&self) -> &Path {
        &self.version
    }

    /// The path of a map's pin.
    pub fn map(&self, name: &str) -> PathBuf {
        self.version.join(name)
    }

    /// The directory of replaced maps of this ABI version. A map with a different size or different flags has replaced
    /// each of these maps, but the entries have not been copied yet.
    pub(super) fn replaced_maps(&self) -> PathBuf {
        self.version.join(REPLACED_DIR)
    }

    /// Whether all maps of this ABI version are pinned. An agent pins the maps when it starts.
    pub fn has_all_maps(&self) -> bool {
        PINNED_MAPS.iter().all(|name| self.map(name).exists())
    }

    /// The pin of the TC link of a device and direction or, without TCX, the directory that records the filter.
    pub fn link(&self, ifindex: u32, direction: Direction) -> PathBuf {
        self.version.join(LINK_DIR).join(format!("{ifindex}_{}", suffix(direction)))
    }

    /// The pin of the XDP link of a device.
    pub fn xdp_link(&self, ifindex: u32) -> PathBuf {
        self.version.join(LINK_DIR).join(format!("{ifindex}_{XDP_SUFFIX}"))
    }

    /// The path of the pinned link of a cgroup hook such as `connect4`. `cgroup` is the inode number of the cgroup.
    pub fn socket_link(&self, cgroup: u64, hook: &str) -> PathBuf {
        self.version.join(LINK_DIR).join(format!("{cgroup}_{hook}"))
    }

    /// The directory that exists if NPL added the clsact qdisc of a device.
    pub fn clsact_mark(&self, ifindex: u32) -> PathBuf {
        self.version.join(CLSACT_DIR).join(ifindex.to_string())
    }

    /// The directory of the programs of one build.
    pub fn programs_of(&self, build: &str) -> PathBuf {
        self.version.join(PROGRAM_DIR).join(build)
    }

    /// The pin of a program of a build.
    pub fn program(&self, build: &str, name: &str) -> PathBuf {
        self.programs_of(build).join(name)
    }

    /// The pin of a map with the constants of a build's programs. Each load of the build's object file creates such a
    /// map; `number` distinguishes the pins of these maps.
    pub(super) fn constants(&self, build: &str, number: u32) -> PathBuf {
        self.programs_of(build).join(format!("{CONSTANTS}{number}"))
    }

    /// Creates the directories in which NPL pins maps, programs and links.
    ///
    /// # Errors
    ///
    /// If a directory cannot be created.
    pub fn create(&self) -> Result<(), DatapathError> {
        for dir in [LINK_DIR, CLSACT_DIR, XDP_REASON_DIR].map(|name| self.version.join(name)) {
            fs::create_dir_all(&dir).map_err(|source| pin_error("create", &dir, source))?;
        }
        Ok(())
    }

    /// The ifindex and direction of every attached TC program, sorted.
    ///
    /// # Errors
    ///
    /// If the directory cannot be listed.
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

    /// The pins in the directory of links whose names this agent does not use.
    ///
    /// # Errors
    ///
    /// If the directory cannot be listed.
    pub(super) fn unknown_links(&self) -> Result<Vec<PathBuf>, DatapathError> {
        let folder = self.version.join(LINK_DIR);
        let names = names_in(&folder)?.into_iter().filter(|name| meaning_of_link(name) == PinMeaning::Unknown);
        Ok(names.map(|name| folder.join(name)).collect())
    }

    /// The ifindex of every device with an XDP link.
    ///
    /// # Errors
    ///
    /// If the directory cannot be listed.
    pub fn xdp_links(&self) -> Result<Vec<u32>, DatapathError> {
        let names = names_in(&self.version.join(LINK_DIR))?;
        let ifindex = |name: &String| name.split_once('_').filter(|(_, suffix)| *suffix == XDP_SUFFIX)?.0.parse().ok();
        Ok(names.iter().filter_map(ifindex).collect())
    }

    /// For each device, by ifindex: why XDP translates the requests that the device receives, or why TC translates them
    /// instead. The text is the key of an `XdpReason`.
    ///
    /// # Errors
    ///
    /// If the directory cannot be listed.
    pub fn xdp_reasons(&self) -> Result<BTreeMap<u32, String>, DatapathError> {
        let names = names_in(&self.version.join(XDP_REASON_DIR))?;
        let reason = |name: &String| {
            let (ifindex, key) = name.split_once('_')?;
            Some((ifindex.parse().ok()?, key.to_owned()))
        };
        Ok(names.iter().filter_map(reason).collect())
    }

    /// The directory that exists while the agent refuses `--forwarding redirect`, because redirected packets would
    /// bypass a policy engine.
    pub(super) fn redirect_refused_mark(&self) -> PathBuf {
        self.version.join("redirect_refused")
    }

    /// Records these reasons for [`Self::xdp_reasons`], and removes recorded reasons that are not in `reasons`.
    pub(super) fn write_xdp_reasons(&self, reasons: &BTreeMap<u32, &str>) -> Result<(), DatapathError> {
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

    /// The cgroup's inode number and the hook of every pinned cgroup link, in the order in which the agent attaches the
    /// links.
    ///
    /// # Errors
    ///
    /// If the directory cannot be listed.
    pub fn socket_links(&self) -> Result<Vec<(u64, &'static str)>, DatapathError> {
        let names = names_in(&self.version.join(LINK_DIR))?;
        let of_hook = |hook: &'static str| {
            let cgroup = move |name: &String| name.split_once('_').filter(|(_, of)| *of == hook)?.0.parse().ok();
            names.iter().filter_map(cgroup).map(move |cgroup| (cgroup, hook))
        };
        Ok(SOCKET_PROGRAMS.iter().flat_map(|program| of_hook(program.hook)).collect())
    }

    /// The name of every build with pinned programs. The name consists of the digest of the object file and the variant
    /// in which the programs were loaded.
    ///
    /// # Errors
    ///
    /// If the directory cannot be listed.
    pub fn builds(&self) -> Result<Vec<String>, DatapathError> {
        names_in(&self.version.join(PROGRAM_DIR))
    }

    /// The sorted names of the pinned programs of a build.
    ///
    /// # Errors
    ///
    /// If the directory cannot be listed.
    pub fn program_names(&self, build: &str) -> Result<Vec<String>, DatapathError> {
        let mut names = names_in(&self.programs_of(build))?;
        names.retain(|name| !name.starts_with(CONSTANTS));
        names.sort_unstable();
        Ok(names)
    }

    /// The pin of the ring buffer for the programs' logs. Only a trace build has this ring buffer.
    pub(super) fn logs(&self, build: &str) -> PathBuf {
        self.programs_of(build).join(format!("{CONSTANTS}{LOGS}"))
    }

    /// The pins of all maps with constants of a build's programs.
    pub(super) fn constants_of(&self, build: &str) -> Result<Vec<PathBuf>, DatapathError> {
        let folder = self.programs_of(build);
        let names = names_in(&folder)?.into_iter().filter(|name| name.starts_with(CONSTANTS));
        Ok(names.map(|name| folder.join(name)).collect())
    }

    /// The ifindex of every device whose clsact qdisc NPL added.
    ///
    /// # Errors
    ///
    /// If the directory cannot be listed.
    pub fn clsact_marks(&self) -> Result<Vec<u32>, DatapathError> {
        let names = names_in(&self.version.join(CLSACT_DIR))?;
        Ok(names.iter().filter_map(|name| name.parse().ok()).collect())
    }
}

/// Determines the kind of the object at a path. `components` are the path's components below [`Pins::root`].
pub(super) fn meaning_of(components: &[&str], is_dir: bool) -> PinMeaning {
    match *components {
        _ if is_dir => PinMeaning::Directory,
        [_, LINK_DIR, link] => meaning_of_link(link),
        [_, PROGRAM_DIR, _, name] if !name.starts_with(CONSTANTS) => PinMeaning::Program,
        [_, PROGRAM_DIR, _, _] | [_, REPLACED_DIR, _] | [_, _] => PinMeaning::Map,
        _ => PinMeaning::Unknown,
    }
}

fn meaning_of_link(name: &str) -> PinMeaning {
    let Some((number, suffix)) = name.split_once('_') else { return PinMeaning::Unknown };
    if SOCKET_PROGRAMS.iter().any(|program| program.hook == suffix) {
        return PinMeaning::CgroupLink(suffix.to_owned());
    }
    let Ok(ifindex) = number.parse() else { return PinMeaning::Unknown };
    if suffix == XDP_SUFFIX {
        return PinMeaning::XdpLink(ifindex);
    }
    let direction = Direction::ALL.into_iter().find(|direction| self::suffix(*direction) == suffix);
    direction.map_or(PinMeaning::Unknown, |direction| PinMeaning::TcLink(ifindex, direction))
}

/// Removes a pin or an empty directory. A missing path is not an error.
///
/// # Errors
///
/// If the pin or directory cannot be removed.
pub fn unpin(path: &Path) -> Result<(), DatapathError> {
    let result = if path.is_dir() { fs::remove_dir(path) } else { fs::remove_file(path) };
    match result {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(pin_error("remove", path, source)),
        _ => Ok(()),
    }
}

/// Removes a directory and all pins and directories in it. A missing directory is not an error.
pub(super) fn remove_folder(dir: &Path) -> Result<(), DatapathError> {
    for name in names_in(dir)? {
        let path = dir.join(name);
        if path.is_dir() { remove_folder(&path)? } else { unpin(&path)? }
    }
    unpin(dir)
}

/// The names of the files and directories in a directory; empty if the directory does not exist.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_meaning_of_a_path_is_that_of_the_pin_which_the_agent_creates() {
        let pins = Pins::new(Path::new("/b"));
        let meaning = |path: &Path| {
            let below = path.strip_prefix(pins.root()).unwrap();
            let components: Vec<&str> = below.iter().map(|part| part.to_str().unwrap()).collect();
            meaning_of(&components, false)
        };
        assert_eq!(meaning(&pins.map("npl_config")), PinMeaning::Map);
        assert_eq!(meaning(&pins.replaced_maps().join("npl_flow_v4")), PinMeaning::Map);
        assert_eq!(meaning(&pins.constants("build", 0)), PinMeaning::Map);
        assert_eq!(meaning(&pins.program("build", "npl_ingress")), PinMeaning::Program);
        assert_eq!(meaning(&pins.xdp_link(7)), PinMeaning::XdpLink(7));
        for direction in Direction::ALL {
            assert_eq!(meaning(&pins.link(7, direction)), PinMeaning::TcLink(7, direction));
        }
        for program in SOCKET_PROGRAMS {
            assert_eq!(meaning(&pins.socket_link(7, program.hook)), PinMeaning::CgroupLink(program.hook.to_owned()));
        }
        assert_eq!(meaning(&pins.version().join(LINK_DIR).join("7_other")), PinMeaning::Unknown);
        assert_eq!(meaning(&pins.root().join("other")), PinMeaning::Unknown);
        assert_eq!(meaning_of(&["v2", LINK_DIR, "7_in"], true), PinMeaning::Directory, "it records a filter");
    }
}
