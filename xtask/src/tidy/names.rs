// SPDX-License-Identifier: Apache-2.0
//! Checks that retired names are not used again. Each concept has only one name, the one that is established in
//! networking or Kubernetes.
//!
//! CHANGELOG.md and docs/design describe the past and may use retired names.

use super::Finding;
use super::rust_code::{identifiers, without_comments};
use super::tree::{Tree, has_ending, is_history};

/// The form in which a retired name is recognized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// The name is retired as a whole identifier anywhere, also in documents and comments. This form is for names that
    /// are not ordinary words.
    Identifier,
    /// The name is retired as a whole identifier in the code of Rust files. Comments may use the word.
    Code,
    /// The name is retired as the name of a module, type, function, constant or static. This form is for ordinary
    /// words, which may occur in code for a different purpose.
    Declaration,
    /// The name is retired as a value in quotation marks, such as the name of a reason or of a metric's state.
    Quoted,
    /// The name is retired as a value between backticks in a document.
    Marked,
}

/// Retired names in files whose path begins with `scope`. The names of files and directories are checked, too, unless
/// the form is [`Form::Quoted`] or [`Form::Marked`].
struct Retired {
    scope: &'static str,
    form: Form,
    names: &'static [(&'static str, &'static str)],
}

const RETIRED: [Retired; 13] = [
    Retired { scope: "", form: Form::Identifier, names: &MAPS },
    Retired { scope: "", form: Form::Identifier, names: &PROGRAMS },
    Retired { scope: "", form: Form::Declaration, names: &HOMONYMS },
    Retired {
        scope: "",
        form: Form::Quoted,
        names: &[
            ("of_host", "host_connection"),
            ("collision", "tuple_conflict"),
            ("header_chain", "ipv6_extension_headers"),
            ("fragment", "early_fragment"),
            ("carrying", "attached"),
            ("refusing", "failed"),
        ],
    },
    Retired {
        scope: "",
        form: Form::Marked,
        names: &[
            ("of_host", "host_connection"),
            ("collision", "tuple_conflict"),
            ("header_chain", "ipv6_extension_headers"),
        ],
    },
    Retired {
        scope: "npl-common/src/reason.rs",
        form: Form::Code,
        names: &[
            ("OfHost", "HostConnection"),
            ("Collision", "TupleConflict"),
            ("HeaderChain", "Ipv6ExtensionHeaders"),
            ("Fragment", "EarlyFragment"),
        ],
    },
    Retired {
        scope: "npl-common/src/",
        form: Form::Declaration,
        names: &[
            ("syn", "half_open"),
            ("hint", "lookup_cache"),
            ("hold", "fragment_buffer"),
            ("host", "host_connection"),
            ("stray", "unmapped"),
            ("peer", "socket_rnat"),
            ("rest", "slow_path"),
            ("direct", "next_hop"),
            ("Passed", "StackSeen"),
        ],
    },
    Retired {
        scope: "npl-ebpf/src/",
        form: Form::Identifier,
        names: &[("was_refused", "remove_refused"), ("NodeEnd", "NatAddress")],
    },
    Retired { scope: "npl-ebpf/src/", form: Form::Code, names: &[("Unusual", "SlowPath")] },
    Retired {
        scope: "npl-ebpf/src/",
        form: Form::Declaration,
        names: &[
            ("attempt", "conntrack"),
            ("hint", "lookup_cache"),
            ("hold", "fragment_buffer"),
            ("first", "sctp_buffer"),
            ("host", "host_connection"),
            ("stray", "unmapped"),
            ("rest", "slow_path"),
            ("word", "slot"),
            ("witness", "stack_seen"),
            ("asks", "is_syn"),
            ("settles", "is_handshake_reply"),
            ("Progress", "Transition"),
            ("Ends", "FlowTuple"),
            ("Location", "Headers"),
            ("Way", "NextHop"),
        ],
    },
    Retired {
        scope: "npl-agent/src/",
        form: Form::Identifier,
        names: &[
            ("WaysBack", "ReplyRoutes"),
            ("Onlooker", "TcInspection"),
            ("Surveying", "SurveyTask"),
            ("Absences", "GracePeriods"),
            ("Unfenced", "Unmitigated"),
            ("leads_home", "mapping_is_current"),
            ("LentPorts", "EphemeralPorts"),
            ("TakesFrames", "ReceivesFrames"),
            ("past_the_node", "bypassing_node"),
        ],
    },
    Retired {
        scope: "npl-agent/src/",
        form: Form::Code,
        names: &[
            ("surveyed", "join_survey"),
            ("starved", "waiting_for_port"),
            ("cramped", "source_table_full"),
            ("troubled", "with_problems"),
            ("parked", "timers"),
            ("Fittings", "DeviceAttachments"),
            ("Strays", "RecentTraffic"),
            ("Carries", "ProgramSet"),
            ("cramp", "source-room"),
            ("stray", "kernel-sources"),
        ],
    },
    Retired {
        scope: "npl-agent/src/",
        form: Form::Declaration,
        names: &[
            ("told", "change_log"),
            ("returns", "reply_routing"),
            ("fittings", "attachments"),
            ("absences", "grace_periods"),
            ("News", "Update"),
            ("Keeper", "Worker"),
            ("Sign", "HealthFinding"),
            ("Gap", "SourceDifference"),
            ("Trace", "Name"),
            ("fate", "replacement_effect"),
            ("may_be", "may_have_port"),
        ],
    },
];

