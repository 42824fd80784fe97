// SPDX-License-Identifier: Apache-2.0
//! Reads the facts about this machine and this container on which the sizes of maps depend.

use std::{fs, sync::OnceLock};

use aya::maps::MapData;
use nix::unistd::{SysconfVar, sysconf};

use super::error::DatapathError;
use crate::core::sizes::{self, AGENT_MEMORY, Machine, MaxFlows, TableSizes, USUAL_PAGE};

const POSSIBLE_CPUS: &str = "/sys/devices/system/cpu/possible";
const MEMORY: &str = "/proc/meminfo";
/// The files with the memory limit of the container's cgroup: for cgroup v2 and for cgroup v1.
const LIMITS: [&str; 2] = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
const MIB: u64 = 1 << 20;

/// Determines the sizes of the maps from this machine's memory and CPUs, and from the requested number of flows.
///
/// # Errors
///
/// If the number of CPUs cannot be read, or the maps do not fit into the container's memory.
pub(super) fn table_sizes(max_flows: MaxFlows) -> Result<TableSizes, DatapathError> {
    let sizes = TableSizes::of(machine()?, max_flows);
    let limit = LIMITS.iter().find_map(|path| fs::read_to_string(path).ok()?.trim().parse().ok());
    check(&sizes, limit)?;
    Ok(sizes)
}

/// The number of entries that an LRU map can hold before the kernel evicts an entry.
pub(super) fn stated_entries(map: &MapData, name: &'static str) -> Result<usize, DatapathError> {
    let info = map.info().map_err(|source| DatapathError::OpenMap { name, source })?;
    Ok(sizes::stated_entries(info.max_entries(), possible_cpus()?) as usize)
}

/// The number of CPUs for which the kernel has reserved per-CPU memory. The number is read once and kept: it is
/// constant until the machine boots again, and is needed at each sweep and each scrape.
fn possible_cpus() -> Result<u32, DatapathError> {
    static CPUS: OnceLock<u32> = OnceLock::new();
    if let Some(cpus) = CPUS.get() {
        return Ok(*cpus);
    }
    let cpus =
        aya::util::nr_cpus().map_err(|(_, source)| DatapathError::PossibleCpus { path: POSSIBLE_CPUS, source })?;
    Ok(*CPUS.get_or_init(|| u32::try_from(cpus).unwrap_or(u32::MAX)))
}

/// The memory size and the number of CPUs of this machine. If the memory size cannot be read, the maps get their
/// smallest default size.
fn machine() -> Result<Machine, DatapathError> {
    let memory = fs::read_to_string(MEMORY).ok().and_then(|text| total_memory(&text)).unwrap_or_default();
    let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().and_then(|bytes| bytes.try_into().ok());
    Ok(Machine { possible_cpus: possible_cpus()?, memory, page: page.unwrap_or(USUAL_PAGE) })
}

/// The machine's memory in bytes, from the text of `/proc/meminfo`.
fn total_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns an error if the maps alone exceed `limit`, a memory limit in bytes. Without this check, the kernel would
/// kill the process of the agent or of the init container while the process creates the maps.
fn check(sizes: &TableSizes, limit: Option<u64>) -> Result<(), DatapathError> {
    let memory = sizes.memory();
    match limit {
        Some(limit) if memory > limit => Err(DatapathError::TooLargeForContainer {
            flows: sizes.flows,
            needed: memory.div_ceil(MIB),
            limit: limit / MIB,
            sufficient: (memory + AGENT_MEMORY).div_ceil(MIB),
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_is_read_from_meminfo() {
        assert_eq!(total_memory("MemTotal:       24684444 kB\nMemFree:         4147912 kB\n"), Some(24_684_444 * 1024));
        for text in ["", "MemFree: 1 kB\n", "MemTotal: many kB\n", "MemTotal: 18446744073709551615 kB\n"] {
            assert_eq!(total_memory(text), None, "{text}");
        }
    }

    #[test]
    fn maps_that_exceed_the_containers_memory_are_refused_with_a_sufficient_limit() {
        let machine = Machine { possible_cpus: 4, memory: 64 << 30, page: USUAL_PAGE };
        let sizes = TableSizes::of(machine, MaxFlows::Flows(4_000_000));
        let error = check(&sizes, Some(480 * MIB)).unwrap_err();
        let DatapathError::TooLargeForContainer { needed, limit, sufficient, .. } = &error else { panic!("{error}") };
        assert!(*limit == 480 && *needed > 480 && *sufficient > *needed, "{error}");
        assert!(error.to_string().contains(&format!("resources.limits.memory to at least {sufficient}Mi")), "{error}");
        check(&sizes, Some(sufficient * MIB)).unwrap();
        check(&sizes, None).unwrap();
        check(&TableSizes::of(machine, MaxFlows::Auto), Some(480 * MIB)).unwrap();
    }
}
