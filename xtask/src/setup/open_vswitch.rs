// SPDX-License-Identifier: Apache-2.0
//! Obtains Open vSwitch, whose userspace datapath stands for OVS-based CNIs in packet tests.
//!
//! The packages are unpacked into the cache and not installed: the installation would start Open vSwitch as a service of
//! this machine, and load a kernel module.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::apt;
use crate::{cache, process};

/// The programs that the tests run, with their paths in the packages.
const PROGRAMS: [(&str, &str); 5] = [
    ("ovs-ofctl", "usr/bin/ovs-ofctl"),
    ("ovs-vsctl", "usr/bin/ovs-vsctl"),
    ("ovs-vswitchd", "usr/lib/openvswitch-switch/ovs-vswitchd"),
    ("ovsdb-server", "usr/sbin/ovsdb-server"),
    ("ovsdb-tool", "usr/bin/ovsdb-tool"),
];

/// The schema of the daemon's database, with its path in the packages and on a machine where Open vSwitch is installed.
const SCHEMA: (&str, &str) = ("vswitch.ovsschema", "usr/share/openvswitch/vswitch.ovsschema");

const PACKAGES: [&str; 2] = ["openvswitch-common", "openvswitch-switch"];

/// The packages with the shared libraries of the programs.
const LIBRARIES: [&str; 5] = ["libbpf1", "libcap-ng0", "libnuma1", "libunbound8", "libxdp1"];

/// Returns a directory with the programs of Open vSwitch and the schema of its database. Downloads Open vSwitch if it is
/// neither installed nor in the cache.
pub(crate) fn obtain() -> Result<PathBuf> {
    let folder = match installed() {
        Some(files) => {
            let made_from: Vec<String> = files.iter().map(|(_, path)| path.display().to_string()).collect();
            let made_from: Vec<&[u8]> = made_from.iter().map(String::as_bytes).collect();
            cache::obtain("open-vswitch", &made_from, |folder| collect(&files, folder, |from, to| symlink(from, to)))?
        }
        None => cache::obtain("open-vswitch", &PACKAGES.map(str::as_bytes), |folder| {
            process::say("Open vSwitch: downloading its programs once, 4 MB");
            let work = folder.join("work");
            let unpacked = work.join("unpacked");
            for package in PACKAGES {
                apt::unpack(package, &work.join(package), &unpacked)?;
            }
            let files = PROGRAMS.iter().chain([&SCHEMA]).map(|(name, path)| (*name, unpacked.join(path)));
            collect(&files.collect::<Vec<_>>(), folder, |from, to| fs::rename(from, to))?;
            fs::remove_dir_all(&work).context("remove the packages")
        })?,
    };
    let version = || process::ask(Command::new(folder.join("ovs-vswitchd")).arg("--version"));
    if version().is_err() {
        apt::install(&LIBRARIES, "running Open vSwitch in packet tests")?;
        version().context("run ovs-vswitchd")?;
    }
    Ok(folder)
}

/// The names and paths of the programs and of the schema, if this machine has all of these files.
fn installed() -> Option<Vec<(&'static str, PathBuf)>> {
    let programs = PROGRAMS.iter().map(|(name, _)| Some((*name, process::find(name)?)));
    let schema = Path::new("/").join(SCHEMA.1);
    programs.chain([schema.is_file().then_some((SCHEMA.0, schema))]).collect()
}

fn collect(files: &[(&str, PathBuf)], folder: &Path, put: impl Fn(&Path, &Path) -> std::io::Result<()>) -> Result<()> {
    files.iter().try_for_each(|(name, path)| {
        put(path, &folder.join(name)).with_context(|| format!("collect {}", path.display()))
    })
}
