// SPDX-License-Identifier: Apache-2.0
//! Checks the imports between modules. In the kernel programs, a layer may import only itself and lower layers. In the
//! agent and the feed, the top-level modules must not import each other in a cycle, and the modules directly below
//! `core` must not either.
//!
//! The rule does not apply to tests: they may import any module.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::Finding;
use super::rust_code::{identifiers, paths, without_comments, without_tests};
use super::tree::Tree;

const KERNEL_PROGRAMS: &str = "npl-ebpf/src/";
const PROCESSES: [&str; 2] = ["npl-agent/src/", "npl-feed/src/"];

/// The layers of the kernel programs, from the lowest to the highest. `main.rs` is above all layers.
const LAYERS: [&str; 5] = ["base", "net", "state", "act", "path"];

/// The folder of the agent and of the feed that must not import from any folder of its crate except itself.
const CORE: &str = "core";

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files(tree, KERNEL_PROGRAMS) {
        findings.extend(check_layers(&file));
    }
    findings.extend(PROCESSES.iter().flat_map(|source| check_process(tree, source)));
    findings
}

fn check_process(tree: &Tree, source: &'static str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let files = files(tree, source);
    for file in files.iter().filter(|file| file.top() == Some(CORE)) {
        let others = file.used().into_iter().filter(|used| *used != CORE);
        findings.extend(others.map(|used| {
            Finding::error(
                file.path,
                format!("`{CORE}` must import no other module of its crate, but uses `crate::{used}`"),
            )
        }));
    }
    findings.extend(circles(source, &graph(&files, &[])));
    findings.extend(circles(&format!("{source}{CORE}/"), &graph(&files, &[CORE])));
    findings
}

/// A source file, its place in the crate's module tree, and the paths below `crate::` that the file uses.
struct File<'a> {
    path: &'a str,
    module: Vec<&'a str>,
    paths: BTreeSet<Vec<String>>,
}

impl<'a> File<'a> {
    /// The top-level module to which the file belongs; `None` for the root of the crate.
    fn top(&self) -> Option<&'a str> {
        self.module.first().copied()
    }

    /// The top-level modules of the crate that the file uses.
    fn used(&self) -> BTreeSet<&str> {
        self.paths.iter().filter_map(|path| path.first().map(String::as_str)).collect()
    }
}

/// Returns the path, module and text of each of a crate's source files. Omits tests, and the package's programs in
/// `bin/`.
pub(super) fn code_files<'a>(
    tree: &'a Tree,
    source: &'static str,
) -> impl Iterator<Item = (&'a str, Vec<&'a str>, &'a str)> {
    let all: Vec<_> = tree
        .below(source, ".rs")
        .map(|(path, text)| (path, module_of(path.strip_prefix(source).unwrap_or(path)), text))
        .filter(|(_, module, _)| module.first() != Some(&"bin"))
        .collect();
    let tests: Vec<Vec<&str>> = all.iter().flat_map(|(_, module, text)| test_modules(module, text)).collect();
    all.into_iter().filter(move |(_, module, _)| !tests.iter().any(|test| module.starts_with(test)))
}

fn files<'a>(tree: &'a Tree, source: &'static str) -> Vec<File<'a>> {
    let files = code_files(tree, source);
    files.map(|(path, module, text)| File { path, paths: used(&module, text), module }).collect()
}

/// Returns the module path of a file: `[a, b]` for `a/b.rs` and `a/b/mod.rs`. For `lib.rs` and `main.rs`, the root of
/// the crate, the module path is empty.
fn module_of(path: &str) -> Vec<&str> {
    let mut parts: Vec<&str> = path.trim_end_matches(".rs").split('/').collect();
    if matches!(parts.as_slice(), [.., "mod"] | ["lib" | "main"]) {
        parts.pop();
    }
    parts
}

/// The attributes of modules that are compiled only for tests, and for fuzz targets.
const ONLY_TESTS: [&str; 2] = ["#[cfg(test)]", "#[cfg(any(test, feature = \"fuzzing\"))]"];

/// Returns the modules in separate files that are compiled only for tests.
fn test_modules<'a>(module: &[&'a str], text: &'a str) -> Vec<Vec<&'a str>> {
    let after = ONLY_TESTS.iter().flat_map(|attribute| text.split(attribute).skip(1));
    let declarations = after.filter_map(|rest| rest.split(';').next());
    let names = declarations.filter(|it| !it.contains('{')).filter_map(|it| {
        let mut words = identifiers(it).skip_while(|word| *word != "mod");
        words.next().and(words.next())
    });
    names.map(|name| [module, &[name]].concat()).collect()
}

