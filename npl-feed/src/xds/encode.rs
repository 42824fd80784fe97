// SPDX-License-Identifier: Apache-2.0
//! Encodes responses as gRPC messages. The encoded endpoints of a Service port are shared by all responses, so a client
//! that does not read its responses takes little memory.

use std::mem;

use axum::body::Bytes;
use envoy_types::pb::{envoy::service::discovery::v3::Resource, google::protobuf::Any};
use prost::{
    Message as _,
    encoding::{WireType, encode_key, encode_varint},
};

use crate::client_memory::Part;

/// The number of the field `resources` in the responses of both variants.
const RESOURCES: u32 = 2;
/// The number of the field `value` of `Any`.
const VALUE: u32 = 2;
/// The number of the field `resource` of `Resource`.
const RESOURCE: u32 = 2;

/// An encoded resource.
#[derive(Debug)]
pub(super) struct Encoded {
    /// The URL of the resource's type.
    pub(super) type_url: String,
    /// The beginning of the encoded resource.
    pub(super) head: Vec<u8>,
    /// The rest of the encoded resource, which other responses may share.
    pub(super) shared: Bytes,
}

impl Encoded {
    /// Returns the resource encoded as `Any`, in two parts: the bytes before the shared bytes, and the shared bytes.
    /// The length of the field `value`, which the first part contains, counts the shared bytes.
    fn any(self) -> (Vec<u8>, Bytes) {
        let mut any = Any { type_url: self.type_url, value: Vec::new() }.encode_to_vec();
        start_field(VALUE, self.head.len() + self.shared.len(), &mut any);
        any.extend(self.head);
        (any, self.shared)
    }
}

/// A response of either variant.
#[derive(Debug)]
pub(super) struct Reply {
    /// The encoded fields of the response, except the resources.
    fields: Vec<u8>,
    /// The encoded field of each resource, without the resource's shared bytes, and the shared bytes.
    resources: Vec<(Vec<u8>, Bytes)>,
}

impl Reply {
    /// Creates a response. `fields` is the response without resources.
    pub(super) fn new(fields: &impl prost::Message) -> Self {
        Self { fields: fields.encode_to_vec(), resources: Vec::new() }
    }

    /// Adds a resource to a response of the state-of-the-world variant.
    pub(super) fn push(&mut self, resource: Encoded) {
        let (any, shared) = resource.any();
        self.push_field(&any, shared);
    }

    /// Adds a resource with its name and version to a response of the delta variant.
    pub(super) fn push_named(&mut self, name: &str, version: &str, resource: Encoded) {
        let (any, shared) = resource.any();
        let named = Resource { name: name.to_owned(), version: version.to_owned(), ..Resource::default() };
        let mut content = named.encode_to_vec();
        start_field(RESOURCE, any.len() + shared.len(), &mut content);
        content.extend(any);
        self.push_field(&content, shared);
    }

    fn push_field(&mut self, content: &[u8], shared: Bytes) {
        let mut field = Vec::with_capacity(content.len() + 8);
        start_field(RESOURCES, content.len() + shared.len(), &mut field);
        field.extend(content);
        self.resources.push((field, shared));
    }

    /// Returns the response as the consecutive parts of a gRPC message, which begins with the compression flag 0 (not
    /// compressed) and the length.
    pub(super) fn into_message(self) -> Vec<Part> {
        let resources: usize = self.resources.iter().map(|(field, shared)| field.len() + shared.len()).sum();
        let length = u32::try_from(self.fields.len() + resources).unwrap_or(u32::MAX);
        let mut own = vec![0];
        own.extend(length.to_be_bytes());
        own.extend(self.fields);
        let mut parts = Vec::new();
        for (field, shared) in self.resources {
            own.extend(field);
            if !shared.is_empty() {
                parts.push(Part::Own(mem::take(&mut own).into()));
                parts.push(Part::Shared(shared));
            }
        }
        if !own.is_empty() {
            parts.push(Part::Own(own.into()));
        }
        parts
    }
}

/// Writes the start of a field whose content has a length: the field's number and the length.
fn start_field(number: u32, length: usize, buffer: &mut Vec<u8>) {
    encode_key(number, WireType::LengthDelimited, buffer);
    encode_varint(length as u64, buffer);
}
