// SPDX-License-Identifier: Apache-2.0
//! Large transfers, in which packets are of many segments and checksums are left to devices, or not.

use npl_testkit::topology::Offload;
use npl_testkit::traffic::{Direction, transfer};

use crate::world::{World, is_emulated};

/// Enough for windows to grow until the largest segments are used; an emulated processor takes its time.
fn bytes() -> u64 {
    if is_emulated() { 2 << 20 } else { 48 << 20 }
}

fn transfer_both_ways(world: &World) {
    for frontend in world.frontends() {
        for direction in [Direction::Upload, Direction::Download] {
            let report = transfer(world.client(), frontend, direction, bytes()).unwrap();
            assert_eq!(report.bytes, bytes());
        }
    }
}

#[test]
fn transfer_is_whole_with_segmentation_offload() {
    let world = World::new(1);
    for device in world.ends() {
        device.set_offloads(&Offload::ALL, true).unwrap();
    }
    transfer_both_ways(&world);
}

#[test]
fn transfer_is_whole_without_any_offload() {
    let world = World::new(1);
    for device in world.ends() {
        device.set_offloads(&Offload::ALL, false).unwrap();
    }
    transfer_both_ways(&world);
}

#[test]
fn transfer_is_whole_when_packets_are_merged_on_receipt() {
    let world = World::new(1);
    for device in world.ends() {
        device.set_offloads(&[Offload::Tso, Offload::Gso], false).unwrap();
        device.set_offloads(&[Offload::Gro], true).unwrap();
    }
    transfer_both_ways(&world);
}

/// Who leaves checksums to its device and who does not, each with each: a rewrite that takes the one for the other
/// breaks every packet of one of these.
#[test]
fn transfer_is_whole_wherever_checksums_are_made() {
    let world = World::new(1);
    let [client, uplink, pod, host_device] = world.ends();
    for at_client in [true, false] {
        for at_pod in [true, false] {
            for at_node in [true, false] {
                client.set_offloads(&[Offload::TxChecksum], at_client).unwrap();
                pod.set_offloads(&[Offload::TxChecksum], at_pod).unwrap();
                for device in [&uplink, &host_device] {
                    device.set_offloads(&[Offload::TxChecksum], at_node).unwrap();
                }
                for frontend in world.frontends() {
                    for direction in [Direction::Upload, Direction::Download] {
                        transfer(world.client(), frontend, direction, 1 << 20).unwrap();
                    }
                }
                world.assert_answers();
            }
        }
    }
}
