// SPDX-License-Identifier: Apache-2.0
//! Types for the members of a Service, in the format of the feed's path `/v1/members/NAMESPACE/SERVICE`. For `kubectl
//! npl members`, this module also compares the members that several replicas of the feed serve.

use std::{collections::BTreeSet, net::IpAddr};

use serde::{Deserialize, Serialize};

use super::model::Family;

/// The members of all ports of a Service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceMembers {
    /// The digest of the Service's members. Replicas that serve the same members have the same digest.
    pub version: String,
    /// The ports of the Service, each with its members.
    pub ports: Vec<PortMembers>,
}

/// The members of one Service port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortMembers {
    /// The namespace of the Service.
    pub namespace: String,
    /// The name of the Service.
    pub service: String,
    /// The number of the Service port.
    pub port: u16,
    /// The name of the Service port; `None` if the port has no name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The protocol in lower case.
    pub protocol: String,
    /// The digest of the port's members.
    pub version: String,
    /// The names under which load balancers find the port.
    pub names: Names,
    /// The members of the port.
    pub members: Vec<Member>,
}

/// The names of a Service port in the feed's interfaces.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Names {
    /// The name of the xDS resources; `None` if the feed does not serve xDS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub xds: Option<String>,
    /// The name of the SRV records; `None` if the feed does not serve DNS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dns: Option<String>,
    /// The path of the port's members in the feed's HTTP interface.
    pub http: String,
}

/// The address of a Node. The JSON object also contains the address's IP family, which is derived from the address.
/// When a JSON object is read, only the field `address` is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "AddressWithFamily", from = "AddressOnly")]
pub struct MemberAddress(pub IpAddr);

#[derive(Serialize)]
struct AddressWithFamily {
    address: IpAddr,
    family: Family,
}

impl From<MemberAddress> for AddressWithFamily {
    fn from(MemberAddress(address): MemberAddress) -> Self {
        Self { address, family: Family::of(address) }
    }
}

#[derive(Deserialize)]
struct AddressOnly {
    address: IpAddr,
}

impl From<AddressOnly> for MemberAddress {
    fn from(AddressOnly { address }: AddressOnly) -> Self {
        Self(address)
    }
}

/// One port of one Pod, as a load balancer reaches it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The address of the Node. The JSON object of the member contains the fields `address` and `family` of this
    /// address.
    #[serde(flatten)]
    pub address: MemberAddress,
    /// The node port of the Pod port.
    pub port: u16,
    /// The name of the Pod.
    pub pod: String,
    /// The name of the Node.
    pub node: String,
    /// The zone of the Node; empty if the Node has no zone.
    pub zone: String,
    /// Whether load balancers send new requests to the member.
    pub ready: bool,
    /// Whether the member gets no new requests, and only completes requests in progress.
    pub draining: bool,
    /// The weight of the member, relative to the weights of the same port's members.
    pub weight: u16,
}

impl ServiceMembers {
    /// Returns the Service with only those ports that have this name. If no port has this name, returns the Service
    /// with the ports that have this number.
    #[must_use]
    pub fn of_port(mut self, port: &str) -> Self {
        let has_name = |it: &PortMembers| it.name.as_deref() == Some(port);
        if self.ports.iter().any(has_name) {
            self.ports.retain(has_name);
        } else {
            self.ports.retain(|it| it.port.to_string() == port);
        }
        self
    }
}

impl PortMembers {
    /// The title of the port's table: the port's name and number, or only the number if the port has no name.
    pub fn title(&self) -> String {
        self.name.as_deref().map_or_else(|| self.port.to_string(), |name| format!("{name} ({})", self.port))
    }
}

impl Member {
    /// The state of the member as one word, for tables.
    pub const fn state(&self) -> &'static str {
        match (self.ready, self.draining) {
            (_, true) => "draining",
            (true, false) => "ready",
            (false, false) => "not ready",
        }
    }
}

/// The answer of one replica of the feed to a request for a Service's members.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplicaAnswer {
    /// The replica serves these members of the Service.
    Members(ServiceMembers),
    /// The replica does not serve the requested Service.
    Unknown,
    /// The replica could not be queried; the text names the cause.
    Failed(String),
}

/// Whether all replicas that answered serve the same members, or none of these replicas serves the Service. Compares
/// the versions, which are digests of the members.
pub fn agree<'a, I: IntoIterator<Item = &'a ReplicaAnswer>>(answers: I) -> bool {
    let versions: BTreeSet<Option<&str>> = answers
        .into_iter()
        .filter_map(|answer| match answer {
            ReplicaAnswer::Members(members) => Some(Some(members.version.as_str())),
            ReplicaAnswer::Unknown => Some(None),
            ReplicaAnswer::Failed(_) => None,
        })
        .collect();
    versions.len() <= 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(name: Option<&str>, port: u16) -> PortMembers {
        PortMembers {
            namespace: "shop".to_owned(),
            service: "web".to_owned(),
            port,
            name: name.map(str::to_owned),
            protocol: "tcp".to_owned(),
            version: String::new(),
            names: Names { xds: None, dns: None, http: String::new() },
            members: Vec::new(),
        }
    }

    fn members(version: &str) -> ReplicaAnswer {
        ReplicaAnswer::Members(ServiceMembers { version: version.to_owned(), ports: Vec::new() })
    }

    #[test]
    fn a_port_is_found_by_its_name_or_else_by_its_number() {
        let all = ServiceMembers { version: String::new(), ports: vec![port(Some("http"), 80), port(Some("80"), 81)] };
        let found = |text| all.clone().of_port(text).ports.iter().map(|it| it.port).collect::<Vec<_>>();
        assert_eq!(found("http"), [80]);
        assert_eq!(found("80"), [81]);
        assert_eq!(found("81"), [81]);
        assert!(found("none").is_empty());
    }

    #[test]
    fn the_family_follows_from_the_address() {
        for (address, family) in [("192.0.2.10", "IPv4"), ("2001:db8::10", "IPv6")] {
            let json = serde_json::json!({ "address": address, "family": family, "port": 61000, "pod": "web-0",
                "node": "node-1", "zone": "west", "ready": true, "draining": false, "weight": 1 });
            let member: Member = serde_json::from_value(json.clone()).unwrap();
            assert_eq!(member.address.0.to_string(), address);
            assert_eq!(serde_json::to_value(&member).unwrap(), json);
            let mut of_older_feed = json.clone();
            of_older_feed["family"].take();
            assert_eq!(serde_json::from_value::<Member>(of_older_feed).unwrap(), member);
        }
    }

    #[test]
    fn replicas_agree_if_all_that_answer_have_one_version() {
        let failed = ReplicaAnswer::Failed("no route".to_owned());
        assert!(agree(&[members("a"), failed.clone(), members("a")]));
        assert!(!agree(&[members("a"), members("b")]));
        assert!(!agree(&[members("a"), ReplicaAnswer::Unknown]));
        assert!(agree(&[failed]));
    }
}
