// SPDX-License-Identifier: Apache-2.0
//! Kills the agent during transfers and starts it again.

use std::time::{Duration, Instant};

use anyhow::Result;
use npl_testkit::cluster::Seen;
use npl_testkit::echo::Protocol;
use npl_testkit::poll;
use npl_testkit::traffic::{Direction, Load, Transfer, TransferReport};
use serde_json::{Value, json};

use crate::environment::Environment;
use crate::publish::{Routes, entry};
use crate::replace::{claim_nothing_lost, requests};
use crate::report::{Report, milliseconds};

/// The number of requests per second during the transfers.
const RATE: u32 = 100;

/// The size of each transfer in bytes. With the rate below, a transfer takes three seconds.
const BYTES: u64 = 24 << 20;
const BYTES_PER_SECOND: u64 = 8 << 20;

/// The number of bytes that each transfer must transmit while no agent runs.
const PROGRESS: u64 = 2 << 20;

/// The time limit of each wait, far above the usual duration of a transfer.
const LIMIT: Duration = Duration::from_secs(20);

/// Kills the agent during an upload and a download, and starts it again.
pub(crate) fn run(report: &mut Report, env: &mut Environment, routes: &Routes) -> Result<()> {
    report.step("Kill the agent during two transfers and start it again")?;
    let before = Kept::look(env, routes)?;
    let load = Load::start(env.client(), RATE, requests(env, routes));
    let (up, down) = (entry(routes, "web-0", Protocol::Tcp)?, entry(routes, "web-2", Protocol::Tcp)?);
    let mib = BYTES >> 20;
    report.say(&format!(
        "uploading {mib} MiB to web-0 at {}, downloading {mib} MiB from web-2 at {}",
        up.address(),
        down.address()
    ))?;
    let upload = Transfer::start(env.client(), up.address(), Direction::Upload, BYTES, BYTES_PER_SECOND)?;
    let download = Transfer::start(env.client(), down.address(), Direction::Download, BYTES, BYTES_PER_SECOND)?;
    upload.wait_for_share(0.2, LIMIT)?;
    let status = env.agent.kill()?;
    let killed = Instant::now();
    report.say(&format!("kill -9 npl-agent: {status}"))?;
    let moved_alone = wait_for_progress(&upload, &download);
    env.agent.restart()?;
    let without = killed.elapsed();
    report.say(&format!("npl-agent is ready again {} ms after the kill", milliseconds(without)))?;
    report.claim("the transfers progressed while no agent was running", moved_alone.is_ok(), "")?;
    let (upload, download) = (upload.join(), download.join());
    claim_whole(report, "to web-0", &upload)?;
    claim_whole(report, "from web-2", &download)?;
    load.wait_for_answers(u64::from(RATE), LIMIT)?;
    let result = load.stop();
    claim_nothing_lost(report, &result)?;
    let after = Kept::look(env, routes)?;
    report.claim("every Pod port has the same node port as before", before.mappings == after.mappings, "")?;
    let is_same = before.annotations == after.annotations;
    report.claim("no annotation was rewritten", is_same, "")?;
    report.record(
        "restart",
        &json!({
            "withoutAgentMilliseconds": without.as_secs_f64() * 1000.0,
            "transferredBytes": [upload.ok().map(|it| it.bytes), download.ok().map(|it| it.bytes)],
            "requests": result.total(),
            "failures": result.failures.len(),
            "annotationsWritten": if is_same { 0 } else { after.annotations.len() },
        }),
    )
}

/// State that a restart must not change.
struct Kept {
    mappings: Vec<Value>,
    annotations: Vec<Vec<Seen>>,
}

impl Kept {
    fn look(env: &Environment, routes: &Routes) -> Result<Self> {
        let mappings = env.node_command().command_json("mappings")?;
        let identity = |mapping: &Value| {
            Value::from_iter(["nodePort", "protocol", "podIp", "podPort"].map(|key| (key, mapping.get(key).cloned())))
        };
        let mappings = mappings.as_array().into_iter().flatten().map(identity).collect();
        Ok(Self { mappings, annotations: routes.keys().map(|pod| env.mappings.history(pod)).collect() })
    }
}

fn wait_for_progress(upload: &Transfer, download: &Transfer) -> Result<()> {
    let start = [upload.moved(), download.moved()];
    let progress = || {
        let now = [upload.moved(), download.moved()];
        now.iter().zip(start).all(|(now, start)| now - start >= PROGRESS).then_some(())
    };
    poll::until("progress of the transfers without the agent", LIMIT, progress).map(drop)
}

fn claim_whole(report: &mut Report, which: &str, transfer: &Result<TransferReport>) -> Result<()> {
    let detail = match transfer {
        Ok(done) => format!("{} MiB in {} ms", done.bytes >> 20, milliseconds(done.elapsed)),
        Err(err) => format!("{err:#}"),
    };
    report.claim(&format!("the transfer {which} is complete and uncorrupted"), transfer.is_ok(), detail)
}
