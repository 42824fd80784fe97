// SPDX-License-Identifier: Apache-2.0
//! Tests Services and Pods of all kinds: which annotation the agent publishes, and whether the node ports in the
//! annotation work.

use npl_testkit::cluster::{Entry, timeout_option};
use npl_testkit::echo::Protocol;
use npl_testkit::poll;
use npl_testkit::tools;

use crate::clients;
use crate::traffic::assert_answers;
use crate::world::{LIMIT, Pod, World};

const NAMESPACE: &str = "kinds";

/// The expected annotation.
#[derive(Debug, PartialEq, Eq)]
enum Published {
    /// No annotation.
    Nothing,
    /// An annotation with a separate node port in each of these families: `true` is IPv4, `false` is IPv6.
    Mapped(&'static [bool]),
    /// An annotation with this host port in both families.
    Host(u16),
}

const KINDS: [(&str, Published); 8] = [
    ("headless", Published::Mapped(&[true])),
    ("load-balancer", Published::Mapped(&[true])),
    // A Service of type NodePort already has a port on every Node, so NPL, like Antrea, publishes no node ports for its
    // Pods.
    ("node-port", Published::Nothing),
    ("only-ipv4", Published::Mapped(&[true])),
    ("only-ipv6", Published::Mapped(&[false])),
    ("dual-stack", Published::Mapped(&[true, false])),
    ("host-port", Published::Host(8090)),
    ("host-network", Published::Host(8091)),
];

pub(crate) fn every_kind_of_service_and_pod_is_published_correctly(world: &mut World) {
    let manifest = tools::repository_file("npl-testkit/tests/cluster/manifests/kinds.yaml");
    world.kubectl(&["apply", "--filename", manifest.to_str().unwrap()]);
    world.kubectl(&["wait", "--for=condition=Ready", "pods", "--all", "--namespace", NAMESPACE, timeout_option()]);
    let all_published = || {
        let pods = world.pods(NAMESPACE, "kind");
        let lacking = KINDS.iter().filter(|(name, published)| {
            let pod = pods.iter().find(|pod| pod.name == *name);
            *published != Published::Nothing && pod.is_none_or(|pod| pod.annotation.is_none())
        });
        (lacking.count() == 0).then_some(pods)
    };
    let (pods, _) = poll::until("the annotations of every kind", LIMIT, all_published).unwrap();
    let outside = clients::outside(world);
    for (name, published) in &KINDS {
        let pod = pods.iter().find(|pod| pod.name == *name).unwrap();
        let entries = entries(pod);
        let families: Vec<bool> = entries.iter().map(|entry| entry.address().is_ipv4()).collect();
        match published {
            Published::Nothing => assert_eq!(pod.annotation, None, "{name}"),
            Published::Mapped(wanted) => assert_eq!(families, *wanted, "{name}: {entries:?}"),
            Published::Host(port) => {
                assert_eq!(families, [true, false], "{name}: {entries:?}");
                assert!(entries.iter().all(|entry| entry.node_port == *port), "{name}: {entries:?}");
            }
        }
        for entry in &entries {
            assert_answers(&outside, pod, Protocol::Tcp, entry.address());
        }
    }
    world.kubectl(&["delete", "--filename", manifest.to_str().unwrap(), timeout_option()]);
}

/// Returns the annotation entries, sorted by family.
fn entries(pod: &Pod) -> Vec<Entry> {
    let mut entries = pod.annotation.as_deref().map(|value| Entry::parse(value).unwrap()).unwrap_or_default();
    entries.sort_by_key(|entry| entry.address().is_ipv6());
    entries
}
