// SPDX-License-Identifier: Apache-2.0
//! Tests the program `npl-feed` with the RBAC rights of its manifest and a real API server.

use std::{
    env, fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use npl_agent::core::members::ServiceMembers;
use serde_json::{Value, json};

use crate::{dns, network, scene::Folder};

pub(crate) const LIMIT: Duration = Duration::from_mins(5);
pub(crate) const FEED: &str = "127.0.0.1:8080";
const API_SERVER: &str = "https://127.0.0.1:6443";
/// The user name of the manifest's service account.
const USER: &str = "system:serviceaccount:npl-system:npl-feed";

/// Fields are dropped in declaration order: the processes end before their folder is removed.
struct ControlPlane {
    binaries: PathBuf,
    _etcd: Running,
    api_server: Option<Running>,
    folder: Folder,
}

/// A process that is killed when it is dropped.
pub(crate) struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Errors are ignored, because the process may have exited already.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

impl Running {
    fn terminate(&self) {
        assert!(Command::new("kill").args(["-TERM", &self.0.id().to_string()]).status().unwrap().success());
    }
}

/// The release build of the program, if the test command has built one (`NPL_FEED`); otherwise, the program that was
/// built with this test.
pub(crate) fn feed_program() -> PathBuf {
    env::var_os("NPL_FEED").map_or_else(|| env!("CARGO_BIN_EXE_npl-feed").into(), PathBuf::from)
}

pub(crate) fn start(folder: &Path, name: &str, command: &mut Command) -> Running {
    let log = fs::File::create(folder.join(format!("{name}.log"))).unwrap();
    let command = command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
    Running(command.spawn().unwrap_or_else(|error| panic!("start {name}: {error}")))
}

impl ControlPlane {
    fn start() -> Self {
        let variables = ["KUBEBUILDER_ASSETS", "NPL_CONTROL_PLANE_DIR"];
        let binaries = variables.iter().find_map(env::var_os).expect("set NPL_CONTROL_PLANE_DIR, as xtask does");
        let binaries = PathBuf::from(binaries);
        let folder = Folder::new("api-server");
        let etcd = ["etcd", "server"].map(|name| binaries.join(name)).into_iter().find(|path| path.exists()).unwrap();
        let etcd = start(
            &folder,
            "etcd",
            Command::new(etcd).arg("--data-dir").arg(folder.join("etcd")).args(["--unsafe-no-fsync"]),
        );
        let key = folder.join("sa.key");
        let made = Command::new("openssl").args(["genrsa", "-out"]).arg(&key).arg("2048").output().unwrap();
        assert!(made.status.success());
        let users = format!("admin-token,admin,admin,system:masters\nfeed-token,{USER},feed,\n");
        fs::write(folder.join("tokens.csv"), users).unwrap();
        let mut plane = Self { folder, binaries, _etcd: etcd, api_server: None };
        plane.start_api_server();
        plane
    }

    fn start_api_server(&mut self) {
        let file = |name: &str| self.folder.join(name).display().to_string();
        let mut command = Command::new(self.binaries.join("kube-apiserver"));
        command.args(["--etcd-servers=http://127.0.0.1:2379", "--secure-port=6443", "--bind-address=127.0.0.1"]);
        command.args(["--service-account-issuer=https://kubernetes.default.svc", "--authorization-mode=RBAC"]);
        command.args(["--service-cluster-ip-range=10.96.0.0/16", "--disable-admission-plugins=ServiceAccount"]);
        command.args(["--advertise-address=192.0.2.10", "--endpoint-reconciler-type=none"]);
        command.arg(format!("--service-account-key-file={}", file("sa.key")));
        command.arg(format!("--service-account-signing-key-file={}", file("sa.key")));
        command.arg(format!("--token-auth-file={}", file("tokens.csv")));
        command.arg(format!("--cert-dir={}", file("certs")));
        self.api_server = Some(start(&self.folder, "kube-apiserver", &mut command));
        until("a ready API server", || {
            let output = self.kubectl_command(&["get", "--raw", "/readyz"]).output().unwrap();
            (output.status.success() && output.stdout == b"ok").then_some(())
        });
    }

    fn kubectl_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("kubectl");
        command.args(["--server", API_SERVER, "--insecure-skip-tls-verify", "--token", "admin-token"]);
        command.arg("--cache-dir").arg(self.folder.join("kubectl")).env("KUBECONFIG", "/dev/null");
        command.args(arguments);
        command
    }

    fn kubectl(&self, arguments: &[&str], input: Option<&Value>) {
        let mut command = self.kubectl_command(arguments);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let text = input.map(Value::to_string).unwrap_or_default();
        child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Creates a ready Pod with an annotation on Node `n1`, in place of the kubelet and the agent.
    fn create_pod(&self, name: &str, node_port: u16) {
        let pod = json!({ "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": name, "namespace": "default", "labels": { "app": "web" },
                          "annotations": { "nodeportlocal.antrea.io": annotation(node_port) } },
            "spec": { "nodeName": "n1", "containers": [{ "name": "web", "image": "web" }] } });
        self.kubectl(&["create", "--filename", "-"], Some(&pod));
        let status = json!({ "status": { "phase": "Running", "podIP": "10.0.0.1",
            "conditions": [{ "type": "Ready", "status": "True" }] } });
        self.kubectl(
            &["patch", "pod", name, "--subresource=status", "--type=merge", "--patch", &status.to_string()],
            None,
        );
    }

    fn kubeconfig(&self) -> PathBuf {
        let path = self.folder.join("feed.kubeconfig");
        let config = json!({ "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{ "name": "c", "cluster": { "server": API_SERVER,
                "certificate-authority": self.folder.join("certs/apiserver.crt") } }],
            "users": [{ "name": "u", "user": { "token": "feed-token" } }],
            "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "u" } }] });
        fs::write(&path, config.to_string()).unwrap();
        path
    }

    fn start_feed(&self, shutdown_delay: &str) -> Running {
        let mut command = Command::new(feed_program());
        // The feed listens on IPv4 addresses, because this machine's kernel may have no IPv6.
        command
            .args(["--http", "0.0.0.0:8080", "--xds", "127.0.0.1:18000", "--dns", "127.0.0.1:5353", "--drain", "1h"])
            .args(["--shutdown-delay", shutdown_delay])
            .arg("--kubeconfig")
            .arg(self.kubeconfig());
        start(&self.folder, "npl-feed", &mut command)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.join("npl-feed.log")).unwrap_or_default()
    }
}

