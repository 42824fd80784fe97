// SPDX-License-Identifier: Apache-2.0
//! Tests that the agent receives the list of Services compressed.

use npl_testkit::cluster::{Port, ServiceObject};
use npl_testkit::echo::Protocol;

use crate::world::{NAMESPACE, POD_PORT, World};

/// The number of Services. Their list exceeds 128 KiB, the size from which the API server compresses responses.
const SERVICES: usize = 400;

#[test]
fn the_list_of_services_is_received_compressed() {
    let mut world = World::behind_proxy_without_agent();
    for number in 0..SERVICES {
        let port = Port::new("http", 80, Protocol::Tcp).to(POD_PORT);
        let service = ServiceObject::new(NAMESPACE, &format!("web-{number}"), "web", vec![port]);
        world.cluster.create_service(&service).unwrap();
    }
    let uncompressed = world.cluster.client().text("/api/v1/services?limit=500").unwrap().len();
    world.start_agent(&[]);
    let received = usize::try_from(world.proxy().bytes_from_server()).unwrap();
    assert!(received * 3 < uncompressed, "{received} bytes received, all Services have {uncompressed}");
}
