// SPDX-License-Identifier: Apache-2.0
//! Tests of the objects of `kubectl npl test`.

use super::*;
use crate::cli::kubectl::script::Script;

#[test]
fn the_ports_of_all_protocols_differ() {
    Script::new("ports", "").with_kubectl(|kubectl| {
        let service = Scene::new(kubectl, &[Site::default()]).unwrap().service();
        let ports = service["spec"]["ports"].as_array().unwrap();
        let numbers: BTreeSet<u64> = ports.iter().filter_map(|port| port["port"].as_u64()).collect();
        assert_eq!((numbers.len(), ports.len()), (2, 2));
    });
}
