// SPDX-License-Identifier: Apache-2.0
//! Pinned maps: what fits is adopted, what does not is replaced, and people can read them.

use std::path::Path;
use std::process::Command;

use aya::maps::{HashMap, MapData};
use npl_agent::core::model::Protocol;
use npl_agent::datapath::{Datapath, Pins};
use npl_common::flow::{FlowKeyV4, FlowV4, MAX_FLOWS};
use npl_common::mapping::{BackendV4, Frontend, MAX_MAPPINGS};
use npl_common::names;
use npl_testkit::mounts::PrivateBpffs;
use npl_testkit::tools;

use crate::lab::{mapping, with_lab};
use crate::left::BPFFS;
use crate::world::is_emulated;

/// Opens a datapath over what `prepare` has pinned; it works, and starts without mappings.
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

#[test]
fn pin_that_is_no_map_is_replaced() {
    opens_over(|pins| std::fs::create_dir(pins.map(names::MAP_STATS)).unwrap());
}

#[test]
fn pinned_map_that_fits_is_kept() {
    with_lab(|lab| {
        lab.add(Protocol::Tcp, 61_000, "10.0.0.5:8080".parse().unwrap(), 7);
        let mut next = Datapath::open(Path::new(BPFFS)).unwrap();
        assert_eq!(next.mappings().unwrap(), lab.datapath.mappings().unwrap());
    });
}

#[test]
fn dump_of_the_mappings_can_be_read_by_people() {
    // The RAM disk of the emulated kernels has no bpftool.
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
