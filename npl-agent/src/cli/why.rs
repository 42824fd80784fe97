// SPDX-License-Identifier: Apache-2.0
//! `npl-agent why`: prints the conditions under which a Pod is served, in order from the state of the agent to the
//! packets of the node port. Marks the first condition that does not hold.

use std::{fmt::Write as _, process::ExitCode, time::Duration};

use super::{
    print, print_json, report_error,
    style::{BAD, DOUBTFUL, GOOD, painted},
};
use crate::{
    config::args::{OutputFormat, WhyArgs},
    core::{
        model::Frontend,
        pages,
        verdict::HealthVerdict,
        why::{Chain, Explanation, Holds, LinkReport, Traffic, add_traffic},
    },
    datapath::{Pins, Tables, kernel_clock, preflight, tables::FlowRecord},
    local,
};

/// Prints the chains of conditions of a Pod or a Service. The exit code is 0 if every condition holds, 1 if a condition
/// does not hold, and 2 if no agent answers.
///
/// # Errors
///
/// If NPL's maps cannot be read, or standard output cannot be written.
pub async fn show(args: &WhyArgs) -> anyhow::Result<ExitCode> {
    let mut explanation = match local::ask_why(&args.node.runtime_dir, &args.object).await {
        Ok(explanation) => explanation,
        Err(error) => {
            report_error(&anyhow::Error::new(error).context(format!(
                "only a running agent knows the chain of conditions; see `npl-agent status` and {}",
                pages::NOT_READY
            )));
            return Ok(ExitCode::from(HealthVerdict::CannotTell.exit_code()));
        }
    };
    add_counters(args, &mut explanation)?;
    match args.node.view.output {
        OutputFormat::Json => print_json(&explanation)?,
        OutputFormat::Table | OutputFormat::Wide => print(&as_text(&explanation))?,
    }
    Ok(ExitCode::from(explanation.verdict().exit_code()))
}

/// Appends the conditions that depend on the kernel's counters to each node port's chain of conditions.
fn add_counters(args: &WhyArgs, explanation: &mut Explanation) -> anyhow::Result<()> {
    let bpffs = &args.node.view.bpffs;
    preflight::check_bpffs(bpffs)?;
    let tables = Tables::open(&Pins::new(bpffs))?;
    let (records, reasons, flows, now) = (tables.records()?, tables.reasons()?, tables.flows()?, kernel_clock());
    for chain in &mut explanation.chains {
        let record = chain.frontend.and_then(|key| records.iter().find(|record| record.frontend == key));
        let traffic = Traffic {
            stats: record.map(|record| record.stats),
            last_packet_millis: chain.frontend.and_then(|frontend| last_packet(&flows, frontend, now)),
            reasons: &reasons,
        };
        add_traffic(chain, &traffic);
    }
    Ok(())
}

/// Returns the time in milliseconds since a packet last refreshed a flow table entry of the node port; `None` if the
/// node port has no flow table entry.
fn last_packet(flows: &[FlowRecord], frontend: Frontend, now: Duration) -> Option<u64> {
    let newest = flows.iter().filter(|flow| flow.frontend() == frontend).map(|flow| flow.last_seen).max()?;
    u64::try_from(now.saturating_sub(newest).as_millis()).ok()
}

/// Formats each chain of conditions: one line per condition, with a mark and the finding. Below the first condition
/// that does not hold, a line refers to the section of the documentation. The last lines name the Nodes whose agents
/// did not answer.
pub(in crate::cli) fn as_text(explanation: &Explanation) -> String {
    let chains = explanation.chains.iter().map(chain_text);
    let missing = explanation.missing.iter().map(|sentence| format!("{sentence}\n"));
    chains.chain(missing).collect::<Vec<_>>().join("\n")
}

fn chain_text(chain: &Chain) -> String {
    let broken = chain.first_broken();
    let is_first = |link: &LinkReport| broken.is_some_and(|first| std::ptr::eq(first, link));
    let mut text = format!("{}\n", chain.subject);
    for link in &chain.links {
        let color = match link.holds {
            Holds::Yes => GOOD,
            Holds::No => BAD,
            Holds::Info => DOUBTFUL,
        };
        let mark = if is_first(link) { "──►" } else { "   " };
        let state = painted(color, &format!("{:<6}", link.holds.as_str()));
        let _infallible = writeln!(text, "{mark} {:<15}{state} {}", link.link.as_str(), link.found);
        if let Some(page) = link.page.as_ref().filter(|_| is_first(link)) {
            let _infallible = writeln!(text, "{:26}see {page}", "");
        }
    }
    text
}
