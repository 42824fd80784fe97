// SPDX-License-Identifier: Apache-2.0
//! Tests which kernel state the cleanup removes, and in which order.

use npl_common::names::ABI_VERSION;

use super::*;
use crate::core::devices::attachments::{FIRST, LAST, STAND_IN_HANDLE, filter_handle};

const PROGRAMS: [&str; 2] = ["npl_ingress", "npl_egress"];

fn filter(side: Side, kind: &str, priority: u16, handle: (u16, u16), program: Option<&str>) -> TcFilter {
    TcFilter { ifindex: 2, side, kind: kind.to_owned(), priority, handle, program: program.map(str::to_owned) }
}

fn entry(path: &str, meaning: PinMeaning) -> PinEntry {
    PinEntry { path: PathBuf::from(path), meaning }
}

fn state() -> KernelState {
    KernelState {
        devices: [(2, "eth0".to_owned())].into(),
        own_qdiscs: vec![2],
        filters: vec![
            filter(Side::Ingress, "bpf", FIRST, (0, 0), None),
            filter(Side::Ingress, "bpf", FIRST, filter_handle(ABI_VERSION), Some("npl_ingress")),
        ],
        table: Some("inet npl"),
        pins: vec![
            entry("/b/npl/v2/npl_config", PinMeaning::Map),
            entry("/b/npl/v2/links/2_xdp", PinMeaning::XdpLink(2)),
            entry("/b/npl/v2/links/9_out", PinMeaning::TcLink(9, Direction::Egress)),
            entry("/b/npl/v2/links/1_connect4", PinMeaning::CgroupLink("connect4".to_owned())),
            entry("/b/npl", PinMeaning::Directory),
        ],
    }
}

/// One line per removal, with `-` for an absent device or hook.
fn lines(removals: &[Removal]) -> Vec<String> {
    let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "-".to_owned());
    removals.iter().map(|it| [it.kind.as_str(), &text(&it.device), &text(&it.hook), &it.name].join(" ")).collect()
}

#[test]
fn xdp_is_removed_first_and_pins_last() {
    let expected = [
        "xdp-link eth0 xdp /b/npl/v2/links/2_xdp".to_owned(),
        format!("tc-filter eth0 ingress npl_ingress, priority 1, handle {:#x}", 0x4e50_4c00 + ABI_VERSION),
        "qdisc eth0 - clsact".to_owned(),
        "nftables-table - - inet npl".to_owned(),
        "map - - /b/npl/v2/npl_config".to_owned(),
        "tc-link ifindex 9 egress /b/npl/v2/links/9_out".to_owned(),
        "cgroup-link - connect4 /b/npl/v2/links/1_connect4".to_owned(),
        "directory - - /b/npl".to_owned(),
    ];
    assert_eq!(lines(&plan(&state(), &PROGRAMS)), expected);
    assert!(plan(&KernelState::default(), &PROGRAMS).is_empty());
}

#[test]
fn only_filters_of_npl_are_removed() {
    let own = [
        filter(Side::Egress, "bpf", FIRST, filter_handle(1), None),
        filter(Side::Egress, "bpf", LAST, STAND_IN_HANDLE, None),
        filter(Side::Egress, "bpf", 7, (0, 1), Some("npl_egress")),
    ];
    let others = [
        filter(Side::Egress, "bpf", FIRST, (0, 1), Some("cil_to_netdev")),
        filter(Side::Egress, "bpf", FIRST, (0, 0), None),
        filter(Side::Egress, "u32", 10, (0x8000, 0x800), None),
    ];
    for (filters, removed) in [(&own, true), (&others, false)] {
        for filter in filters {
            let state = KernelState { filters: vec![filter.clone()], ..KernelState::default() };
            assert_eq!(!plan(&state, &PROGRAMS).is_empty(), removed, "{filter:?}");
        }
    }
}

#[test]
fn a_qdisc_with_a_filter_of_other_software_or_without_a_device_stays() {
    let has_qdisc = |state: &KernelState| plan(state, &PROGRAMS).iter().any(|it| it.kind == RemovalKind::Qdisc);
    assert!(has_qdisc(&state()));
    for other in [
        filter(Side::Egress, "u32", 10, (0x8000, 0x800), None),
        filter(Side::Egress, "u32", 10, (0, 0), None),
        filter(Side::Ingress, "bpf", FIRST, (0, 1), Some("cil_from_netdev")),
    ] {
        let mut state = state();
        state.filters.push(other.clone());
        assert!(!has_qdisc(&state), "{other:?}");
        state.filters.last_mut().unwrap().ifindex = 3;
        assert!(has_qdisc(&state), "a filter of another device does not keep the qdisc: {other:?}");
    }
    assert!(!has_qdisc(&KernelState { devices: BTreeMap::new(), ..state() }));
}

#[test]
fn the_kind_has_the_same_name_in_tables_and_in_json() {
    for removal in plan(&state(), &PROGRAMS) {
        let json = serde_json::to_value(&removal).unwrap();
        assert_eq!(json["kind"], removal.kind.as_str());
        assert_eq!(json.as_object().unwrap().len(), 4, "{json}");
    }
}
