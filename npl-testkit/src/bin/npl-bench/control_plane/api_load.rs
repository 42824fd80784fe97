// SPDX-License-Identifier: Apache-2.0
//! Measures the requests of one agent, and the bytes that the agent reads from the API server, in a cluster with many
//! Services. The model of a large cluster multiplies the figures of one agent by the number of Nodes: no agent reads
//! objects of other Nodes, so an agent's share does not depend on the number of Nodes.

use std::time::Duration;

use anyhow::Result;
use npl_testkit::proxy::Proxy;
use npl_testkit::run::Run;
use serde_json::json;

use super::environment::{
    Environment, LIMIT, NAMESPACE, NODE, in_parallel, is_published, let_pass, numbered, service, with_control_plane,
};
use super::figures::{
    MODEL_READ, MODEL_READ_NAMESPACES, MODEL_READ_SELECTOR, MODEL_READ_STREAMED, MODEL_REQUESTS,
    MODEL_REQUESTS_STREAMED, REPLACED_READ, REPLACED_REQUESTS, RESTART_READ, RESTART_READ_NAMESPACES,
    RESTART_READ_SELECTOR, RESTART_READ_STREAMED, RESTART_SENT, RESTART_SENT_NAMESPACES, RESTART_SENT_STREAMED,
    SERVICE_READ, SERVICE_READ_NAMESPACES, START_READ, START_SENT,
};
use super::requests::Requests;
use super::services::{OTHERS, Others};
use crate::Effort;
use crate::figures::{Figure, Samples, say};

/// The number of Services in other namespaces than [`NAMESPACE`].
const OTHER_SERVICES: usize = 1_900;
/// The number of Services in [`NAMESPACE`]. All have the label of [`SELECTOR`], and the first one selects the Pods.
const OWN_SERVICES: usize = 100;
const SELECTOR: &str = "npl=yes";
/// The number of Pods on the Node.
const PODS: usize = 30;
/// The number of Pods that are replaced, and of Services that are changed, in one sample.
const CHANGES: usize = 20;
/// The number of Nodes in the model.
const NODES: f64 = 5_000.0;
/// The time in which an agent sends its last requests and receives its last events after a start or a change.
const SETTLES: Duration = Duration::from_secs(2);

/// The flags that limit the Services that an agent reads.
#[derive(Clone, Copy, Debug)]
enum Limit {
    Unlimited,
    Selector,
    Namespaces,
}

impl Limit {
    const fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Unlimited => &[],
            Self::Selector => &["--service-selector", SELECTOR],
            Self::Namespaces => &["--namespaces", NAMESPACE],
        }
    }
}

/// The requests of one agent, watches included, and the bytes that the agent has read.
#[derive(Clone, Copy, Debug)]
struct Traffic {
    requests: f64,
    bytes: f64,
}

/// The traffic of one agent in one round.
#[derive(Clone, Copy, Debug)]
struct Measured {
    /// The first start on the Node, with one write for each Pod.
    start: Traffic,
    /// A restart with all Pods published, as in a rolling update of the DaemonSet.
    restart: Traffic,
    /// One Pod that is deleted and created again.
    replaced: Traffic,
    /// One changed Service of another namespace.
    service: Traffic,
}

