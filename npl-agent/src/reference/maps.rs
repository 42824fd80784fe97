// SPDX-License-Identifier: Apache-2.0
//! Renders `maps.md` from [`npl_common::catalog`] and [`npl_common::names`].

use std::{collections::BTreeSet, fmt::Write as _};

use npl_common::{
    FieldLayout, LAYOUTS, Layout,
    catalog::{Content, MAPS, Map, MapKind, PROGRAM_LIST, Program},
    names::{ABI_VERSION, LINK_DIR, MAP_MAPPING_V4, PIN_ROOT, PROGRAM_DIR},
};

use super::markdown::{anchor, code, codes, heading, number, prose, table};
use crate::core::sizes::follows_the_node;

pub(super) fn body() -> String {
    let folder = format!("/sys/fs/bpf/{PIN_ROOT}/v{ABI_VERSION}");
    let mut text = format!(
        "Maps are pinned as `{folder}/NAME`, below the mount point that `--bpffs` names. `v{ABI_VERSION}` is the ABI version: \
         agents with different ABI versions never share a map. Pins, programs and links outlive the agent; `npl-agent cleanup` \
         removes them.\n\n\
         ```sh\nbpftool map dump pinned {folder}/{MAP_MAPPING_V4}\n```\n\n\
         Addresses are bytes in network order, ports are numbers in host order, times are nanoseconds of `CLOCK_MONOTONIC` \
         unless the table names another unit.\n\
         Do not write to a map: a wrong element misdirects traffic.\n"
    );
    text += &heading(2, "Maps");
    text += &table(
        &["map", "purpose", "written by"],
        MAPS.iter().map(|map| {
            let link = format!("[{}]({})", codes(map.names), anchor(&title(map)));
            vec![link, map.purpose.to_owned(), map.written_by.to_owned()]
        }),
    );
    text += &heading(2, "Programs");
    let _infallible = writeln!(
        text,
        "Programs are pinned as `{folder}/{PROGRAM_DIR}/BUILD/NAME`; `npl-agent status` names the builds. The links of \
         XDP and cgroup v2 programs, and from Linux 6.6 on those of TC programs, are pinned below \
         `{folder}/{LINK_DIR}/`.\n\
         Uplinks are the devices of `--devices`; the slow-path programs are tail-called by the programs in the third column.\n"
    );
    text += &table(
        &["program", "hook", "used with", "purpose"],
        PROGRAM_LIST.iter().map(|Program { name, hook, used_with, purpose }| {
            vec![code(name), (*hook).to_owned(), (*used_with).to_owned(), (*purpose).to_owned()]
        }),
    );
    text += &heading(2, "Each map");
    for map in MAPS {
        text += &map_section(map);
    }
    text += &heading(2, "Types of keys and values");
    for layouts in described_types() {
        text += &type_section(&layouts);
    }
    text
}

fn title(map: &Map) -> String {
    map.names.join(", ")
}

fn map_section(map: &Map) -> String {
    let elements = match map.capacity {
        _ if map.names.iter().all(|name| follows_the_node(name)) => {
            "number of elements [by `--max-flows`](sizes.md)".to_owned()
        }
        bytes if map.kind == MapKind::RingBuffer => format!("{} bytes", number(bytes as usize)),
        1 => "1 element".to_owned(),
        several => format!("{} elements", number(several as usize)),
    };
    let per_cpu = if map.kind == MapKind::PerCpuArray { " for each CPU" } else { "" };
    let families = if map.names.len() > 1 { " in the map of each IP family" } else { "" };
    let lines = [
        ("Type", format!("{}, {elements}{per_cpu}{families}", code(map.kind.name()))),
        ("Key", content(map.key)),
        ("Value", content(map.value)),
        ("Written by", map.written_by.to_owned()),
        ("When full", map.when_full.to_owned()),
    ];
    let mut text = heading(3, &title(map)) + map.purpose + "\n\n";
    for (name, line) in lines {
        let _infallible = writeln!(text, "* {name}: {line}.");
    }
    text
}

fn content(content: Content) -> String {
    let types = |layouts: &[Layout]| {
        let links = layouts.iter().map(|layout| format!("[`{}`]({})", layout.name, anchor(&type_title(&pair(layout)))));
        links.collect::<Vec<_>>().join(", ")
    };
    match content {
        Content::None(meaning) => meaning.to_owned(),
        Content::U32(meaning) => format!("`u32`: {meaning}"),
        Content::U64(meaning) => format!("`u64`: {meaning}"),
        Content::Type(layouts) => types(layouts),
        Content::Prefix(layouts) => {
            format!("`u32`: prefix length in bits, counted from the start of the type; then {}", types(layouts))
        }
    }
}

