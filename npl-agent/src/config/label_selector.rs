// SPDX-License-Identifier: Apache-2.0
//! Checks the syntax of label selectors, which the library kube cannot parse. The API server would reject each list
//! with an invalid selector, so the agent checks the selector at start.

use super::value::is_subdomain;

/// Kubernetes' limit for a label value, and for the name in a label key.
const NAME_BYTES: usize = 63;
/// Kubernetes' limit for the prefix of a label key.
const PREFIX_BYTES: usize = 253;

/// Whether the API server accepts the text as a label selector with at least one requirement.
pub(super) fn is_valid(text: &str) -> bool {
    requirements(text).into_iter().all(is_requirement)
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

fn is_requirement(text: &str) -> bool {
    let text = text.trim();
    if let Some(key) = text.strip_prefix('!') {
        return is_key(key.trim());
    }
    if let Some((left, set)) = text.split_once('(') {
        let Some(set) = set.strip_suffix(')') else { return false };
        let mut words = left.split_whitespace();
        let (key, operator) = (words.next(), words.next());
        let is_set_operator = matches!(operator, Some("in" | "notin")) && words.next().is_none();
        return is_set_operator && key.is_some_and(is_key) && set.split(',').all(|value| is_value(value.trim()));
    }
    let (key, value) = ["!=", "==", "="].iter().find_map(|it| text.split_once(it)).unwrap_or((text, ""));
    is_key(key.trim()) && is_value(value.trim())
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
    use super::is_valid;

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
