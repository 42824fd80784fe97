// SPDX-License-Identifier: Apache-2.0
//! Renders `events.md` from [`EventReason`] and the texts of [`Cause`].

use std::{fmt::Write as _, net::Ipv4Addr};

use super::markdown::{anchor, heading, table};
use crate::core::{
    model::{Family, NodePort, ObjectKey, PodPort, PodUid, Protocol, sources::Unreadable},
    publish::{
        event_reason::EventReason,
        problem::{AffectedObject, Cause, Problem},
        report::{QUIET_MILLIS, REFRESH_MILLIS, SETTLE_MILLIS},
        request_problem::{Obstacle, RequestProblem},
    },
};

const MILLIS_PER_SECOND: u64 = 1_000;

pub(super) fn body() -> String {
    let mut text = format!(
        "An Event is written {} s after its cause begins, at most once in {} s for an object and reason, and again \
         every {} minutes while the cause lasts. If several causes of an object have the same reason, the text names \
         the first cause and the number of the other causes. The text ends with the URL of the section about the \
         reason.\n\
         All Events have the type `Warning`, the action `Publish` and the reporting controller `npl-agent`. \
         `kubectl get events -A --field-selector reportingComponent=npl-agent` lists them. The metric \
         [`npl_problems`](metrics.md#npl_problems) counts the causes that last, by the same reasons.\n\n",
        SETTLE_MILLIS / MILLIS_PER_SECOND,
        QUIET_MILLIS / MILLIS_PER_SECOND,
        REFRESH_MILLIS / MILLIS_PER_SECOND / 60,
    );
    text += &table(
        &["reason", "object", "cause"],
        EventReason::ALL.iter().map(|reason| {
            let link = format!("[`{0}`]({1})", reason.name(), anchor(reason.name()));
            vec![link, reason.object().to_owned(), reason.cause().to_owned()]
        }),
    );
    let examples = examples();
    for reason in EventReason::ALL {
        text += &heading(2, reason.name());
        let _infallible =
            writeln!(text, "On the {}. {}\n\nAction: {}", reason.object(), reason.cause(), reason.action());
        for problem in examples.iter().filter(|problem| problem.reason() == reason.name()) {
            let _infallible = writeln!(text, "\nExample: \"{}\"", problem.cause);
        }
    }
    text
}

/// Creates an example of a problem for each Event reason. The page shows the text that the agent writes about this
/// problem.
fn examples() -> Vec<Problem> {
    let pod = || ObjectKey { namespace: "shop".into(), name: "web-2".into() };
    let service = || ObjectKey { namespace: "shop".into(), name: "web".into() };
    let (protocol, family, node_port) = (Protocol::Tcp, Family::V4, NodePort(61_000));
    let ip = Ipv4Addr::new(10, 0, 1, 7).into();
    let name = "http".to_owned();
    let unreadable = Unreadable { position: 1, entry: "192.0.2.0/33".to_owned(), others: 0 };
    let obstacle = Obstacle::Quarantined { pod: Some(pod()), seconds: 42 };
    let refused = RequestProblem::Refused { pod_port: PodPort(8080), protocol, node_port, obstacle };
    let causes = [
        Cause::RangeExhausted { pod_port: PodPort(8080), protocol, family },
        Cause::UnresolvedTargetPort { service: service(), name, protocol },
        Cause::NoNodeAddress { family: Family::V6 },
        Cause::AddressConflict { ip, holder: pod() },
        Cause::OnNodeNetwork { ip: Ipv4Addr::new(192, 0, 2, 77).into(), device: "eth0".to_owned() },
        Cause::HostPortConflict { node_port, protocol },
        Cause::NodePortConflict { node_port, service: service() },
        Cause::NodePortShadowed { node_port, pod: pod() },
        Cause::NodePortRequest(refused),
        Cause::AnnotationContested { manager: Some("antrea-agent".to_owned()) },
        Cause::UnsupportedProtocol { protocol: Protocol::Sctp },
        Cause::ProtocolsNotMerged { pod_port: PodPort(53) },
        Cause::UnsupportedFamily { family: Family::V6 },
        Cause::UnreadableSource(unreadable),
        Cause::TooManySources { beyond: 12 },
        Cause::SourceTableFull { node_port, protocol, family },
        Cause::UnenforcedSources { node_port: NodePort(8080), protocol },
    ];
    let subject = AffectedObject::Pod(pod(), PodUid("uid".into()));
    causes.into_iter().map(|cause| Problem { subject: subject.clone(), cause }).collect()
}

#[cfg(test)]
mod tests {
    use super::{EventReason, Problem, examples};

    #[test]
    fn every_reason_has_an_example() {
        let mut of_examples: Vec<_> = examples().iter().map(Problem::reason).collect();
        let mut all: Vec<_> = EventReason::ALL.iter().map(|reason| reason.name()).collect();
        of_examples.sort_unstable();
        all.sort_unstable();
        assert_eq!(of_examples, all);
    }
}
