// SPDX-License-Identifier: Apache-2.0
//! Runs events, such as a rollout, while a load balancer sends requests. The event must not affect any request.

use std::collections::BTreeSet;
use std::time::Duration;

use npl_testkit::balancer::{Balancer, Kind, Options, Port, Report};
use npl_testkit::echo::Protocol;
use npl_testkit::poll;
use npl_testkit::real_cluster::client_addresses;
use npl_testkit::tools;

use crate::control::Control;
use crate::world::{LIMIT, Pod, World};

/// The namespace of the workloads under load.
pub(crate) const NAMESPACE: &str = "busy";

/// The target ports of the Services.
const PORTS: [Port; 2] =
    [Port { target: 8080, protocol: Protocol::Tcp }, Port { target: 5300, protocol: Protocol::Udp }];

/// The number of members that the balancer has for each Pod: one per protocol and family.
const MEMBERS: usize = 4;

/// Requests per second, less than a third of the rate that two idle processors sustain with 40 Pods.
const RATE: u32 = 500;

/// The options for running an event under load.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Under {
    /// The delay until the balancer applies changes of its members.
    pub(crate) delay: Duration,
    /// Whether requests over IPv6 may be lost, because the event loses them without NPL as well. The [`Control`] shows
    /// these losses.
    pub(crate) may_lose_ipv6: bool,
}

impl Under {
    /// Runs `event` under load. Every request must receive a response from the intended Pod, and afterwards every ready
    /// Pod must respond.
    pub(crate) fn load(self, world: &mut World, event: impl FnOnce(&mut World)) -> Report {
        set_up(world);
        let options = Options {
            namespace: NAMESPACE.to_owned(),
            ports: PORTS.to_vec(),
            rate: RATE,
            delay: self.delay,
            addresses: client_addresses().to_vec(),
        };
        let client = world.cluster.client().clone();
        let balancer = Balancer::start(world.cluster.cluster().client(), &client, &options).unwrap();
        settle(world, &balancer);
        let control = self.may_lose_ipv6.then(|| Control::start(world));
        event(world);
        let last = settle(world, &balancer);
        let report = balancer.stop().unwrap();
        println!("    {report}");
        for failure in &report.failures {
            let (member, at) = (&failure.member, failure.at.as_secs_f32());
            println!(
                "    {at:.2} s after the start: {:?}, {} of {}: {}",
                failure.kind, member.server, member.pod, failure.error
            );
        }
        let lost_by_the_cni = control.map_or(0, |control| losses_of_the_cni(control, &report));
        let bad = [report.count(Kind::Lost) - lost_by_the_cni, report.count(Kind::Wrong), report.count(Kind::Refused)];
        assert_eq!(
            (bad, report.unserved),
            ([0, 0, 0], 0),
            "failed requests ([lost, wrong, refused], without a member)"
        );
        assert_eq!(
            report.answered.len(),
            MEMBERS,
            "there must be responses of both protocols in both families: {:?}",
            report.answered
        );
        let silent: Vec<&String> = last.iter().filter(|pod| !report.pods.contains_key(*pod)).collect();
        assert!(silent.is_empty(), "Pods that received no request: {silent:?}");
        world.lost += lost_by_the_cni;
        world.answered += report.answered.values().sum::<u64>();
        report
    }
}

/// Returns the number of lost requests over IPv6, and prints the losses of the control. Felix deletes a route for a
/// short time, so the control may lose no request although the load loses one.
fn losses_of_the_cni(control: Control, report: &Report) -> u64 {
    let counts = control.stop();
    println!("    to the Pods' own addresses, without NPL, over IPv4 and IPv6: {counts:?}");
    assert!(counts.sent.iter().all(|sent| *sent > 0), "the control must send requests of both families: {counts:?}");
    assert_eq!(counts.lost[0], 0, "the control must lose no request over IPv4");
    report.count_in(Kind::Lost, true)
}

/// Returns the Pods under load that are not terminating.
pub(crate) fn pods(world: &World) -> Vec<Pod> {
    world.pods(NAMESPACE, "load=yes")
}

/// Restarts a workload with `kubectl rollout restart` and waits for the completion.
pub(crate) fn renew(world: &World, workload: &str) {
    world.kubectl(&["rollout", "restart", workload, "--namespace", NAMESPACE]);
    world.wait_for_rollout(NAMESPACE, workload);
}

/// Applies the workloads under load and waits until they are ready.
pub(crate) fn set_up(world: &World) {
    let manifest = tools::repository_file("npl-testkit/tests/cluster/manifests/busy.yaml");
    world.kubectl(&["apply", "--filename", manifest.to_str().unwrap()]);
    for workload in ["deployment/web", "deployment/elastic", "statefulset/store"] {
        world.wait_for_rollout(NAMESPACE, workload);
    }
}

/// Waits until the balancer's members are exactly the current Pods and each has received a request. Returns the Pods'
/// names.
fn settle(world: &World, balancer: &Balancer) -> BTreeSet<String> {
    let complete = || {
        let pods = pods(world);
        let names: BTreeSet<String> = pods.iter().filter(|pod| pod.is_ready).map(|pod| pod.name.clone()).collect();
        let members = balancer.members();
        let known: BTreeSet<String> = members.iter().map(|member| member.pod.clone()).collect();
        (names.len() == pods.len() && names == known && members.len() == names.len() * MEMBERS).then_some(names)
    };
    let (names, _) = poll::until("the balancer to have all members", LIMIT, complete).unwrap();
    balancer.wait_for_a_round(LIMIT).unwrap();
    names
}
