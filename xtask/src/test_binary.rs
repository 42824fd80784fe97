// SPDX-License-Identifier: Apache-2.0
//! Compiles and lists test binaries, and sorts them in the order in which xtask runs them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::process;

/// The name of the tests of the trace build, which need the kernel object of trace builds.
pub(crate) const TRACE: &str = "trace";

/// The name of the tests of npl-feed with real load balancers.
pub(crate) const BALANCERS: &str = "balancers";

/// A program that cargo has compiled from tests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TestBinary {
    /// For unit tests, the name of the crate, such as `npl-agent`; for integration tests, the name of the test, such as
    /// `kernel`.
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) executable: PathBuf,
    /// The working directory that cargo sets for the test binary.
    folder: PathBuf,
}

/// The kind of a test binary, which determines what the tests need. The kinds are sorted by the time that their tests
/// take, the shortest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// Unit tests in the crate's own source files. These tests need neither root privileges nor programs other than
    /// their binary.
    Unit,
    /// Tests that need root (for network namespaces, or for the kernel programs of the trace build) or programs of load
    /// balancers.
    TestKit,
    /// Tests that need root and the kernel programs. The same tests also run under kernels on emulated machines.
    Kernel,
    /// Tests that need Helm and a real API server.
    Chart,
    /// Tests that need the agent and a real API server.
    Agent,
    /// Tests that need the agent's image and real Nodes.
    RealCluster,
}

impl TestBinary {
    /// Returns a command that runs the tests of this binary.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.executable);
        command.current_dir(&self.folder);
        command
    }

    /// Whether the binary, called with these arguments, has a test that runs on this machine by default. Ignored tests
    /// do not count: they run only on emulated machines, or need an agent of another ABI version (`--former-agent`).
    pub(crate) fn has_test(&self, arguments: &[&str]) -> Result<bool> {
        let mut ignored = BTreeSet::new();
        // The harness of the real cluster's tests is not asked for ignored tests: it has no option `--ignored`, and no
        // ignored tests.
        if self.kind != Kind::RealCluster {
            ignored = listed(self.command().args(["--list", "--ignored"]).args(arguments))?;
        }
        Ok(listed(self.command().arg("--list").args(arguments))?.difference(&ignored).next().is_some())
    }

    /// Parses a line of cargo's JSON messages; returns `None` if the line does not describe a test binary.
    fn from_message(message: &str) -> Option<Self> {
        let message: Value = serde_json::from_str(message).ok()?;
        // The field `test` of the profile decides: the field `test` of the target is true for every program that has
        // tests.
        if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
            return None;
        }
        let name = message["target"]["name"].as_str()?;
        let kind = match message["target"]["kind"][0].as_str()? {
            "test" if name.starts_with("testkit") || name == TRACE || name == BALANCERS => Kind::TestKit,
            "test" if name.starts_with("kernel") => Kind::Kernel,
            "test" if name == "chart" => Kind::Chart,
            "test" if name.starts_with("cluster") => Kind::RealCluster,
            "test" => Kind::Agent,
            _ => Kind::Unit,
        };
        Some(Self {
            name: name.to_owned(),
            kind,
            executable: message["executable"].as_str()?.into(),
            folder: Path::new(message["manifest_path"].as_str()?).parent()?.to_owned(),
        })
    }
}

/// Returns the names of the tests that a command lists in lines such as `module::name: test`.
pub(crate) fn listed(list: &mut Command) -> Result<BTreeSet<String>> {
    let output = process::ask(list)?;
    Ok(output.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

/// Compiles tests without running them, and returns the test binaries.
pub(crate) fn compile(cargo_test: &mut Command) -> Result<Vec<TestBinary>> {
    cargo_test.args(["--no-run", "--message-format=json-render-diagnostics"]);
    process::show(cargo_test);
    let output = cargo_test.stderr(Stdio::inherit()).output().context("start cargo")?;
    process::check(cargo_test, output.status)?;
    let messages = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut binaries: Vec<_> = messages.lines().filter_map(TestBinary::from_message).collect();
    binaries.sort_by(|a, b| (a.kind, &a.name).cmp(&(b.kind, &b.name)));
    Ok(binaries)
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::process::Command;

    use super::{Kind, TestBinary, listed};

    #[test]
    fn a_test_is_found_by_a_part_of_its_name() {
        let executable = env::current_exe().unwrap();
        let folder = env::current_dir().unwrap();
        let own = TestBinary { name: "xtask".to_owned(), kind: Kind::Unit, executable, folder };
        assert!(own.has_test(&["found_by_a_part_of"]).unwrap());
        assert!(!own.has_test(&["no_test_has_this_name"]).unwrap());
    }

    #[test]
    fn tests_are_listed_by_their_harness() {
        let mut list = Command::new("printf");
        list.arg("a::b: test\nc: benchmark\n\n1 test, 1 benchmark\n");
        assert_eq!(listed(&mut list).unwrap().into_iter().collect::<Vec<_>>(), ["a::b"]);
    }

    const MESSAGE: &str = r#"{"reason":"compiler-artifact","package_id":"path+file:///p#0.1.0","manifest_path":"/p/k/Cargo.toml","target":{"kind":["test"],"crate_types":["bin"],"name":"kernel","src_path":"/p/k/tests/kernel/main.rs"},"profile":{"opt_level":"3","test":true},"features":[],"filenames":["/t/kernel-1"],"executable":"/t/kernel-1","fresh":true}"#;

    #[test]
    fn a_message_of_cargo_describes_a_test_binary() {
        let binary = TestBinary::from_message(MESSAGE).unwrap();
        assert_eq!((binary.name.as_str(), binary.kind), ("kernel", Kind::Kernel));
        assert_eq!(binary.executable.to_str(), Some("/t/kernel-1"));
        assert_eq!(binary.folder.to_str(), Some("/p/k"));
    }

    #[test]
    fn the_name_decides_the_requirements() {
        let kind = |name: &str| {
            let message = MESSAGE.replace(r#""name":"kernel""#, &format!(r#""name":"{name}""#));
            TestBinary::from_message(&message).unwrap().kind
        };
        assert_eq!(
            ["testkit_network", "trace", "balancers", "agent", "cluster"].map(kind),
            [Kind::TestKit, Kind::TestKit, Kind::TestKit, Kind::Agent, Kind::RealCluster]
        );
    }

    #[test]
    fn other_messages_are_ignored() {
        let program = MESSAGE
            .replace(r#""test":true"#, r#""test":false"#)
            .replace(r#"main.rs"}"#, r#"main.rs","doctest":false,"test":true}"#);
        for message in ["", r#"{"reason":"build-finished"}"#, &program] {
            assert_eq!(TestBinary::from_message(message), None, "{message}");
        }
    }
}