/// Measures with three API servers: the first compresses lists and supports streaming lists, the second does not
/// compress lists, and the third does not support streaming lists.
pub(super) fn measure(effort: Effort, samples: &mut Samples) -> Result<()> {
    let compressed = with_api_server(&[], |scene| {
        for _round in 0..effort.rounds {
            let limited = scene.measure(Limit::Selector)?;
            add(samples, &RESTART_READ_SELECTOR, limited.restart.bytes / 1e3);
            add(samples, &MODEL_READ_SELECTOR, limited.restart.bytes * NODES / 1e9);
            let limited = scene.measure(Limit::Namespaces)?;
            add(samples, &RESTART_SENT_NAMESPACES, limited.restart.requests);
            add(samples, &RESTART_READ_NAMESPACES, limited.restart.bytes / 1e3);
            add(samples, &MODEL_READ_NAMESPACES, limited.restart.bytes * NODES / 1e9);
            add(samples, &SERVICE_READ_NAMESPACES, limited.service.bytes / 1e3);
        }
        scene.rounds(effort)
    })?;
    let uncompressed =
        with_api_server(&["--feature-gates=APIResponseCompression=false"], |scene| scene.rounds(effort))?;
    let listed = with_api_server(&["--feature-gates=WatchList=false"], |scene| scene.rounds(effort))?;
    for (with, without) in compressed.iter().zip(&uncompressed) {
        add(samples, &START_SENT, with.start.requests);
        add(samples, &RESTART_SENT, with.restart.requests);
        add(samples, &MODEL_REQUESTS, with.restart.requests * NODES);
        add(samples, &REPLACED_REQUESTS, with.replaced.requests);
        samples.add(&START_READ, &[with.start.bytes / 1e3], &[without.start.bytes / 1e3]);
        samples.add(&RESTART_READ, &[with.restart.bytes / 1e3], &[without.restart.bytes / 1e3]);
        samples.add(&MODEL_READ, &[with.restart.bytes * NODES / 1e9], &[without.restart.bytes * NODES / 1e9]);
        samples.add(&REPLACED_READ, &[with.replaced.bytes / 1e3], &[without.replaced.bytes / 1e3]);
        samples.add(&SERVICE_READ, &[with.service.bytes / 1e3], &[without.service.bytes / 1e3]);
    }
    for (streamed, listed) in compressed.iter().zip(&listed) {
        let (streamed, listed) = (streamed.restart, listed.restart);
        samples.add(&RESTART_SENT_STREAMED, &[streamed.requests], &[listed.requests]);
        samples.add(&RESTART_READ_STREAMED, &[streamed.bytes / 1e3], &[listed.bytes / 1e3]);
        samples.add(&MODEL_REQUESTS_STREAMED, &[streamed.requests * NODES], &[listed.requests * NODES]);
        samples.add(&MODEL_READ_STREAMED, &[streamed.bytes * NODES / 1e9], &[listed.bytes * NODES / 1e9]);
    }
    Ok(())
}

fn add(samples: &mut Samples, figure: &Figure, value: f64) {
    samples.add(figure, &[value], &[]);
}

/// Starts an API server with these flags and with all objects, and runs `work` in the API server's network namespace.
fn with_api_server<T: Send>(flags: &[&str], work: impl FnOnce(&mut Scene<'_, '_>) -> Result<T> + Send) -> Result<T> {
    let flags: Vec<String> = flags.iter().map(ToString::to_string).collect();
    with_control_plane(&Run::start()?, &flags, |env| {
        let proxy = Proxy::start(env.netns, env.plane.address())?;
        let mut scene = Scene { env, proxy: &proxy, pods: numbered("app", PODS), changes: 0 };
        scene.create_objects()?;
        work(&mut scene)
    })
}

struct Scene<'a, 'b> {
    env: &'a mut Environment<'b>,
    /// The proxy through which the agents reach the API server.
    proxy: &'a Proxy,
    pods: Vec<String>,
    /// The number of samples of changed Services so far. Each change of a Service writes this number, so that it
    /// differs from the previous change.
    changes: usize,
}

impl Scene<'_, '_> {
    fn create_objects(&self) -> Result<()> {
        Requests::count_from_now_on(self.env.cluster.client())?;
        self.env.create_pods(&self.pods, NODE, &app(0))?;
        self.env.run_pods(&self.pods)?;
        let labels = json!({"metadata": {"labels": {"npl": "yes"}}});
        in_parallel(&(0..OWN_SERVICES).collect::<Vec<_>>(), |number| {
            let name = app(*number);
            self.env.cluster.create_service(&service(NAMESPACE, &name, &name))?;
            self.env.cluster.client().merge_patch_unread(&service_path(NAMESPACE, &name), &labels)
        })?;
        self.env.cluster.create_namespace(OTHERS)?;
        Others::default().grow_to(self.env, OTHER_SERVICES)
    }

