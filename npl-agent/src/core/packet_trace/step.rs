// SPDX-License-Identifier: Apache-2.0
//! One run of a program on a packet, as the program recorded it.

use npl_common::{
    packet_trace::{self, PacketCopy, TraceRecord},
    reason::Reason,
};

use super::packet::Packet;

/// The hook on which a program ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hook {
    /// The TC ingress hook of the device.
    Ingress,
    /// The TC egress hook of the device.
    Egress,
    /// The XDP hook in the device's driver.
    Xdp,
}

/// The verdict of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgramVerdict {
    /// The program passed the packet unchanged and counted no reason: by its addresses and ports, the packet cannot
    /// belong to a mapping.
    Unrelated,
    /// The program passed the packet unchanged, for the reason in [`Step::reason`].
    Passed,
    /// The program rewrote the packet and passed it to the host's stack.
    Translated,
    /// The program rewrote the packet and redirected it to another device.
    Redirected,
    /// The program dropped the packet, for the reason in [`Step::reason`].
    Dropped,
}

/// One run of one program on one packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The time at which the program ran, by the kernel's monotonic clock, in nanoseconds.
    pub nanoseconds: u64,
    /// The ifindex of the device on which the program ran.
    pub ifindex: u32,
    /// The hook on which the program ran.
    pub hook: Hook,
    /// Whether the program translates replies (true) or requests (false).
    pub is_reply: bool,
    /// Whether the slow path returned the verdict.
    pub is_slow_path: bool,
    /// The program's verdict on the packet.
    pub verdict: ProgramVerdict,
    /// The reason why the packet was passed unchanged or dropped; `None` if the packet was translated, redirected or
    /// unrelated.
    pub reason: Option<Reason>,
    /// The length of the packet in bytes, starting at the IP header.
    pub length: u32,
    /// The first bytes of the packet before the program ran.
    pub before: Vec<u8>,
    /// The first bytes of the packet after the program ran.
    pub after: Vec<u8>,
}

impl Hook {
    /// The name of the hook in tables.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
            Self::Xdp => "xdp",
        }
    }
}

impl ProgramVerdict {
    /// The name of the verdict in tables.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unrelated => "unrelated",
            Self::Passed => "passed",
            Self::Translated => "translated",
            Self::Redirected => "redirected",
            Self::Dropped => "dropped",
        }
    }

    /// Whether the program rewrote the packet before it returned this verdict.
    pub const fn is_rewritten(self) -> bool {
        matches!(self, Self::Translated | Self::Redirected)
    }

    const fn of(number: u8) -> Option<Self> {
        match number {
            packet_trace::verdict::UNRELATED => Some(Self::Unrelated),
            packet_trace::verdict::PASSED => Some(Self::Passed),
            packet_trace::verdict::TRANSLATED => Some(Self::Translated),
            packet_trace::verdict::REDIRECTED => Some(Self::Redirected),
            packet_trace::verdict::DROPPED => Some(Self::Dropped),
            _ => None,
        }
    }
}

impl Step {
    /// Decodes a trace record; `None` if the record contains a hook, verdict or reason that this version of the agent
    /// does not know.
    pub fn of(record: &TraceRecord) -> Option<Self> {
        let verdict = ProgramVerdict::of(record.verdict)?;
        let hook = match record.hook {
            packet_trace::hook::INGRESS => Hook::Ingress,
            packet_trace::hook::EGRESS => Hook::Egress,
            packet_trace::hook::XDP => Hook::Xdp,
            _ => return None,
        };
        let reason = match verdict {
            ProgramVerdict::Passed | ProgramVerdict::Dropped => {
                Some(Reason::ALL.iter().copied().find(|reason| *reason as u32 == record.reason)?)
            }
            ProgramVerdict::Unrelated | ProgramVerdict::Translated | ProgramVerdict::Redirected => None,
        };
        let [before, after] = record.packets.map(|copy| bytes(&copy));
        Some(Self {
            nanoseconds: record.time,
            ifindex: record.ifindex,
            hook,
            is_reply: record.is_reply != 0,
            is_slow_path: record.is_slow_path != 0,
            verdict,
            reason,
            length: record.length,
            before,
            after,
        })
    }

    /// The name of the verdict, with the reason, if any, in parentheses.
    pub fn outcome(&self) -> String {
        let reason = self.reason.map(|reason| format!(" ({})", reason.name())).unwrap_or_default();
        self.verdict.as_str().to_owned() + &reason
    }

    /// Creates, for tests, the step of a request at the ingress hook of a device.
    #[cfg(test)]
    pub(crate) const fn of_request(verdict: ProgramVerdict, reason: Option<Reason>) -> Self {
        Self {
            nanoseconds: 0,
            ifindex: 2,
            hook: Hook::Ingress,
            is_reply: false,
            is_slow_path: false,
            verdict,
            reason,
            length: 1500,
            before: Vec::new(),
            after: Vec::new(),
        }
    }

    /// The packet before the program ran, and the packet after the program ran if the trace record contains that
    /// packet. Returns `None` if the record does not contain the complete IP header of the packet before the program
    /// ran.
    pub fn packets(&self) -> Option<(Packet, Option<Packet>)> {
        Some((Packet::parse(&self.before)?, Packet::parse(&self.after)))
    }
}

fn bytes(copy: &PacketCopy) -> Vec<u8> {
    copy.bytes.iter().copied().take(copy.captured as usize).collect()
}
