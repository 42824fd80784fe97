// SPDX-License-Identifier: Apache-2.0
//! Checks that dependencies have the same features in the build of the programs in images and in the build of the
//! tests. If the features of a dependency differ, cargo compiles the dependency and all its dependents again for the
//! tests, which takes minutes.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};

use crate::arch::Arch;
use crate::{build, paths, process, test};

/// The options of `cargo tree` that print one package per line: its name, version and features.
const FORMAT: [&str; 4] = ["--prefix", "none", "--format", "{p} [{f}]"];

/// Compares the features of the dependencies in both builds.
pub(crate) fn check() -> Result<()> {
    let agent = packages(&build::PACKAGES, "normal,build")?;
    let tests = packages(&test::packages(), "normal,build,dev")?;
    let different = different(&agent, &tests);
    ensure!(
        different.is_empty(),
        "these packages are compiled twice, because their features in the agent and in the tests differ; select the \
         same features in Cargo.toml: {}",
        different.join(", ")
    );
    Ok(())
}

/// Returns all packages that a build of the packages in `selection` contains, each with its features.
fn packages(selection: &[&str], edges: &str) -> Result<BTreeSet<String>> {
    let mut command = build::plain_cargo();
    command.args(["tree", "--locked", "--target", &Arch::native().target(), "--edges", edges]).args(FORMAT);
    let tree = process::ask(command.args(selection).current_dir(paths::root()))?;
    // cargo adds `(*)` to a package that it has listed before; without this mark, the two lines are equal.
    Ok(tree.lines().map(|line| line.trim_end_matches(" (*)").to_owned()).filter(|line| !line.is_empty()).collect())
}

/// Returns the packages of the agent's build that the build of the tests does not contain with the same features.
fn different(agent: &BTreeSet<String>, tests: &BTreeSet<String>) -> Vec<String> {
    agent.difference(tests).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::{build, check, different, packages};

    #[test]
    fn the_tests_use_the_dependencies_of_the_agents_build() {
        check().unwrap();
    }

    #[test]
    fn a_package_with_other_features_is_found() {
        let agent = packages(&build::PACKAGES, "normal,build").unwrap();
        assert!(agent.iter().any(|package| package.starts_with("kube-client v") && package.contains("rustls-tls")));
        let tests =
            agent.iter().map(|it| if it.starts_with("tokio v") { it.replace(']', ",full]") } else { it.clone() });
        let different = different(&agent, &tests.collect());
        assert!(matches!(different.as_slice(), [one] if one.starts_with("tokio v")), "{different:?}");
    }
}
