// SPDX-License-Identifier: Apache-2.0
//! Writes the software bill of materials of an image's program in the format `CycloneDX` 1.5, from cargo's metadata of
//! the dependencies. The bill contains no time and no random number, so the same Cargo.lock results in the same bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::arch::Arch;
use crate::{build, paths, process};

/// Writes the bill of materials of a program to `target/<program>.cdx.json`; if the architecture is not this machine's,
/// its name is part of the file name. The program's package has the same name.
pub(super) fn write(program: &str, arch: Arch) -> Result<PathBuf> {
    let mut command = build::plain_cargo();
    command.args(["metadata", "--format-version", "1", "--locked", "--filter-platform", &arch.target()]);
    let metadata: Value = serde_json::from_str(&process::ask(command.current_dir(paths::root()))?)
        .context("read the output of cargo metadata")?;
    let path = paths::target_dir().join(format!("{}.cdx.json", arch.mark(program)));
    let bill =
        of(&metadata, program).with_context(|| format!("cargo metadata describes no dependencies of {program}"))?;
    fs::write(&path, format!("{bill:#}\n")).with_context(|| format!("write {}", path.display()))?;
    Ok(path)
}

/// Builds the bill of materials, which lists the program and all packages that are linked into the program.
fn of(metadata: &Value, program: &str) -> Option<Value> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let packages: BTreeMap<String, &Value> =
        metadata["packages"].as_array()?.iter().map(|package| (text(&package["id"]), package)).collect();
    let nodes: BTreeMap<String, &Value> =
        metadata["resolve"]["nodes"].as_array()?.iter().map(|node| (text(&node["id"]), node)).collect();
    let root = packages.iter().find(|(_, package)| package["name"] == program)?.0.clone();
    let (mut linked, mut waiting) = (BTreeSet::new(), vec![root.clone()]);
    while let Some(id) = waiting.pop() {
        if linked.insert(id.clone()) {
            waiting.extend(normal_dependencies(nodes.get(&id)?));
        }
    }
    let mut components = Vec::new();
    for package in linked.iter().filter(|id| **id != root).filter_map(|id| packages.get(id)) {
        components.push(component(package, "library"));
    }
    components.sort_by_key(|component| text(&component["purl"]));
    Some(json!({
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "metadata": { "component": component(packages.get(&root)?, "application") },
        "components": components,
    }))
}

/// Returns the packages that are linked into a package, without the dependencies of build scripts and tests.
fn normal_dependencies(node: &Value) -> impl Iterator<Item = String> {
    let dependencies = node["deps"].as_array().into_iter().flatten();
    let is_normal = |dependency: &&Value| {
        dependency["dep_kinds"].as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind["kind"].is_null()))
    };
    dependencies.filter(is_normal).filter_map(|dependency| Some(dependency["pkg"].as_str()?.to_owned()))
}

fn component(package: &Value, kind: &str) -> Value {
    let [name, version] = ["name", "version"].map(|field| package[field].as_str().unwrap_or_default());
    let purl = format!("pkg:cargo/{name}@{version}");
    let mut component =
        json!({ "type": kind, "bom-ref": purl, "name": name, "version": version, "purl": purl, "scope": "required" });
    if let Some(license) = package["license"].as_str() {
        // Some old Cargo manifests have a slash instead of OR between alternative licenses.
        component["licenses"] = json!([{ "expression": license.replace('/', " OR ") }]);
    }
    component
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::{Value, json};

    use super::{Arch, of, write};
    use crate::build;

    fn names(bill: &Value) -> Vec<&str> {
        let components = bill["components"].as_array().unwrap();
        components.iter().map(|component| component["purl"].as_str().unwrap()).collect()
    }

    #[test]
    fn the_bill_lists_linked_packages_and_no_dependency_of_builds_or_tests() {
        let package = |name: &str| json!({ "id": name, "name": name, "version": "1.0.0", "license": "MIT/Apache-2.0" });
        let on = |name: &str, kind: Option<&str>| json!({ "pkg": name, "dep_kinds": [{ "kind": kind }] });
        let node = |name: &str, deps: Vec<Value>| json!({ "id": name, "deps": deps });
        let metadata = json!({
            "packages": (["npl-agent", "npl-feed", "b", "c", "built", "tested"].map(package)),
            "resolve": { "nodes": [
                node("npl-agent", vec![on("b", None), on("built", Some("build")), on("tested", Some("dev"))]),
                node("npl-feed", vec![on("npl-agent", None), on("tested", None)]),
                node("b", vec![on("c", None)]),
                node("c", vec![on("b", None)]),
                node("built", vec![]),
                node("tested", vec![]),
            ] },
        });
        let bill = of(&metadata, "npl-agent").unwrap();
        assert_eq!(names(&bill), ["pkg:cargo/b@1.0.0", "pkg:cargo/c@1.0.0"]);
        assert_eq!(bill["metadata"]["component"]["name"], "npl-agent");
        assert_eq!(bill["components"][0]["licenses"][0]["expression"], "MIT OR Apache-2.0");
        let bill = of(&metadata, "npl-feed").unwrap();
        let linked = ["b", "c", "npl-agent", "tested"].map(|name| format!("pkg:cargo/{name}@1.0.0"));
        assert_eq!(names(&bill), linked);
        assert_eq!(bill["metadata"]["component"]["name"], "npl-feed");
        assert_eq!(of(&metadata, "npl-other"), None);
    }

    #[test]
    fn the_image_of_the_feed_has_a_bill_of_its_own() {
        let bill = |program| -> Value {
            serde_json::from_slice(&fs::read(write(program, Arch::native()).unwrap()).unwrap()).unwrap()
        };
        let has = |bill: &Value, name: &str| names(bill).iter().any(|it| it.starts_with(&format!("pkg:cargo/{name}@")));
        let (agent, feed) = (bill(build::AGENT), bill(build::FEED));
        assert_eq!(feed["metadata"]["component"]["name"], "npl-feed");
        // Only the feed serves gRPC, with the crate tonic. The feed uses the agent's library, which is the crate npl-agent.
        assert!(has(&feed, "tonic") && has(&feed, "npl-agent"), "{:?}", names(&feed));
        assert!(!has(&agent, "tonic") && has(&agent, "aya"), "{:?}", names(&agent));
    }
}
