// SPDX-License-Identifier: Apache-2.0
//! Decodes the annotation like Go's `encoding/json`. Field names match case-insensitively, and the last of duplicate
//! fields wins. Values of the wrong type are ignored, and a syntax error discards the whole list.

use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

/// The three fields that consumers read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Fields {
    pub(super) pod_port: i64,
    pub(super) node_ip: String,
    pub(super) node_port: i64,
}

/// Decodes all elements. `limit` is the largest absolute value of the consumer's integer type.
pub(super) fn decode(annotation: &str, limit: i64) -> Vec<Fields> {
    let elements: Vec<Element> = match serde_json::from_str(annotation) {
        Ok(List(elements)) => elements,
        Err(_syntax) => Vec::new(),
    };
    elements.into_iter().map(|element| element.fields(limit)).collect()
}

/// A list of elements. Other JSON values decode as an empty list.
struct List(Vec<Element>);

/// The fields of a JSON object, in their order. JSON values of other types decode as an object without fields.
struct Element(Vec<(String, Value)>);

impl Element {
    fn fields(self, limit: i64) -> Fields {
        let mut fields = Fields::default();
        for (name, value) in self.0 {
            let number = value.as_i64().filter(|number| (-limit..=limit).contains(number));
            if name.eq_ignore_ascii_case("podPort") {
                fields.pod_port = number.unwrap_or(fields.pod_port);
            } else if name.eq_ignore_ascii_case("nodePort") {
                fields.node_port = number.unwrap_or(fields.node_port);
            } else if name.eq_ignore_ascii_case("nodeIP")
                && let Value::String(text) = value
            {
                fields.node_ip = text;
            }
        }
        fields
    }
}

/// Visitor methods that ignore values of unexpected types, as Go does.
macro_rules! ignore_other_types {
    ($empty:expr) => {
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("any JSON value")
        }

        fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
            Ok($empty)
        }

        fn visit_i64<E>(self, _: i64) -> Result<Self::Value, E> {
            Ok($empty)
        }

        fn visit_u64<E>(self, _: u64) -> Result<Self::Value, E> {
            Ok($empty)
        }

        fn visit_f64<E>(self, _: f64) -> Result<Self::Value, E> {
            Ok($empty)
        }

        fn visit_str<E>(self, _: &str) -> Result<Self::Value, E> {
            Ok($empty)
        }

        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok($empty)
        }
    };
}

impl<'de> Deserialize<'de> for List {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ListVisitor;

        impl<'de> Visitor<'de> for ListVisitor {
            type Value = List;
            ignore_other_types!(List(Vec::new()));

            fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<List, A::Error> {
                let mut list = Vec::new();
                while let Some(element) = elements.next_element()? {
                    list.push(element);
                }
                Ok(List(list))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<List, A::Error> {
                while entries.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(List(Vec::new()))
            }
        }

        deserializer.deserialize_any(ListVisitor)
    }
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ElementVisitor;

        impl<'de> Visitor<'de> for ElementVisitor {
            type Value = Element;
            ignore_other_types!(Element(Vec::new()));

            fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Element, A::Error> {
                while elements.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Element(Vec::new()))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Element, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = entries.next_entry()? {
                    fields.push(field);
                }
                Ok(Element(fields))
            }
        }

        deserializer.deserialize_any(ElementVisitor)
    }
}
