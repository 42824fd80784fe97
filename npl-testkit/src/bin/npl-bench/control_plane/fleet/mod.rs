// SPDX-License-Identifier: Apache-2.0
//! Kills and restarts the agents of a hundred Nodes at the same time, with one API server.

mod load;
mod nodes;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use npl_testkit::cluster::{Cluster, PodObject, annotation_of};
use npl_testkit::control_plane::{AGENT_USER, Account, ControlPlane};
use npl_testkit::poll;
use npl_testkit::run::Run;
use serde_json::{Value, json};

use self::nodes::{API_SERVER, Node, build_lan};
use super::environment::{LIMIT, NAMESPACE, in_parallel, is_published, let_pass, manifest, service};
use super::figures::{
    FLEET_AT_ONCE, FLEET_BUSIEST, FLEET_CHANGED, FLEET_CPU, FLEET_REFUSED, FLEET_REQUESTS, FLEET_RESTART, FLEET_WRITES,
};
use super::requests::Requests;
use super::usage;
use crate::Effort;
use crate::figures::{Samples, say};

/// The number of Nodes.
const COUNT: u8 = 100;
/// The number of Services, each with one Pod on every Node.
const SERVICES: u8 = 5;
/// The number of agents that start for the first time concurrently. The number is small, because the kernel verifies
/// the programs of each agent, which takes processor time.
const FIRST_STARTS: usize = 3;
/// The time after a restart for which the bench counts writes. An agent that made unnecessary writes would make them
/// within this time.
const WRITES_BY_THEN: Duration = Duration::from_secs(2);

/// A hundred Nodes and their cluster. The client in `cluster` is for threads in the API server's network namespace.
#[derive(Debug)]
struct Fleet<'a> {
    run: &'a Run,
    nodes: Vec<Node>,
    cluster: Cluster,
    kubeconfig: PathBuf,
}

/// Measures concurrent restarts of all agents, round by round.
pub(super) fn measure(run: &Run, effort: Effort, samples: &mut Samples) -> Result<()> {
    say(&format!("starting a control plane and {COUNT} Nodes"));
    let lan = build_lan(run)?;
    let plane = ControlPlane::start_for_nodes(run, &lan, API_SERVER, &[Account::agent()])?;
    let nodes = (1..=COUNT).map(|number| Node::connect(run, &lan, number)).collect::<Result<Vec<_>>>()?;
    lan.run(|| {
        let mut fleet = Fleet::new(run, &plane, nodes)?;
        fleet.start_for_the_first_time()?;
        for round in 0..effort.rounds {
            say(&format!("concurrent restart of all agents, round {} of {}", round + 1, effort.rounds));
            fleet.restart(samples)?;
        }
        Ok(())
    })?
}

impl<'a> Fleet<'a> {
    fn new(run: &'a Run, plane: &ControlPlane, nodes: Vec<Node>) -> Result<Self> {
        let kubeconfig = run.file("fleet.kubeconfig");
        fs::write(&kubeconfig, plane.kubeconfig(AGENT_USER)?).context("write the agents' kubeconfig")?;
        let cluster = Cluster::new(plane)?.from_inside();
        cluster.apply_access(&manifest())?;
        Requests::count_from_now_on(cluster.client())?;
        cluster.create_namespace(NAMESPACE)?;
        // The API server rejects Pods without this service account. No controller creates the account, so the bench
        // creates it.
        let accounts = format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts");
        cluster.client().create(&accounts, &json!({"metadata": {"name": "default"}}))?;
        let fleet = Self { run, nodes, cluster, kubeconfig };
        fleet.create_objects()?;
        Ok(fleet)
    }

    fn create_objects(&self) -> Result<()> {
        for number in 0..SERVICES {
            let app = app(number);
            self.cluster.create_service(&service(NAMESPACE, &app, &app).enabled())?;
        }
        let hosts: Vec<(u8, &Node)> = (0..=u8::MAX).zip(&self.nodes).collect();
        in_parallel(&hosts, |(host, node)| {
            self.cluster.create_node(&node.name, &[node.ip.into()])?;
            for number in 0..SERVICES {
                let (pod, ip) = (pod(node, number), [10, 64, *host, number].into());
                self.cluster.create_pod(&PodObject::new(NAMESPACE, &pod, &node.name, &app(number)))?;
                self.cluster.set_pod_running(NAMESPACE, &pod, node.ip.into(), &[ip])?;
            }
            Ok(())
        })
    }

