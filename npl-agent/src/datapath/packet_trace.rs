// SPDX-License-Identifier: Apache-2.0
//! For `npl-agent trace`: turns packet tracing in the kernel programs on and off, and reads the trace records that the
//! programs write.

use std::{
    fmt,
    fs::File,
    io,
    os::fd::{AsFd as _, OwnedFd},
    time::Duration,
};

use aya::maps::{Array, MapData, PerCpuArray, RingBuf};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};
use npl_common::{
    names::{MAP_TRACE_CPU, MAP_TRACE_FILTER, MAP_TRACE_RING},
    packet_trace::{TraceCpu, TraceFilter, TraceRecord},
};

use super::{
    error::DatapathError,
    pins::{Pins, pin_error},
    sys,
    tables::open,
};

/// The time for which tracing stays on without a call of [`PacketTrace::extend`]. If `npl-agent trace` is killed, the
/// programs turn tracing off after this time.
pub const LEASE: Duration = Duration::from_secs(3);

/// Packet tracing that is turned on with a filter. When this value is dropped, tracing is turned off.
pub struct PacketTrace {
    filter: Array<MapData, TraceFilter>,
    cpus: PerCpuArray<MapData, TraceCpu>,
    ring: RingBuf<MapData>,
    armed: TraceFilter,
    before: LeftOut,
    /// The time at which tracing was turned on. A trace record of a program run that began before this time is
    /// discarded, because the packet may have matched the filter of an earlier command.
    armed_at: Duration,
    _lock: Flock<File>,
}

impl fmt::Debug for PacketTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PacketTrace").field("armed", &self.armed).finish_non_exhaustive()
    }
}

/// The numbers of packets that matched the filter, but for which the programs wrote no record to the ring buffer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LeftOut {
    /// The number of trace records that exceeded the rate limit.
    pub rate_limited: u64,
    /// The number of trace records for which the ring buffer had no room.
    pub lost: u64,
}

impl PacketTrace {
    /// Turns tracing on with a filter. Trace records of an earlier command are discarded.
    ///
    /// # Errors
    ///
    /// If another `npl-agent trace` is running, or a map cannot be opened or written.
    pub fn arm(pins: &Pins, filter: TraceFilter) -> Result<Self, DatapathError> {
        if has_only_logging_programs(pins)? {
            return Err(DatapathError::TraceBuildLogs);
        }
        let lock = lock(pins)?;
        let missing = [MAP_TRACE_FILTER, MAP_TRACE_CPU, MAP_TRACE_RING].map(|name| pins.map(name));
        if let Some(pin) = missing.into_iter().find(|pin| !pin.exists()) {
            return Err(DatapathError::Incomplete(pin));
        }
        let mut trace = Self {
            filter: open(pins, MAP_TRACE_FILTER)?,
            cpus: open(pins, MAP_TRACE_CPU)?,
            ring: open(pins, MAP_TRACE_RING)?,
            armed: filter,
            before: LeftOut::default(),
            armed_at: Duration::ZERO,
            _lock: lock,
        };
        while trace.ring.next().is_some() {}
        trace.before = trace.all_left_out()?;
        trace.armed_at = sys::now();
        trace.extend()?;
        Ok(trace)
    }

    /// Keeps tracing on for another [`LEASE`].
    ///
    /// # Errors
    ///
    /// If the map cannot be written.
    pub fn extend(&mut self) -> Result<(), DatapathError> {
        let until = u64::try_from((sys::now() + LEASE).as_nanos()).unwrap_or(u64::MAX);
        let armed = TraceFilter { until, ..self.armed };
        self.filter.set(0, armed, 0).map_err(DatapathError::map("write", MAP_TRACE_FILTER))
    }

    /// The next trace record; `None` if the ring buffer is empty. A record whose size differs from [`TraceRecord`] is
    /// skipped, because programs of a different version wrote it.
    pub fn next_record(&mut self) -> Option<TraceRecord> {
        loop {
            let record = sys::value_of::<TraceRecord>(&self.ring.next()?);
            if let Some(record) = record.filter(|record| Duration::from_nanos(record.time) >= self.armed_at) {
                return Some(record);
            }
        }
    }

    /// Turns tracing off. Trace records that the programs have already written remain in the ring buffer. If the write
    /// to the filter map fails, the programs turn tracing off when the [`LEASE`] is over.
    pub fn disarm(&mut self) {
        drop(self.filter.set(0, TraceFilter::OFF, 0));
    }

    /// A file descriptor that is readable when records arrive.
    ///
    /// # Errors
    ///
    /// If the descriptor cannot be duplicated.
    pub fn readiness(&self) -> io::Result<OwnedFd> {
        self.ring.as_fd().try_clone_to_owned()
    }

    /// The numbers of trace records that were left out since tracing was turned on.
    ///
    /// # Errors
    ///
    /// If the map cannot be read.
    pub fn left_out(&self) -> Result<LeftOut, DatapathError> {
        let now = self.all_left_out()?;
        Ok(LeftOut {
            rate_limited: now.rate_limited.saturating_sub(self.before.rate_limited),
            lost: now.lost.saturating_sub(self.before.lost),
        })
    }

    fn all_left_out(&self) -> Result<LeftOut, DatapathError> {
        let cpus = self.cpus.get(&0, 0).map_err(DatapathError::map("read", MAP_TRACE_CPU))?;
        Ok(cpus.iter().fold(LeftOut::default(), |sum, cpu| LeftOut {
            rate_limited: sum.rate_limited.wrapping_add(cpu.rate_limited),
            lost: sum.lost.wrapping_add(cpu.lost),
        }))
    }
}

impl Drop for PacketTrace {
    fn drop(&mut self) {
        self.disarm();
    }
}

/// Whether all pinned programs are of a trace build, whose programs log verdicts and write no trace records. Returns
/// false while an agent replaces programs of a build that writes trace records, because the programs of both builds are
/// then pinned.
fn has_only_logging_programs(pins: &Pins) -> Result<bool, DatapathError> {
    let builds = pins.builds()?;
    Ok(!builds.is_empty() && builds.iter().all(|build| pins.logs(build).exists()))
}

/// Prevents a second `npl-agent trace` from tracing with another filter. The lock is on the directory of this ABI
/// version's pins, which only root can open. This lock does not conflict with the agent's lock, which is on the parent
/// directory.
fn lock(pins: &Pins) -> Result<Flock<File>, DatapathError> {
    let folder = pins.version();
    let opened = File::open(folder).map_err(|source| pin_error("open", folder, source))?;
    Flock::lock(opened, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| {
        if errno == Errno::EWOULDBLOCK {
            DatapathError::AlreadyTracing
        } else {
            pin_error("lock", folder, errno.into())
        }
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_trace_build_is_recognized_by_its_logs() {
        let folder = std::env::temp_dir().join(format!("npl-agent-trace-{}", std::process::id()));
        let pins = Pins::new(&folder);
        let is_recognized = |build: &str, has_logs: bool| {
            fs::create_dir_all(pins.programs_of(build)).unwrap();
            if has_logs {
                fs::write(pins.logs(build), "").unwrap();
            }
            has_only_logging_programs(&pins).unwrap()
        };
        assert!(!has_only_logging_programs(&pins).unwrap());
        assert!(is_recognized("trace", true));
        assert!(!is_recognized("other", false));
        fs::remove_dir_all(&folder).unwrap();
    }
}
