// SPDX-License-Identifier: Apache-2.0
//! Tests a Pod that is a virtual machine, as with Kata Containers and `KubeVirt`. A network namespace stands for the
//! machine: a bridge in the Pod's namespace connects the machine with the Pod's device, and the machine has the Pod's
//! address. Its sockets are in no cgroup of the Node, as the sockets of another kernel.

use npl_testkit::cluster::{PodObject, Port};
use npl_testkit::echo::{EchoServer, Protocol};
use npl_testkit::netns::Netns;
use npl_testkit::{poll, traffic};

use crate::world::{LIMIT, NAMESPACE, NODE, POD_PORT, World};

/// Creates a running Pod whose server runs in a virtual machine. Returns the machine.
fn create_machine(world: &mut World, name: &str) -> Netns {
    let pod = world.topology.add_pod(&world.run, name).unwrap();
    let machine = world.run.netns("machine").unwrap();
    let bridge = format!(
        "addr flush dev eth0\n\
         link add tap0 type veth peer name eth0 netns {}\n\
         link add bridge0 type bridge\n\
         link set eth0 master bridge0\n\
         link set tap0 master bridge0\n\
         link set tap0 up\n\
         link set bridge0 up",
        machine.name()
    );
    pod.netns.ip(&bridge).unwrap();
    let inside = format!(
        "link set eth0 up\n\
         addr add {}/32 dev eth0\n\
         route add 169.254.1.1 dev eth0 scope link\n\
         route add default via 169.254.1.1 dev eth0",
        pod.ip()
    );
    machine.ip(&inside).unwrap();
    world.servers.push(EchoServer::start_in(&machine, name, &[POD_PORT]).unwrap());
    let own = (pod.ip(), POD_PORT).into();
    let is_reached = || traffic::tcp_request(world.topology.node(), own, "who?").ok();
    poll::until("the machine to answer the Node", LIMIT, is_reached).unwrap();
    let object = PodObject::new(NAMESPACE, name, NODE, "web");
    world.cluster.create_pod(&object.with_ports(vec![Port::new("web", POD_PORT, Protocol::Tcp)])).unwrap();
    world.cluster.set_pod_running(NAMESPACE, name, world.node_ip(), &[pod.ip().into()]).unwrap();
    machine
}

/// The case of kata-containers/kata-containers#3159.
#[test]
fn a_virtual_machine_is_served_to_all_clients_and_is_itself_no_local_client() {
    let (mut world, cgroup) = World::with_local_clients(&[]);
    let machine = create_machine(&mut world, "machine-0");
    world.assert_served("machine-0");
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        let server = world.address("machine-0", protocol);
        for client in [world.topology.node(), &world.topology.pods()[0].netns] {
            let answer = cgroup.run(|| traffic::request(client, protocol, server, "who?")).unwrap().unwrap();
            assert_eq!(answer.pod, "machine-0", "{protocol:?} from {}", client.name());
        }
    }

    // The machine reaches the other Pod by the Pod's address, and not by the Pod's node port.
    let pod = world.topology.pods()[0].ip();
    assert_eq!(traffic::tcp_request(&machine, (pod, POD_PORT).into(), "who?").unwrap().pod, "web-0");
    let server = world.address("web-0", Protocol::Tcp);
    assert!(traffic::tcp_request(&machine, server, "who?").is_err());
    // A client with a socket of the Node's kernel reaches the same node port.
    let ask = || traffic::tcp_request(world.topology.node(), server, "who?");
    assert_eq!(cgroup.run(ask).unwrap().unwrap().pod, "web-0");
}
