// SPDX-License-Identifier: Apache-2.0
//! Compares the requests that each load balancer repeats at another Pod with the table in docs/load-balancers.md: after
//! a refused connection, and after a connection that the Pod resets although it has received the request.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    process::Child,
    sync::atomic::Ordering,
};

use npl_feed::core::model::Change;
use npl_testkit::{
    load_balancers::{CADDY, ENVOY, HAPROXY, LoadBalancer, NGINX, TRAEFIK},
    poll,
};
use tokio::runtime::Runtime;

use crate::{
    backends::Backends,
    network::{self, NODES},
    scene::{self, BALANCER, Feed, Folder, LIMIT},
};

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/load-balancers.md");
/// The second cell in the first row of the page's table.
const HEADING: &str = "| repeats requests that a Pod may have received |";
/// If this many successive requests cause no attempt at a removed Pod, the test assumes that the load balancer no
/// longer uses the Pod.
const QUIET: usize = 20;

/// The row of a load balancer in the page's table: the methods whose requests it repeats, and the methods whose
/// requests it does not repeat.
fn documented(balancer: &LoadBalancer) -> [Vec<String>; 2] {
    let page = fs::read_to_string(PAGE).unwrap();
    let (_, table) = page.split_once(HEADING).expect("the page has no table with the heading");
    let cells = |row: &str| -> Vec<Vec<String>> {
        let cells = row.trim_matches('|').split('|');
        cells.map(|cell| cell.split(',').map(|word| word.trim().to_owned()).collect()).collect()
    };
    let mut rows = table.lines().skip(2).take_while(|line| line.starts_with('|')).map(cells);
    let row = rows.find(|row| row[0].iter().any(|name| name.eq_ignore_ascii_case(balancer.name)));
    row.and_then(|row| row.into_iter().skip(1).collect::<Vec<_>>().try_into().ok()).expect("no row with three cells")
}

/// Sends one request on a new connection. Returns the status code; `None` if the load balancer closes the connection
/// without an answer.
fn request(method: &str) -> Option<u16> {
    let mut stream = TcpStream::connect(BALANCER).ok()?;
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let length = if matches!(method, "GET" | "HEAD") { "" } else { "Content-Length: 0\r\n" };
    write!(stream, "{method} / HTTP/1.1\r\nHost: web.example\r\n{length}Connection: close\r\n\r\n").ok()?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).ok()?;
    String::from_utf8_lossy(&answer).split(' ').nth(1)?.parse().ok()
}

/// The number of connection attempts of this network namespace that a peer has refused.
fn refused_connections() -> usize {
    let counters = fs::read_to_string("/proc/net/snmp").unwrap();
    let mut rows = counters.lines().filter_map(|line| line.strip_prefix("Tcp: "));
    let (names, values) = rows.next().zip(rows.next()).unwrap();
    let mut counters = names.split(' ').zip(values.split(' '));
    counters.find(|(name, _)| *name == "AttemptFails").unwrap().1.parse().unwrap()
}

/// A load balancer and a Service with one healthy Pod. Fields are dropped in declaration order.
struct Service {
    balancer: &'static str,
    process: Child,
    feeds: Vec<Feed>,
    backends: Backends,
    started: u16,
    _runtime: Runtime,
    _folder: Folder,
}

impl Service {
    fn start(balancer: &LoadBalancer) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let folder = Folder::new("retries");
        let mut backends = Backends::new(runtime.handle());
        backends.start("web-0", scene::address(0));
        // Caddy's example names two replicas. All replicas run, so that only Pods refuse connections.
        let replicas = NODES.iter().take(2);
        let feeds = replicas.map(|node_ip| Feed::start(node_ip, vec![scene::pod("web-0", "web", 0)])).collect();
        // The health checks are removed, because the test would also count their refused connections.
        let replacements = [(" check inter 1s", "")];
        let process = scene::launch(balancer, &folder, &folder.join("log"), &replacements);
        poll::until("first answer", LIMIT, || (request("GET") == Some(200)).then_some(())).unwrap();
        Self { balancer: balancer.name, process, feeds, backends, started: 1, _runtime: runtime, _folder: folder }
    }

    fn send(&self, change: impl Fn() -> Change) {
        self.feeds.iter().for_each(|feed| feed.send(change()));
    }

    /// Adds a Pod to the Service, and sends requests until the load balancer has tried this Pod. `tried` counts the
    /// attempts. Returns the answer of the request for which the load balancer tried the Pod, and the number of
    /// attempts for this request.
    fn try_pod(&mut self, method: &str, is_crashing: bool) -> (Option<u16>, usize) {
        let (number, name) = (self.started, format!("web-{:03}", self.started));
        self.started += 1;
        let received = is_crashing.then(|| self.backends.start_crashing(&name, scene::address(number)));
        let tried = || received.as_ref().map_or_else(refused_connections, |count| count.load(Ordering::SeqCst));
        let pod = scene::pod(&name, "web", number);
        self.send(|| Change::Pod(Box::new(pod.clone())));
        let (result, _) = poll::until("request to the new Pod", LIMIT, || {
            let before = tried();
            let status = request(method);
            let attempts = tried() - before;
            assert!(attempts > 0 || status == Some(200), "{}: {method} at the healthy Pod: {status:?}", self.balancer);
            (attempts > 0).then_some((status, attempts))
        })
        .unwrap();
        if is_crashing {
            self.backends.stop(&name);
        }
        self.send(|| Change::PodGone(pod.object.key.clone(), pod.object.uid.clone()));
        poll::until("end of requests to the removed Pod", LIMIT, || {
            let before = refused_connections();
            let are_answered = (0..QUIET).all(|_| request("GET") == Some(200));
            (are_answered && refused_connections() == before).then_some(())
        })
        .unwrap();
        result
    }
}

fn repeats_as_documented(test: &str, balancer: &LoadBalancer) {
    network::inside(test, || {
        let [repeated, failing] = documented(balancer);
        let mut service = Service::start(balancer);
        for method in repeated.iter().chain(&failing) {
            let (refused, attempts) = service.try_pod(method, false);
            println!("{}: {method}, connection refused {attempts} times: {refused:?}", balancer.name);
            assert_eq!(refused, Some(200), "{}: {method} reached no Pod", balancer.name);
            let (reset, attempts) = service.try_pod(method, true);
            println!("{}: {method}, connection reset {attempts} times: {reset:?}", balancer.name);
            if repeated.contains(method) {
                assert_eq!(reset, Some(200), "{}: {method} must be repeated", balancer.name);
            } else {
                assert_ne!(reset, Some(200), "{}: {method} must not be repeated", balancer.name);
                assert_eq!(attempts, 1, "{}: {method} must be received once", balancer.name);
            }
        }
        service.process.kill().unwrap();
        service.process.wait().unwrap();
    });
}

#[test]
fn envoy_repeats_as_documented() {
    repeats_as_documented("retries::envoy_repeats_as_documented", &ENVOY);
}

#[test]
fn haproxy_repeats_as_documented() {
    repeats_as_documented("retries::haproxy_repeats_as_documented", &HAPROXY);
}

#[test]
fn nginx_repeats_as_documented() {
    repeats_as_documented("retries::nginx_repeats_as_documented", &NGINX);
}

#[test]
fn caddy_repeats_as_documented() {
    repeats_as_documented("retries::caddy_repeats_as_documented", &CADDY);
}

#[test]
fn traefik_repeats_as_documented() {
    repeats_as_documented("retries::traefik_repeats_as_documented", &TRAEFIK);
}
