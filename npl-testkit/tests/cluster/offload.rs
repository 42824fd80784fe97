// SPDX-License-Identifier: Apache-2.0
//! Tests `--forwarding offload`: most packets of an established flow bypass the Node's stack, as long as the stack
//! forwards the remaining packets of the flow.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use npl_testkit::cluster::Entry;
use npl_testkit::echo::{Answer, Protocol};
use npl_testkit::poll;

use crate::load::{self, Under};
use crate::traffic::PORTS;
use crate::world::{LIMIT, Pod, World};

/// Requests over one connection; each is at least one packet to the Pod.
const QUESTIONS: u64 = 1000;

/// The time limit of a response, far above the usual time of less than a millisecond.
const PATIENCE: Duration = Duration::from_secs(10);

/// The number of packets that the firewall must drop before the connection counts as stopped: a request and two
/// retransmissions, all without a response.
const DROPPED: u64 = 3;

/// While a balancer sends requests, agents with `--forwarding offload` replace agents that forward through the stack.
pub(crate) fn agents_are_switched_to_offload_under_load(world: &mut World) {
    Under::default().load(world, |world| {
        world.cluster.offload().unwrap();
        load::renew(world, "deployment/elastic");
    });
}

/// The Node's firewall counts only a few packets of an offloaded connection, but a new drop rule in the firewall still
/// ends the connection.
pub(crate) fn an_offloaded_connection_bypasses_the_stack_until_a_rule_drops_it(world: &mut World) {
    let shop = world.wait_for_shop(4);
    let pod = shop.values().next().unwrap();
    let node = world.cluster.node(&pod.node).unwrap().netns().clone();
    for is_ipv4 in [true, false] {
        let address = pod.ips.iter().find(|ip| ip.is_ipv4() == is_ipv4).unwrap();
        let family = if is_ipv4 { "ip" } else { "ip6" };
        let rules = format!(
            "table inet npl-test-offload {{
                counter to-pod {{ }}
                counter dropped {{ }}
                chain forward {{
                    type filter hook forward priority filter;
                    {family} daddr {address} meta l4proto tcp counter name to-pod
                }}
            }}"
        );
        node.nft(&rules).unwrap();
        let server = server(world, pod, is_ipv4);
        let client = world.cluster.client().clone();
        let stream = client.run(|| TcpStream::connect(server)).unwrap().unwrap();
        stream.set_read_timeout(Some(poll::extended(PATIENCE))).unwrap();
        for _question in 0..QUESTIONS {
            assert_eq!(ask(&stream).unwrap().pod, pod.name);
        }
        let seen = node.packets_counted("inet npl-test-offload to-pod").unwrap();
        println!("    the firewall of {} saw {seen} packets of {QUESTIONS} requests over {family}", pod.node);
        assert!(seen > 0 && seen * 4 < QUESTIONS, "the firewall saw {seen} packets to the Pod");
        let (rule, port) = ("add rule inet npl-test-offload forward", stream.local_addr().unwrap().port());
        let drop = format!("{rule} {family} daddr {address} tcp sport {port} counter name dropped drop");
        node.nft(&drop).unwrap();
        stream.set_nonblocking(true).unwrap();
        send(&stream).unwrap();
        let counted = || node.packets_counted("inet npl-test-offload dropped").unwrap();
        let mut before = counted();
        let is_stopped = || {
            // After a response, the connection is not stopped yet, and the next request follows.
            let mut response = [0; 1024];
            if let Ok(length @ 1..) = (&stream).read(&mut response) {
                if response[..length].ends_with(b"\n") {
                    send(&stream).unwrap();
                }
                before = counted();
                return None;
            }
            (counted() >= before + DROPPED).then_some(())
        };
        poll::until("the rule to stop the connection", LIMIT, is_stopped).unwrap();
        node.nft("delete table inet npl-test-offload").unwrap();
    }
}

/// Returns the node address and node port of the Pod's TCP mapping in one IP family.
fn server(world: &World, pod: &Pod, is_ipv4: bool) -> SocketAddr {
    let entries = world.entries(&pod.name, PORTS);
    let mut of_tcp = entries.iter().filter(|entry| entry.protocol == Protocol::Tcp).map(Entry::address);
    of_tcp.find(|address| address.is_ipv4() == is_ipv4).unwrap()
}

/// Sends a request over an open connection.
fn send(mut stream: &TcpStream) -> std::io::Result<()> {
    stream.write_all(b"who?\n")
}

/// Sends a request over an open connection and returns the response.
fn ask(stream: &TcpStream) -> anyhow::Result<Answer> {
    send(stream)?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}
