// SPDX-License-Identifier: Apache-2.0
//! A gRPC client without a proxy: grpc-go reads the members of a Service from the feed over xDS, with the bootstrap
//! file of docs/load-balancers.md, and balances its requests over the Pods.

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

/// The number of requests whose distribution over the Pods the test counts.
const COUNTED: usize = 400;

/// A zone with one ready and nine draining Pods gets the requests of one Pod, not of ten.
#[test]
fn grpc_client_gives_ready_pods_of_two_zones_the_same_share() {
    network::inside("grpc::grpc_client_gives_ready_pods_of_two_zones_the_same_share", || {
        let folder = scene::Folder::new("grpc-zones");
        fs::write(folder.join("bootstrap.json"), load_balancers::example("bootstrap.json").unwrap()).unwrap();
        // The index of a Pod's Node is the number of the Pod modulo three.
        let west: Vec<u16> = (0..10).map(|number| 3 * number).collect();
        let east = [1, 4, 7];
        let pod = |number: &u16| scene::pod(&format!("web-{number}"), "web", *number);
        let mut pods: Vec<_> = west.iter().chain(&east).map(pod).collect();
        for draining in &mut pods[1..west.len()] {
            draining.object.is_terminating = true;
        }
        let ready: Vec<String> = [west[0]].iter().chain(&east).map(|number| format!("web-{number}")).collect();
        let serve =
            |number: &u16| start(&["serve", &format!("web-{number}"), &scene::address(*number).to_string()], &folder);
        let _servers: Vec<Running> = [west[0]].iter().chain(&east).map(serve).collect();
        let feed = Feed::start(NODES[0], pods);
        for (index, zone) in ["west", "east"].into_iter().enumerate() {
            feed.send(Change::Node(scene::node(index, zone)));
        }
        let _client = start(&["ask", "xds:///web.default:http"], &folder);
        for name in &ready {
            wait_for_answer_of(&folder, name);
        }
        let before = answers(&folder).len();
        wait(&folder, "requests", |lines| lines.len() >= before + COUNTED);
        let lines = answers(&folder).split_off(before);
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for line in &lines[..COUNTED] {
            *counts.entry(line).or_default() += 1;
        }
        println!("grpc: {counts:?}");
        assert!(counts.keys().all(|name| ready.iter().any(|ready| ready == name)), "{counts:?}");
        // Each of the four ready Pods should get a quarter of the 400 requests; half of the requests would be 11
        // standard deviations more. If the weight of the zone counted its nine draining Pods, the zone's ready Pod
        // would get ten of thirteen requests.
        assert!(counts.len() == 4 && counts.values().all(|count| *count < COUNTED / 2), "{counts:?}");
    });
}
