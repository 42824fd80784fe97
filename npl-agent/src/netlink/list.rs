// SPDX-License-Identifier: Apache-2.0
//! Reads complete netlink dumps. The kernel sends a long dump in parts. If the dumped list changes between two parts,
//! the dump may lack an object that exists during the whole dump. In this case, the kernel sets `NLM_F_DUMP_INTR`, and
//! the agent repeats the dump.

use futures::StreamExt as _;
use rtnetlink::{
    Handle, new_connection,
    packet_core::{NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload},
    packet_route::RouteNetlinkMessage,
};
use tokio::task::AbortHandle;

use super::{NetlinkError, request};

/// The maximum number of attempts to dump a list. An attempt fails if the list changes during the dump.
const TRIES: usize = 8;

/// A netlink socket that is used only for dumps. The socket also returns the final message of each dump, which the
/// callers of other requests do not expect.
pub(super) struct Lists {
    handle: Handle,
    driver: AbortHandle,
}

impl Lists {
    pub(super) fn open() -> Result<Self, NetlinkError> {
        let (mut connection, handle, _unsolicited) = new_connection().map_err(NetlinkError::Open)?;
        // The final message is needed, because the kernel may set `NLM_F_DUMP_INTR` only there.
        connection.set_forward_done(true);
        Ok(Self { handle, driver: tokio::spawn(connection).abort_handle() })
    }

    /// Dumps the objects that the request `wanted` selects, and returns the objects that `pick` accepts.
    ///
    /// # Errors
    ///
    /// If the kernel returns an error, or if the list changes during every attempt.
    pub(super) async fn dump<T>(
        &self,
        operation: &'static str,
        wanted: RouteNetlinkMessage,
        pick: fn(RouteNetlinkMessage) -> Option<T>,
    ) -> Result<Vec<T>, NetlinkError> {
        for _ in 0..TRIES {
            let mut message = NetlinkMessage::from(wanted.clone());
            message.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
            let answers = self.handle.clone().request(message).map_err(request(operation))?.collect().await;
            if let Some(list) = complete(answers).map_err(request(operation))? {
                return Ok(list.into_iter().filter_map(pick).collect());
            }
        }
        Err(NetlinkError::Changing { operation })
    }
}

impl Drop for Lists {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// Returns the messages of a dump; `None` if the dump is not complete, because the list changed during the dump.
pub(super) fn complete(
    answers: Vec<NetlinkMessage<RouteNetlinkMessage>>,
) -> Result<Option<Vec<RouteNetlinkMessage>>, rtnetlink::Error> {
    let mut list = Vec::with_capacity(answers.len());
    for NetlinkMessage { header, payload, .. } in answers {
        if header.flags & NLM_F_DUMP_INTR != 0 {
            return Ok(None);
        }
        if let NetlinkPayload::InnerMessage(message) = payload {
            list.push(message);
        } else if let NetlinkPayload::Error(error) = payload {
            return Err(rtnetlink::Error::NetlinkError(error));
        } else {
            let is_end = matches!(payload, NetlinkPayload::Done(end) if end.code >= 0);
            return Ok(is_end.then_some(list));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use rtnetlink::{
        packet_core::{DoneMessage, NLM_F_DUMP_INTR, NLM_F_MULTIPART, NetlinkMessage, NetlinkPayload},
        packet_route::{RouteNetlinkMessage, link::LinkMessage},
    };

    use super::complete;

    type Answer = NetlinkMessage<RouteNetlinkMessage>;

    fn link(index: u32) -> Answer {
        let mut link = LinkMessage::default();
        link.header.index = index;
        let mut answer = NetlinkMessage::from(RouteNetlinkMessage::NewLink(link));
        answer.header.flags = NLM_F_MULTIPART;
        answer
    }

    fn other(payload: NetlinkPayload<RouteNetlinkMessage>) -> Answer {
        let mut answer = link(0);
        answer.payload = payload;
        answer
    }

    fn end(code: i32) -> Answer {
        let mut done = DoneMessage::default();
        done.code = code;
        other(NetlinkPayload::Done(done))
    }

    fn interrupted(mut answer: Answer) -> Answer {
        answer.header.flags |= NLM_F_DUMP_INTR;
        answer
    }

    fn length(answers: Vec<Answer>) -> Option<usize> {
        complete(answers).unwrap().map(|list| list.len())
    }

    #[test]
    fn a_dump_without_an_interruption_is_complete() {
        assert_eq!(length(vec![link(1), link(2), end(0)]), Some(2));
        assert_eq!(length(vec![end(0)]), Some(0));
    }

    #[test]
    fn an_interrupted_dump_is_rejected_whichever_message_has_the_flag() {
        assert_eq!(length(vec![interrupted(link(1)), link(2), end(0)]), None);
        assert_eq!(length(vec![link(1), interrupted(link(2)), end(0)]), None);
        assert_eq!(length(vec![link(1), link(2), interrupted(end(0))]), None);
    }

    #[test]
    fn a_dump_without_its_final_message_is_rejected() {
        assert_eq!(length(vec![link(1), link(2)]), None);
        assert_eq!(length(vec![link(1), other(NetlinkPayload::Overrun(Vec::new())), end(0)]), None);
        assert_eq!(length(vec![link(1), end(-12)]), None);
        assert_eq!(length(Vec::new()), None);
    }
}
