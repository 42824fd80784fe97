// SPDX-License-Identifier: Apache-2.0
//! The standard Prometheus metrics of a process, read from `/proc` at each scrape. The names of these metrics do not
//! begin with `npl_`, because dashboards expect the standard names.

use std::{fs, path::Path};

use nix::{
    sys::resource::{Resource, getrlimit},
    unistd::{SysconfVar, sysconf},
};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Unit,
};

const STAT: &str = "/proc/self/stat";
const SYSTEM_STAT: &str = "/proc/stat";
const FILES: &str = "/proc/self/fd";

/// Reads the metrics of this process.
#[derive(Debug)]
pub(super) struct ProcessCollector;

/// Fields of `/proc/<pid>/stat`, in the kernel's units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stat {
    cpu_ticks: u64,
    threads: u64,
    started_ticks: u64,
    virtual_bytes: u64,
    resident_pages: u64,
}

impl Stat {
    /// Parses the content of `/proc/<pid>/stat`; `None` if a field is missing. The fields are counted from the last
    /// parenthesis, because the program's name, which is in parentheses, may itself contain spaces and parentheses.
    fn parse(text: &str) -> Option<Self> {
        let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
        // The fields have the numbers of proc(5), in which the first field after the program's name has the number 3.
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        Some(Self {
            cpu_ticks: field(14)? + field(15)?,
            threads: field(20)?,
            started_ticks: field(22)?,
            virtual_bytes: field(23)?,
            resident_pages: field(24)?,
        })
    }
}

/// Returns the Unix time in seconds at which the system started, from `/proc/stat`.
fn boot_time(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(Path::new(path)).ok()
}

#[expect(clippy::cast_precision_loss, reason = "metrics are floating point numbers")]
const fn float(number: u64) -> f64 {
    number as f64
}

fn of_system(variable: SysconfVar) -> Option<f64> {
    let value = sysconf(variable).ok().flatten()?;
    u64::try_from(value).ok().map(float)
}

impl Collector for ProcessCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let stat = read(STAT).and_then(|text| Stat::parse(&text));
        if let Some((stat, ticks)) = stat.zip(of_system(SysconfVar::CLK_TCK)) {
            let seconds = float(stat.cpu_ticks) / ticks;
            let (name, help) = ("process_cpu", "User and system time of the agent");
            let metric = encoder.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Counter)?;
            ConstCounter::new(seconds).encode(metric)?;
            if let Some(boot) = read(SYSTEM_STAT).and_then(|text| boot_time(&text)) {
                let (name, help) = ("process_start_time", "Unix time at which the agent started");
                let metric = encoder.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Gauge)?;
                ConstGauge::new(float(boot) + float(stat.started_ticks) / ticks).encode(metric)?;
            }
        }
        let mut gauge = |name, help, unit: Option<&Unit>, value: Option<f64>| {
            let Some(value) = value else { return Ok(()) };
            ConstGauge::new(value).encode(encoder.encode_descriptor(name, help, unit, MetricType::Gauge)?)
        };
        let resident = stat.zip(of_system(SysconfVar::PAGE_SIZE)).map(|(stat, page)| float(stat.resident_pages) * page);
        let (bytes, virtual_bytes) = (Some(&Unit::Bytes), stat.map(|stat| float(stat.virtual_bytes)));
        gauge("process_resident_memory", "Resident memory of the agent", bytes, resident)?;
        gauge("process_virtual_memory", "Virtual memory of the agent", bytes, virtual_bytes)?;
        gauge("process_threads", "Threads of the agent", None, stat.map(|stat| float(stat.threads)))?;
        let files = fs::read_dir(FILES).ok().map(|all| float(all.count() as u64));
        gauge(
            "process_open_fds",
            "Open files of the agent; a node port takes one for each of its IP families and protocols",
            None,
            files,
        )?;
        let limit = getrlimit(Resource::RLIMIT_NOFILE).ok().map(|(soft, _)| float(soft));
        gauge("process_max_fds", "Limit of open files of the agent", None, limit)
    }
}

#[cfg(test)]
mod tests {
    use super::{Stat, boot_time};

    #[test]
    fn fields_are_read_after_the_name_of_the_program() {
        let numbers: Vec<String> = (4..=52).map(|number| number.to_string()).collect();
        let text = format!("7 (a) b (c) S {}\n", numbers.join(" "));
        let expected =
            Stat { cpu_ticks: 14 + 15, threads: 20, started_ticks: 22, virtual_bytes: 23, resident_pages: 24 };
        assert_eq!(Stat::parse(&text), Some(expected));
        assert_eq!(Stat::parse("7 (a) S 1 2"), None);
        assert_eq!(Stat::parse(""), None);
    }

    #[test]
    fn the_time_of_the_systems_start_is_read() {
        assert_eq!(boot_time("cpu 1 2 3\nbtime 1700000000\nprocesses 9\n"), Some(1_700_000_000));
        assert_eq!(boot_time("cpu 1 2 3\n"), None);
    }
}
