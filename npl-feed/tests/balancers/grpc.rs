// SPDX-License-Identifier: Apache-2.0
//! A gRPC client without a proxy: grpc-go reads the members of a Service from the feed by xDS, with the bootstrap file
//! of docs/load-balancers.md, and balances its requests over the Pods.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use npl_feed::core::model::Change;
use npl_testkit::{load_balancers, poll};

use crate::{
    network::{self, NODES},
    scene::{self, Feed, LIMIT, QUIET},
};

/// The environment variable with the directory of the program `grpc`. The program is both a server that answers with
/// its name, and a client that prints the names of the servers that answer.
const PROGRAM: &str = "NPL_GRPC_DIR";

/// A running program, which is killed when this value is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Errors are ignored, because the program may have ended already.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn start(arguments: &[&str], folder: &Path) -> Running {
    let program = env::var_os(PROGRAM).unwrap_or_else(|| panic!("set {PROGRAM}, as `cargo xtask test` does"));
    let log = |name: &str| fs::File::create(folder.join(name)).unwrap();
    let mut command = Command::new(PathBuf::from(program).join("grpc"));
    command.args(arguments).env("GRPC_XDS_BOOTSTRAP", folder.join("bootstrap.json")).stdin(Stdio::null());
    command.stdout(log(arguments[0])).stderr(log("errors"));
    Running(command.spawn().unwrap())
}

/// The lines that the client has printed: the name of the Pod that answered, or an error.
fn answers(folder: &Path) -> Vec<String> {
    fs::read_to_string(folder.join("ask")).unwrap_or_default().lines().map(str::to_owned).collect()
}

fn wait(folder: &Path, what: &str, is_over: impl Fn(&[String]) -> bool) {
    let waited = poll::until(what, LIMIT, || is_over(&answers(folder)).then_some(()));
    let errors = || fs::read_to_string(folder.join("errors")).unwrap_or_default();
    assert!(waited.is_ok(), "{waited:?}: {:?}\n{}", answers(folder).last(), scene::last_lines(&errors()));
}

fn wait_for_answer_of(folder: &Path, name: &str) {
    let before = answers(folder).len();
    wait(folder, &format!("answer of {name}"), |lines| lines.iter().skip(before).any(|line| line == name));
}

#[test]
fn grpc_client_balances_over_the_pods_by_itself() {
    network::inside("grpc::grpc_client_balances_over_the_pods_by_itself", || {
        let folder = scene::Folder::new("grpc");
        fs::write(folder.join("bootstrap.json"), load_balancers::example("bootstrap.json").unwrap()).unwrap();
        let mut servers = BTreeMap::new();
        for (name, number) in [("web-0", 0), ("web-1", 1), ("other-0", 2), ("web-2", 3)] {
            servers.insert(name, start(&["serve", name, &scene::address(number).to_string()], &folder));
        }
        let pods = [("web-0", "web", 0), ("web-1", "web", 1), ("other-0", "other", 2)];
        let feed = Feed::start(NODES[0], pods.map(|(name, app, number)| scene::pod(name, app, number)).to_vec());
        let _client = start(&["ask", "xds:///web.default:http"], &folder);
        wait_for_answer_of(&folder, "web-0");
        wait_for_answer_of(&folder, "web-1");
        feed.send(Change::Pod(Box::new(scene::pod("web-2", "web", 3))));
        wait_for_answer_of(&folder, "web-2");
        // A deleted Pod drains, and stops only after the client has stopped using it.
        let mut deleted = scene::pod("web-0", "web", 0);
        deleted.object.is_terminating = true;
        feed.send(Change::Pod(Box::new(deleted)));
        let is_left =
            |lines: &[String]| lines.len() > QUIET && lines.iter().rev().take(QUIET).all(|line| line != "web-0");
        wait(&folder, "end of the requests to web-0", is_left);
        drop(servers.remove("web-0"));
        for name in ["web-1", "web-2"] {
            wait_for_answer_of(&folder, name);
        }
        assert!(feed.has_accepted_resources());
        let lines = answers(&folder);
        let wrong: Vec<_> = lines.iter().filter(|line| !line.starts_with("web-")).collect();
        println!("grpc: {} requests, {} without an answer of the Service's Pods", lines.len(), wrong.len());
        assert!(wrong.is_empty(), "{wrong:?}");
    });
}
