// SPDX-License-Identifier: Apache-2.0
//! Renders `sizes.md` from [`crate::core::sizes`].

use super::markdown::{heading, number, table};
use crate::core::sizes::{AGENT_MEMORY, Machine, MaxFlows, TableSizes, USUAL_PAGE};

const CPUS: [u32; 10] = [2, 4, 8, 16, 32, 64, 128, 256, 512, 768];
const GIB: u64 = 1 << 30;
const MEMORY: [u64; 5] = [1, 2, 4, 8, 64];
const FLOWS: [u32; 4] = [65_536, 524_288, 2_097_152, 8_388_608];
/// The memory size in bytes of a Node on which `auto` selects the largest number of flows.
const LARGE: u64 = 64 * GIB;

pub(super) fn body() -> String {
    let agent = mib(AGENT_MEMORY);
    let mut text = String::from(
        "`--max-flows` (`config.maxFlows` in the chart) is the number of TCP connections of each IP family that a Node has room \
         for. With `auto`, the number depends on the memory of the machine; on machines with so many CPUs that the maps would \
         not fit into the container's default memory limit, the number is smaller.\n\n\
         TCP, UDP and SCTP have a flow table each, so that a flood of one protocol evicts no flows of the other \
         protocols. `--max-flows` is the number for TCP; UDP has room for half as many flows, and SCTP for a \
         sixteenth. Socket reverse NAT for local clients has room for an eighth as many entries, at least 16 384; each \
         open socket of a local client uses at least two entries.\n\n\
         The kernel reserves 128 elements of each LRU map for each possible CPU, and other CPUs cannot use these elements. \
         The agent therefore adds the number of reserved elements to `max_entries` of these maps, so that the stated \
         number of flows is always available. Possible CPUs are those in `/sys/devices/system/cpu/possible`; on a virtual \
         machine, more CPUs may be possible than are present.\n\n\
         The half-open cache, the lookup caches and the other slot arrays have constant sizes, because programs select a slot by \
         a hash and a constant mask. The half-open cache has separate slots for handshakes, 128 KiB per IP family, which \
         stay in the CPU's cache during a SYN flood. Counters and fragment \
         buffers take memory for each possible CPU. The tables below do not include the memory of allowed sources, \
         which the kernel allocates when the agent writes them.\n\n\
         A changed number takes effect when the agent's Pod restarts: the agent copies the entries to the new maps \
         ([upgrade](../upgrade.md)).\n",
    );
    text += &heading(2, "By memory of the machine, with `auto`");
    text += &table(
        &["memory, GiB", "TCP flows of each family", "maps with 8 CPUs, MiB"],
        MEMORY.map(|gib| {
            let sizes =
                TableSizes::of(Machine { possible_cpus: 8, memory: gib * GIB, page: USUAL_PAGE }, MaxFlows::Auto);
            vec![number_of(gib), number_of(sizes.flows.into()), number_of(mib(sizes.memory()))]
        }),
    );
    text += &heading(2, "By number of CPUs, with `auto` and at least 8 GiB");
    text += &table(
        &["possible CPUs", "TCP flows of each family", "maps, MiB", &format!("maps and {agent} MiB for the agent")],
        CPUS.map(|possible_cpus| {
            let sizes = TableSizes::of(Machine { possible_cpus, memory: LARGE, page: USUAL_PAGE }, MaxFlows::Auto);
            let memory = sizes.memory();
            let columns = [possible_cpus.into(), sizes.flows.into(), mib(memory), mib(memory + AGENT_MEMORY)];
            columns.map(number_of).to_vec()
        }),
    );
    text += &heading(2, "Maps in MiB, by number of CPUs and `--max-flows`");
    let header: Vec<String> = FLOWS.iter().map(|flows| number_of((*flows).into())).collect();
    let header: Vec<&str> = ["possible CPUs"].into_iter().chain(header.iter().map(String::as_str)).collect();
    text += &table(
        &header,
        CPUS.map(|possible_cpus| {
            let memory = |flows: &u32| {
                let machine = Machine { possible_cpus, memory: LARGE, page: USUAL_PAGE };
                number_of(mib(TableSizes::of(machine, MaxFlows::Flows(*flows)).memory()))
            };
            [number_of(possible_cpus.into())].into_iter().chain(FLOWS.iter().map(memory)).collect()
        }),
    );
    text + "\nThe memory limit of the agent's container (`resources.limits.memory`) must be at least the memory of the \
    maps plus the memory of the agent. If the maps alone exceed the limit, the agent does not start, and the agent's \
    error message names a sufficient limit.\n"
}

/// Converts bytes to mebibytes. Rounds up, so that the result is sufficient as a memory limit.
const fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

fn number_of(value: u64) -> String {
    usize::try_from(value).map(number).unwrap_or_default()
}
