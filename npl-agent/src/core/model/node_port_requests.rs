// SPDX-License-Identifier: Apache-2.0
//! The node ports that a Pod requests, and the parser for the text of the Pod's annotation.

use std::collections::BTreeMap;

use super::{NodePort, PodPort, Protocol, list_entry};

/// The maximum number of entries of an annotation that are read. The agent ignores further entries.
pub const MAX_REQUESTS: usize = 64;
/// The maximum length of the annotation's value in bytes. The agent ignores a longer value.
pub const MAX_REQUEST_BYTES: usize = 4096;

/// The node ports that a Pod's annotation requests, and the first fault of the annotation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodePortRequests {
    /// The requested node ports. A request without a protocol applies to each protocol of the Pod port that has no
    /// request of its own.
    by_port: BTreeMap<(PodPort, Option<Protocol>), NodePort>,
    fault: Option<RequestFault>,
}

/// The first fault of an annotation, and the number of further faulty entries.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestFault {
    /// The position of the faulty entry in the list, counted from 1.
    pub position: usize,
    /// The first 48 characters of the faulty entry.
    pub entry: String,
    /// The kind of the fault.
    pub kind: RequestFaultKind,
    /// The number of further faulty entries.
    pub others: usize,
}

/// The reason why the agent ignores an entry of the annotation, or the whole annotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RequestFaultKind {
    /// The value is longer than [`MAX_REQUEST_BYTES`], so all entries are ignored.
    TooLong,
    /// The entry is not a Pod port, an optional protocol and a node port.
    Malformed,
    /// An earlier entry requests a node port for the same Pod port and protocol.
    SamePodPort,
    /// An earlier entry requests the same node port for another Pod port.
    SameNodePort,
    /// The entry follows [`MAX_REQUESTS`] other entries.
    TooMany,
}

impl NodePortRequests {
    /// Parses a comma-separated list of entries such as `8080=61005` and `53/udp=61006`. A faulty entry requests no
    /// node port; the other entries apply.
    pub fn read(text: &str) -> Self {
        let mut requests = Self::default();
        if text.len() > MAX_REQUEST_BYTES {
            requests.add_fault(1, text, RequestFaultKind::TooLong);
            return requests;
        }
        for (count, (position, entry)) in list_entry::entries(text).enumerate() {
            let added = if count < MAX_REQUESTS { requests.add(entry) } else { Err(RequestFaultKind::TooMany) };
            if let Err(kind) = added {
                requests.add_fault(position, entry, kind);
            }
        }
        requests
    }

    /// The node port that the Pod requests for a Pod port; `None` if the Pod requests no node port for the Pod port.
    pub fn of(&self, pod_port: PodPort, protocol: Protocol) -> Option<NodePort> {
        let own = self.by_port.get(&(pod_port, Some(protocol)));
        own.or_else(|| self.by_port.get(&(pod_port, None))).copied()
    }

    /// Whether the annotation is absent or has no entries.
    pub fn is_empty(&self) -> bool {
        self.by_port.is_empty() && self.fault.is_none()
    }

    /// All requests: Pod port, protocol if the entry names a protocol, and node port.
    pub fn iter(&self) -> impl Iterator<Item = (PodPort, Option<Protocol>, NodePort)> {
        self.by_port.iter().map(|((pod_port, protocol), node_port)| (*pod_port, *protocol, *node_port))
    }

    /// The first fault of the annotation.
    pub const fn fault(&self) -> Option<&RequestFault> {
        self.fault.as_ref()
    }

    fn add(&mut self, entry: &str) -> Result<(), RequestFaultKind> {
        let (pod_port, protocol, node_port) = read_entry(entry).ok_or(RequestFaultKind::Malformed)?;
        if self.by_port.contains_key(&(pod_port, protocol)) {
            return Err(RequestFaultKind::SamePodPort);
        }
        // Load balancers that ignore the protocol would mistake one of the Pod ports for the other.
        if self.iter().any(|(other, _, number)| number == node_port && other != pod_port) {
            return Err(RequestFaultKind::SameNodePort);
        }
        self.by_port.insert((pod_port, protocol), node_port);
        Ok(())
    }

    fn add_fault(&mut self, position: usize, entry: &str, kind: RequestFaultKind) {
        if let Some(first) = &mut self.fault {
            first.others += 1;
        } else {
            self.fault = Some(RequestFault { position, entry: list_entry::excerpt(entry), kind, others: 0 });
        }
    }
}

