// SPDX-License-Identifier: Apache-2.0
//! A network namespace for each test. The test program runs itself in it.

use std::{env, process::Command};

/// Set in the program inside of the namespace.
const INSIDE: &str = "NPL_FEED_TEST_INSIDE";

/// The addresses of the Nodes. The load balancers reach the feed at the first one, as the documents show.
pub(crate) const NODES: [&str; 3] = ["192.0.2.10", "192.0.2.11", "192.0.2.12"];

/// Runs the work of a test in a network namespace, with a process namespace whose processes end with the test.
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
    let status = Command::new("unshare")
        .args(namespaces)
        .arg(program)
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "1")
        .status()
        .expect("run unshare of util-linux");
    assert!(status.success(), "{test} failed in its network namespace: {status}");
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().expect("run ip of iproute2");
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}
