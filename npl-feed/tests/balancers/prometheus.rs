// SPDX-License-Identifier: Apache-2.0
//! A real Prometheus discovers the members of a Service through the feed's HTTP service discovery, with the
//! configuration of docs/load-balancers.md, and scrapes the feed's own metrics for the queries of the dashboard.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use npl_feed::core::model::Change;
use npl_testkit::{load_balancers::example, poll, prometheus};
use serde_json::Value;

use crate::{
    backends::Backends,
    network::{self, NODES},
    scene::{Feed, Folder, LIMIT, address, last_lines, pod},
};

const LISTEN: &str = "127.0.0.1:9090";
const DASHBOARD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/chart/npl/files/dashboard.json");

/// A running Prometheus, which is killed when this value is dropped.
struct Prometheus {
    process: Child,
    log: PathBuf,
}

impl Prometheus {
    /// Starts Prometheus with the example of the document, which discovers the members, and with a job that scrapes the
    /// feed. Prometheus scrapes all targets every second.
    fn start(folder: &Path) -> Self {
        let feed = format!("  - job_name: npl-feed\n    static_configs: [{{targets: [\"{}:30181\"]}}]\n", NODES[0]);
        let text = format!("global: {{scrape_interval: 1s}}\n{}{feed}", example("prometheus.yaml").unwrap());
        fs::write(folder.join("prometheus.yaml"), text).unwrap();
        let log = folder.join("log");
        let output = fs::File::create(&log).unwrap();
        let mut command = prometheus::server().unwrap();
        command.args(["--config.file=prometheus.yaml", "--storage.tsdb.path=data"]).current_dir(folder);
        command.arg(format!("--web.listen-address={LISTEN}"));
        command.stdin(Stdio::null()).stdout(output.try_clone().unwrap()).stderr(output);
        Self { process: command.spawn().unwrap(), log }
    }

    /// Returns the samples of an instant query; an empty list while Prometheus does not answer.
    fn query(expression: &str) -> Vec<Value> {
        let url = format!("http://{LISTEN}/api/v1/query");
        let query = format!("query={expression}");
        let arguments = ["--silent", "--max-time", "20", "--get", "--data-urlencode", &query, &url];
        let answer = Command::new("curl").args(arguments).output().unwrap();
        let answer: Value = serde_json::from_slice(&answer.stdout).unwrap_or_default();
        answer["data"]["result"].as_array().cloned().unwrap_or_default()
    }

    /// The Pods of the members that Prometheus has discovered and scrapes successfully.
    fn scraped() -> BTreeSet<String> {
        let samples = Self::query(r#"up{job="npl-members"} == 1"#);
        samples.iter().map(|sample| sample["metric"]["pod"].as_str().unwrap_or("no label").to_owned()).collect()
    }

    fn wait(&mut self, what: &str, mut is_over: impl FnMut() -> bool) {
        let poll = || {
            let ended = self.process.try_wait().unwrap();
            assert!(ended.is_none(), "Prometheus has ended: {ended:?}");
            is_over().then_some(())
        };
        if let Err(error) = poll::until(what, LIMIT, poll) {
            let log = fs::read_to_string(&self.log).unwrap_or_default();
            panic!("{error:#}; Pods: {:?}\n{}", Self::scraped(), last_lines(&log));
        }
    }

    fn wait_for_pods(&mut self, pods: &[&str]) {
        let expected: BTreeSet<String> = pods.iter().map(|&pod| pod.to_owned()).collect();
        self.wait(&format!("scrape of exactly {pods:?}"), || Self::scraped() == expected);
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

/// The expressions of the dashboard's panels about the feed, as Grafana sends them.
fn queries() -> BTreeSet<String> {
    let dashboard: Value = serde_json::from_str(&fs::read_to_string(DASHBOARD).unwrap()).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.filter_map(|panel| panel["targets"].as_array()).flatten();
    let expressions = targets.map(|target| target["expr"].as_str().unwrap());
    // Grafana sets `$__rate_interval` to at least four scrape intervals.
    expressions.filter(|it| it.contains("npl_feed_")).map(|it| it.replace("$__rate_interval", "4s")).collect()
}

#[test]
fn prometheus_discovers_the_members_and_the_dashboard_shows_the_feed() {
    network::inside("prometheus::prometheus_discovers_the_members_and_the_dashboard_shows_the_feed", || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let folder = Folder::new("prometheus");
        let mut backends = Backends::new(runtime.handle());
        let pods = [("web-0", "web", 0), ("web-1", "web", 1), ("other-0", "other", 2)];
        let pods = pods.map(|(name, app, number)| {
            backends.start(name, address(number));
            pod(name, app, number)
        });
        let feed = Feed::start(NODES[0], pods.to_vec());
        let mut prometheus = Prometheus::start(&folder);
        prometheus.wait_for_pods(&["web-0", "web-1"]);

        let mut draining = pods[1].clone();
        draining.object.is_terminating = true;
        backends.start("web-2", address(3));
        for changed in [draining, pod("web-2", "web", 3)] {
            feed.send(Change::Pod(Box::new(changed)));
        }
        prometheus.wait_for_pods(&["web-0", "web-2"]);

        let mut missing = queries();
        assert!(missing.len() > 5, "{missing:?}");
        prometheus.wait("data for every query", || {
            missing.retain(|query| Prometheus::query(query).is_empty());
            missing.is_empty()
        });
    });
}
