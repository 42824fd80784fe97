// SPDX-License-Identifier: Apache-2.0
//! Tests pinned maps: the next agent adopts a compatible map and replaces an incompatible one, and bpftool can print
//! the content of the maps.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use aya::maps::{Array, HashMap, MapData};
use npl_agent::core::model::Protocol;
use npl_agent::datapath::inspect::Inspection;
use npl_agent::datapath::{Datapath, Pins};
use npl_agent::process::error_chain::ErrorChain;
use npl_common::flow::{FlowKeyV4, FlowV4, MAX_FLOWS};
use npl_common::mapping::{BackendV4, Frontend, MAX_MAPPINGS};
use npl_common::{half_open, names};
use npl_testkit::mounts::PrivateBpffs;
use npl_testkit::tools;

use crate::bpffs_pool::BPFFS;
use crate::lab::{mapping, with_lab};
use crate::world::{is_emulated, set_addresses};

/// Asserts that the agent can open its datapath although `prepare` has pinned an unusable map: the datapath has no
/// mappings, and accepts a mapping and a node address.
fn opens_over(prepare: impl FnOnce(&Pins) + Send) {
    let open = || {
        let pins = Pins::new(Path::new(BPFFS));
        pins.create().unwrap();
        prepare(&pins);
        let mut datapath = Datapath::open(Path::new(BPFFS)).unwrap();
        assert!(datapath.mappings().unwrap().is_empty());
        let (frontend, backend) = mapping(Protocol::Tcp, 61_000, "10.0.0.5:8080".parse().unwrap(), 1);
        datapath.upsert_mapping(frontend, backend).unwrap();
        assert_eq!(datapath.mappings().unwrap()[&frontend], backend);
        set_addresses(&mut datapath, &["192.0.2.10".parse().unwrap()]);
    };
    PrivateBpffs::mount(Path::new(BPFFS)).unwrap().run(open).unwrap();
}

#[test]
fn pinned_map_with_other_keys_and_values_is_replaced() {
    opens_over(|pins| {
        let mut other = HashMap::<MapData, u32, u64>::create(MAX_MAPPINGS, 0).unwrap();
        other.insert(1, 2, 0).unwrap();
        other.pin(pins.map(names::MAP_MAPPING_V4)).unwrap();
    });
}

#[test]
fn pinned_map_of_another_size_is_replaced() {
    opens_over(|pins| {
        let other = HashMap::<MapData, Frontend, BackendV4>::create(16, 0).unwrap();
        other.pin(pins.map(names::MAP_MAPPING_V4)).unwrap();
    });
}

#[test]
fn pinned_map_of_another_type_is_replaced() {
    opens_over(|pins| {
        let other = HashMap::<MapData, FlowKeyV4, FlowV4>::create(MAX_FLOWS, 0).unwrap();
        other.pin(pins.map(names::MAP_FLOW_V4)).unwrap();
    });
}

/// The agent maps the half-open cache into its memory, so it must replace a pinned map without the flag
/// `BPF_F_MMAPABLE`.
#[test]
fn pinned_map_with_other_flags_is_replaced() {
    opens_over(|pins| {
        let other = Array::<MapData, u64>::create(half_open::SLOTS, 0).unwrap();
        other.pin(pins.map(names::MAP_HALF_OPEN_V4)).unwrap();
    });
}

#[test]
fn pin_other_than_a_map_is_replaced() {
    opens_over(|pins| fs::create_dir(pins.map(names::MAP_STATS)).unwrap());
}

#[test]
fn compatible_pinned_map_is_adopted() {
    with_lab(|lab| {
        lab.add(Protocol::Tcp, 61_000, "10.0.0.5:8080".parse().unwrap(), 7);
        let mut next = Datapath::open(Path::new(BPFFS)).unwrap();
        assert_eq!(next.mappings().unwrap(), lab.datapath.mappings().unwrap());
    });
}

#[test]
fn bpftool_dumps_mappings_with_field_names() {
    // The initial RAM disk of emulated kernels has no bpftool.
    if is_emulated() {
        return;
    }
    with_lab(|lab| {
        lab.add(Protocol::Tcp, 61_000, "10.0.0.5:8080".parse().unwrap(), 7);
        let pin = Pins::new(Path::new(BPFFS)).map(names::MAP_MAPPING_V4);
        let dump = tools::output(Command::new("bpftool").args(["map", "dump", "pinned"]).arg(pin)).unwrap();
        let dump: String = dump.split_whitespace().collect();
        for part in [r#""node_port":61000"#, r#""protocol":6"#, r#""pod_addr":[10,0,0,5]"#, r#""pod_port":8080"#] {
            assert!(dump.contains(part), "{part} is not in {dump}");
        }
    });
}

/// An agent may be unable to open a map because it lacks a permission (as in this test) or file descriptors. The map
/// must keep all its mappings.
#[test]
fn pinned_map_that_cannot_be_opened_is_kept() {
    with_lab(|lab| {
        lab.add(Protocol::Tcp, 61_000, "10.0.0.5:8080".parse().unwrap(), 7);
        let pin = Pins::new(Path::new(BPFFS)).map(names::MAP_MAPPING_V4);
        let set_mode = |mode| fs::set_permissions(&pin, fs::Permissions::from_mode(mode)).unwrap();
        set_mode(0);
        let error = Datapath::open(Path::new(BPFFS)).unwrap_err();
        let text = ErrorChain(&error).to_string();
        assert!(text.starts_with(&format!("open {}", pin.display())) && text.contains("Permission denied"), "{text}");
        set_mode(0o600);
        let mut next = Datapath::open(Path::new(BPFFS)).unwrap();
        assert_eq!(next.mappings().unwrap().len(), 1);
    });
}

/// `npl-agent status` may find an incomplete set of maps, while a first agent loads its programs or a cleanup removes
/// the maps. `status` must report each missing map. A running agent pins its own map again.
#[test]
fn missing_pin_of_a_map_is_reported_and_restored_by_the_agent() {
    with_lab(|lab| {
        let pin = Pins::new(Path::new(BPFFS)).map(names::MAP_FLOW_V6);
        fs::remove_file(&pin).unwrap();
        let text = Inspection::read(Path::new(BPFFS)).unwrap_err().to_string();
        assert!(text.starts_with(&pin.display().to_string()) && text.contains("run the command again"), "{text}");
        lab.datapath.check_pins().unwrap();
        Inspection::read(Path::new(BPFFS)).unwrap();
        let repaired: Vec<_> = lab.datapath.repairs.take().into_iter().map(|repair| repair.name).collect();
        assert_eq!(repaired, [pin.display().to_string()]);
    });
}

#[test]
fn pins_that_another_agent_replaced_are_reported() {
    with_lab(|lab| {
        lab.datapath.check_pins().unwrap();
        fs::remove_dir(Pins::new(Path::new(BPFFS)).version().join(names::LINK_DIR)).unwrap();
        lab.datapath.check_pins().unwrap();
        assert!(Pins::new(Path::new(BPFFS)).version().join(names::LINK_DIR).exists(), "the directory must exist again");
        fs::remove_file(Pins::new(Path::new(BPFFS)).map(names::MAP_CONFIG)).unwrap();
        drop(Datapath::open(Path::new(BPFFS)).unwrap());
        let text = lab.datapath.check_pins().unwrap_err().to_string();
        assert!(text.contains("its restart recreates"), "another map is pinned there: {text}");
    });
}
