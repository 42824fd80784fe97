// SPDX-License-Identifier: Apache-2.0
//! The fuzz target `annotation`: the mapping annotation of a Pod, the node ports that a Pod requests, and a Service's
//! list of allowed sources.

use std::collections::BTreeSet;

use super::{Input, assert_is_one_line};
use crate::core::{
    model::{
        Family, Protocol,
        node_port_requests::{MAX_REQUESTS, NodePortRequests},
        settings::{AnnotationFormat, ProtocolPairing},
        sources::{AllowList, MAX_RANGES, SourceRange},
    },
    publish::{
        annotation::{Entry, SeenEntry, Style, encode, is_right, published, published_entries, seen_entries},
        problem::Cause,
        request_problem::RequestProblem,
    },
};

const FORMATS: [AnnotationFormat; 3] = [AnnotationFormat::V1_7, AnnotationFormat::V2_0, AnnotationFormat::V2_6];
/// The API server's limit, in bytes, for the text of an Event.
const EVENT_BYTES: usize = 1024;

/// Checks how annotations are read and written. The first byte of the input selects the format that is written; the
/// remaining bytes are the annotation's value.
pub fn annotation(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let choice = usize::from(input.byte());
    let is_separate = (choice / FORMATS.len()).is_multiple_of(2);
    let pairing = if is_separate { ProtocolPairing::Separate } else { ProtocolPairing::Merged };
    let text = input.text();
    check_mappings(&text, Style { format: FORMATS[choice % FORMATS.len()], pairing });
    check_allow_list(&text);
    check_requests(&text);
}

fn check_mappings(text: &str, style: Style) {
    let (entries, malformed) = published_entries(text);
    let seen = seen_entries(text);
    let complete: BTreeSet<SeenEntry> = entries.iter().map(without_address).collect();
    assert!(complete.is_subset(&seen), "a load balancer reads more than the agent");
    assert_eq!(published(text).into_iter().map(|entry| entry.seen).collect::<BTreeSet<_>>(), seen);
    assert!(seen.iter().all(|entry| entry.node_port.0 != 0 && entry.pod_port.0 != 0), "port 0: {seen:?}");
    let entries = one_node(&entries);
    if is_right(text, &entries, style) {
        assert_eq!((complete, malformed), (seen, 0), "the agent keeps a value that readers read differently");
    }
    let written = encode(&entries, style);
    assert_is_one_line(&written);
    assert!(is_right(&written, &entries, style), "{written} is not right for {entries:?}");
    let (again, malformed) = published_entries(&written);
    assert_eq!(malformed, 0, "{written}");
    let set = |entries: &[Entry]| entries.iter().map(without_address).collect::<BTreeSet<_>>();
    assert_eq!(set(&again), set(&entries), "{written}");
    assert_eq!(encode(&again, style), written, "the same set of entries gives other bytes");
}

/// Returns the distinct entries with the same node address for all entries of a family, as one Node publishes them.
fn one_node(entries: &[Entry]) -> Vec<Entry> {
    let address = |family| entries.iter().map(|entry| entry.node_ip).find(|ip| Family::of(*ip) == family);
    let mut distinct: Vec<Entry> = Vec::new();
    for entry in entries {
        let entry = Entry { node_ip: address(Family::of(entry.node_ip)).unwrap_or(entry.node_ip), ..*entry };
        if !distinct.contains(&entry) {
            distinct.push(entry);
        }
    }
    distinct
}

fn without_address(entry: &Entry) -> SeenEntry {
    let Entry { node_ip, node_port, protocol, pod_port } = *entry;
    SeenEntry { family: Family::of(node_ip), node_port, protocol, pod_port }
}

fn check_allow_list(text: &str) {
    let list = AllowList::read(text);
    assert!(list.sources.is_restricted(), "an annotation never allows every client");
    let ranges: Vec<SourceRange> = list.sources.ranges().collect();
    assert!(ranges.len() <= MAX_RANGES);
    for range in &ranges {
        assert_eq!(range.to_string().parse(), Ok(*range));
        assert!(range.contains(range.first()));
    }
    let shown: Vec<String> = ranges.iter().map(ToString::to_string).collect();
    let again = AllowList { unreadable: None, beyond: 0, ..list.clone() };
    assert_eq!(AllowList::read(&shown.join(",")), again, "the ranges change if they are written and read");
    if let Some(unreadable) = list.unreadable {
        let problem = Cause::UnreadableSource(unreadable).to_string();
        assert_is_one_line(&problem);
        assert!(problem.len() <= EVENT_BYTES, "{problem}");
    }
}

fn check_requests(text: &str) {
    let requests = NodePortRequests::read(text);
    let all: Vec<_> = requests.iter().collect();
    assert!(all.len() <= MAX_REQUESTS);
    for (pod_port, protocol, node_port) in &all {
        assert!(pod_port.0 != 0 && node_port.0 != 0, "port 0: {all:?}");
        let of = |protocol| requests.of(*pod_port, protocol);
        assert!(Protocol::ALL.into_iter().any(|any| of(any) == Some(*node_port)) || protocol.is_none(), "{all:?}");
        let same_number = all.iter().filter(|(_, _, number)| number == node_port);
        assert!(same_number.into_iter().all(|(other, ..)| other == pod_port), "two Pod ports request {node_port}");
    }
    let shown: Vec<String> = all
        .iter()
        .map(|(pod_port, protocol, node_port)| match protocol {
            Some(protocol) => format!("{pod_port}/{protocol}={node_port}"),
            None => format!("{pod_port}={node_port}"),
        })
        .collect();
    let again = NodePortRequests::read(&shown.join(","));
    assert_eq!(again.iter().collect::<Vec<_>>(), all, "the requests change if they are written and read");
    assert_eq!(again.fault(), None);
    if let Some(fault) = requests.fault() {
        let problem = Cause::NodePortRequest(RequestProblem::Faulty(fault.clone())).to_string();
        assert_is_one_line(&problem);
        assert!(problem.len() <= EVENT_BYTES, "{problem}");
    }
}
