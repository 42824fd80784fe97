// SPDX-License-Identifier: Apache-2.0
//! The writes that are asked for and not answered: a few are requests, all others wait their turn.

use std::collections::VecDeque;

use tokio::task::JoinSet;

use super::patch::{PatchError, Patched, PodPatcher};
use crate::core::{
    model::{PodKey, PodUid},
    op::PodWrite,
};

/// Requests under way: enough to keep the API server's disk busy, few enough for a hundred Nodes that start together.
const MAX_IN_FLIGHT: usize = 8;

/// A write to a Pod of this name and uid.
pub type Asked = (PodKey, PodUid, PodWrite);

/// All of them, in the order in which they were asked for.
#[derive(Debug)]
pub struct Writes {
    patcher: PodPatcher,
    in_flight: JoinSet<(Asked, Result<Patched, PatchError>)>,
    /// No requests yet: a thousand of those take megabytes, and what is allocated among them keeps these resident.
    waiting: VecDeque<Asked>,
}

impl Writes {
    /// None so far.
    pub fn new(patcher: PodPatcher) -> Self {
        Self { patcher, in_flight: JoinSet::new(), waiting: VecDeque::new() }
    }

    /// Asks for one more.
    pub fn push(&mut self, asked: Asked) {
        self.waiting.push_back(asked);
        self.send();
    }

    /// The next answer; waits for ever while nothing is under way. Nothing is lost if it is dropped.
    pub async fn next_answer(&mut self) -> (Asked, Result<Patched, PatchError>) {
        loop {
            match self.in_flight.join_next().await {
                Some(Ok(answer)) => {
                    self.send();
                    return answer;
                }
                // A patch that panicked never answers; so does the agent, whose successor starts from what is there.
                Some(Err(error)) => {
                    if let Ok(panic) = error.try_into_panic() {
                        std::panic::resume_unwind(panic);
                    }
                }
                None => std::future::pending().await,
            }
        }
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
    async fn a_few_writes_are_in_flight_and_the_others_follow_in_order() {
        let (client, mut server) = api_server();
        let patcher = PodPatcher::new(client, AnnotationKeys::new("nodeportlocal.antrea.io"), metrics());
        let mut writes = Writes::new(patcher);
        for number in 0..=MAX_IN_FLIGHT {
            let pod = PodKey::new("default", &format!("web-{number}"));
            writes.push((pod, PodUid("u-1".into()), PodWrite::Set("[]".to_owned())));
        }
        assert_eq!((writes.in_flight.len(), writes.waiting.len()), (MAX_IN_FLIGHT, 1));
        server.asked().await.answer(404, refusal(404, "NotFound", "no such Pod"));
        let ((pod, ..), result) = writes.next_answer().await;
        assert_eq!(pod, PodKey::new("default", "web-0"));
        assert!(matches!(result, Err(PatchError::Gone { .. })), "{result:?}");
        assert_eq!((writes.in_flight.len(), writes.waiting.len()), (MAX_IN_FLIGHT, 0));
        for _ in 1..MAX_IN_FLIGHT {
            drop(server.asked().await);
        }
        assert!(server.asked().await.line.contains("web-8/status"));
    }
}
