// SPDX-License-Identifier: Apache-2.0
//! Checks the limits of npl-ebpf/budget.toml on the instructions and the stack of each kernel program. If a commit
//! makes a program exceed a limit, the commit must raise the limit and state the reason.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context as _, Result, bail};

use crate::bytecode::Use;
use crate::paths;

/// The file with the limits of all kernel programs.
const FILE: &str = "npl-ebpf/budget.toml";

/// The limits of one kernel program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Limit {
    instructions: u64,
    stack: u64,
}

/// Returns an error if a kernel program exceeds its limits.
pub(crate) fn check(uses: &[Use]) -> Result<()> {
    let file = paths::root().join(FILE);
    let text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
    let problems = problems(uses, &parse(&text)?);
    if !problems.is_empty() {
        bail!("{}", problems.join("; "));
    }
    Ok(())
}

fn problems(uses: &[Use], limits: &BTreeMap<String, Limit>) -> Vec<String> {
    let mut problems = Vec::new();
    for Use { name, instructions, stack, .. } in uses {
        let Some(limit) = limits.get(name) else {
            problems.push(format!("{name} has no limit: add a line for it to {FILE}"));
            continue;
        };
        for (unit, taken, allowed) in
            [("instructions", *instructions, limit.instructions), ("bytes of stack", *stack, limit.stack)]
        {
            if taken > allowed {
                problems.push(format!(
                    "{name} has {taken} {unit}, and {allowed} are allowed: reduce them, or raise the limit in {FILE} and \
                     give the reason in the commit"
                ));
            }
        }
    }
    let gone = limits.keys().filter(|name| uses.iter().all(|it| it.name != **name));
    problems.extend(gone.map(|name| format!("{FILE} has a limit for {name}, which is not a program: remove the line")));
    problems
}

/// Reads the limits from lines such as `name = { instructions = 1, stack = 2 }`.
fn parse(text: &str) -> Result<BTreeMap<String, Limit>> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(|line| limit(line).with_context(|| format!("read `{line}` in {FILE}"))).collect()
}

fn limit(line: &str) -> Result<(String, Limit)> {
    let (name, rest) = line.split_once('=').context("a line needs a name, `=` and limits")?;
    let inside =
        rest.trim().strip_prefix('{').and_then(|it| it.strip_suffix('}')).context("limits need braces around them")?;
    let mut numbers = BTreeMap::new();
    for part in inside.split(',') {
        let (key, value) = part.split_once('=').context("a limit needs a name, `=` and a number")?;
        numbers.insert(key.trim(), value.trim().parse().context("a limit must be a number")?);
    }
    match (numbers.remove("instructions"), numbers.remove("stack"), numbers.is_empty()) {
        (Some(instructions), Some(stack), true) => Ok((name.trim().to_owned(), Limit { instructions, stack })),
        _ => bail!("the limits must be `instructions` and `stack`"),
    }
}

#[cfg(test)]
mod tests {
    use super::{Use, parse, problems};

    fn program(name: &str, instructions: u64, stack: u64) -> Use {
        Use { name: name.to_owned(), section: "classifier".to_owned(), instructions, stack }
    }

    #[test]
    fn an_exceeded_limit_is_reported_with_a_remedy() {
        let limits =
            parse("# why\n\na = { instructions = 100, stack = 64 }\nb = { stack = 8, instructions = 9 }\n").unwrap();
        assert!(problems(&[program("a", 100, 64), program("b", 9, 8)], &limits).is_empty());
        assert_eq!(
            problems(&[program("a", 101, 72), program("b", 1, 0)], &limits),
            [("101 instructions", "100"), ("72 bytes of stack", "64")].map(|(taken, allowed)| format!(
                "a has {taken}, and {allowed} are allowed: reduce them, or raise the limit in npl-ebpf/budget.toml and \
                 give the reason in the commit"
            ))
        );
    }

    #[test]
    fn every_program_has_a_limit_and_every_limit_a_program() {
        let limits = parse("old = { instructions = 1, stack = 1 }").unwrap();
        assert_eq!(
            problems(&[program("new", 1, 1)], &limits),
            [
                "new has no limit: add a line for it to npl-ebpf/budget.toml",
                "npl-ebpf/budget.toml has a limit for old, which is not a program: remove the line"
            ]
        );
    }

    #[test]
    fn an_invalid_line_is_quoted() {
        for line in [
            "a",
            "a = 5",
            "a = { instructions = 5 }",
            "a = { stack = x, instructions = 1 }",
            "a = { stack = 1, stack = 2, cpu = 3 }",
        ] {
            let error = format!("{:#}", parse(line).unwrap_err());
            assert!(error.starts_with(&format!("read `{line}` in npl-ebpf/budget.toml: ")), "{error}");
        }
    }
}
