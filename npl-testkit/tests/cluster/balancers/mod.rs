// SPDX-License-Identifier: Apache-2.0
//! Tests Envoy, `HAProxy`, nginx, Caddy and Traefik outside of the cluster during rollouts, restarts and outages. Their
//! configuration is taken from docs/load-balancers.md, with other addresses. A Pod of the Service must answer every
//! request. Only Caddy may lose requests while no replica of the feed runs: for each new connection to a Pod, Caddy looks
//! up the Node's address in the feed's DNS.

mod load;
mod scene;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use npl_testkit::poll;
use serde_json::Value;

use self::scene::Scene;
use crate::agent;
use crate::load::{NAMESPACE, pods, renew};
use crate::moves::{drain, scale};
use crate::restarts::interrupt_the_api_server;
use crate::world::{self, AGENT_NAMESPACE, LIMIT, World};

/// The number of Pods to which the workload `elastic` is scaled.
const MANY: usize = 40;

/// The number of agents and of replicas of the feed.
const REPLICAS: usize = 2;

/// The duration of the API server's outage.
const API_SERVER_OUTAGE: Duration = Duration::from_mins(1);

pub(crate) fn real_load_balancers_lose_no_request(world: &mut World) {
    let mut scene = Scene::start(world);
    if world.cluster.cni().api_server_reaches_pods() {
        show_members(world);
    }
    scene.during(world, "rolling update, also of another Service's Pods", |world| {
        world.kubectl(&["rollout", "restart", "deployment/web", "--namespace", world::NAMESPACE]);
        renew(world, "deployment/web");
        world.wait_for_rollout(world::NAMESPACE, "deployment/web");
    });
    scene.during(world, "update of a StatefulSet", |world| renew(world, "statefulset/store"));
    scene.during(world, "scaled to 40 Pods", |world| scale(world, MANY));
    scene.during(world, "scaled to one Pod", |world| scale(world, 1));
    scene.during(world, "a Node is drained and uncordoned", |world| drain(world));
    scene.during(world, "agents killed and updated", |world| {
        kill(world, "agent", "npl-agent", REPLICAS);
        renew(world, "deployment/elastic");
        world.kubectl(&["rollout", "restart", "daemonset/npl-agent", "--namespace", AGENT_NAMESPACE]);
        renew(world, "deployment/elastic");
        world.wait_for_rollout(AGENT_NAMESPACE, "daemonset/npl-agent");
    });
    scene.during(world, "feed updated after one replica was killed", |world| {
        kill(world, "feed", "npl-feed", 1);
        renew(world, "deployment/elastic");
        world.kubectl(&["rollout", "restart", "deployment/npl-feed", "--namespace", AGENT_NAMESPACE]);
        renew(world, "deployment/elastic");
        world.wait_for_rollout(AGENT_NAMESPACE, "deployment/npl-feed");
    });
    scene.during_outage_of_the_feed(world, "both replicas of the feed killed", |world| {
        scene::outage_during(world, |world| {
            kill(world, "feed", "npl-feed", REPLICAS);
            renew(world, "deployment/elastic");
            world.wait_for_rollout(AGENT_NAMESPACE, "deployment/npl-feed");
        })
    });
    scene.during(world, "API server down for a minute", |world| {
        interrupt_the_api_server(world, API_SERVER_OUTAGE);
        renew(world, "deployment/elastic");
    });
    scene.finish(world);
}

/// `kubectl npl members` must show exactly the Pods of the Service, all of them ready, and both replicas of the feed
/// must agree.
fn show_members(world: &World) {
    let arguments = ["members", "web:http", "--namespace", NAMESPACE, "--settle", "10s", "--output", "json"];
    let output = world.plug_in(&arguments).output().unwrap();
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}: {text}{errors}", output.status);
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&answer["agree"], answer["replicas"].as_array().map(Vec::len)), (&Value::Bool(true), Some(REPLICAS)));
    // Pods that an earlier test has deleted may still drain.
    let members = answer["ports"][0]["members"].as_array().unwrap();
    let members: Vec<&Value> = members.iter().filter(|member| member["draining"] == false).collect();
    let shown: BTreeSet<&str> = members.iter().filter_map(|member| member["pod"].as_str()).collect();
    let pods = pods(world);
    assert_eq!(shown, pods.iter().map(|pod| pod.name.as_str()).collect(), "{text}");
    assert!(members.iter().all(|member| member["ready"] == true), "{text}");
}

/// Kills the process of `count` Pods of a component with SIGKILL, and waits until these processes have ended; the
/// kubelets start new containers.
fn kill(world: &World, component: &str, program: &str, count: usize) {
    let pods = world.pods(AGENT_NAMESPACE, &format!("app.kubernetes.io/component={component}"));
    assert_eq!(pods.len(), REPLICAS, "{pods:?}");
    let processes: Vec<_> = pods.iter().take(count).map(|pod| agent::process_of(world, pod, program)).collect();
    for process in &processes {
        signal::kill(Pid::from_raw(i32::try_from(*process).unwrap()), Signal::SIGKILL).unwrap();
    }
    let have_ended = || processes.iter().all(|it| !Path::new(&format!("/proc/{it}")).exists()).then_some(());
    poll::until("the end of the killed processes", LIMIT, have_ended).unwrap();
}
