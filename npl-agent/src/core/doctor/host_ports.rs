// SPDX-License-Identifier: Apache-2.0
//! Checks whether the published host ports of Pods lead to the Pods. The CNI serves these ports, not NPL.

use std::net::SocketAddr;

use super::{Facts, Finding, abridged};

/// A published TCP host port of a Pod, and the results of two connections from the Node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPort {
    /// The Pod, as `namespace/name`.
    pub pod: String,
    /// The Node's address and the host port, as the annotation of the Pod names them.
    pub published: SocketAddr,
    /// Whether a connection to the Pod's address and port is accepted.
    pub is_pod_listening: bool,
    /// Whether a connection to [`Self::published`] is accepted.
    pub is_accepted: bool,
}

/// Reports a host port that accepts no connection although the Pod accepts connections at its own address. If the Pod
/// accepts no connection, the Pod may not be listening yet, so the host port shows nothing about the CNI.
pub(super) fn host_ports(facts: &Facts) -> Finding {
    let key = "host_ports";
    let host_ports = match facts.answer_of_agent(key, &facts.host_ports) {
        Ok(host_ports) => host_ports,
        Err(finding) => return finding,
    };
    let listening: Vec<&HostPort> = host_ports.iter().filter(|it| it.is_pod_listening).collect();
    let refused: Vec<String> = listening
        .iter()
        .filter(|it| !it.is_accepted)
        .map(|HostPort { pod, published, .. }| format!("{published} of {pod}"))
        .collect();
    if refused.is_empty() {
        return Finding::ok(key, format!("{} of {} TCP host ports tested", listening.len(), host_ports.len()));
    }
    let found = format!(
        "connections from the Node to these published host ports fail, while the Pods accept connections at their own \
         addresses: {}",
        abridged(&refused, ", ", ", and ")
    );
    let advice = "the CNI does not serve the host ports, so clients do not reach the Pods: configure the CNI to serve \
                  host ports, for example by its plug-in portmap, or remove `hostPort` from the Pods, which then get \
                  node ports";
    Finding::warning(key, found, advice)
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Facts, State, tests::check},
        HostPort,
    };

    const KEY: &str = "host_ports";

    fn tested(facts: &mut Facts, is_pod_listening: bool, is_accepted: bool) {
        let of_number = |number| HostPort {
            pod: format!("shop/web-{number}"),
            published: ([192, 0, 2, 10], 8090 + number).into(),
            is_pod_listening,
            is_accepted,
        };
        facts.host_ports = Ok((0_u16..4).map(of_number).collect());
    }

    #[test]
    fn host_ports_that_are_refused_while_their_pods_listen_are_reported() {
        check(&[
            (|it| it.host_ports = Ok(Vec::new()), KEY, State::Ok, "0 of 0 TCP host ports tested", ""),
            (|it| tested(it, true, true), KEY, State::Ok, "4 of 4 TCP host ports tested", ""),
            (|it| tested(it, false, false), KEY, State::Ok, "0 of 4 TCP host ports tested", ""),
            (|it| tested(it, true, false), KEY, State::Warning, "192.0.2.10:8090 of shop/web-0, ", "portmap"),
            (|it| tested(it, true, false), KEY, State::Warning, "8092 of shop/web-2, and 1 more", "remove `hostPort`"),
            (|it| it.host_ports = Err("no socket".to_owned()), KEY, State::Unknown, "no socket", "--runtime-dir"),
        ]);
    }
}
