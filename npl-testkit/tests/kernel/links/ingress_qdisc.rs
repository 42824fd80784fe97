// SPDX-License-Identifier: Apache-2.0
//! Tests a device with an `ingress` qdisc of other software, which has the handle of `clsact` and no egress hook.

use std::fs;

use npl_agent::core::devices::redirect::{Forwarding, NetworkPolicy};
use npl_agent::core::devices::xdp::Attach;
use npl_agent::core::devices::{Coverage, DeviceSelection};
use npl_agent::datapath::inspect::Inspection;
use npl_agent::datapath::pins::{Direction, Pins};
use npl_agent::devices::uplinks::Uplinks;
use npl_agent::netlink;
use npl_agent::nft_guard::GuardMode;
use npl_testkit::topology::{Offload, Options};

use crate::world::World;

/// A third-party ingress filter, which passes every packet.
const FILTER: &str = "filter add dev eth0 ingress pref 10 protocol ip u32 match u32 0 0 flowid 1:1";

fn tc(world: &World, words: &str) -> String {
    world.node().tc(words).unwrap()
}

/// Surveys the devices after a change and attaches the programs, as the agent does. Returns the numbers of uplinks on
/// which attaching succeeded and failed.
fn follow(world: &mut World, attach: Attach) -> Coverage {
    let mut uplinks =
        Uplinks::new(DeviceSelection::Auto, (Forwarding::Stack, NetworkPolicy::Applies), attach, GuardMode::Off);
    let (node, node_ips) = (world.node().clone(), world.node_ips());
    node.block_on(uplinks.follow(world.datapath(), &node_ips)).unwrap().unwrap()
}

fn is_tcx(world: &mut World) -> bool {
    world.datapath().hooks.mechanism() == "tcx"
}

const SERVED: Coverage = Coverage { attached: 1, failed: 0 };
const REFUSED: Coverage = Coverage { attached: 0, failed: 1 };

#[test]
fn ingress_qdisc_is_distinguished_from_clsact_and_refused_for_filters() {
    let mut world = World::bare(1, Options::default());
    tc(&world, "qdisc add dev eth0 ingress");
    tc(&world, FILTER);
    world.install_on(&[]);
    let is_tcx = is_tcx(&mut world);
    // TCX links do not depend on the qdisc, so only filters are refused.
    assert_eq!(follow(&mut world, Attach::Tc), if is_tcx { SERVED } else { REFUSED });
    if is_tcx {
        world.assert_answers();
    } else {
        let mut devices = world.node().block_on(netlink::interfaces()).unwrap().unwrap();
        devices.retain(|device| device.name == "eth0");
        let mut datapath = world.datapath.take().unwrap();
        let errors = world.attach_to(&mut datapath, &devices);
        world.datapath = Some(datapath);
        let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        assert!(matches!(&errors[..], [error] if error.contains("replace it with clsact")), "{errors:?}");
        assert!(
            Inspection::read(world.bpffs.path()).unwrap().links.is_empty(),
            "no program may be reported as attached"
        );
        world.wait_until_refused();
    }
    let filters = tc(&world, "filter show dev eth0 ingress");
    assert!(filters.contains("u32") && !filters.contains("npl_"), "{filters}");

    tc(&world, "qdisc del dev eth0 ingress");
    tc(&world, "qdisc add dev eth0 clsact");
    tc(&world, FILTER);
    assert_eq!(follow(&mut world, Attach::Tc), SERVED);
    world.assert_answers();
    assert!(tc(&world, "filter show dev eth0 ingress").contains("u32"));
}

#[test]
fn xdp_is_detached_where_the_egress_program_cannot_be_attached() {
    let mut world = World::fresh(1);
    // XDP programs require complete checksums, so checksum offload is disabled at the client.
    world.topology.client().device.set_offloads(&[Offload::TxChecksum], false).unwrap();
    let has_program = |world: &World| world.node().ip("link show dev eth0").unwrap().contains("prog/xdp");
    assert_eq!(follow(&mut world, Attach::Xdp), SERVED);
    assert!(has_program(&world));
    if is_tcx(&mut world) {
        let ifindex = world.topology.client().uplink.ifindex().unwrap();
        let pin = Pins::new(world.bpffs.path()).link(ifindex, Direction::Egress);
        fs::remove_file(&pin).unwrap();
        fs::create_dir(&pin).unwrap();
    } else {
        tc(&world, "qdisc del dev eth0 clsact");
        tc(&world, "qdisc add dev eth0 ingress");
    }
    assert_eq!(follow(&mut world, Attach::Xdp), REFUSED);
    assert!(!has_program(&world));
}