/// Returns the type for IPv4 and the type for IPv6, if `layout` has a counterpart for the other IP family; otherwise,
/// only `layout`.
fn pair(layout: &Layout) -> Vec<Layout> {
    let stem = |name: &'static str| name.strip_suffix("V4").or(name.strip_suffix("V6"));
    let is_other = |other: &Layout| stem(other.name).is_some() && stem(other.name) == stem(layout.name);
    LAYOUTS.iter().filter(|other| other.name == layout.name || is_other(other)).copied().collect()
}

/// Returns the types of the keys and values of all maps, and the types of their fields. The types for IPv4 and IPv6
/// form a pair, and no pair appears twice.
fn described_types() -> Vec<Vec<Layout>> {
    let mut seen = BTreeSet::new();
    let pairs = LAYOUTS.iter().map(pair);
    pairs.filter(|layouts| seen.insert(type_title(layouts))).collect()
}

fn type_title(layouts: &[Layout]) -> String {
    layouts.iter().map(|layout| layout.name).collect::<Vec<_>>().join(" and ")
}

fn type_section(layouts: &[Layout]) -> String {
    let help = layouts.first().map(|layout| prose(layout.help)).unwrap_or_default();
    let sizes: Vec<_> = layouts.iter().map(|layout| number(layout.size)).collect();
    let (size, offset) = match sizes.as_slice() {
        [v4, v6] => (format!("{v4} bytes for IPv4, {v6} bytes for IPv6"), "offset for IPv4, IPv6"),
        sizes => (format!("{} bytes", sizes.concat()), "offset"),
    };
    let mut text = heading(3, &type_title(layouts));
    let _infallible = writeln!(text, "{help} Size: {size}.\n");
    let mut fields: Vec<&FieldLayout> = Vec::new();
    for field in layouts.iter().rev().flat_map(|layout| layout.fields) {
        if !fields.iter().any(|known| known.name == field.name) {
            fields.push(field);
        }
    }
    text += &table(
        &[offset, "field", "type", "meaning"],
        fields.iter().map(|field| {
            let own: Vec<_> =
                layouts.iter().map(|layout| layout.fields.iter().find(|own| own.name == field.name)).collect();
            let offsets = own.iter().map(|own| own.map_or("none".to_owned(), |own| own.offset.to_string()));
            let types = own.iter().flatten().map(|own| own.ty);
            let help = own.iter().flatten().next().map(|own| prose(own.help)).unwrap_or_default();
            vec![merged(offsets), code(field.name), codes_merged(types), help]
        }),
    );
    text
}

/// Returns the values of both IP families as text, or one value if both are equal.
fn merged(values: impl Iterator<Item = String>) -> String {
    let mut values: Vec<_> = values.collect();
    values.dedup();
    values.join(", ")
}

fn codes_merged(types: impl Iterator<Item = &'static str>) -> String {
    merged(types.map(code))
}

#[cfg(test)]
mod tests {
    use aya_obj::Object;
    use npl_common::{LAYOUTS, catalog::MAPS};

    use crate::datapath::embedded_object;

    #[test]
    fn every_type_of_a_map_is_described() {
        for layout in MAPS.iter().flat_map(|map| [map.key.layouts(), map.value.layouts()]).flatten() {
            assert!(LAYOUTS.iter().any(|described| described.name == layout.name), "{}", layout.name);
        }
    }

    /// If the build has no kernel object, as in a code editor, the test passes, because it has no maps to compare.
    #[test]
    fn listed_maps_are_those_of_the_kernel_object() {
        let Ok(bytes) = embedded_object() else { return };
        let object = Object::parse(bytes).unwrap();
        for map in MAPS {
            for (position, name) in map.names.iter().enumerate() {
                let found = &object.maps[*name];
                assert_eq!(found.map_type(), map.kind.number(), "{name}");
                assert_eq!(found.max_entries(), map.capacity, "{name}");
                assert_eq!(found.key_size() as usize, map.key.size(position), "key of {name}");
                assert_eq!(found.value_size() as usize, map.value.size(position), "value of {name}");
            }
        }
    }
}
