// SPDX-License-Identifier: Apache-2.0
//! The HTTP requests for lists and watches of one kind of object.

use std::{
    marker::PhantomData,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::{StreamExt as _, stream::BoxStream};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta;
use kube::{
    Client,
    api::{ListParams, ObjectList, WatchEvent, WatchParams},
    core::Request,
};
use serde::{Deserialize, de::DeserializeOwned};
use tokio::time::{Instant, timeout};
use tower::service_fn;

use super::{
    failure::{RequestFailure, retry_after},
    watched::Watched,
};

/// Time limit for receiving a complete list, or the complete error answer to a refused watch. The time limit of the
/// client covers only the headers of an answer, and HTTP/2 pings do not detect an answer that never ends.
const COMPLETE_ANSWER: Duration = Duration::from_mins(2);

/// The stream of the events of one watch.
pub(super) type Events<W> = BoxStream<'static, Result<WatchEvent<W>, RequestFailure>>;

/// A watch that the API server has accepted.
pub(super) struct OpenWatch<W> {
    /// The time of the request.
    pub(super) started: Instant,
    pub(super) events: Events<W>,
}

/// The events with which a watch begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WatchStart<'a> {
    /// The changes after this resource version.
    After(&'a str),
    /// All objects, then a bookmark that marks their end, and then their changes: a streaming list. The request has no
    /// resource version, so the API server sends the bookmark only when the objects are at least as new as the state of
    /// etcd at the time of the request.
    InitialEvents,
}

/// Which page of a list to request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Page {
    /// The number of objects per page; `None` requests all remaining objects.
    pub(super) size: Option<u32>,
    /// The continue token of the previous page; `None` for the first page.
    pub(super) token: Option<String>,
}

/// The namespace and the selectors that determine which objects of a kind are watched.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    /// The namespace; `None` selects all namespaces, and is the only value for objects without a namespace.
    pub namespace: Option<String>,
    /// A field selector; `None` selects all objects.
    pub fields: Option<String>,
    /// A label selector; `None` selects all objects.
    pub labels: Option<String>,
}

impl Selection {
    /// Selects the objects that match this field selector.
    pub fn of_fields(fields: &str) -> Self {
        Self { fields: Some(fields.to_owned()), ..Self::default() }
    }
}

/// Sends the requests for lists and watches of one kind of object.
pub(super) struct Source<W> {
    client: Client,
    selection: Selection,
    retry_after: LastRetryAfter,
    kind: PhantomData<fn() -> W>,
}

/// The part of a list that [`Source::newest_version`] decodes: only the metadata, without the objects.
#[derive(Deserialize)]
struct ListHead {
    metadata: ListMeta,
}

impl<W: Watched> Source<W> {
    pub(super) fn new(client: Client, selection: Selection) -> Self {
        let retry_after = LastRetryAfter::default();
        Self { client: retry_after.record(client), selection, retry_after, kind: PhantomData }
    }

    /// The namespace of the list and of the watch; `None` for all namespaces.
    pub(super) fn namespace(&self) -> Option<&str> {
        self.selection.namespace.as_deref()
    }

    /// Requests one page of the list.
    pub(super) async fn page(&self, page: &Page) -> Result<ObjectList<W>, RequestFailure> {
        let params = ListParams {
            field_selector: self.selection.fields.clone(),
            label_selector: self.selection.labels.clone(),
            limit: page.size,
            continue_token: page.token.clone(),
            ..ListParams::default()
        };
        self.list(&params).await
    }

    /// Requests the newest resource version of the API server's store.
    pub(super) async fn newest_version(&self) -> Result<String, RequestFailure> {
        let fields = self.selection.fields.clone().filter(|_| W::IS_SELECTED_BY_NAME);
        let params = ListParams { field_selector: fields, limit: Some(1), ..ListParams::default() };
        let head: ListHead = self.list(&params).await?;
        head.metadata.resource_version.ok_or_else(RequestFailure::without_version)
    }

    /// Returns a builder of requests for the selected namespace.
    fn request(&self) -> Request {
        Request::new(W::url_path(&(), self.namespace()))
    }

    async fn list<T: DeserializeOwned>(&self, params: &ListParams) -> Result<T, RequestFailure> {
        let request = self.request().list(params).map_err(kube::Error::BuildRequest);
        let answer = match request {
            Ok(request) => self.complete(self.client.request(request)).await?,
            Err(err) => Err(err),
        };
        answer.map_err(|err| RequestFailure::of(&err, self.retry_after.take()))
    }

    /// Waits for a complete answer, at most for [`COMPLETE_ANSWER`].
    async fn complete<T>(&self, answer: impl Future<Output = T>) -> Result<T, RequestFailure> {
        timeout(COMPLETE_ANSWER, answer).await.map_err(|_elapsed| {
            self.retry_after.take();
            RequestFailure::without_end(COMPLETE_ANSWER)
        })
    }

    /// Starts a watch that the API server ends after `seconds`.
    pub(super) async fn watch(&self, start: WatchStart<'_>, seconds: u32) -> Result<OpenWatch<W>, RequestFailure> {
        let started = Instant::now();
        let (version, send_initial_events) = match start {
            WatchStart::After(version) => (version, false),
            WatchStart::InitialEvents => ("", true),
        };
        let params = WatchParams {
            field_selector: self.selection.fields.clone(),
            label_selector: self.selection.labels.clone(),
            timeout: Some(seconds),
            bookmarks: true,
            send_initial_events,
        };
        let request = self.request().watch(&params, version).map_err(kube::Error::BuildRequest);
        let events = match request {
            Ok(request) => self.complete(self.client.request_events::<W>(request)).await?,
            Err(err) => Err(err),
        };
        let events = events.map_err(|err| RequestFailure::of(&err, self.retry_after.take()))?;
        let events = events.map(|event| event.map_err(|err| RequestFailure::of(&err, None))).boxed();
        Ok(OpenWatch { started, events })
    }
}

/// The header `Retry-After` of the last answer, which kube's errors do not include.
#[derive(Debug, Clone, Default)]
struct LastRetryAfter(Arc<Mutex<Option<Duration>>>);

impl LastRetryAfter {
    /// Returns a client that stores the header `Retry-After` of each answer in `self`.
    fn record(&self, client: Client) -> Client {
        let namespace = client.default_namespace().to_owned();
        let last = self.clone();
        let send = move |request| {
            let (client, last) = (client.clone(), last.clone());
            async move {
                let response = client.send(request).await?;
                *last.0.lock().unwrap_or_else(PoisonError::into_inner) = retry_after(&response);
                Ok::<_, kube::Error>(response)
            }
        };
        Client::new(service_fn(send), namespace)
    }

    fn take(&self) -> Option<Duration> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
