// SPDX-License-Identifier: Apache-2.0
//! Writes the trace records on a separate thread. If the reader of the output pauses, the command can still handle
//! signals and extend the time for which tracing stays on.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use anyhow::Context as _;
use tokio::sync::{
    mpsc::{self, Receiver, Sender, error::TryRecvError},
    oneshot,
};

/// The maximum number of trace records that wait for the reader of the output. Further records stay in the ring buffer.
/// If the ring buffer is full, the programs only count further records.
pub(super) const CAPACITY: usize = 1_024;

/// The destination to which the thread writes trace records.
pub(super) trait Sink<T>: Send + 'static {
    /// Writes a record. Returns `false` if the reader has closed the output.
    fn add(&mut self, record: &T) -> anyhow::Result<bool>;

    /// Writes all buffered output. Returns `false` if the reader has closed the output.
    fn flush(&mut self) -> anyhow::Result<bool>;
}

/// Passes trace records to the thread that writes the records to the output.
pub(super) struct Writer<T> {
    records: Sender<T>,
    written: Arc<AtomicU64>,
    result: oneshot::Receiver<anyhow::Result<()>>,
}

impl<T: Send + 'static> Writer<T> {
    /// Starts the thread that writes to `sink`.
    pub(super) fn start(mut sink: impl Sink<T>) -> anyhow::Result<Self> {
        let (records, mut waiting) = mpsc::channel(CAPACITY);
        let (report, result) = oneshot::channel();
        let written = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&written);
        let thread = thread::Builder::new().name("output".to_owned());
        let started = thread.spawn(move || {
            let ended = write(&mut sink, &mut waiting, &counter);
            // The error is ignored, because the command may have ended without waiting for this thread.
            drop(report.send(ended));
        });
        started.context("start the thread that writes the records")?;
        Ok(Self { records, written, result })
    }

    /// Returns how many more records can be added immediately.
    pub(super) fn room(&self) -> usize {
        self.records.capacity()
    }

    /// Adds a record. The caller has checked by [`Self::room`] that the record can be added.
    pub(super) fn add(&self, record: T) {
        // The error is ignored, because if the thread has ended, the record is not needed any more.
        drop(self.records.try_send(record));
    }

    /// Waits until a record can be added. Returns `false` if the thread has ended.
    pub(super) async fn has_room(&self) -> bool {
        self.records.reserve().await.is_ok()
    }

    /// Waits until the thread ends early: because the reader has closed the output, or because of an error.
    pub(super) async fn ended(&self) {
        self.records.closed().await;
    }

    /// Returns the counter of the records that were written to the output.
    pub(super) fn written(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.written)
    }

    /// Waits until all records are written.
    pub(super) async fn finish(self) -> anyhow::Result<()> {
        drop(self.records);
        self.result.await.context("the thread that writes the records ended")?
    }
}

fn write<T>(sink: &mut impl Sink<T>, waiting: &mut Receiver<T>, written: &AtomicU64) -> anyhow::Result<()> {
    loop {
        let next = match waiting.try_recv() {
            Err(TryRecvError::Empty) => {
                if !sink.flush()? {
                    return Ok(());
                }
                waiting.blocking_recv()
            }
            next => next.ok(),
        };
        let Some(record) = next else { return sink.flush().map(drop) };
        if !sink.add(&record)? {
            return Ok(());
        }
        written.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::mpsc::{Receiver, channel},
        time::Duration,
    };

    use tokio::time::timeout;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    /// An output whose reader accepts one record for each message in the channel, and closes the output when the
    /// channel is closed.
    struct Reader(Receiver<()>);

    impl Sink<u64> for Reader {
        fn add(&mut self, _record: &u64) -> anyhow::Result<bool> {
            Ok(self.0.recv().is_ok())
        }

        fn flush(&mut self) -> anyhow::Result<bool> {
            Ok(true)
        }
    }

    #[tokio::test]
    async fn a_reader_that_pauses_the_output_blocks_only_the_thread() {
        let (accept, accepted) = channel();
        let writer = Writer::start(Reader(accepted)).unwrap();
        let mut added = 0;
        // `CAPACITY` + 1 records can be added, because the blocked thread has already taken one record.
        while added <= CAPACITY {
            assert!(timeout(LIMIT, writer.has_room()).await.unwrap());
            writer.add(0);
            added += 1;
        }
        assert_eq!((writer.room(), writer.written().load(Ordering::Relaxed)), (0, 0));
        assert!(timeout(Duration::ZERO, writer.has_room()).await.is_err(), "the records stay in the ring buffer");
        for _ in 0..added {
            accept.send(()).unwrap();
        }
        let written = writer.written();
        timeout(LIMIT, writer.finish()).await.unwrap().unwrap();
        assert_eq!(usize::try_from(written.load(Ordering::Relaxed)), Ok(added));
    }

    #[tokio::test]
    async fn a_reader_that_goes_away_ends_the_output() {
        let (accept, accepted) = channel();
        let writer = Writer::start(Reader(accepted)).unwrap();
        drop(accept);
        writer.add(0);
        timeout(LIMIT, writer.ended()).await.unwrap();
        assert!(!timeout(LIMIT, writer.has_room()).await.unwrap());
        timeout(LIMIT, writer.finish()).await.unwrap().unwrap();
    }
}
