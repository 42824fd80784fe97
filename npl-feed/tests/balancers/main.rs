// SPDX-License-Identifier: Apache-2.0
//! Real load balancers, with exactly the configuration of docs/load-balancers.md, take their members from the feed
//! while Pods come, go and fail, and while the feed is away. Every request is answered by a Pod of the Service.
//!
//! Each test runs in a network namespace of its own. The Pods are servers at the node addresses and node ports: that
//! the datapath leads there is the subject of other tests.

#![expect(
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a failure of these fails the test, and the times of each load balancer are shown"
)]

mod api_server;
mod backends;
mod load;
mod network;
mod scene;
mod tls;

use scene::{Balancer, Scene};

/// The whole life of a Service behind one load balancer.
fn serve_all_requests(test: &str, balancer: &Balancer) {
    network::inside(test, || {
        let mut scene = Scene::start(balancer);
        scene.scale_up();
        scene.roll();
        scene.lose_a_pod();
        scene.be_away();
        scene.scale_down();
        scene.finish();
    });
}

#[test]
fn envoy_serves_all_requests() {
    let balancer = Balancer {
        program: "envoy",
        arguments: &["--disable-hot-restart", "--concurrency", "1", "--log-level", "warn", "-c", "envoy.yaml"],
        files: &["envoy.yaml"],
    };
    serve_all_requests("envoy_serves_all_requests", &balancer);
}

#[test]
fn haproxy_serves_all_requests() {
    let balancer = Balancer { program: "haproxy", arguments: &["-db", "-f", "haproxy.cfg"], files: &["haproxy.cfg"] };
    serve_all_requests("haproxy_serves_all_requests", &balancer);
}

#[test]
fn nginx_serves_all_requests() {
    let balancer = Balancer {
        program: "nginx",
        arguments: &["-p", ".", "-c", "nginx.conf", "-e", "stderr", "-g", "daemon off; pid nginx.pid; user root;"],
        files: &["nginx.conf"],
    };
    serve_all_requests("nginx_serves_all_requests", &balancer);
}

#[test]
fn caddy_serves_all_requests() {
    let balancer = Balancer {
        program: "caddy",
        arguments: &["run", "--adapter", "caddyfile", "--config", "Caddyfile"],
        files: &["Caddyfile"],
    };
    serve_all_requests("caddy_serves_all_requests", &balancer);
}

#[test]
fn traefik_serves_all_requests() {
    let balancer = Balancer {
        program: "traefik",
        arguments: &["--configFile=traefik.yaml"],
        files: &["traefik.yaml", "routers.yaml"],
    };
    serve_all_requests("traefik_serves_all_requests", &balancer);
}
