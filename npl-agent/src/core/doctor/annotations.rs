// SPDX-License-Identifier: Apache-2.0
//! Checks whether the annotations of the Node's Pods, the mappings in the kernel and the Node's addresses match.

use super::{Facts, Finding, abridged};
use crate::core::check::Kind;

pub(super) fn annotations(facts: &Facts) -> Finding {
    let key = "annotations";
    let differences = match facts.answer_of_agent(key, &facts.differences) {
        Ok(differences) => differences,
        Err(finding) => return finding,
    };
    if differences.is_empty() {
        let found = "the annotations of the Node's Pods match the kernel's mappings and the Node's addresses";
        return Finding::ok(key, found);
    }
    let texts = differences.iter().map(|it| {
        if it.pod.is_empty() { it.text.clone() } else { format!("{}/{}: {}", it.namespace, it.pod, it.text) }
    });
    let found = abridged(&texts.collect::<Vec<_>>(), "; ", "; and ");
    if differences.iter().all(|it| it.kind == Kind::Unowned) {
        let advice = "clients that still use these node ports reach the Pod addresses in the mappings, but no Pod has \
                      the node ports: the agent removes the mappings at the next --resync; if the mappings stay, read \
                      the agent's log";
        return Finding::warning(key, found, advice);
    }
    let advice = "clients of these node ports reach no Pod, or another Pod: the agent corrects mappings at the next \
                  --resync, and annotations as soon as the API server accepts them; if the difference lasts, read the \
                  agent's log";
    Finding::failed(key, found, advice)
}

#[cfg(test)]
mod tests {
    use super::super::{Facts, State, tests::check};
    use crate::core::{
        check::{Inconsistency, Kind},
        pages,
    };

    const KEY: &str = "annotations";

    fn differ(facts: &mut Facts, kinds: &[Kind]) {
        let of_kind = |(number, kind): (usize, &Kind)| Inconsistency {
            kind: *kind,
            namespace: if *kind == Kind::Unowned { String::new() } else { "shop".to_owned() },
            pod: if *kind == Kind::Unowned { String::new() } else { format!("web-{number}") },
            node: "node-1".to_owned(),
            text: format!("difference {number}"),
            page: pages::DIFFERENCE,
        };
        facts.differences = Ok(kinds.iter().enumerate().map(of_kind).collect());
    }

    #[test]
    fn differences_between_annotations_kernel_and_node_are_reported() {
        check(&[
            (|_| {}, KEY, State::Ok, "match the kernel's mappings", ""),
            (|it| differ(it, &[Kind::NotMapped]), KEY, State::Failed, "shop/web-0: difference 0", "--resync"),
            (|it| differ(it, &[Kind::WrongAddress; 5]), KEY, State::Failed, "difference 2; and 2 more", "reach no Pod"),
            (|it| differ(it, &[Kind::Unowned]), KEY, State::Warning, "difference 0", "removes the mappings"),
            (|it| differ(it, &[Kind::Unowned, Kind::NotMapped]), KEY, State::Failed, "difference 1", "another Pod"),
            (|it| it.differences = Err("no socket".to_owned()), KEY, State::Unknown, "no socket", "--runtime-dir"),
            (
                |it| {
                    it.is_agent_running = false;
                    it.differences = Err("no socket".to_owned());
                },
                KEY,
                State::Ok,
                "no agent runs",
                "",
            ),
        ]);
    }
}
