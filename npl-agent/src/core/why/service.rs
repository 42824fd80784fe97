// SPDX-License-Identifier: Apache-2.0
//! Builds the chains of a Service: the chains of all Pods on this Node that the Service selects.

use super::{Chain, Link, LinkReport, outside_of_namespaces, pod};
use crate::core::{model::ServiceKey, pages, state::PlannerState, view::AgentView};

pub(super) fn chains(state: &PlannerState, view: &AgentView, key: &ServiceKey) -> Vec<Chain> {
    let subject = || format!("service {key}");
    let alone = |links: Vec<LinkReport>| vec![Chain { subject: subject(), frontend: None, links }];
    if let Some(outside) = outside_of_namespaces(state, &key.namespace) {
        return alone(vec![outside]);
    }
    let Some(service) = state.snapshot.service(key) else {
        let text = "the agent does not act on a Service of this name: the Service does not exist, its annotation \
                    DOMAIN/enabled is not exactly \"true\", its type is NodePort or ExternalName, its selector is \
                    empty, or the agent's --service-selector excludes its labels";
        return alone(vec![LinkReport::broken(Link::Enabled, text, pages::NO_ANNOTATION)]);
    };
    let enabled = LinkReport::ok(Link::Enabled, format!("service {key} is enabled"));
    let pods: Vec<_> = state
        .snapshot
        .pods()
        .filter(|pod| service.key.namespace == pod.key.namespace && service.selects(pod))
        .collect();
    if pods.is_empty() {
        let labels: Vec<String> = service.selector.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let text = format!(
            "no Pod of this Node has the labels {} in namespace {}; Pods of other Nodes are served by the agents of \
             those Nodes",
            labels.join(","),
            key.namespace
        );
        return alone(vec![enabled, LinkReport::broken(Link::Selected, text, pages::NO_ANNOTATION)]);
    }
    pods.into_iter().flat_map(|pod| pod::chains(state, view, &pod.key, None, Some(key))).collect()
}