fn annotation(node_port: u16) -> String {
    json!([{ "podPort": 8080, "nodeIP": "192.0.2.10", "nodePort": node_port, "protocol": "tcp" }]).to_string()
}

pub(crate) fn until<T>(what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(value) = probe() {
            return value;
        }
        assert!(Instant::now() < end, "no {what} within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Requests a path of the feed. Returns the status code and the body of the answer; `None` if the feed does not answer.
pub(crate) fn get(path: &str) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(FEED).ok()?;
    stream.set_read_timeout(Some(LIMIT)).ok()?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: feed\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
}

/// The members of the Service as `POD:PORT STATE`.
fn members() -> Vec<String> {
    let Some((200, body)) = get("/v1/members/default/web/http") else { return Vec::new() };
    let body: Value = serde_json::from_str(&body).unwrap();
    let text = |member: &Value| {
        let state = if member["draining"] == true { "draining" } else { "serving" };
        format!("{}:{} {state}", member["pod"].as_str().unwrap(), member["port"])
    };
    body["members"].as_array().unwrap().iter().map(text).collect()
}

fn expect(expected: &[&str], plane: &ControlPlane) {
    let end = Instant::now() + LIMIT;
    while members() != expected {
        assert!(Instant::now() < end, "members are {:?}, not {expected:?}\n{}", members(), plane.log());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// `kubectl npl members` reads the feed through the API server's proxy. The command distinguishes a missing Pod from a
/// missing Service by the error text that kubectl prints.
fn the_plugin_for_kubectl_reads_the_answers_through_the_proxy(plane: &ControlPlane) {
    let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "npl-feed-a", "namespace": "npl-system" },
        "spec": { "nodeName": "n1", "containers": [{ "name": "npl-feed", "image": "npl-feed" }] } });
    plane.kubectl(&["create", "--filename", "-"], Some(&pod));
    // The API server's proxy refuses loopback addresses, so the Pod gets the address of a Node.
    let status = json!({ "status": { "phase": "Running", "podIP": network::NODES[0] } }).to_string();
    let patch = ["patch", "pod", "npl-feed-a", "--subresource=status", "--type=merge", "--patch", &status];
    plane.kubectl(&[&patch[..], &["--namespace", "npl-system"]].concat(), None);
    let read = |pod: &str, service: &str| {
        let path = format!("/api/v1/namespaces/npl-system/pods/{pod}:8080/proxy/v1/members/default/{service}");
        let output = plane.kubectl_command(&["get", "--raw", &path]).output().unwrap();
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap())
    };
    let [body, errors] = read("npl-feed-a", "web");
    let read_members = serde_json::from_str::<ServiceMembers>(&body);
    assert!(read_members.is_ok_and(|it| it.ports[0].members[0].pod == "a"), "{body}{errors}");
    let [body, errors] = read("npl-feed-a", "none");
    assert!(body.is_empty() && errors.contains("(NotFound)") && !errors.contains("pods \""), "{body}{errors}");
    let [body, errors] = read("npl-feed-b", "web");
    assert!(body.is_empty() && errors.contains("(NotFound)") && errors.contains("pods \""), "{body}{errors}");
}

