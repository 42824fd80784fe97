// SPDX-License-Identifier: Apache-2.0
//! Real load balancers, with exactly the configuration of docs/load-balancers.md, read their members from the feed
//! while Pods are created, deleted and crash, and while a replica of the feed does not run. No request may fail: each
//! request must be answered by a Pod of the Service.
//!
//! Each test runs in its own network namespace. Servers at the node addresses and node ports stand in for the Pods;
//! other tests cover the datapath.

#![expect(
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a panic fails the test, and the tests print the times of each load balancer"
)]

mod api_server;
mod backends;
mod dns;
mod flood;
mod grpc;
mod hostile;
mod load;
mod memory;
mod network;
mod prometheus;
mod retries;
mod scene;
mod slow;
mod tls;

use npl_testkit::load_balancers::{self, CADDY, ENVOY, HAPROXY, LoadBalancer, NGINX, TRAEFIK};
use scene::Scene;

/// Runs one load balancer through all events in the life of a Service.
fn serve_all_requests(test: &str, balancer: &LoadBalancer, replicas: usize) {
    serve_all_requests_with(test, balancer, replicas, &[]);
}

/// Like [`serve_all_requests`], with these replacements in the load balancer's configuration.
fn serve_all_requests_with(test: &str, balancer: &LoadBalancer, replicas: usize, replacements: &[(&str, &str)]) {
    network::inside(test, || {
        let mut scene = Scene::start(balancer, replicas, replacements);
        scene.scale_up(4);
        scene.roll();
        scene.lose_a_pod();
        scene.be_away();
        scene.scale_down();
        scene.finish();
    });
}

#[test]
fn envoy_serves_all_requests() {
    serve_all_requests("envoy_serves_all_requests", &ENVOY, 1);
}

/// Envoy can also read the feed with the state-of-the-world variant of xDS: only the `api_type` of the example has to
/// be changed.
#[test]
fn envoy_serves_all_requests_by_state_of_the_world() {
    let replacement = ("api_type: DELTA_GRPC", "api_type: GRPC");
    assert_eq!(load_balancers::example("envoy.yaml").unwrap().matches(replacement.0).count(), 1);
    serve_all_requests_with("envoy_serves_all_requests_by_state_of_the_world", &ENVOY, 1, &[replacement]);
}

#[test]
fn haproxy_serves_all_requests() {
    serve_all_requests("haproxy_serves_all_requests", &HAPROXY, 1);
}

#[test]
fn nginx_serves_all_requests() {
    serve_all_requests("nginx_serves_all_requests", &NGINX, 1);
}

/// The members do not fit into an answer over UDP, so nginx repeats its query over TCP.
#[test]
fn nginx_uses_more_members_than_an_answer_by_udp_has() {
    network::inside("nginx_uses_more_members_than_an_answer_by_udp_has", || {
        let mut scene = Scene::start(&NGINX, 1, &[]);
        scene.scale_up(40);
        dns::expect_truncation_by_udp();
        scene.finish();
    });
}

/// Caddy looks up a member's address in the feed's DNS for each new connection to the Pod. While the first replica of
/// the feed is stopped, the second replica answers these DNS queries.
#[test]
fn caddy_serves_all_requests() {
    serve_all_requests("caddy_serves_all_requests", &CADDY, 2);
}

#[test]
fn traefik_serves_all_requests() {
    serve_all_requests("traefik_serves_all_requests", &TRAEFIK, 1);
}
