// SPDX-License-Identifier: Apache-2.0
//! After a failed request, builds the client of the API server again from the kubeconfig or service account files. The
//! files are read again, because the cluster's CA, the token and the client certificate may have been replaced since
//! the agent started.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use http::{Request, Response, StatusCode};
use kube::{Client, client::Body};
use tokio::time::Instant;
use tower::service_fn;
use tracing::debug;

use super::client::ConnectError;

/// Minimum time between two reads of the kubeconfig or service account files. Without this minimum, an unreachable API
/// server would cause a read for each request.
const REST: Duration = Duration::from_secs(5);

/// The client that is currently in use, and the function that builds its replacement.
struct Renewal<R> {
    current: Mutex<Current>,
    read: R,
}

struct Current {
    client: Client,
    /// When the kubeconfig or service account files were last read.
    read_at: Instant,
    /// Whether a request has had no answer, or the answer 401, since `read_at`. New files may help in these two cases.
    is_doubtful: bool,
}

/// Returns a client that sends requests through the client `first`. After a request without an answer, or with the
/// answer 401, the returned client sends requests through the client that `read` builds. If `read` fails, for example
/// while the files are being replaced, requests still go through the client that is in use.
pub(super) fn renewing<F>(first: Client, read: impl Fn() -> F + Send + Sync + 'static) -> Client
where
    F: Future<Output = Result<Client, ConnectError>> + Send + 'static,
{
    let namespace = first.default_namespace().to_owned();
    let current = Current { client: first, read_at: Instant::now(), is_doubtful: false };
    let renewal = Arc::new(Renewal { current: Mutex::new(current), read });
    let send = move |request| {
        let renewal = Arc::clone(&renewal);
        async move { renewal.send(request).await }
    };
    Client::new(service_fn(send), namespace)
}

impl<R, F> Renewal<R>
where
    R: Fn() -> F,
    F: Future<Output = Result<Client, ConnectError>>,
{
    async fn send(&self, request: Request<Body>) -> kube::Result<Response<Body>> {
        let answer = self.client().await.send(request).await;
        if answer.as_ref().map_or(true, |answer| answer.status() == StatusCode::UNAUTHORIZED) {
            self.lock().is_doubtful = true;
        }
        answer
    }

    async fn client(&self) -> Client {
        let last = {
            let mut current = self.lock();
            let last = current.client.clone();
            if !current.is_doubtful || current.read_at.elapsed() < REST {
                return last;
            }
            current.read_at = Instant::now();
            current.is_doubtful = false;
            last
        };
        match (self.read)().await {
            Ok(client) => {
                self.lock().client = client.clone();
                client
            }
            Err(err) => {
                debug!(%err, "the client for the API server cannot be built again; the agent keeps the current one");
                last
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use tokio::time::advance;

    use super::*;
    use crate::kube::mock::{MockServer, api_server, refusal};

    /// Returns a renewing client and two API servers. The client uses the first server. If `is_readable`, the client
    /// uses the second server after it has read its files again.
    fn scene(is_readable: bool) -> (Client, MockServer, MockServer) {
        let ((first, before), (second, after)) = (api_server(), api_server());
        let unreadable = || ConnectError::Kubeconfig { path: PathBuf::new(), reason: "half written".to_owned() };
        let read = move || {
            let second = second.clone();
            async move { if is_readable { Ok(second) } else { Err(unreadable()) } }
        };
        (renewing(first, read), before, after)
    }

    async fn get(client: &Client) -> kube::Result<String> {
        client.request_text(Request::get("/version").body(Vec::new()).unwrap()).await
    }

    /// Lets one request fail: with this status, or with a broken connection if `status` is `None`.
    async fn fail(client: &Client, server: &mut MockServer, status: Option<u16>) {
        let answer = async {
            let request = server.next_request().await;
            match status {
                Some(code) => request.answer(code, refusal(code, "Unauthorized", "Unauthorized")),
                None => request.break_connection(),
            }
        };
        let (result, ()) = tokio::join!(get(client), answer);
        assert!(result.is_err(), "{result:?}");
    }

    async fn answer(client: &Client, server: &mut MockServer) {
        let (result, ()) = tokio::join!(get(client), async { server.next_request().await.answer(200, "v1") });
        assert_eq!(result.unwrap(), "v1");
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_failed_or_unauthorized_request_the_files_are_read_again() {
        for status in [None, Some(401)] {
            let (client, mut before, mut after) = scene(true);
            advance(REST).await;
            fail(&client, &mut before, status).await;
            answer(&client, &mut after).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_files_are_not_read_again_without_a_cause_or_too_soon() {
        let (client, mut before, _after) = scene(true);
        advance(REST).await;
        answer(&client, &mut before).await;
        fail(&client, &mut before, Some(403)).await;
        answer(&client, &mut before).await;

        let (client, mut before, mut after) = scene(true);
        fail(&client, &mut before, None).await;
        answer(&client, &mut before).await;
        advance(REST).await;
        answer(&client, &mut after).await;
    }

    #[tokio::test(start_paused = true)]
    async fn unreadable_files_leave_the_last_client_in_use() {
        let (client, mut before, _after) = scene(false);
        advance(REST).await;
        fail(&client, &mut before, None).await;
        answer(&client, &mut before).await;
    }
}