/// Until its shutdown delay ends, a deleted replica serves changes of the cluster on all interfaces, because kube-proxy
/// on the Nodes may still send clients to the replica. The delay of this test's replica exceeds the test's time limit,
/// so only the second SIGTERM can end the replica in time.
fn a_replica_serves_after_sigterm_until_a_second_sigterm(mut feed: Running, plane: &ControlPlane) {
    feed.terminate();
    until("log line about the delay", || plane.log().contains("SIGTERM: the feed serves").then_some(()));
    plane.create_pod("d", 61003);
    expect(&["a:61000 serving", "c:61002 serving", "d:61003 serving"], plane);
    assert_eq!(get("/readyz"), Some((200, "ok\n".to_owned())));
    let records = dns::ask_at("127.0.0.1:5353", "dig", "SRV _http._tcp.web.default.npl.internal").answers;
    assert_eq!(records.len(), 3, "{records:?}");
    assert!(TcpStream::connect("127.0.0.1:18000").is_ok());
    feed.terminate();
    let status = until("end of the feed", || feed.0.try_wait().unwrap());
    assert!(status.success(), "{status}\n{}", plane.log());
}

fn without_a_delay_a_replica_ends_at_the_first_sigterm(plane: &ControlPlane) {
    let mut feed = plane.start_feed("0s");
    expect(&["a:61000 serving", "c:61002 serving", "d:61003 serving"], plane);
    feed.terminate();
    let status = until("end of the feed", || feed.0.try_wait().unwrap());
    assert!(status.success() && !plane.log().contains("SIGTERM"), "{status}\n{}", plane.log());
}

/// Waits until the feed's metrics contain this line.
fn expect_metric(line: &str) {
    until(line, || get("/metrics")?.1.lines().any(|metric| metric == line).then_some(()));
}

fn expect_watches_failing(is_failing: bool) {
    for subject in ["pods", "services", "nodes"] {
        expect_metric(&format!("npl_feed_watch_failing{{subject=\"{subject}\"}} {}", u8::from(is_failing)));
    }
}

#[test]
fn a_real_api_server_is_followed_with_the_rights_of_the_manifest() {
    network::inside("api_server::a_real_api_server_is_followed_with_the_rights_of_the_manifest", || {
        let mut plane = ControlPlane::start();
        let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/npl-feed.yaml");
        plane.kubectl(&["create", "namespace", "npl-system"], None);
        plane.kubectl(&["create", "--filename", manifest], None);
        let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n1" } });
        plane.kubectl(&["create", "--filename", "-"], Some(&node));
        let addresses = json!({ "status": { "addresses": [{ "type": "InternalIP", "address": "192.0.2.10" }] } });
        let addresses = addresses.to_string();
        plane.kubectl(&["patch", "node", "n1", "--subresource=status", "--type=merge", "--patch", &addresses], None);
        let service = json!({ "apiVersion": "v1", "kind": "Service",
            "metadata": { "name": "web", "namespace": "default", "annotations": { "nodeportlocal.antrea.io/enabled": "true" } },
            "spec": { "selector": { "app": "web" }, "ports": [{ "name": "http", "port": 80, "targetPort": 8080 }] } });
        plane.kubectl(&["create", "--filename", "-"], Some(&service));
        plane.create_pod("a", 61000);

        let feed = plane.start_feed("1h");
        expect(&["a:61000 serving"], &plane);
        until("readiness without an outage", || get("/readyz").filter(|answer| *answer == (200, "ok\n".to_owned())));
        the_plugin_for_kubectl_reads_the_answers_through_the_proxy(&plane);
        plane.create_pod("b", 61001);
        expect(&["a:61000 serving", "b:61001 serving"], &plane);
        plane.kubectl(&["annotate", "pod", "b", "--overwrite", "nodeportlocal.antrea.io=[]"], None);
        expect(&["a:61000 serving", "b:61001 draining"], &plane);
        plane.kubectl(&["annotate", "pod", "a", "--overwrite", "nodeportlocal.antrea.io=[{}]"], None);
        expect(&["a:61000 draining", "b:61001 draining"], &plane);
        assert!(plane.log().contains("reasons=\"malformed=1\""), "{}", plane.log());
        expect_metric("npl_feed_left_out_entries{reason=\"malformed\"} 1");
        plane.kubectl(&["delete", "pod", "b", "--force", "--grace-period=0"], None);
        expect(&["a:61000 draining"], &plane);
        plane.kubectl(
            &["annotate", "pod", "a", "--overwrite", &format!("nodeportlocal.antrea.io={}", annotation(61000))],
            None,
        );
        expect(&["a:61000 serving"], &plane);
        expect_metric("npl_feed_left_out_entries{reason=\"malformed\"} 0");

        expect_watches_failing(false);
        plane.api_server = None;
        let readiness =
            until("report of the outage", || get("/readyz").filter(|(_, text)| text.starts_with("ok, but")));
        assert_eq!(readiness.0, 200);
        expect_watches_failing(true);
        assert_eq!(members(), ["a:61000 serving"]);
        plane.start_api_server();
        plane.create_pod("c", 61002);
        expect(&["a:61000 serving", "c:61002 serving"], &plane);
        until("end of the outage", || get("/readyz").filter(|(_, text)| text == "ok\n"));
        expect_watches_failing(false);
        a_replica_serves_after_sigterm_until_a_second_sigterm(feed, &plane);
        without_a_delay_a_replica_ends_at_the_first_sigterm(&plane);
    });
}
