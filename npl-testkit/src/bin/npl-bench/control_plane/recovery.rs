// SPDX-License-Identifier: Apache-2.0
//! Measures how fast an agent with a thousand mappings recovers after a kill, and after the removal of its mappings
//! from the kernel.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use aya::maps::{HashMap, MapData};
use nix::sys::signal::Signal;
use npl_common::mapping::{BackendV4, Endpoint, EndpointV4, Frontend};
use npl_common::names::{ABI_VERSION, MAP_ENDPOINT_V4, MAP_MAPPING_V4, PIN_ROOT};
use npl_testkit::agent::Agent;
use npl_testkit::mounts::BpfFs;

use super::environment::{Agents, Environment, LIMIT, is_published, let_pass};
use super::figures::{KERNEL_BACK, RESTART, RESTART_PORTS, RESTART_REQUESTS, RESTART_WRITES};
use super::requests::Requests;
use crate::figures::Samples;

/// The resync interval of the restarted agent, short so that the bench does not wait long.
const RESYNC: Duration = Duration::from_secs(1);
/// The time after a restart for which the bench counts writes. An agent that made unnecessary writes would make them
/// within this time.
const WRITES_BY_THEN: Duration = Duration::from_millis(700);

/// Kills the agent, assigns an address to a new Pod, and starts the agent again.
pub(crate) fn restart(
    env: &Environment<'_>,
    agents: Agents,
    published: &[String],
    late: &str,
    samples: &mut Samples,
) -> Result<Agents> {
    let annotations = env.values(published);
    let Agents { mut agent, bpffs } = agents;
    let mut options = agent.options().clone();
    options.flags.extend(["--resync".to_owned(), format!("{}s", RESYNC.as_secs())]);
    agent.kill()?;
    env.run_pod(late)?;
    let before = Requests::counted(env.cluster.client())?;
    let began = Instant::now();
    let mut agent = Agent::launch(options)?;
    let seen = env.annotations.wait_for(late, LIMIT, is_published)?;
    samples.add(&RESTART, &[seen.at.duration_since(began).as_secs_f64()], &[]);
    agent.wait_until_ready()?;
    let_pass(WRITES_BY_THEN)?;
    let asked = Requests::counted(env.cluster.client())?.since(before);
    let writes = asked.writes.checked_sub(1).context("the annotation of the new Pod was not counted as a write")?;
    let changed = env.values(published).iter().zip(&annotations).filter(|(now, then)| now != then).count();
    #[expect(clippy::cast_precision_loss, reason = "a handful")]
    let counts =
        [(&RESTART_WRITES, writes as f64), (&RESTART_PORTS, changed as f64), (&RESTART_REQUESTS, asked.all() as f64)];
    for (figure, count) in counts {
        samples.add(figure, &[count], &[]);
    }
    Ok(Agents { agent, bpffs })
}

/// Removes all mappings from the kernel while the agent is suspended by SIGSTOP, and measures how fast the agent
/// restores them after SIGCONT.
pub(crate) fn flush(agents: &mut Agents, count: usize, samples: &mut Samples) -> Result<()> {
    let mut maps = Maps::open(&agents.bpffs)?;
    let before = maps.mappings()?;
    ensure!(before.len() == count, "the kernel has {} mappings instead of {count}", before.len());
    agents.agent.signal(Signal::SIGSTOP)?;
    let_pass(2 * RESYNC)?;
    maps.flush()?;
    let began = Instant::now();
    agents.agent.signal(Signal::SIGCONT)?;
    while maps.count()? < count {
        ensure!(began.elapsed() < LIMIT, "the mappings were not restored within {} s", LIMIT.as_secs());
    }
    samples.add(&KERNEL_BACK, &[began.elapsed().as_secs_f64() * 1e3], &[]);
    ensure!(maps.mappings()? == before, "the restored mappings differ from the removed ones");
    Ok(())
}

/// The agent's maps, opened by their pins.
struct Maps {
    mappings: HashMap<MapData, Frontend, BackendV4>,
    endpoints: HashMap<MapData, EndpointV4, Endpoint>,
}

/// The fields of a mapping that the agent must restore: all except the index of its counters, which can change.
type Mapping = ((u16, u8), ([u8; 4], u16, u32));

impl Maps {
    fn open(bpffs: &BpfFs) -> Result<Self> {
        let open = |name: &str| -> Result<aya::maps::Map> {
            let path = bpffs.path().join(PIN_ROOT).join(format!("v{ABI_VERSION}")).join(name);
            let data = MapData::from_pin(&path).with_context(|| format!("open {}", path.display()))?;
            Ok(aya::maps::Map::HashMap(data))
        };
        Ok(Self { mappings: open(MAP_MAPPING_V4)?.try_into()?, endpoints: open(MAP_ENDPOINT_V4)?.try_into()? })
    }

    fn count(&self) -> Result<usize> {
        Ok(self.mappings.keys().try_fold(0, |count, key| key.map(|_| count + 1))?)
    }

    fn mappings(&self) -> Result<Vec<Mapping>> {
        let mut all = Vec::new();
        for item in &self.mappings {
            let (Frontend { node_port, protocol, .. }, BackendV4 { pod_addr, pod_port, generation, .. }) = item?;
            all.push(((node_port, protocol), (pod_addr, pod_port, generation)));
        }
        all.sort_unstable();
        Ok(all)
    }

    fn flush(&mut self) -> Result<()> {
        for key in self.mappings.keys().collect::<Result<Vec<_>, _>>()? {
            self.mappings.remove(&key)?;
        }
        for key in self.endpoints.keys().collect::<Result<Vec<_>, _>>()? {
            self.endpoints.remove(&key)?;
        }
        Ok(())
    }
}
