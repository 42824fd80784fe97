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

/// The Service of the test is in a Namespace with a random name, which no list of namespaces contains.
#[test]
fn agents_that_read_only_certain_namespaces_are_refused() {
    Script::new("namespaces", "").with_kubectl(|kubectl| {
        let mut limited = Site { node: "node-2".to_owned(), ..Site::default() };
        limited.agent.variables.insert("NPL_NAMESPACES".to_owned(), "shop".to_owned());
        let Err(error) = Scene::new(kubectl, &[Site::default(), limited]) else { panic!("the test starts") };
        let error = error.to_string();
        assert!(error.starts_with("the agent on Node node-2 reads only Services of the namespaces shop"), "{error}");
    });
}
