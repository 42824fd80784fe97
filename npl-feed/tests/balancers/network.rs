// SPDX-License-Identifier: Apache-2.0
//! Creates a network namespace for each test, and runs the test program again inside the namespace.

use std::{
    env,
    process::{Command, Stdio},
};

/// The environment variable that [`inside`] sets for the copy of the test program in the new network namespace.
const INSIDE: &str = "NPL_FEED_TEST_INSIDE";

/// The addresses of the Nodes. The load balancers reach the feed at the first address, which docs/load-balancers.md
/// uses.
pub(crate) const NODES: [&str; 3] = ["192.0.2.10", "192.0.2.11", "192.0.2.12"];

/// Runs a test in a network namespace, and in a PID namespace whose processes are killed at the end of the test.
pub(crate) fn inside(test: &str, work: impl FnOnce()) {
    if env::var_os(INSIDE).is_some() {
        run("ip", &["link", "set", "lo", "up"]);
        for address in NODES {
            run("ip", &["address", "add", &format!("{address}/32"), "dev", "lo"]);
        }
        return work();
    }
    let namespaces = ["--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--"];
    let program = env::current_exe().unwrap();
    let mut command = Command::new("unshare");
    command.args(namespaces).arg(program).args(["--exact", test, "--nocapture"]).env(INSIDE, "1");
    let output = command.stdin(Stdio::null()).output().expect("cannot run unshare: install util-linux");
    let [report, errors] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    // The result line of the inner run is not printed, because xtask would count the inner result in addition to the
    // outer one.
    let report = report.split("test result: ").next().unwrap_or_default();
    print!("{report}{errors}");
    assert!(output.status.success(), "{test} failed in its network namespace: {}", output.status);
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().expect("cannot run ip: install iproute2");
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}
