// SPDX-License-Identifier: Apache-2.0
//! Changes pinned maps as an administrator does, with `bpftool`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use npl_testkit::tools;
use serde_json::Value;

use crate::world::World;

/// An entry of a map: the bytes of the key and of the value.
pub(super) type Entry = (Vec<u8>, Vec<u8>);

/// A pinned map.
pub(crate) struct PinnedMap(PathBuf);

pub(crate) fn map(world: &World, name: &str) -> PinnedMap {
    PinnedMap(world.pins().join(name))
}

impl PinnedMap {
    pub(super) fn entries(&self) -> Vec<Entry> {
        let entries: Value = serde_json::from_str(&bpftool(&["-j", "map", "dump", "pinned", self.path()])).unwrap();
        let all = entries.as_array().unwrap();
        all.iter().map(|entry| (bytes(&entry["key"]), bytes(&entry["value"]))).collect()
    }

    pub(super) fn value(&self, key: &[u8]) -> Vec<u8> {
        self.entries().into_iter().find(|(found, _)| found == key).unwrap().1
    }

    pub(crate) fn set(&self, key: &[u8], value: &[u8]) {
        self.change("update", key, &[&["value".to_owned(), "hex".to_owned()], &hex(value)[..]].concat());
    }

    pub(super) fn remove(&self, key: &[u8]) {
        self.change("delete", key, &[]);
    }

    fn change(&self, verb: &str, key: &[u8], rest: &[String]) {
        let mut command = Command::new("bpftool");
        command.args(["map", verb, "pinned", self.path(), "key", "hex"]).args(hex(key)).args(rest);
        tools::output(&mut command).unwrap();
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

/// Replaces the object that is pinned at `pin` by a map of other software, in one step: the agent never finds the pin
/// missing.
pub(super) fn replace_by_map(world: &World, pin: &Path) {
    let foreign = world.bpffs.path().join("foreign");
    let path = foreign.to_str().unwrap();
    bpftool(&["map", "create", path, "type", "hash", "key", "4", "value", "4", "entries", "1", "name", "foreign"]);
    fs::rename(&foreign, pin).unwrap();
}

pub(super) fn bpftool(arguments: &[&str]) -> String {
    tools::output(Command::new("bpftool").args(arguments)).unwrap()
}

fn hex(bytes: &[u8]) -> Vec<String> {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Parses an array of bytes, which `bpftool` prints as strings such as `0x1f`.
fn bytes(value: &Value) -> Vec<u8> {
    let byte = |text: &Value| u8::from_str_radix(text.as_str().unwrap().trim_start_matches("0x"), 16).unwrap();
    value.as_array().unwrap().iter().map(byte).collect()
}