/// Returns the paths below `crate::` that the code uses, including paths that begin with `super::` in the code.
fn used(module: &[&str], text: &str) -> BTreeSet<Vec<String>> {
    let code = without_comments(text);
    let code = without_tests(&code);
    let mut used = BTreeSet::new();
    for path in paths(code) {
        let mut segments = path.split("::").skip_while(|it| *it == "self").peekable();
        let mut depth = module.len();
        let is_relative = segments.peek() == Some(&"super");
        while segments.next_if_eq(&"super").is_some() {
            depth = depth.saturating_sub(1);
        }
        if !is_relative && segments.next_if_eq(&"crate").is_none() {
            continue;
        }
        let base = module.iter().copied().take(if is_relative { depth } else { 0 });
        let names = base.chain(segments).map(|it| it.trim_matches(['!', '*']).to_owned());
        let names: Vec<String> = names.take_while(|it| !it.is_empty()).collect();
        if !names.is_empty() {
            used.insert(names);
        }
    }
    used
}

fn check_layers(file: &File<'_>) -> Vec<Finding> {
    let Some(own) = file.top() else { return Vec::new() };
    let rank = |name: &str| LAYERS.iter().position(|layer| *layer == name);
    let Some(own_rank) = rank(own) else {
        let folders = LAYERS.join(", ");
        return vec![Finding::error(file.path, format!("the file must be in one of the folders {folders}"))];
    };
    let refused = file.used().into_iter().filter_map(|used| match rank(used) {
        Some(other) if other <= own_rank => None,
        Some(_) => Some(format!("`{own}` is below `{used}` and may not use it")),
        None => Some(format!("`{own}` is below main.rs and may not use `crate::{used}`, which main.rs declares")),
    });
    refused.map(|rule| Finding::error(file.path, rule)).collect()
}

/// For each module of one level: the modules that it imports, each with the path of a file that contains the import.
type Graph<'a> = BTreeMap<&'a str, BTreeMap<&'a str, &'a str>>;

/// Returns the imports between the modules directly below `parent`. An empty `parent` is the root of the crate.
fn graph<'a>(files: &'a [File<'a>], parent: &[&'static str]) -> Graph<'a> {
    let own = |file: &File<'a>| -> Option<&'a str> { file.module.strip_prefix(parent)?.first().copied() };
    let mut graph: Graph<'a> = files.iter().filter_map(|file| Some((own(file)?, BTreeMap::new()))).collect();
    let known: BTreeSet<&str> = graph.keys().copied().collect();
    for file in files {
        let Some(own) = own(file) else { continue };
        for used in file.paths.iter().filter(|it| it.len() > parent.len() && it.iter().zip(parent).all(|(a, b)| a == b))
        {
            let name = used.get(parent.len()).map_or("", String::as_str);
            let Some(other) = known.get(name).filter(|other| **other != own) else { continue };
            graph.entry(own).or_default().entry(other).or_insert(file.path);
        }
    }
    graph
}

/// Reports, for each module, the shortest import cycle through this module. A cycle is reported only once.
fn circles(source: &str, graph: &Graph<'_>) -> Vec<Finding> {
    let mut seen = BTreeSet::new();
    let mut findings = Vec::new();
    for start in graph.keys() {
        let Some(circle) = circle_through(graph, start) else { continue };
        if seen.insert(circle.iter().copied().collect::<BTreeSet<_>>()) {
            let ends = circle.iter().zip(circle.iter().skip(1).chain(circle.first()));
            let uses: Vec<String> =
                ends.filter_map(|(from, to)| Some(format!("{} uses `{to}`", graph.get(from)?.get(to)?))).collect();
            let rule = format!("its modules import each other in a circle: {}", uses.join(", "));
            findings.push(Finding::error(source, rule));
        }
    }
    findings
}

