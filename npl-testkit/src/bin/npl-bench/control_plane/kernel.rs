// SPDX-License-Identifier: Apache-2.0
//! Measures the time to write the mappings of a full Node into the kernel's maps.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Instant;

use anyhow::{Result, ensure};
use npl_agent::core::model::{Backend, Family, Frontend, NodePort, PodPort, Protocol};
use npl_agent::datapath::Datapath;
use npl_testkit::run::Run;

use super::figures::KERNEL_INSTALL;
use crate::Effort;
use crate::figures::Samples;

const MAPPINGS: u16 = 1000;

/// Installs a thousand mappings in empty maps, round by round.
pub(crate) fn measure(run: &Run, effort: Effort, samples: &mut Samples) -> Result<()> {
    let bpffs = run.bpffs("bpf-kernel")?;
    let mut datapath = Datapath::open(bpffs.path())?;
    for _round in 0..effort.rounds * 3 {
        let wanted = mappings().collect();
        let began = Instant::now();
        let refused = datapath.upsert_mappings(&wanted);
        samples.add(&KERNEL_INSTALL, &[began.elapsed().as_secs_f64() * 1e3], &[]);
        ensure!(refused.is_empty(), "the kernel refused mappings: {refused:?}");
        ensure!(
            datapath.mappings()?.len() == usize::from(MAPPINGS),
            "the kernel's maps do not contain all written mappings"
        );
        for (frontend, _) in mappings() {
            datapath.remove_mapping(frontend)?;
        }
    }
    Ok(())
}

/// Returns a thousand mappings, each to a different Pod.
fn mappings() -> impl Iterator<Item = (Frontend, Backend)> {
    (0..MAPPINGS).map(|number| {
        let [high, low] = number.to_be_bytes();
        let frontend = Frontend { family: Family::V4, node_port: NodePort(61_000 + number), protocol: Protocol::Tcp };
        let pod_ip = IpAddr::from(Ipv4Addr::new(10, 64, high, low));
        (frontend, Backend { pod_ip, pod_port: PodPort(8080), generation: u32::from(number) + 1, is_restricted: false })
    })
}
