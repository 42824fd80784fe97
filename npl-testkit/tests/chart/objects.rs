// SPDX-License-Identifier: Apache-2.0
//! Renders and finds the chart's Kubernetes objects.

use npl_testkit::helm;
use serde_json::Value;

/// Parses the Kubernetes objects of a YAML text.
pub(crate) fn parse(text: &str) -> Vec<Value> {
    let objects: Vec<Value> = serde_saphyr::from_multiple(text).unwrap();
    objects.into_iter().filter(|object| !object.is_null()).collect()
}

/// Returns the objects that Helm renders from the chart with these values. Each value is a path and its JSON.
pub(crate) fn rendered(values: &[(&str, &str)]) -> Vec<Value> {
    let set: Vec<String> = values.iter().map(|(path, json)| format!("{path}={json}")).collect();
    let arguments: Vec<&str> = set.iter().flat_map(|set| ["--set-json", set]).collect();
    parse(&helm::template(&arguments).unwrap())
}

/// Returns the object with this kind and name; `None` if Helm does not render it.
pub(crate) fn find<'a>(objects: &'a [Value], kind: &str, name: &str) -> Option<&'a Value> {
    objects.iter().find(|object| object["kind"] == kind && object["metadata"]["name"] == name)
}