fn circle_through<'a>(graph: &Graph<'a>, start: &'a str) -> Option<Vec<&'a str>> {
    let mut waiting = VecDeque::from([vec![start]]);
    let mut reached = BTreeSet::new();
    while let Some(path) = waiting.pop_front() {
        for next in path.last().and_then(|last| graph.get(last)).into_iter().flat_map(BTreeMap::keys) {
            if *next == start {
                return Some(path);
            }
            if reached.insert(*next) {
                waiting.push_back([path.as_slice(), &[*next]].concat());
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::check;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        super::super::tests::found(check, files)
    }

    #[test]
    fn a_layer_may_use_itself_and_lower_ones() {
        let files = [
            ("npl-ebpf/src/main.rs", "mod base;\nuse crate::path::xdp;"),
            ("npl-ebpf/src/base/mod.rs", "use npl_common::config;\nuse crate::base::clock;"),
            ("npl-ebpf/src/act/rewrite/mod.rs", "use crate::{base::{clock, maps::{self}}, net::Headers, state};"),
            (
                "npl-ebpf/src/path/reply.rs",
                "// use crate::main\nfn f() { crate::act::redirect::f(); super::request::g() }",
            ),
            ("npl-ebpf/src/bin/npl-traffic.rs", "use crate::anything;"),
        ];
        assert_eq!(found(&files), Vec::<String>::new());
    }

    #[test]
    fn a_layer_that_uses_a_higher_one_is_found() {
        for (code, expected) in [
            ("use crate::path::xdp;", "`net` is below `path` and may not use it"),
            ("use crate::{base::clock, act::{redirect as r}};", "`net` is below `act` and may not use it"),
            ("fn f() { crate::state::conntrack::f() }", "`net` is below `state` and may not use it"),
            ("use super::super::state;", "`net` is below `state` and may not use it"),
            ("use crate::Verdict;", "`net` is below main.rs and may not use `crate::Verdict`, which main.rs declares"),
        ] {
            assert_eq!(found(&[("npl-ebpf/src/net/tcp.rs", code)]), [format!("npl-ebpf/src/net/tcp.rs: {expected}")]);
        }
    }

    #[test]
    fn a_file_outside_of_the_layers_is_found() {
        let expected = "npl-ebpf/src/flow.rs: the file must be in one of the folders base, net, state, act, path";
        assert_eq!(found(&[("npl-ebpf/src/flow.rs", "")]), [expected]);
    }

    #[test]
    fn a_circle_of_the_agent_is_reported_once_with_the_files_that_close_it() {
        let files = [
            ("npl-agent/src/lib.rs", "mod kube;\nmod metrics;\nmod http;\nmod core;"),
            ("npl-agent/src/kube/watch.rs", "use crate::{core::model::Pod, metrics::{self, Watch}};"),
            ("npl-agent/src/metrics/mod.rs", "use crate::http::Page;"),
            ("npl-agent/src/http/mod.rs", "fn f() { crate::kube::watch::g() }"),
            ("npl-agent/src/core/model.rs", "use crate::core::ports;"),
            ("npl-agent/src/sockets.rs", "use crate::kube;"),
        ];
        assert_eq!(
            found(&files),
            ["npl-agent/src/: its modules import each other in a circle: npl-agent/src/http/mod.rs uses `kube`, \
              npl-agent/src/kube/watch.rs uses `metrics`, npl-agent/src/metrics/mod.rs uses `http`"]
        );
    }

    #[test]
    fn a_circle_between_modules_of_the_core_is_found() {
        let files = [
            ("npl-agent/src/core/mod.rs", "pub mod devices;\npub mod doctor;\nuse self::doctor::Facts;"),
            ("npl-agent/src/core/devices/mod.rs", "mod planner;\nuse super::model::Family;"),
            ("npl-agent/src/core/devices/planner.rs", "use super::{super::doctor::networks, xdp};"),
            (
                "npl-agent/src/core/doctor/mod.rs",
                "use crate::core::{devices::Device, model};\nuse self::kernel::Kernel;",
            ),
            ("npl-agent/src/core/model.rs", "use super::model;"),
        ];
        assert_eq!(
            found(&files),
            [
                "npl-agent/src/core/: its modules import each other in a circle: npl-agent/src/core/devices/planner.rs uses \
              `doctor`, npl-agent/src/core/doctor/mod.rs uses `devices`"
            ]
        );
    }

    #[test]
    fn the_core_imports_no_other_module() {
        let rule = "`core` must import no other module of its crate, but uses `crate::kube`";
        assert_eq!(
            found(&[("npl-agent/src/core/model.rs", "use crate::kube::Pod;"), ("npl-agent/src/kube/mod.rs", "")]),
            [format!("npl-agent/src/core/model.rs: {rule}")]
        );
    }

    #[test]
    fn tests_may_use_anything() {
        let files = [
            (
                "npl-agent/src/kube/mod.rs",
                "use crate::core;\n#[cfg(test)]\npub(crate) mod mock;\n#[cfg(test)]\nmod tests;",
            ),
            ("npl-agent/src/kube/mock.rs", "use crate::metrics;"),
            ("npl-agent/src/kube/tests/a.rs", "use crate::metrics;"),
            ("npl-agent/src/core/mod.rs", "#[cfg(test)]\nmod tests {\n    use crate::metrics;\n}"),
            ("npl-agent/src/metrics/mod.rs", "use crate::kube;"),
        ];
        assert_eq!(found(&files), Vec::<String>::new());
    }
}
