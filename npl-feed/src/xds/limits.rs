// SPDX-License-Identifier: Apache-2.0
//! Limits the number of xDS streams, and the number of names to which all streams subscribe.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::status::Status;

/// The maximum number of xDS streams of all connections. Load balancers and gRPC clients use one stream for each
/// connection.
pub(crate) const MOST_STREAMS: usize = 2048;

/// The limits that all xDS streams share.
#[derive(Debug, Clone)]
pub(super) struct Limits {
    streams: Arc<Semaphore>,
    names: Arc<AtomicUsize>,
    most_names: usize,
}

impl Limits {
    pub(super) fn new(most_names: usize) -> Self {
        Self { streams: Arc::new(Semaphore::new(MOST_STREAMS)), names: Arc::default(), most_names }
    }

    /// Counts a new stream as open until the returned value is dropped; `None` if too many streams are open.
    pub(super) fn open(&self, status: &Arc<Status>) -> Option<OpenStream> {
        let permit = Arc::clone(&self.streams).try_acquire_owned().ok()?;
        status.add_xds_stream(1);
        Some(OpenStream { limits: self.clone(), names: 0, status: Arc::clone(status), _permit: permit })
    }
}

/// An open stream, which counts in the metrics and in the limits until this value is dropped.
#[derive(Debug)]
pub(super) struct OpenStream {
    limits: Limits,
    /// The number of names that this stream has contributed to the sum of all streams.
    names: usize,
    status: Arc<Status>,
    _permit: OwnedSemaphorePermit,
}

impl OpenStream {
    /// Records the number of names to which the stream subscribes now. Returns whether the sum of all streams is within
    /// the limit, or has not grown.
    pub(super) fn set_names(&mut self, names: usize) -> bool {
        let before = std::mem::replace(&mut self.names, names);
        self.status.add_xds_names(names, before);
        if names <= before {
            self.limits.names.fetch_sub(before - names, Ordering::Relaxed);
            return true;
        }
        let grown = names - before;
        self.limits.names.fetch_add(grown, Ordering::Relaxed).saturating_add(grown) <= self.limits.most_names
    }

    /// Returns the maximum number of names of all streams.
    pub(super) const fn most_names(&self) -> usize {
        self.limits.most_names
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.set_names(0);
        self.status.add_xds_stream(-1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_all_streams_are_limited() {
        let (limits, status) = (Limits::new(100), Arc::new(Status::default()));
        let [mut one, mut other] = [(); 2].map(|()| limits.open(&status).unwrap());
        assert!(one.set_names(60) && other.set_names(40));
        assert!(status.encode().unwrap().contains("npl_feed_xds_names 100\n"));
        assert!(other.set_names(40), "the same names again");
        assert!(!other.set_names(41));
        drop(other);
        assert!(one.set_names(100));
        drop(one);
        assert!(status.encode().unwrap().contains("npl_feed_xds_names 0\n"));
        assert!(limits.open(&status).unwrap().set_names(100));
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
