// SPDX-License-Identifier: Apache-2.0
//! Defines the requests of xDS clients, with only the fields that the feed uses. The decoder skips all other fields,
//! above all the description of the client's node, so that the skipped fields take no memory.

use std::collections::HashMap;

use prost::{
    DecodeError, Message, Name,
    encoding::{DecodeContext, decode_key, skip_field},
};

use super::session::MOST_NAMES;

/// The maximum size of a request in bytes. A delta client that connects again sends the names and versions of its
/// resources. The size is enough for [`MOST_NAMES`] names of up to 160 bytes.
pub(super) const LARGEST: usize = 4 * 1024 * 1024;
/// The maximum number of fields of a request: names to subscribe, names to unsubscribe, and versions.
const MOST_FIELDS: usize = 3 * MOST_NAMES;

const PACKAGE: &str = "envoy.service.discovery.v3";

/// The message `DiscoveryRequest`: a request of the state-of-the-world variant.
#[derive(Clone, PartialEq, Message)]
pub(super) struct StateOfTheWorldRequest {
    #[prost(string, repeated, tag = "3")]
    pub(super) resource_names: Vec<String>,
    #[prost(string, tag = "4")]
    pub(super) type_url: String,
    #[prost(string, tag = "5")]
    pub(super) response_nonce: String,
    #[prost(message, optional, tag = "6")]
    pub(super) error_detail: Option<ErrorDetail>,
}

impl Name for StateOfTheWorldRequest {
    const NAME: &'static str = "DiscoveryRequest";
    const PACKAGE: &'static str = PACKAGE;
}

/// The message `DeltaDiscoveryRequest`: a request of the delta variant.
#[derive(Clone, PartialEq, Message)]
pub(super) struct DeltaRequest {
    #[prost(string, tag = "2")]
    pub(super) type_url: String,
    #[prost(string, repeated, tag = "3")]
    pub(super) resource_names_subscribe: Vec<String>,
    #[prost(string, repeated, tag = "4")]
    pub(super) resource_names_unsubscribe: Vec<String>,
    #[prost(map = "string, string", tag = "5")]
    pub(super) initial_resource_versions: HashMap<String, String>,
    #[prost(string, tag = "6")]
    pub(super) response_nonce: String,
    #[prost(message, optional, tag = "7")]
    pub(super) error_detail: Option<ErrorDetail>,
}

impl Name for DeltaRequest {
    const NAME: &'static str = "DeltaDiscoveryRequest";
    const PACKAGE: &'static str = PACKAGE;
}

/// The presence of the message `google.rpc.Status`, with which a client rejects a response.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub(super) struct ErrorDetail {}

/// Decodes a request.
///
/// # Errors
///
/// Returns the status that ends the stream if the message is malformed, or has too many fields.
pub(super) fn decode<T: Message + Name + Default>(bytes: &[u8]) -> Result<T, tonic::Status> {
    let malformed = |error| tonic::Status::internal(format!("the message is no {}: {error}", T::NAME));
    if count_fields(bytes).map_err(malformed)? > MOST_FIELDS {
        let text = format!("the {} has more than {MOST_FIELDS} fields, such as names and versions", T::NAME);
        return Err(tonic::Status::resource_exhausted(text));
    }
    T::decode(bytes).map_err(malformed)
}

/// Counts the fields of a message without decoding their content. A decoded name takes at least 24 bytes of memory in
/// addition to its text, so a request with many short names would take several times its size. [`MOST_FIELDS`] bounds
/// this memory.
fn count_fields(mut bytes: &[u8]) -> Result<usize, DecodeError> {
    let mut count = 0;
    while !bytes.is_empty() {
        let (tag, wire_type) = decode_key(&mut bytes)?;
        skip_field(wire_type, tag, &mut bytes, DecodeContext::default())?;
        count += 1;
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::{
        envoy::{
            config::core::v3::Node,
            service::discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest},
        },
        google::rpc::Status as RpcStatus,
    };

    use super::*;

    #[test]
    fn the_used_fields_have_the_numbers_of_the_protocol() {
        let names = |names: [&str; 2]| names.map(str::to_owned).to_vec();
        let node = Some(Node { id: "balancer".to_owned(), ..Node::default() });
        let error_detail = Some(RpcStatus { message: "refused".to_owned(), ..RpcStatus::default() });
        let (type_url, response_nonce) = ("type".to_owned(), "7".to_owned());
        let request = DiscoveryRequest {
            version_info: "1".to_owned(),
            node: node.clone(),
            resource_names: names(["a", "b"]),
            type_url: type_url.clone(),
            response_nonce: response_nonce.clone(),
            error_detail: error_detail.clone(),
            ..DiscoveryRequest::default()
        };
        let expected = StateOfTheWorldRequest {
            resource_names: names(["a", "b"]),
            type_url: type_url.clone(),
            response_nonce: response_nonce.clone(),
            error_detail: Some(ErrorDetail {}),
        };
        assert_eq!(StateOfTheWorldRequest::decode(&*request.encode_to_vec()).unwrap(), expected);
        let versions = HashMap::from([("a".to_owned(), "v".to_owned())]);
        let request = DeltaDiscoveryRequest {
            node,
            type_url: type_url.clone(),
            resource_names_subscribe: names(["a", "b"]),
            resource_names_unsubscribe: names(["c", "d"]),
            initial_resource_versions: versions.clone(),
            response_nonce: response_nonce.clone(),
            error_detail,
            ..DeltaDiscoveryRequest::default()
        };
        let expected = DeltaRequest {
            type_url,
            resource_names_subscribe: names(["a", "b"]),
            resource_names_unsubscribe: names(["c", "d"]),
            initial_resource_versions: versions,
            response_nonce,
            error_detail: Some(ErrorDetail {}),
        };
        assert_eq!(DeltaRequest::decode(&*request.encode_to_vec()).unwrap(), expected);
    }

    #[test]
    fn fields_are_counted_with_those_that_are_not_used() {
        let request = DiscoveryRequest {
            node: Some(Node { id: "balancer".to_owned(), ..Node::default() }),
            resource_names: vec!["a".to_owned(); 5],
            type_url: "type".to_owned(),
            ..DiscoveryRequest::default()
        };
        assert_eq!(count_fields(&request.encode_to_vec()).unwrap(), 7);
        assert!(count_fields(&[0x1a, 5, b'a']).is_err());
    }
}
