// SPDX-License-Identifier: Apache-2.0
//! Objects that Helm renders.

use npl_testkit::helm;
use serde_json::Value;

/// The objects of a YAML text.
pub(crate) fn parse(text: &str) -> Vec<Value> {
    let objects: Vec<Value> = serde_saphyr::from_multiple(text).unwrap();
    objects.into_iter().filter(|object| !object.is_null()).collect()
}

/// The objects that the chart renders with these values, each a path and JSON.
pub(crate) fn rendered(values: &[(&str, &str)]) -> Vec<Value> {
    let set: Vec<String> = values.iter().map(|(path, json)| format!("{path}={json}")).collect();
    let arguments: Vec<&str> = set.iter().flat_map(|set| ["--set-json", set]).collect();
    parse(&helm::template(&arguments).unwrap())
}

/// The object of a kind and name; none if it is not rendered.
pub(crate) fn find<'a>(objects: &'a [Value], kind: &str, name: &str) -> Option<&'a Value> {
    objects.iter().find(|object| object["kind"] == kind && object["metadata"]["name"] == name)
}
