// SPDX-License-Identifier: Apache-2.0
//! Prints the records of `npl-agent trace`, or writes their packets to a file.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use nix::net::if_::if_indextoname;
use serde::Serialize;

use super::{pcap::Capture, writer::Sink};
use crate::{
    cli::write_out,
    config::{args::OutputFormat, trace_args::TraceArgs},
    core::packet_trace::{Step, packet::Packet},
    datapath::kernel_clock,
};

/// The destination of the trace records: text or JSON on standard output, or a pcapng file of packets.
#[derive(Debug)]
pub(super) struct Output {
    kind: Kind,
    /// The time since the Unix epoch at which the kernel's monotonic clock was zero.
    boot: Duration,
    names: BTreeMap<u32, String>,
}

#[derive(Debug)]
enum Kind {
    Text { is_json: bool, has_header: bool },
    Capture(Capture),
}

/// The JSON form of one trace record.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Line<'a> {
    /// The time of the trace record, in seconds since the Unix epoch.
    time: f64,
    device: &'a str,
    hook: &'static str,
    /// Whether the program translates requests (`request`) or replies (`reply`).
    direction: &'static str,
    is_slow_path: bool,
    verdict: &'static str,
    reason: Option<&'static str>,
    length: u32,
    before: &'a Packet,
    /// The packet after the program; absent if the program did not change the packet.
    after: Option<&'a Packet>,
}

impl Output {
    pub(super) fn new(args: &TraceArgs) -> anyhow::Result<Self> {
        let is_json = args.node.view.output == OutputFormat::Json;
        let kind = match &args.pcap {
            Some(path) => Kind::Capture(Capture::create(path)?),
            None => Kind::Text { is_json, has_header: is_json },
        };
        #[expect(clippy::disallowed_methods, reason = "the output has the time of day")]
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Ok(Self { kind, boot: now.saturating_sub(kernel_clock()), names: BTreeMap::new() })
    }
}

/// A trace record with the packet before the program and the packet after it.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) step: Step,
    pub(super) before: Packet,
    pub(super) after: Option<Packet>,
}

impl Sink<Record> for Output {
    fn add(&mut self, Record { step, before, after }: &Record) -> anyhow::Result<bool> {
        let after = after.as_ref();
        let device = self.names.entry(step.ifindex).or_insert_with(|| name_of(step.ifindex));
        let time = self.boot + Duration::from_nanos(step.nanoseconds);
        match &mut self.kind {
            Kind::Capture(capture) => capture.add(step, device, time),
            Kind::Text { is_json: true, .. } => {
                let after = after.filter(|_| step.verdict.is_rewritten());
                write_out(&(serde_json::to_string(&line(step, device, time, before, after))? + "\n"))
            }
            Kind::Text { has_header, .. } => {
                let header = if std::mem::replace(has_header, true) { String::new() } else { header() };
                write_out(&(header + &text(step, device, time, before, after)))
            }
        }
    }

    fn flush(&mut self) -> anyhow::Result<bool> {
        if let Kind::Capture(capture) = &mut self.kind { capture.flush() } else { Ok(true) }
    }
}

fn name_of(ifindex: u32) -> String {
    let name = if_indextoname(ifindex).ok().and_then(|name| name.into_string().ok());
    name.unwrap_or_else(|| format!("if{ifindex}"))
}

const fn direction(step: &Step) -> &'static str {
    if step.is_reply { "reply" } else { "request" }
}

fn line<'a>(step: &Step, device: &'a str, time: Duration, before: &'a Packet, after: Option<&'a Packet>) -> Line<'a> {
    Line {
        time: time.as_secs_f64(),
        device,
        hook: step.hook.as_str(),
        direction: direction(step),
        is_slow_path: step.is_slow_path,
        verdict: step.verdict.as_str(),
        reason: step.reason.map(npl_common::reason::Reason::name),
        length: step.length,
        before,
        after,
    }
}

fn header() -> String {
    format!("{:<15} {:<15} {:<7} {:<7} {}\n", "TIME (UTC)", "DEVICE", "HOOK", "PROGRAM", "PACKET AND VERDICT")
}

/// Formats a trace record as text: `11:22:33.123456 eth0 ingress request tcp 192.0.2.7:50000 > 10.0.0.1:61000 [S]:
/// translated as tcp …`.
fn text(step: &Step, device: &str, time: Duration, before: &Packet, after: Option<&Packet>) -> String {
    let rewritten =
        after.filter(|_| step.verdict.is_rewritten()).map(|after| format!(" as {after}")).unwrap_or_default();
    let slow_path = if step.is_slow_path { ", slow path" } else { "" };
    format!(
        "{:<15} {device:<15} {:<7} {:<7} {before}: {}{rewritten}{slow_path}\n",
        time_of_day(time),
        step.hook.as_str(),
        direction(step),
        step.outcome()
    )
}

fn time_of_day(time: Duration) -> String {
    let seconds = time.as_secs() % 86_400;
    let (hours, minutes, seconds) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
    format!("{hours:02}:{minutes:02}:{seconds:02}.{:06}", time.subsec_micros())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use npl_common::reason::Reason;

    use super::{line, text};
    use crate::core::packet_trace::{ProgramVerdict, Step, packet::Packet};

    fn packet(destination: &str, port: u16) -> Packet {
        Packet {
            source: "192.0.2.7".parse().unwrap(),
            destination: destination.parse().unwrap(),
            protocol: 6,
            ports: Some([50_000, port]),
            flags: "S".to_owned(),
            is_fragment: false,
            quoted: None,
        }
    }

    #[test]
    fn a_line_has_the_packet_and_the_verdict_with_its_reason() {
        let (before, after) = (packet("10.0.0.1", 61_000), packet("10.244.1.5", 8080));
        let time = Duration::from_micros(86_400_000_000 + 3_723_000_456);
        let shown = |step: &Step| text(step, "eth0", time, &before, Some(&after));
        assert_eq!(
            shown(&Step::of_request(ProgramVerdict::Translated, None)),
            "01:02:03.000456 eth0            ingress request tcp 192.0.2.7:50000 > 10.0.0.1:61000 [S]: translated as tcp \
             192.0.2.7:50000 > 10.244.1.5:8080 [S]\n"
        );
        assert_eq!(
            shown(&Step::of_request(ProgramVerdict::Dropped, Some(Reason::SourceRefused))),
            "01:02:03.000456 eth0            ingress request tcp 192.0.2.7:50000 > 10.0.0.1:61000 [S]: dropped \
             (source_refused)\n"
        );
    }

    #[test]
    fn json_has_the_packet_after_translation() {
        let (before, after) = (packet("10.0.0.1", 61_000), packet("10.244.1.5", 8080));
        let step = Step::of_request(ProgramVerdict::Translated, None);
        let value =
            serde_json::to_value(line(&step, "eth0", Duration::from_millis(1500), &before, Some(&after))).unwrap();
        assert_eq!(value["time"], 1.5);
        assert_eq!(value["verdict"], "translated");
        assert_eq!(value["before"]["destination"], "10.0.0.1");
        assert_eq!(value["after"]["ports"][1], 8080);
    }
}