fn read_entry(entry: &str) -> Option<(PodPort, Option<Protocol>, NodePort)> {
    let (pod_port, node_port) = entry.split_once('=')?;
    let (pod_port, protocol) = match pod_port.split_once('/') {
        Some((pod_port, protocol)) => (pod_port, Some(protocol.parse().ok()?)),
        None => (pod_port, None),
    };
    Some((PodPort(read_port(pod_port)?), protocol, NodePort(read_port(node_port)?)))
}

/// Parses a port number from 1 to 65535.
fn read_port(text: &str) -> Option<u16> {
    list_entry::number(text).filter(|port| *port != 0)
}

#[cfg(test)]
mod tests {
    use super::{MAX_REQUEST_BYTES, MAX_REQUESTS, NodePort, NodePortRequests, PodPort, Protocol, RequestFaultKind};

    fn requested(text: &str, pod_port: u16, protocol: Protocol) -> Option<u16> {
        NodePortRequests::read(text).of(PodPort(pod_port), protocol).map(|port| port.0)
    }

    /// The position and the kind of the first fault, and the number of further faults.
    fn fault(text: &str) -> Option<(usize, RequestFaultKind, usize)> {
        NodePortRequests::read(text).fault().map(|fault| (fault.position, fault.kind, fault.others))
    }

    #[test]
    fn a_request_with_a_protocol_precedes_the_request_for_all_protocols() {
        let text = "53=61006, 8080=61005,53/UDP=61007,";
        assert_eq!(fault(text), None);
        assert_eq!(requested(text, 8080, Protocol::Tcp), Some(61_005));
        assert_eq!(requested(text, 53, Protocol::Tcp), Some(61_006));
        assert_eq!(requested(text, 53, Protocol::Udp), Some(61_007));
        assert_eq!(requested(text, 80, Protocol::Tcp), None);
    }

    #[test]
    fn an_absent_or_empty_list_requests_nothing() {
        for text in ["", ",", " , "] {
            assert!(NodePortRequests::read(text).is_empty(), "{text:?}");
        }
    }

    #[test]
    fn an_entry_of_another_form_is_a_fault_and_the_others_apply() {
        for entry in [
            "8080",
            "8080=",
            "=61005",
            "8080=0",
            "0=61005",
            "8080=65536",
            "65536=61005",
            "8080=+61005",
            "8080=061005",
            "8080 =61005",
            "8080= 61005",
            "8080=61005=1",
            "8080/=61005",
            "8080/icmp=61005",
            "8080/tcp/udp=61005",
            "http=61005",
            "8080=61005/tcp",
            "8080=61005;81=61006",
            "８０=61005",
            "8080:61005",
            "\u{0}",
            "{}",
        ] {
            let text = format!("80=61001,{entry},81=61002");
            assert_eq!(fault(&text), Some((2, RequestFaultKind::Malformed, 0)), "{entry:?}");
            assert_eq!(
                (requested(&text, 80, Protocol::Tcp), requested(&text, 81, Protocol::Tcp)),
                (Some(61_001), Some(61_002))
            );
            assert_eq!(requested(&text, 8080, Protocol::Tcp), None, "{entry:?}");
        }
    }

    #[test]
    fn of_two_entries_that_contradict_each_other_the_first_applies() {
        assert_eq!(fault("80=61001,80=61002"), Some((2, RequestFaultKind::SamePodPort, 0)));
        assert_eq!(requested("80=61001,80=61002", 80, Protocol::Tcp), Some(61_001));
        let text = "80=61001,81/udp=61001,82=61001";
        assert_eq!(fault(text), Some((2, RequestFaultKind::SameNodePort, 1)));
        assert_eq!(requested(text, 81, Protocol::Udp), None);
        assert_eq!(fault("53/tcp=61001,53/udp=61001"), None, "one number for all protocols of a Pod port");
    }

    #[test]
    fn long_lists_are_cut_off() {
        let entry = |number: usize| format!("{number}={}", 1_000 + number);
        let list = |count: usize| (1..=count).map(entry).collect::<Vec<_>>().join(",");
        assert_eq!(fault(&list(MAX_REQUESTS)), None);
        let cut = MAX_REQUESTS + 1;
        assert_eq!(fault(&list(cut + 2)), Some((cut, RequestFaultKind::TooMany, 2)));
        assert_eq!(NodePortRequests::read(&list(cut)).iter().count(), MAX_REQUESTS);
        let long = format!("80=61001,{}", "x".repeat(MAX_REQUEST_BYTES));
        let requests = NodePortRequests::read(&long);
        assert_eq!(requests.of(PodPort(80), Protocol::Tcp), None::<NodePort>);
        assert_eq!(fault(&long), Some((1, RequestFaultKind::TooLong, 0)));
        assert_eq!(requests.fault().map(|fault| fault.entry.len()), Some(48));
    }
}