/// Names that two or three different types had at the same time, each with advice on the name to use.
const HOMONYMS: [(&str, &str); 8] = [
    ("Held", "Claim"),
    ("PodWay", "NextHop"),
    ("Placement", "Exposure"),
    ("Subject", "RetryTarget"),
    ("Collision", "TupleConflict"),
    ("Walk", "ChainOutcome"),
    ("By", "FlowSource"),
    ("Known", "ResolvedFlow"),
];

const MAPS: [(&str, &str); 50] = [
    ("npl_syn_v4", "npl_halfopen_v4"),
    ("npl_syn_v6", "npl_halfopen_v6"),
    ("npl_hint_v4", "npl_reqcache_v4"),
    ("npl_hint_v6", "npl_reqcache_v6"),
    ("npl_rhint_v4", "npl_repcache_v4"),
    ("npl_rhint_v6", "npl_repcache_v6"),
    ("npl_hold", "npl_early_frags"),
    ("npl_first", "npl_sctp_frags"),
    ("npl_sctpbuf", "npl_sctp_frags"),
    ("npl_host_v4", "npl_hostconn_v4"),
    ("npl_host_v6", "npl_hostconn_v6"),
    ("npl_stray_v4", "npl_unmap_ts_v4"),
    ("npl_stray_v6", "npl_unmap_ts_v6"),
    ("npl_unmap_v4", "npl_unmap_ts_v4"),
    ("npl_unmap_v6", "npl_unmap_ts_v6"),
    ("npl_xdp_dev", "npl_pre_tc_devs"),
    ("npl_peer_v4", "npl_sk_rnat_v4"),
    ("npl_peer_v6", "npl_sk_rnat_v6"),
    ("npl_passed_v4", "npl_stkseen_v4"),
    ("npl_passed_v6", "npl_stkseen_v6"),
    ("npl_rest", "npl_slow"),
    ("npl_local_v4", "npl_addr2idx_v4"),
    ("npl_local_v6", "npl_addr2idx_v6"),
    ("npl_laddr_v4", "npl_idx2addr_v4"),
    ("npl_laddr_v6", "npl_idx2addr_v6"),
    ("npl_map_v4", "npl_mapping_v4"),
    ("npl_map_v6", "npl_mapping_v6"),
    ("npl_ep_v4", "npl_endpoint_v4"),
    ("npl_ep_v6", "npl_endpoint_v6"),
    ("npl_pod_v4", "npl_pod_dev_v4"),
    ("npl_pod_v6", "npl_pod_dev_v6"),
    ("npl_nodeip_v4", "npl_addr2idx_v4"),
    ("npl_nodeip_v6", "npl_addr2idx_v6"),
    ("npl_nodeidx_v4", "npl_idx2addr_v4"),
    ("npl_nodeidx_v6", "npl_idx2addr_v6"),
    ("npl_lcache_v4", "npl_reqcache_v4"),
    ("npl_lcache_v6", "npl_reqcache_v6"),
    ("npl_rcache_v4", "npl_repcache_v4"),
    ("npl_rcache_v6", "npl_repcache_v6"),
    ("npl_fragbuf", "npl_early_frags"),
    ("npl_sctp_reasm", "npl_sctp_frags"),
    ("npl_uplink", "npl_rd_uplinks"),
    ("npl_stats", "npl_cnt_mapping"),
    ("npl_reason", "npl_cnt_reason"),
    ("npl_nexthop_v4", "npl_pod_dev_v4"),
    ("npl_nexthop_v6", "npl_pod_dev_v6"),
    ("npl_frag_buf", "npl_early_frags"),
    ("npl_xdp_devices", "npl_pre_tc_devs"),
    ("npl_unmapped_v4", "npl_unmap_ts_v4"),
    ("npl_unmapped_v6", "npl_unmap_ts_v6"),
];

