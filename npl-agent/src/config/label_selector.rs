// SPDX-License-Identifier: Apache-2.0
//! Checks the syntax of label selectors, which the library kube cannot parse. The API server would reject each list
//! request with an invalid selector, so the agent checks the selector at start.

use std::collections::{BTreeMap, BTreeSet};

use kube::core::{Expression, SelectorExt as _};

use super::value::is_subdomain;

/// Kubernetes' limit for a label value, and for the name in a label key.
const NAME_BYTES: usize = 63;
/// Kubernetes' limit for the prefix of a label key.
const PREFIX_BYTES: usize = 253;
/// The values that are tried in turn for a label that must exist, but for which no selector requires a value.
const ANY: [&str; 3] = ["true", "npl-test", "other"];

/// Whether the API server accepts the text as a label selector with at least one requirement.
pub(super) fn is_valid(text: &str) -> bool {
    parse(text).is_some()
}

/// Returns labels with which an object matches all of the selectors.
///
/// # Errors
///
/// Returns the requirements that no labels satisfy, or the text that is not a label selector.
pub fn satisfying(selectors: &BTreeSet<&str>) -> Result<BTreeMap<String, String>, String> {
    let mut all = Vec::new();
    for text in selectors {
        all.extend(parse(text).ok_or_else(|| format!("{text:?} is not a label selector"))?);
    }
    let mut labels = BTreeMap::new();
    for expression in &all {
        let (key, candidates): (_, Vec<&str>) = match expression {
            Expression::Equal(key, value) => (key, vec![value]),
            Expression::In(key, values) => (key, values.iter().map(String::as_str).collect()),
            Expression::Exists(key) => (key, ANY.into()),
            Expression::NotEqual(..) | Expression::NotIn(..) | Expression::DoesNotExist(..) => continue,
        };
        let fitting = candidates.into_iter().find(|value| {
            let label = [(key.clone(), (*value).to_owned())].into();
            all.iter().filter(|other| key_of(other) == key).all(|other| other.matches(&label))
        });
        if let Some(value) = fitting {
            labels.insert(key.clone(), value.to_owned());
        }
    }
    let missed: Vec<String> = all.iter().filter(|it| !it.matches(&labels)).map(Expression::to_string).collect();
    if missed.is_empty() { Ok(labels) } else { Err(missed.join(", ")) }
}

const fn key_of(expression: &Expression) -> &String {
    match expression {
        Expression::In(key, _)
        | Expression::NotIn(key, _)
        | Expression::Equal(key, _)
        | Expression::NotEqual(key, _)
        | Expression::Exists(key)
        | Expression::DoesNotExist(key) => key,
    }
}

fn parse(text: &str) -> Option<Vec<Expression>> {
    requirements(text).into_iter().map(requirement).collect()
}

/// Splits a selector at the commas that are outside of parentheses.
fn requirements(text: &str) -> Vec<&str> {
    let mut is_in_set = false;
    text.split(move |character| {
        is_in_set = if is_in_set { character != ')' } else { character == '(' };
        character == ',' && !is_in_set
    })
    .collect()
}

fn requirement(text: &str) -> Option<Expression> {
    let text = text.trim();
    if let Some(key) = text.strip_prefix('!') {
        return Some(Expression::DoesNotExist(valid_key(key)?));
    }
    if let Some((left, set)) = text.split_once('(') {
        let values = set.strip_suffix(')')?.split(',').map(valid_value).collect::<Option<BTreeSet<_>>>()?;
        let mut words = left.split_whitespace();
        let (key, operator) = (valid_key(words.next()?)?, words.next());
        return match (operator, words.next()) {
            (Some("in"), None) => Some(Expression::In(key, values)),
            (Some("notin"), None) => Some(Expression::NotIn(key, values)),
            _ => None,
        };
    }
    if let Some((key, value)) = text.split_once("!=") {
        return Some(Expression::NotEqual(valid_key(key)?, valid_value(value)?));
    }
    match text.split_once("==").or_else(|| text.split_once('=')) {
        Some((key, value)) => Some(Expression::Equal(valid_key(key)?, valid_value(value)?)),
        None => Some(Expression::Exists(valid_key(text)?)),
    }
}

fn valid_key(text: &str) -> Option<String> {
    Some(text.trim()).filter(|key| is_key(key)).map(str::to_owned)
}

fn valid_value(text: &str) -> Option<String> {
    Some(text.trim()).filter(|value| is_value(value)).map(str::to_owned)
}

fn is_key(text: &str) -> bool {
    let (prefix, name) = text.rsplit_once('/').map_or((None, text), |(prefix, name)| (Some(prefix), name));
    !name.is_empty() && is_value(name) && prefix.is_none_or(|prefix| is_subdomain(prefix, PREFIX_BYTES))
}

/// Whether a text is a valid label value. An empty value is valid.
fn is_value(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let is_end = |byte: Option<&u8>| byte.is_none_or(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    bytes.len() <= NAME_BYTES && bytes.iter().copied().all(is_inner) && is_end(bytes.first()) && is_end(bytes.last())
}

#[cfg(test)]
mod tests {
    use super::{is_valid, satisfying};

    #[test]
    fn labels_satisfy_requirements_of_every_kind() {
        let labels = |selectors: &[&str]| {
            let labels = satisfying(&selectors.iter().copied().collect())?;
            Ok::<_, String>(labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(","))
        };
        assert_eq!(labels(&[]), Ok(String::new()));
        assert_eq!(labels(&["example.com/npl=yes, team==a,tier!=b"]), Ok("example.com/npl=yes,team=a".to_owned()));
        assert_eq!(labels(&["npl,!canary,zone in (c,d)", "zone notin (c)"]), Ok("npl=true,zone=d".to_owned()));
        assert_eq!(labels(&["npl,npl!=true"]), Ok("npl=npl-test".to_owned()));
        // The agents of two Nodes may have contradictory selectors, so that no labels of a Service satisfy both.
        assert_eq!(labels(&["team=a", "team=b"]), Err("team=a, team=b".to_owned()));
        assert_eq!(labels(&["team,!team"]), Err("team".to_owned()));
    }

    #[test]
    fn selectors_of_kubectl_are_valid() {
        for text in [
            "npl=yes",
            "npl==yes",
            "npl!=no",
            "npl",
            "!npl",
            "npl=",
            "example.com/npl=yes,tier in (web, api),zone notin (a),!canary",
        ] {
            assert!(is_valid(text), "{text:?}");
        }
    }

    #[test]
    fn text_that_the_api_server_rejects_is_invalid() {
        let long = format!("npl={}", "a".repeat(64));
        for text in [
            "",
            ",",
            "npl=yes,",
            "=yes",
            "!",
            "npl=a=b",
            "npl yes",
            "npl in yes",
            "npl in (a",
            "npl of (a)",
            "npl=-a",
            "a/b/c=d",
            "/npl",
            "Example.com/npl",
            "npl=ä",
            &long,
        ] {
            assert!(!is_valid(text), "{text:?}");
        }
    }
}
