// SPDX-License-Identifier: Apache-2.0
//! Limits the number of xDS streams, and the number of names to which all streams subscribe.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use npl_agent::core::pages;
use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore},
    time::Instant,
};
use tracing::warn;

use crate::status::{ClientRefusal, Status};

/// The maximum number of xDS streams of all connections. Load balancers and gRPC clients use one stream for each
/// connection.
pub(crate) const MOST_STREAMS: usize = 2048;
/// The minimum time between two warnings about too many names.
const WARN_EVERY: Duration = Duration::from_mins(1);

/// The limits that all xDS streams share.
#[derive(Debug, Clone)]
pub(super) struct Limits {
    streams: Arc<Semaphore>,
    names: Arc<Mutex<Names>>,
    most_names: usize,
}

#[derive(Debug, Default)]
struct Names {
    /// The number that was last assigned to a stream.
    last: u64,
    /// By stream: the number of names, and the signal that ends the stream.
    by_stream: BTreeMap<u64, (usize, Arc<Notify>)>,
    /// The sum of the names of all streams.
    sum: usize,
    warned: Option<Instant>,
}

impl Names {
    fn set(&mut self, stream: u64, names: usize) {
        if let Some((before, _)) = self.by_stream.get_mut(&stream) {
            self.sum = self.sum.saturating_add(names).saturating_sub(*before);
            *before = names;
        }
    }

    /// Removes the stream with the most names, and signals its end. If several streams have the same number of names,
    /// the newest of them ends.
    fn end_largest(&mut self) {
        let largest = self.by_stream.iter().max_by_key(|(number, (names, _))| (*names, **number));
        if let Some((number, (names, ended))) = largest.map(|(number, (names, ended))| (*number, (*names, ended))) {
            ended.notify_one();
            self.sum = self.sum.saturating_sub(names);
            self.by_stream.remove(&number);
        }
    }
}

impl Limits {
    pub(super) fn new(most_names: usize) -> Self {
        Self { streams: Arc::new(Semaphore::new(MOST_STREAMS)), names: Arc::default(), most_names }
    }

    fn names(&self) -> MutexGuard<'_, Names> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a new stream as open until the returned value is dropped; `None` if too many streams are open.
    pub(super) fn open(&self, status: &Arc<Status>) -> Option<OpenStream> {
        let permit = Arc::clone(&self.streams).try_acquire_owned().ok()?;
        status.add_xds_stream(1);
        let ended = Arc::<Notify>::default();
        let mut names = self.names();
        names.last += 1;
        let number = names.last;
        names.by_stream.insert(number, (0, Arc::clone(&ended)));
        drop(names);
        Some(OpenStream { limits: self.clone(), number, ended, status: Arc::clone(status), _permit: permit })
    }
}

/// An open stream, which counts in the metrics and in the limits until this value is dropped.
#[derive(Debug)]
pub(super) struct OpenStream {
    limits: Limits,
    number: u64,
    ended: Arc<Notify>,
    status: Arc<Status>,
    _permit: OwnedSemaphorePermit,
}

impl OpenStream {
    /// Records the number of names to which the stream subscribes after a new snapshot.
    pub(super) fn set_names(&self, names: usize) {
        let mut all = self.limits.names();
        all.set(self.number, names);
        self.status.set_xds_names(all.sum);
    }

    /// Records the number of names to which the stream subscribes after a request. If the sum over all streams exceeds
    /// the limit, ends the streams with the most names, so that clients with many names do not affect a client with few
    /// names. Returns whether this stream continues.
    pub(super) fn request_names(&self, names: usize) -> bool {
        let most = self.limits.most_names;
        let mut all = self.limits.names();
        all.set(self.number, names);
        while all.sum > most && !all.by_stream.is_empty() {
            all.end_largest();
            self.status.count_refused("xds", ClientRefusal::Names);
            if all.warned.is_none_or(|warned| warned.elapsed() >= WARN_EVERY) {
                all.warned = Some(Instant::now());
                warn!(
                    see = pages::url(pages::FEED_FAILURES),
                    limit = most,
                    "an xDS stream was ended, because all streams together subscribe to too many names: raise \
                     --xds-max-names and the memory limit"
                );
            }
        }
        self.status.set_xds_names(all.sum);
        all.by_stream.contains_key(&self.number)
    }

    /// Waits until the stream must end because all streams together subscribe to too many names.
    pub(super) async fn ended(&self) {
        self.ended.notified().await;
    }

    /// Returns the maximum number of names of all streams.
    pub(super) const fn most_names(&self) -> usize {
        self.limits.most_names
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        let mut all = self.limits.names();
        all.set(self.number, 0);
        all.by_stream.remove(&self.number);
        self.status.set_xds_names(all.sum);
        drop(all);
        self.status.add_xds_stream(-1);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn is_ended(stream: &OpenStream) -> bool {
        stream.ended().now_or_never().is_some()
    }

    #[test]
    fn above_the_limit_the_stream_with_the_most_names_ends() {
        let (limits, status) = (Limits::new(100), Arc::new(Status::default()));
        let [small, large, other] = [(); 3].map(|()| limits.open(&status).unwrap());
        large.request_names(60);
        small.request_names(40);
        assert!(status.encode().unwrap().contains("npl_feed_xds_names 100\n"));
        small.request_names(40);
        other.request_names(30);
        assert_eq!([&small, &large, &other].map(is_ended), [false, true, false]);
        assert!(status.encode().unwrap().contains("npl_feed_xds_names 70\n"));
        // A stream that has ended does not count again.
        large.set_names(60);
        drop(large);
        other.request_names(61);
        assert_eq!([&small, &other].map(is_ended), [false, true]);
        drop(other);
        small.request_names(101);
        assert!(is_ended(&small));
        drop(small);
        assert!(status.encode().unwrap().contains("npl_feed_xds_names 0\n"));
    }

    #[test]
    fn new_services_end_no_stream() {
        let (limits, status) = (Limits::new(100), Arc::new(Status::default()));
        let stream = limits.open(&status).unwrap();
        stream.set_names(200);
        assert!(!is_ended(&stream));
    }

    #[test]
    fn the_number_of_streams_is_limited() {
        let (limits, status) = (Limits::new(100), Arc::new(Status::default()));
        let mut open: Vec<OpenStream> = (0..MOST_STREAMS).map(|_| limits.open(&status).unwrap()).collect();
        assert!(limits.open(&status).is_none());
        drop(open.pop());
        assert!(limits.open(&status).is_some());
        drop(open);
    }
}
