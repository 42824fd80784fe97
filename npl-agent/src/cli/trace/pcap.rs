// SPDX-License-Identifier: Apache-2.0
//! Writes the packets of trace records to a pcapng file. For each program, the file has one interface for the packets
//! before the program, and one for the packets after it.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    io::{self, BufWriter, Write},
    path::Path,
    time::Duration,
};

use anyhow::Context as _;
use npl_common::packet_trace::SNAP_LENGTH;
use pcap_file::{
    DataLink, PcapError,
    pcapng::{
        PcapNgWriter,
        blocks::{
            enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption},
            interface_description::{InterfaceDescriptionBlock, InterfaceDescriptionOption},
        },
    },
};

use crate::{
    cli::new_private_file,
    core::packet_trace::{Hook, Step},
};

/// The resolution of time stamps: 10⁻⁹ s, as the library pcap-file writes them.
const NANOSECONDS: u8 = 9;

/// A pcapng file. For the program at each hook of each device, the file has two interfaces: one for packets before the
/// program, and one for packets after the program. The packets begin with the IP header.
pub(super) struct Capture {
    writer: PcapNgWriter<Buffered>,
    interfaces: BTreeMap<(u32, Hook, Side), u32>,
}

/// Buffers the output, so that the reader of a pipe has only complete packets after each flush.
type Buffered = BufWriter<Box<dyn Write + Send>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Side {
    Before,
    After,
}

impl std::fmt::Debug for Capture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Capture").field("interfaces", &self.interfaces).finish_non_exhaustive()
    }
}

impl Capture {
    /// Creates the pcapng file, or writes to standard output if the path is `-`.
    pub(super) fn create(path: &Path) -> anyhow::Result<Self> {
        let to: Box<dyn Write + Send> = if path == Path::new("-") {
            Box::new(io::stdout())
        } else {
            Box::new(
                new_private_file(path)
                    .with_context(|| format!("create {}: choose the path of a new file", path.display()))?,
            )
        };
        Self::to(to)
    }

    fn to(to: Box<dyn Write + Send>) -> anyhow::Result<Self> {
        let writer = PcapNgWriter::new(BufWriter::new(to)).context("write the capture")?;
        Ok(Self { writer, interfaces: BTreeMap::new() })
    }

    /// Writes the packet as it was before the program and, if the program rewrote the packet, as it was after the
    /// program. Returns `false` if the reader has closed the output.
    pub(super) fn add(&mut self, step: &Step, device: &str, time: Duration) -> anyhow::Result<bool> {
        let sides = [(Side::Before, &step.before), (Side::After, &step.after)];
        for (side, bytes) in sides.into_iter().take(if step.verdict.is_rewritten() { 2 } else { 1 }) {
            let written = self.write(step, device, time, side, bytes);
            if is_closed(&written) {
                return Ok(false);
            }
            written.context("write the capture")?;
        }
        Ok(true)
    }

    /// Writes all buffered packets; returns `false` if the reader has closed the output.
    pub(super) fn flush(&mut self) -> anyhow::Result<bool> {
        match self.writer.get_mut().flush() {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
            Err(error) => Err(error).context("write the capture"),
        }
    }

    fn write(&mut self, step: &Step, device: &str, time: Duration, side: Side, bytes: &[u8]) -> Result<(), PcapError> {
        let next = u32::try_from(self.interfaces.len()).unwrap_or(u32::MAX);
        let key = (step.ifindex, step.hook, side);
        let interface_id = self.interfaces.get(&key).copied().unwrap_or(next);
        if interface_id == next {
            self.writer.write_pcapng_block(interface(step.hook, device, side))?;
            self.interfaces.insert(key, next);
        }
        let comment = EnhancedPacketOption::Comment(Cow::Owned(step.outcome()));
        let data = Cow::Borrowed(bytes);
        let options = vec![comment];
        let block = EnhancedPacketBlock { interface_id, timestamp: time, original_len: step.length, data, options };
        self.writer.write_pcapng_block(block).map(drop)
    }
}

fn interface(hook: Hook, device: &str, side: Side) -> InterfaceDescriptionBlock<'static> {
    let side = match side {
        Side::Before => "before",
        Side::After => "after",
    };
    let name = InterfaceDescriptionOption::IfName(Cow::Owned(format!("{device} {} {side}", hook.as_str())));
    let options = vec![name, InterfaceDescriptionOption::IfTsResol(NANOSECONDS)];
    InterfaceDescriptionBlock { linktype: DataLink::RAW, snaplen: SNAP_LENGTH, options }
}

fn is_closed(written: &Result<(), PcapError>) -> bool {
    matches!(written, Err(PcapError::IoError(error)) if error.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{self, Write},
        sync::{Arc, Mutex},
        time::Duration,
    };

    use npl_common::reason::Reason;
    use pcap_file::pcapng::{Block, PcapNgReader};

    use super::Capture;
    use crate::core::packet_trace::{ProgramVerdict, Step};

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn step(verdict: ProgramVerdict, reason: Option<Reason>) -> Step {
        Step { before: vec![0x45; 128], after: vec![0x46; 128], ..Step::of_request(verdict, reason) }
    }

    #[test]
    fn packets_before_and_after_translation_are_on_interfaces_of_their_own() {
        let bytes = Shared::default();
        let mut capture = Capture::to(Box::new(bytes.clone())).unwrap();
        let time = Duration::new(1_700_000_000, 123_456_789);
        assert!(capture.add(&step(ProgramVerdict::Translated, None), "eth0", time).unwrap());
        assert!(capture.add(&step(ProgramVerdict::Dropped, Some(Reason::SourceRefused)), "eth0", time).unwrap());
        assert!(capture.flush().unwrap());
        let bytes = bytes.0.lock().unwrap().clone();
        let mut reader = PcapNgReader::new(bytes.as_slice()).unwrap();
        let mut shown = Vec::new();
        while let Some(block) = reader.next_block() {
            let block = block.unwrap();
            if let Block::InterfaceDescription(interface) = block {
                shown.push(format!("{:?}", interface.options));
            } else if let Block::EnhancedPacket(packet) = block {
                assert_eq!((packet.timestamp, packet.original_len), (time, 1500));
                shown.push(format!("{} {:x} {:?}", packet.interface_id, packet.data[0], packet.options));
            } else {
                panic!("{block:?}");
            }
        }
        assert_eq!(
            shown,
            [
                "[IfName(\"eth0 ingress before\"), IfTsResol(9)]",
                "0 45 [Comment(\"translated\")]",
                "[IfName(\"eth0 ingress after\"), IfTsResol(9)]",
                "1 46 [Comment(\"translated\")]",
                "0 45 [Comment(\"dropped (source_refused)\")]",
            ]
        );
    }
}
