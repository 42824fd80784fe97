// SPDX-License-Identifier: Apache-2.0
//! The queue of writes to Pods. At most eight requests are in flight at the same time, and further writes wait in the
//! order of their arrival.

use std::collections::VecDeque;

use tokio::task::JoinSet;

use super::patch::{PatchError, Patched, PodPatcher};
use crate::core::{
    model::{PodKey, PodUid},
    op::PodWrite,
};

/// The maximum number of requests in flight. The number is limited, because a hundred Nodes that start at the same time
/// must not overload the API server.
const MAX_IN_FLIGHT: usize = 8;

/// A write, with the name and uid of the Pod to which it applies.
pub type PodWriteRequest = (PodKey, PodUid, PodWrite);

/// The queue of writes to Pods, and the requests in flight.
#[derive(Debug)]
pub struct Writes {
    patcher: PodPatcher,
    in_flight: JoinSet<(PodWriteRequest, Result<Patched, PatchError>)>,
    /// Writes for which no HTTP request exists yet. A request is created only when it can be sent, because a thousand
    /// requests would occupy megabytes and fragment the heap.
    waiting: VecDeque<PodWriteRequest>,
}

impl Writes {
    /// Creates an empty queue of writes.
    pub fn new(patcher: PodPatcher) -> Self {
        Self { patcher, in_flight: JoinSet::new(), waiting: VecDeque::new() }
    }

    /// Appends a write, and sends it immediately if fewer than `MAX_IN_FLIGHT` requests are in flight.
    pub fn push(&mut self, request: PodWriteRequest) {
        self.waiting.push_back(request);
        self.send();
    }

    /// Waits for the next answer of the API server. If the queue is empty, the future stays pending. Dropping the
    /// future loses no answer.
    pub async fn next_answer(&mut self) -> (PodWriteRequest, Result<Patched, PatchError>) {
        loop {
            match self.in_flight.join_next().await {
                Some(Ok(answer)) => {
                    self.send();
                    return answer;
                }
                // A panic in a write ends the agent. No write is lost: the next agent compares the annotations of all
                // Pods when it starts.
                Some(Err(error)) => {
                    if let Ok(panic) = error.try_into_panic() {
                        std::panic::resume_unwind(panic);
                    }
                }
                None => std::future::pending().await,
            }
        }
    }

    /// Returns the number of writes that wait in the queue or for an answer.
    pub fn pending(&self) -> usize {
        self.in_flight.len() + self.waiting.len()
    }

    fn send(&mut self) {
        while self.in_flight.len() < MAX_IN_FLIGHT
            && let Some((pod, uid, write)) = self.waiting.pop_front()
        {
            let patcher = self.patcher.clone();
            self.in_flight.spawn(async move {
                let result = patcher.write(&pod, &uid, &write).await;
                ((pod, uid, write), result)
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::{
        convert::AnnotationKeys,
        mock::{api_server, metrics, refusal},
    };

    #[tokio::test(start_paused = true)]
    async fn writes_beyond_the_limit_wait_and_are_sent_in_order() {
        let (client, mut server) = api_server();
        let patcher = PodPatcher::new(client, AnnotationKeys::new("nodeportlocal.antrea.io"), metrics());
        let mut writes = Writes::new(patcher);
        for number in 0..=MAX_IN_FLIGHT {
            let pod = PodKey::new("default", &format!("web-{number}"));
            writes.push((pod, PodUid("u-1".into()), PodWrite::Set("[]".to_owned())));
        }
        assert_eq!((writes.in_flight.len(), writes.waiting.len()), (MAX_IN_FLIGHT, 1));
        server.next_request().await.answer(404, refusal(404, "NotFound", "no such Pod"));
        let ((pod, ..), result) = writes.next_answer().await;
        assert_eq!(pod, PodKey::new("default", "web-0"));
        assert!(matches!(result, Err(PatchError::Gone { .. })), "{result:?}");
        assert_eq!((writes.in_flight.len(), writes.waiting.len()), (MAX_IN_FLIGHT, 0));
        for _ in 1..MAX_IN_FLIGHT {
            drop(server.next_request().await);
        }
        assert!(server.next_request().await.line.contains("web-8/status"));
    }
}
