// SPDX-License-Identifier: Apache-2.0
//! Connects from the Node to the published TCP host ports of Pods, and to these Pods, for the doctor.

use std::{net::SocketAddr, time::Duration};

use tokio::{net::TcpStream, task::JoinSet, time::timeout};

use crate::core::{
    doctor::HostPort,
    model::Protocol,
    view::{AgentView, NodePortView, PortState},
};

/// The time limit of a connection. Both ends are on this Node.
const LIMIT: Duration = Duration::from_secs(2);

/// Tests all published TCP host ports at the same time. Host ports of Pods on the host network are not tested, because
/// they need no CNI.
pub(super) async fn test(agent: &AgentView) -> Vec<HostPort> {
    let mut tests = JoinSet::new();
    for (pod, published, own) in agent.node_ports.iter().filter_map(|view| addresses(agent, view)) {
        tests.spawn(async move {
            let is_pod_listening = accepts(own).await;
            let is_accepted = is_pod_listening && accepts(published).await;
            HostPort { pod, published, is_pod_listening, is_accepted }
        });
    }
    let mut tested = tests.join_all().await;
    tested.sort_by(|one, other| (&one.pod, one.published).cmp(&(&other.pod, other.published)));
    tested
}

/// Returns the Pod's name, the published address and the Pod's own address of a host port.
fn addresses(agent: &AgentView, view: &NodePortView) -> Option<(String, SocketAddr, SocketAddr)> {
    let NodePortView { frontend, state: PortState::HostPort, namespace, pod, pod_port, pod_ip, .. } = view else {
        return None;
    };
    let pod_ip = pod_ip.filter(|ip| !agent.node_addresses.contains(ip))?;
    let node_ip = agent.node_addresses.iter().find(|ip| ip.is_ipv4() == pod_ip.is_ipv4())?;
    let name = format!("{}/{}", namespace.as_ref()?, pod.as_ref()?);
    let published = SocketAddr::new(*node_ip, frontend.node_port.0);
    (frontend.protocol == Protocol::Tcp).then_some((name, published, SocketAddr::new(pod_ip, (*pod_port)?.0)))
}

async fn accepts(server: SocketAddr) -> bool {
    matches!(timeout(LIMIT, TcpStream::connect(server)).await, Ok(Ok(_)))
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use tokio::net::TcpSocket;

    use super::{AgentView, HostPort, NodePortView, PortState, Protocol, test};
    use crate::core::model::{Family, Frontend, NodePort, PodPort};

    fn view(node_port: u16, pod_port: u16, protocol: Protocol) -> NodePortView {
        NodePortView {
            frontend: Frontend { family: Family::V4, node_port: NodePort(node_port), protocol },
            state: PortState::HostPort,
            namespace: Some("shop".to_owned()),
            pod: Some("web-0".to_owned()),
            pod_port: Some(PodPort(pod_port)),
            pod_ip: Some([127, 0, 0, 2].into()),
            services: Vec::new(),
            age_millis: None,
            ends_in_millis: None,
        }
    }

    /// `127.0.0.1` stands for the Node, and `127.0.0.2` for a Pod.
    #[tokio::test]
    async fn a_host_port_is_tested_if_the_pod_listens() {
        let listen = |ip: [u8; 4]| TcpListener::bind((Ipv4Addr::from(ip), 0)).unwrap();
        let port_of = |listener: &TcpListener| listener.local_addr().unwrap().port();
        let (node, pod) = (listen([127, 0, 0, 1]), listen([127, 0, 0, 2]));
        let (served, own) = (port_of(&node), port_of(&pod));
        // A bound socket that does not listen refuses connections, and no other process can use its port.
        let refuse = |ip: [u8; 4]| {
            let socket = TcpSocket::new_v4().unwrap();
            socket.bind((ip, 0).into()).unwrap();
            socket
        };
        let (refusing_node, refusing_pod) = (refuse([127, 0, 0, 1]), refuse([127, 0, 0, 2]));
        let refused = refusing_node.local_addr().unwrap().port();
        let silent = refusing_pod.local_addr().unwrap().port();
        let agent = |view| AgentView {
            node_addresses: vec![[127, 0, 0, 1].into()],
            node_ports: vec![view],
            ..AgentView::default()
        };
        let host_port = |node_port, is_pod_listening, is_accepted| HostPort {
            pod: "shop/web-0".to_owned(),
            published: ([127, 0, 0, 1], node_port).into(),
            is_pod_listening,
            is_accepted,
        };
        let expected = [
            (view(served, own, Protocol::Tcp), vec![host_port(served, true, true)]),
            (view(refused, own, Protocol::Tcp), vec![host_port(refused, true, false)]),
            (view(served, silent, Protocol::Tcp), vec![host_port(served, false, false)]),
            (view(served, own, Protocol::Udp), Vec::new()),
            (NodePortView { state: PortState::Published, ..view(served, own, Protocol::Tcp) }, Vec::new()),
            (NodePortView { pod_ip: Some([127, 0, 0, 1].into()), ..view(served, own, Protocol::Tcp) }, Vec::new()),
        ];
        for (view, expected) in expected {
            assert_eq!(test(&agent(view)).await, expected);
        }
    }
}
