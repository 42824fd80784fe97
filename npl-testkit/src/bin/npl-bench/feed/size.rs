// SPDX-License-Identifier: Apache-2.0
//! Measures the memory and the processor time of a feed with 10 000 members.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use anyhow::Result;
use npl_testkit::cluster::{MAPPING_ANNOTATION, PodObject, Port, ServiceObject};
use npl_testkit::echo::Protocol;
use serde_json::json;

use super::figures::{RESIDENT, STEADY_CPU};
use super::scene::{FIRST_NODE_PORT, POD_PORT, Scene};
use crate::Effort;
use crate::control_plane::{in_parallel, let_pass, usage};
use crate::figures::{Samples, say};

/// The namespace of the Pods.
const NAMESPACE: &str = "many";
const MEMBERS: u16 = 10_000;
/// The number of Services, and of Nodes. Each Service has one Pod on each Node.
const SERVICES: u16 = 100;

/// The time that the feed gets to complete its work after it has listed all members.
const SETTLES: Duration = Duration::from_secs(1);

/// Creates the members, and measures a feed that starts with these members, round by round.
pub(super) fn measure(scene: &mut Scene<'_>, effort: Effort, samples: &mut Samples) -> Result<()> {
    say(&format!("measuring a feed with {MEMBERS} members"));
    create(scene)?;
    for _ in 0..effort.rounds {
        // The Pod that `Scene::start` has created is a member, too.
        let feed = scene.restart_feed(usize::from(MEMBERS) + 1)?;
        let_pass(SETTLES)?;
        samples.add(&RESIDENT, &[usage::memory(feed)?.resident], &[]);
        let before = usage::cpu_time(feed)?;
        let_pass(effort.steady)?;
        let spent = usage::cpu_time(feed)?.saturating_sub(before);
        samples.add(&STEADY_CPU, &[spent.as_secs_f64() / effort.steady.as_secs_f64() * 100.0], &[]);
    }
    Ok(())
}

fn create(scene: &Scene<'_>) -> Result<()> {
    let cluster = scene.cluster();
    cluster.create_namespace(NAMESPACE)?;
    let numbers: Vec<u16> = (0..SERVICES).collect();
    in_parallel(&numbers, |number| {
        cluster.create_node(&node(*number), &[node_ip(*number)])?;
        let ports = vec![Port::new("http", 80, Protocol::Tcp).to(POD_PORT)];
        cluster.create_service(&ServiceObject::new(NAMESPACE, &service(*number), &service(*number), ports).enabled())
    })?;
    let numbers: Vec<u16> = (0..MEMBERS).collect();
    in_parallel(&numbers, |number| {
        let (at, of) = (number % SERVICES, number / SERVICES);
        let name = format!("{}-{at}", service(of));
        let declared = vec![Port::new("http", POD_PORT, Protocol::Tcp)];
        cluster.create_pod(&PodObject::new(NAMESPACE, &name, &node(at), &service(of)).with_ports(declared))?;
        let value = json!([{ "podPort": POD_PORT, "nodeIP": node_ip(at), "nodePort": FIRST_NODE_PORT + of,
                             "protocol": "tcp", "protocols": ["tcp"] }]);
        let patch = json!({
            "metadata": { "annotations": { MAPPING_ANNOTATION: value.to_string() } },
            "status": { "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }] },
        });
        cluster.client().merge_patch_unread(&format!("/api/v1/namespaces/{NAMESPACE}/pods/{name}/status"), &patch)
    })
}

fn node(number: u16) -> String {
    format!("many-{number}")
}

fn node_ip(number: u16) -> IpAddr {
    let [high, low] = number.to_be_bytes();
    Ipv4Addr::new(198, 18, high, low).into()
}

fn service(number: u16) -> String {
    format!("web-{number}")
}
