// SPDX-License-Identifier: Apache-2.0
//! The namespaces whose Services the agent reads (`--namespaces`).

use std::{collections::BTreeSet, fmt, str::FromStr, sync::Arc};

/// The maximum number of namespaces. Each agent lists and watches the Services of each namespace separately, so the
/// number of watches at the API server is the number of Nodes times the number of namespaces.
const MOST: usize = 16;
/// Kubernetes' limit for the name of a namespace.
const NAME_BYTES: usize = 63;

/// The namespaces whose Services the agent reads: the named namespaces, or all namespaces if none is named.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Namespaces(BTreeSet<Arc<str>>);

/// A part of the cluster whose Services are listed and watched together: one namespace, or all namespaces if `None`.
pub type ServiceScope = Option<Arc<str>>;

/// The error for a text that is not a list of namespaces.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NamespacesError {
    /// The list contains a text that cannot be the name of a namespace.
    #[error(
        "{0:?} is not the name of a namespace: give names of at most 63 lower-case letters, digits and inner dashes, \
         with commas between them, for example shop,billing"
    )]
    Name(String),
    /// The list contains a name twice.
    #[error("namespace {0:?} is in the list twice: give each namespace once, for example shop,billing")]
    Duplicate(String),
    /// The list has more than [`MOST`] names.
    #[error(
        "the list has {0} namespaces, and at most {MOST} are allowed: give fewer names, or give none and limit the \
         Services by their labels with --service-selector"
    )]
    TooMany(usize),
}

impl Namespaces {
    /// Returns whether the agent reads the Services of this namespace.
    pub fn contains(&self, namespace: &str) -> bool {
        self.0.is_empty() || self.0.contains(namespace)
    }

    /// Returns the scopes that the agent lists and watches separately. Together, the scopes contain every Service that
    /// the agent reads.
    pub fn scopes(&self) -> BTreeSet<ServiceScope> {
        if self.0.is_empty() { [None].into() } else { self.0.iter().cloned().map(Some).collect() }
    }
}

impl fmt::Display for Namespaces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, name) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { "," };
            write!(f, "{separator}{name}")?;
        }
        Ok(())
    }
}

impl FromStr for Namespaces {
    type Err = NamespacesError;

    /// Parses a comma-separated list of names. The empty text selects all namespaces.
    fn from_str(text: &str) -> Result<Self, NamespacesError> {
        let mut names = BTreeSet::new();
        if text.is_empty() {
            return Ok(Self(names));
        }
        for name in text.split(',').map(str::trim) {
            if !is_name(name) {
                return Err(NamespacesError::Name(name.to_owned()));
            }
            if !names.insert(Arc::from(name)) {
                return Err(NamespacesError::Duplicate(name.to_owned()));
            }
        }
        if names.len() > MOST { Err(NamespacesError::TooMany(names.len())) } else { Ok(Self(names)) }
    }
}

/// Whether Kubernetes accepts the text as the name of a namespace: a DNS label as in RFC 1123.
fn is_name(text: &str) -> bool {
    (1..=NAME_BYTES).contains(&text.len())
        && !text.starts_with('-')
        && !text.ends_with('-')
        && text.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn complaint(text: &str) -> String {
        text.parse::<Namespaces>().unwrap_err().to_string()
    }

    #[test]
    fn no_name_means_all_namespaces() {
        for all in [Namespaces::default(), "".parse().unwrap()] {
            assert!(all.contains("shop"));
            assert_eq!(all.scopes(), [None].into());
        }
    }

    #[test]
    fn each_named_namespace_is_a_scope_and_no_other_is_contained() {
        let named: Namespaces = "shop, billing".parse().unwrap();
        assert_eq!(named.to_string(), "billing,shop");
        assert_eq!(named.scopes(), [Some(Arc::from("billing")), Some(Arc::from("shop"))].into());
        assert!(named.contains("shop") && !named.contains("sho") && !named.contains(""));
    }

    #[test]
    fn wrong_lists_are_refused_with_the_wrong_name() {
        for wrong in [",", "shop,", "shop,,billing", "Shop", "a.b", "-a", "a-", "a b", "a/b", "*", " "] {
            assert!(complaint(wrong).contains("is not the name of a namespace"), "{wrong}");
        }
        assert!(complaint("shop,Billing").starts_with("\"Billing\" is not"));
        assert!(complaint("shop,web,shop").starts_with("namespace \"shop\" is in the list twice"));
    }

    #[test]
    fn the_limits_of_length_and_number_are_exact() {
        let longest = "a".repeat(63);
        assert!(longest.parse::<Namespaces>().is_ok());
        assert!(complaint(&format!("{longest}a")).contains("at most 63"));
        let names = |count: usize| (0..count).map(|number| format!("ns-{number}")).collect::<Vec<_>>().join(",");
        assert_eq!(names(16).parse::<Namespaces>().unwrap().scopes().len(), 16);
        assert!(complaint(&names(17)).starts_with("the list has 17 namespaces, and at most 16 are allowed"));
    }

    proptest! {
        #[test]
        fn a_list_that_is_accepted_is_accepted_again_as_it_is_displayed(text in "[a-c,. A-]{0,12}") {
            if let Ok(parsed) = text.parse::<Namespaces>() {
                prop_assert_eq!(parsed.to_string().parse::<Namespaces>().unwrap(), parsed);
            }
        }
    }
}