    fn rounds(&mut self, effort: Effort) -> Result<Vec<Measured>> {
        (0..effort.rounds).map(|_round| self.measure(Limit::Unlimited)).collect()
    }

    /// Starts an agent on the Node, which has no kernel state of NPL and no annotations, measures the agent's traffic,
    /// and removes the annotations again.
    fn measure(&mut self, limit: Limit) -> Result<Measured> {
        say(&format!("counting requests and bytes of one agent: {limit:?}"));
        self.env.cluster.set_service_enabled(NAMESPACE, &app(0), true)?;
        let (mut agents, start) = self.traffic_of(|scene| {
            let kubeconfig = scene.env.plane.agent_kubeconfig_by(scene.proxy.port())?;
            let agents = scene.env.start_agent_with(&kubeconfig, limit.flags())?;
            scene.env.wait_for_all(&scene.pods, is_published)?;
            Ok(agents)
        })?;
        let ((), restart) = self.traffic_of(|_scene| agents.agent.restart())?;
        let ((), replaced) = self.traffic_of(Self::replace_pods)?;
        let ((), service) = self.traffic_of(Self::change_services)?;
        self.env.cluster.set_service_enabled(NAMESPACE, &app(0), false)?;
        self.env.wait_for_all(&self.pods, |value| value.is_none())?;
        drop(agents);
        Ok(Measured { start, restart, replaced: replaced.divided(CHANGES), service: service.divided(CHANGES) })
    }

    /// Returns the result of `work`, and the traffic of the agent during `work` and for [`SETTLES`] afterwards.
    fn traffic_of<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<(T, Traffic)> {
        let requests = Requests::counted(self.env.cluster.client())?;
        let bytes = self.proxy.bytes_from_server();
        let result = work(self)?;
        let_pass(SETTLES)?;
        let bytes = self.proxy.bytes_from_server() - bytes;
        let requests = Requests::counted(self.env.cluster.client())?.since(requests).all();
        #[expect(clippy::cast_precision_loss, reason = "some million")]
        Ok((result, Traffic { requests: requests as f64, bytes: bytes as f64 }))
    }

    /// Deletes Pods and creates Pods of the same names, one after the other.
    fn replace_pods(&mut self) -> Result<()> {
        for pod in self.pods.iter().take(CHANGES) {
            self.env.cluster.delete_pod(NAMESPACE, pod)?;
            self.env.create_pods(std::slice::from_ref(pod), NODE, &app(0))?;
            // The Pod in the deletion event still has the annotation; the new Pod has none.
            self.env.annotations.wait_for(pod, LIMIT, |value| value.is_none())?;
            let pod = std::slice::from_ref(pod);
            self.env.run_pods(pod)?;
            self.env.wait_for_all(pod, is_published)?;
        }
        Ok(())
    }

    /// Changes Services of another namespace that are not enabled.
    fn change_services(&mut self) -> Result<()> {
        self.changes += 1;
        let change = json!({"metadata": {"annotations": {"example.org/change": self.changes.to_string()}}});
        for number in 1..=CHANGES {
            let path = service_path(OTHERS, &Others::name(OTHER_SERVICES - number));
            self.env.cluster.client().merge_patch_unread(&path, &change)?;
        }
        Ok(())
    }
}

impl Traffic {
    fn divided(self, count: usize) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "a handful")]
        let count = count as f64;
        Self { requests: self.requests / count, bytes: self.bytes / count }
    }
}

fn app(number: usize) -> String {
    format!("app-{number}")
}

fn service_path(namespace: &str, name: &str) -> String {
    format!("/api/v1/namespaces/{namespace}/services/{name}")
}
