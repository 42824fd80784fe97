// SPDX-License-Identifier: Apache-2.0
//! Parses Rust source code for the rules of `tidy`: removes comments, and extracts the paths that the code names.

/// Returns Rust source code without line comments.
pub(super) fn without_comments(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    for line in text.lines() {
        code.push_str(comment_start(line).and_then(|start| line.get(..start)).unwrap_or(line));
        code.push('\n');
    }
    code
}

/// Returns Rust source code without the test module at its end.
pub(super) fn without_tests(text: &str) -> &str {
    text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default()
}

/// Returns the position at which the comment in a line starts. The `//` of an address such as `https://` does not start
/// a comment.
pub(super) fn comment_start(line: &str) -> Option<usize> {
    line.match_indices("//")
        .map(|(start, _)| start)
        .find(|start| !line.get(..*start).is_some_and(|it| it.ends_with(':')))
}

/// Returns the identifiers in a text, in their order.
pub(super) fn identifiers(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !is_identifier(c)).filter(|word| !word.is_empty())
}

fn is_identifier(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Returns every path that the code names: the paths of `use` declarations, with groups expanded, and qualified paths.
pub(super) fn paths(code: &str) -> Vec<String> {
    let mut paths = imports(code);
    paths.extend(qualified_paths(code));
    paths
}

/// Returns the paths of all `use` declarations, with groups expanded.
fn imports(code: &str) -> Vec<String> {
    let mut paths = Vec::new();
    for statement in code.split("use ").skip(1).filter_map(|rest| rest.split(';').next()) {
        let compact = without_renames(statement);
        expand(&compact, "", &mut paths);
    }
    paths
}

/// Returns a `use` tree without white space and without the names after `as`.
fn without_renames(statement: &str) -> String {
    let mut parts = statement.split(" as ");
    let mut compact: String = parts.next().unwrap_or_default().split_whitespace().collect();
    for part in parts {
        let rest = part.trim_start().trim_start_matches(is_identifier);
        compact.extend(rest.split_whitespace());
    }
    compact
}

/// Adds the paths of a `use` tree such as `a::{b, c::{d, e}}` to `paths`.
fn expand(tree: &str, prefix: &str, paths: &mut Vec<String>) {
    let Some((head, group)) = tree.split_once('{') else {
        paths.push(format!("{prefix}{tree}"));
        return;
    };
    let inner = group.strip_suffix('}').unwrap_or(group);
    for part in split_top_level(inner) {
        expand(part, &format!("{prefix}{head}"), paths);
    }
}

/// Splits a list at its commas, but not at commas inside a group in braces.
fn split_top_level(list: &str) -> Vec<&str> {
    let mut depth = 0_usize;
    let parts = list.split(|c: char| {
        match c {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    });
    parts.filter(|part| !part.is_empty()).collect()
}

/// Returns the qualified paths outside of `use` declarations, such as `std::fs::read`.
fn qualified_paths(code: &str) -> impl Iterator<Item = String> {
    code.split(move |c: char| !is_identifier(c) && c != ':')
        .filter(|word| word.contains("::"))
        .map(|word| word.trim_matches(':').to_owned())
}

#[cfg(test)]
mod tests {
    use super::{identifiers, paths, without_comments};

    #[test]
    fn comments_are_removed_and_addresses_are_kept() {
        assert_eq!(without_comments("a(); // b\n/// c\nd(\"https://e\");\n"), "a(); \n\nd(\"https://e\");\n");
    }

    #[test]
    fn groups_and_renames_of_imports_are_written_out() {
        assert_eq!(
            paths("pub(crate) use a::{self, b as c, d::{e, f::G as H}};"),
            ["a::self", "a::b", "a::d::e", "a::d::f::G", "a::", "d::", "f::G"].map(|it| it.trim_end_matches(':'))
        );
    }

    #[test]
    fn identifiers_are_whole_words() {
        assert_eq!(identifiers("npl_slow-x(npl_slow_2)").collect::<Vec<_>>(), ["npl_slow", "x", "npl_slow_2"]);
    }
}
