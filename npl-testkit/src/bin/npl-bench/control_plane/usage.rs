// SPDX-License-Identifier: Apache-2.0
//! Reads the CPU time and memory of a process, as the kernel counts them.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result};
use nix::time::{clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;

/// Returns the CPU time of all threads of a process, including threads that have ended.
pub(crate) fn cpu_time(pid: u32) -> Result<Duration> {
    let pid = Pid::from_raw(i32::try_from(pid).context("process id out of range")?);
    let clock = clock_getcpuclockid(pid).with_context(|| format!("find the CPU clock of process {pid}"))?;
    Ok(clock_gettime(clock).with_context(|| format!("read the CPU clock of process {pid}"))?.into())
}

/// The memory of a process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    /// The current resident size in MiB.
    pub(crate) resident: f64,
    /// The peak resident size in MiB.
    pub(crate) peak: f64,
}

/// Reads the resident size of a process, including the pages of its executable.
pub(crate) fn memory(pid: u32) -> Result<Memory> {
    let path = format!("/proc/{pid}/status");
    let status = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let mib = |name: &str| -> Result<f64> {
        let line =
            status.lines().find_map(|line| line.strip_prefix(name)).with_context(|| format!("no {name} in {path}"))?;
        let kib: u32 =
            line.trim().trim_end_matches(" kB").parse().with_context(|| format!("parse {name} in {path}"))?;
        Ok(f64::from(kib) / 1024.0)
    };
    Ok(Memory { resident: mib("VmRSS:")?, peak: mib("VmHWM:")? })
}

#[cfg(test)]
mod tests {
    use super::{cpu_time, memory};

    #[test]
    fn this_process_uses_time_and_memory() {
        let pid = std::process::id();
        let before = cpu_time(pid).unwrap();
        let used = memory(pid).unwrap();
        assert!(used.resident > 0.1 && used.peak >= used.resident, "{used:?}");
        assert!(cpu_time(pid).unwrap() > before);
    }
}