const PROGRAMS: [(&str, &str); 8] = [
    ("npl_in_direct", "npl_rd_ingress"),
    ("npl_pods", "npl_rd_pods"),
    ("npl_in_rest", "npl_in_slow4"),
    ("npl_out_rest", "npl_out_slow4"),
    ("npl_in_l3_rest", "npl_inl3_slow4"),
    ("npl_out_l3_rest", "npl_outl3_slow4"),
    ("npl_in_d_rest", "npl_rdin_slow4"),
    ("npl_pods_rest", "npl_rdpod_slow4"),
];

/// The extensions of the files that are searched for retired names.
const SEARCHED: [&str; 6] = ["rs", "toml", "md", "yaml", "yml", "snap"];

/// The files that may contain retired names: this file, and the tables by which an agent finds the maps of earlier
/// builds.
const LISTS: [&str; 2] = ["xtask/src/tidy/names.rs", "npl-common/src/former_names.rs"];

/// The Rust keywords that are followed by the name that they declare.
const DECLARING: [&str; 9] = ["mod", "fn", "struct", "enum", "union", "type", "trait", "const", "static"];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let is_searched =
        |path: &str| SEARCHED.iter().any(|it| has_ending(path, it)) && !is_history(path) && !LISTS.contains(&path);
    tree.files().filter(|(path, _)| is_searched(path)).flat_map(|(path, text)| check_file(path, text)).collect()
}

fn check_file(path: &str, text: &str) -> Vec<Finding> {
    let code = without_comments(text);
    let mut findings = Vec::new();
    for Retired { scope, form, names } in RETIRED.iter().filter(|it| path.starts_with(it.scope)) {
        let inner = path.get(scope.len()..).unwrap_or_default();
        for (retired, replacement) in *names {
            let rule = || format!("`{retired}` is a retired name: use `{replacement}`");
            if !matches!(form, Form::Quoted | Form::Marked) && inner.split('/').any(|part| stem(part) == *retired) {
                findings.push(Finding::error(path, rule()));
            }
            let searched = if matches!(form, Form::Code | Form::Declaration) { code.as_str() } else { text };
            for (index, line) in searched.lines().enumerate() {
                if line.contains(retired) && is_used(*form, line, retired, path) {
                    findings.push(Finding::error(format!("{path}:{}", index + 1), rule()));
                }
            }
        }
    }
    findings
}

/// Returns the part of a path component before its first dot.
fn stem(part: &str) -> &str {
    part.split('.').next().unwrap_or(part)
}

fn is_used(form: Form, line: &str, retired: &str, path: &str) -> bool {
    let (is_rust, is_document) = (has_ending(path, "rs"), has_ending(path, "md"));
    match form {
        Form::Identifier => identifiers(line).any(|word| word == retired),
        Form::Code => is_rust && identifiers(line).any(|word| word == retired),
        Form::Declaration => is_rust && declared(line).any(|word| word == retired),
        Form::Quoted => is_quoted(line, retired),
        Form::Marked => is_document && line.contains(&format!("`{retired}`")),
    }
}

/// Returns the names that a line of code declares.
fn declared(line: &str) -> impl Iterator<Item = &str> {
    let mut before = "";
    identifiers(line).filter(move |word| DECLARING.contains(&std::mem::replace(&mut before, word)))
}