    /// Starts the agents for the first time, a few at a time. This start is not measured.
    fn start_for_the_first_time(&mut self) -> Result<()> {
        say(&format!("starting {COUNT} agents for the first time, {FIRST_STARTS} at a time"));
        for few in self.nodes.chunks_mut(FIRST_STARTS) {
            few.iter_mut().try_for_each(|node| node.launch(self.run, &self.kubeconfig))?;
            few.iter_mut().try_for_each(Node::wait_until_ready)?;
        }
        self.wait_until_published()
    }

    fn restart(&mut self, samples: &mut Samples) -> Result<()> {
        let annotations = self.annotations()?;
        self.nodes.iter_mut().try_for_each(Node::send_kill)?;
        self.nodes.iter_mut().try_for_each(Node::wait_for_exit)?;
        let client = self.cluster.client().clone();
        let before = Requests::counted(&client)?;
        let refused = Requests::refused(&client)?;
        let (took, load) = load::observe(&client, || self.launch_all())?;
        let asked = Requests::counted(&client)?.since(before);
        let refused = Requests::refused(&client)? - refused;
        let changed = self.annotations()?.iter().filter(|(pod, now)| annotations.get(*pod) != Some(*now)).count();
        let mut cpu = Vec::new();
        for node in &mut self.nodes {
            cpu.push(usage::cpu_time(node.pid()?)?.as_secs_f64());
        }
        samples.add(&FLEET_CPU, &cpu, &[]);
        #[expect(clippy::cast_precision_loss, reason = "some thousands")]
        let counts = [
            (&FLEET_RESTART, took.as_secs_f64()),
            (&FLEET_WRITES, asked.writes as f64),
            (&FLEET_CHANGED, changed as f64),
            (&FLEET_REQUESTS, asked.all() as f64 / f64::from(COUNT)),
            (&FLEET_BUSIEST, load.busiest_second),
            (&FLEET_AT_ONCE, load.most_at_once as f64),
            (&FLEET_REFUSED, refused as f64),
        ];
        for (figure, count) in counts {
            samples.add(figure, &[count], &[]);
        }
        Ok(())
    }

    /// Starts all agents, waits until all are ready, and then waits for [`WRITES_BY_THEN`]. Returns the time until all
    /// agents were ready.
    fn launch_all(&mut self) -> Result<Duration> {
        let began = Instant::now();
        self.nodes.iter_mut().try_for_each(|node| node.launch(self.run, &self.kubeconfig))?;
        self.nodes.iter_mut().try_for_each(Node::wait_until_ready)?;
        let took = began.elapsed();
        let_pass(WRITES_BY_THEN)?;
        Ok(took)
    }

    fn wait_until_published(&self) -> Result<()> {
        let wanted = usize::from(COUNT) * usize::from(SERVICES);
        let is_done = || {
            let annotations = self.annotations().ok()?;
            let published = annotations.values().filter(|value| is_published(value.as_deref())).count();
            (published == wanted).then_some(())
        };
        poll::until("the annotations of all Pods", LIMIT, is_done).map(drop)
    }

    /// The annotation of each Pod.
    fn annotations(&self) -> Result<BTreeMap<String, Option<String>>> {
        let list = self.cluster.client().get(&format!("/api/v1/namespaces/{NAMESPACE}/pods"))?;
        let pods = list.get("items").and_then(Value::as_array).context("the list of Pods has no items")?;
        let name = |pod: &Value| pod.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default().to_owned();
        Ok(pods.iter().map(|pod| (name(pod), annotation_of(pod).map(str::to_owned))).collect())
    }
}

fn app(number: u8) -> String {
    format!("app-{number}")
}

fn pod(node: &Node, number: u8) -> String {
    format!("{}-{number}", node.name)
}
