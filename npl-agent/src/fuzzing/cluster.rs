// SPDX-License-Identifier: Apache-2.0
//! The fuzz target `cluster`: Kubernetes objects, the state of the core, and the plan.

use serde::{Deserialize, de::DeserializeOwned};

use super::{Input, assert_is_one_line};
use crate::{
    core::{
        model::{Node, ObjectKey, Pod, Service},
        tests::fuzz::{Step, random_events, run},
    },
    kube::{
        AnnotationKeys,
        convert::{self, Converted},
        objects::{NodeObject, PodObject, ServiceObject},
    },
};

/// The maximum number of lines of an input that are watch events or steps.
const MAX_LINES: usize = 40;
/// The maximum length of an object's name and namespace, in bytes.
const NAME_BYTES: usize = 253;

/// Checks the decisions for a sequence of events. The first byte selects how the input is read: an even number means
/// that the remaining bytes are random seeds of events ([`random_events`]); an odd number means that the remaining bytes
/// are lines of text ([`step`]).
pub fn cluster(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    if input.byte().is_multiple_of(2) {
        return random_events(input.rest());
    }
    let text = input.text();
    let problems = run(text.lines().take(MAX_LINES).filter_map(step).collect());
    for problem in &problems {
        assert_is_one_line(problem);
    }
}

#[derive(Deserialize)]
struct Kind {
    kind: String,
}

/// Reads a line: an object of the API server after `+` (added or changed) or `-` (deleted), `pass`, `restart`, or
/// `wait SECONDS`. Returns `None` for any other line, and for an object that the API server would refuse.
fn step(line: &str) -> Option<Step> {
    match line.split_once(' ').unwrap_or((line, "")) {
        ("pass", _) => return Some(Step::Pass),
        ("restart", _) => return Some(Step::Restart),
        ("wait", seconds) => return Some(Step::Wait(seconds.parse().ok()?)),
        _ => {}
    }
    let (is_gone, json) = match (line.strip_prefix('+'), line.strip_prefix('-')) {
        (Some(json), _) => (false, json),
        (None, json) => (true, json?),
    };
    let keys = AnnotationKeys::new("nodeportlocal.antrea.io");
    match read::<Kind>(json)?.kind.as_str() {
        "Pod" => {
            let Converted { object: pod, .. } = convert::pod(read::<PodObject>(json)?, &keys)?;
            check_pod(&pod);
            is_possible(&pod.key).then_some(if is_gone { Step::PodGone(pod) } else { Step::Pod(pod) })
        }
        "Service" => {
            let Converted { object: service, .. } = convert::service(read::<ServiceObject>(json)?, &keys)?;
            check_service(&service);
            is_possible(&service.key).then_some(if is_gone {
                Step::ServiceGone(service)
            } else {
                Step::Service(service)
            })
        }
        "Node" => {
            let Converted { object: node, .. } = convert::node(read::<NodeObject>(json)?)?;
            check_node(&node);
            Some(Step::Node(node)).filter(|_| !is_gone)
        }
        _ => None,
    }
}

fn read<T: DeserializeOwned>(json: &str) -> Option<T> {
    serde_json::from_str(json).ok()
}

/// Whether the API server accepts an object with this name and namespace.
fn is_possible(key: &ObjectKey) -> bool {
    let is_name = |name: &str| {
        let is_allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
        (1..=NAME_BYTES).contains(&name.len()) && name.chars().all(is_allowed)
    };
    is_name(&key.namespace) && is_name(&key.name)
}

fn check_pod(pod: &Pod) {
    assert!(pod.ips.iter().all(|ip| !ip.is_unspecified() && *ip == ip.to_canonical()), "{:?}", pod.ips);
    let mut distinct = pod.ips.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), pod.ips.len(), "{:?}", pod.ips);
    for port in &pod.ports {
        assert!(port.port.0 != 0 && port.host_port.is_none_or(|number| number.0 != 0), "{port:?}");
    }
    assert_ne!(pod.uid.generation(), 0);
}

fn check_service(service: &Service) {
    assert!(service.node_ports.iter().all(|port| port.0 != 0), "{:?}", service.node_ports);
}

fn check_node(node: &Node) {
    let mut ips = node.internal_ips.iter().chain(&node.external_ips);
    assert!(ips.all(|ip| !ip.is_unspecified() && *ip == ip.to_canonical()), "{node:?}");
}