/// Whether the line contains the value between quotation marks. The quotation marks may be escaped, as in
/// `state=\"value\"`.
fn is_quoted(line: &str, value: &str) -> bool {
    line.match_indices(value).any(|(start, _)| {
        let (before, after) =
            (line.get(..start).unwrap_or_default(), line.get(start + value.len()..).unwrap_or_default());
        before.ends_with('"') && after.trim_start_matches('\\').starts_with('"')
    })
}

#[cfg(test)]
mod tests {
    use super::{RETIRED, Tree, check};

    fn found(path: &str, text: &str) -> Vec<String> {
        check(&Tree::of(&[(path, text)])).into_iter().map(|it| format!("{}: {}", it.place, it.rule)).collect()
    }

    #[test]
    fn a_finding_names_the_line_and_the_replacement() {
        assert_eq!(
            found("docs/datapath.md", "text\n`npl_syn_v4` holds"),
            ["docs/datapath.md:2: `npl_syn_v4` is a retired name: use `npl_halfopen_v4`"]
        );
    }

    #[test]
    fn maps_and_programs_are_refused_in_every_kind_of_file() {
        for path in
            ["npl-agent/src/a.rs", "npl-ebpf/budget.toml", "README.md", "deploy/npl.yaml", "npl-common/layout.snap"]
        {
            assert_eq!(found(path, "npl_in_direct = { npl_map_v6 }").len(), 2, "{path}");
        }
        assert!(
            found("xtask/src/a.rs", "npl_in_direct_2 npl_map npl_rest_").is_empty(),
            "a longer identifier that contains a retired name is not retired"
        );
    }

    #[test]
    fn documents_of_the_past_may_use_old_names() {
        for path in ["CHANGELOG.md", "docs/design/0001-flow-state.md", "npl-testkit/a.txt"] {
            assert!(found(path, "npl_syn_v4").is_empty(), "{path}");
        }
    }

    #[test]
    fn reasons_and_states_are_refused_as_values() {
        assert_eq!(found("npl-testkit/tests/a.rs", "wait(r#\"npl_devices{state=\"carrying\"} 1\"#)").len(), 1);
        assert_eq!(found("docs/operate.md", "reason=\"fragment\"").len(), 1);
        assert_eq!(found("npl-testkit/tests/a.rs", "reason=\\\"collision\\\"").len(), 1);
        assert_eq!(found("npl-common/src/reason.rs", "Collision = 4, \"collision\";").len(), 2);
        assert_eq!(found("docs/reference/reasons.md", "| `of_host` | `collision` |").len(), 2);
        assert!(found("docs/operate.md", "a fragment; a collision of fragments; \"fragments\"").is_empty());
    }

    #[test]
    fn ordinary_words_are_refused_as_declared_names_in_their_crates_only() {
        for (path, text) in [
            ("npl-common/src/lib.rs", "pub mod hold;"),
            ("npl-common/src/hold.rs", ""),
            ("npl-ebpf/src/state/first.rs", ""),
            ("npl-ebpf/src/hold/mod.rs", ""),
            ("npl-ebpf/src/net/tcp.rs", "pub const fn asks(flags: u8) -> bool {"),
            ("npl-ebpf/src/act/redirect.rs", "struct Way<F> {"),
            ("npl-agent/src/lib.rs", "pub mod told;"),
            ("npl-agent/src/core/tests/script.rs", "\"stray\" => {"),
            ("npl-feed/src/core/state.rs", "enum Subject {"),
            ("npl-testkit/src/maps.rs", "pub struct Walk;"),
        ] {
            assert_eq!(found(path, text).len(), 1, "{path}");
        }
        for (path, text) in [
            ("npl-common/src/flow.rs", "// a host may hold the rest\nlet first = hold(word);"),
            ("npl-agent/src/core/sources.rs", "pub fn first(self) {}"),
            ("npl-testkit/tests/kernel/lab.rs", "enum Ends {}\nfn told() {}"),
        ] {
            assert!(found(path, text).is_empty(), "{path}: {:?}", found(path, text));
        }
    }

    #[test]
    fn replacements_are_not_retired_themselves() {
        for table in &RETIRED {
            for (retired, replacement) in table.names {
                assert!(!table.names.iter().any(|(other, _)| other == replacement), "{retired}: {replacement}");
            }
        }
    }
}
