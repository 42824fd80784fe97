// SPDX-License-Identifier: Apache-2.0
//! `npl-agent top`: shows the busiest mappings of this Node, refused packets and problems, and updates the screen at
//! the interval `--interval`.

mod screen;

use std::{
    collections::BTreeMap,
    io::{self, IsTerminal as _},
    time::Duration,
};

use anyhow::{Context as _, bail};
use npl_common::reason::Reason;
use ratatui::{
    DefaultTerminal,
    crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers},
};
use tokio::time::Instant;

use self::screen::{Order, Screen, draw};
use super::{
    mappings::rows::{Filter, rates, rows},
    rate,
};
use crate::{config::args::TopArgs, core::view::AgentView, datapath::inspect::Inspection, local};

/// Draws the screen at the interval `--interval` until the operator quits.
///
/// # Errors
///
/// If the output is not a terminal, or the maps cannot be read.
pub async fn show(args: &TopArgs) -> anyhow::Result<()> {
    if !io::stdout().is_terminal() {
        bail!("top draws on a terminal: give `kubectl exec` the flags -i and -t, or use `npl-agent mappings --watch`");
    }
    let mut former = Reading::take(args).await?;
    let terminal = ratatui::try_init().context("prepare the terminal")?;
    let outcome = follow(args, terminal, &mut former).await;
    ratatui::restore();
    outcome
}

async fn follow(args: &TopArgs, mut terminal: DefaultTerminal, former: &mut Reading) -> anyhow::Result<()> {
    let mut order = Order::Packets;
    let mut shown = Screen::of(former, None);
    loop {
        terminal.draw(|frame| draw(frame, &shown, order)).context("draw on the terminal")?;
        let next = Instant::now() + args.interval;
        while let Some(left) = next.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            match pressed(left)? {
                Some(Pressed::Quit) => return Ok(()),
                Some(Pressed::Order(chosen)) => {
                    order = chosen;
                    terminal.draw(|frame| draw(frame, &shown, order)).context("draw on the terminal")?;
                }
                None => {}
            }
        }
        let current = Reading::take(args).await?;
        shown = Screen::of(&current, Some(former));
        *former = current;
    }
}

/// The action that a key requests.
enum Pressed {
    Quit,
    Order(Order),
}

/// Waits at most `patience` for an event of the terminal. Returns the action of the pressed key; `None` for a key
/// without an action, and for other events.
fn pressed(patience: Duration) -> anyhow::Result<Option<Pressed>> {
    if !event::poll(patience).context("read the keyboard")? {
        return Ok(None);
    }
    let Event::Key(key) = event::read().context("read the keyboard")? else { return Ok(None) };
    let is_interrupt = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    let is = |c: char| key.code == KeyCode::Char(c);
    Ok(if key.kind != KeyEventKind::Press {
        None
    } else if is_interrupt || is('q') || key.code == KeyCode::Esc {
        Some(Pressed::Quit)
    } else if is('p') {
        Some(Pressed::Order(Order::Packets))
    } else if is('f') {
        Some(Pressed::Order(Order::NewFlows))
    } else {
        None
    })
}

/// The content of the kernel's maps and the agent's state, at one point in time.
struct Reading {
    at: Instant,
    inspection: Inspection,
    agent: Option<AgentView>,
}

impl Reading {
    async fn take(args: &TopArgs) -> anyhow::Result<Self> {
        let agent = local::ask(&args.node.runtime_dir).await.ok();
        Ok(Self { at: Instant::now(), inspection: Inspection::read(&args.node.view.bpffs)?, agent })
    }
}

impl Screen {
    /// Computes the content of the screen from the reading `current`, with packets and new flows per second since the
    /// reading `former`.
    fn of(current: &Reading, former: Option<&Reading>) -> Self {
        let elapsed = former.map(|former| current.at.duration_since(former.at)).unwrap_or_default();
        let before = former.map(|former| former.inspection.mappings.as_slice()).unwrap_or_default();
        let rates = rates(before, &current.inspection.mappings, elapsed);
        let counted = |reading: &Reading| reading.inspection.reasons.iter().copied().collect::<BTreeMap<Reason, u64>>();
        let before = former.map(counted).unwrap_or_default();
        let grown = |(reason, count): (Reason, u64)| Some((reason, count.checked_sub(*before.get(&reason)?)?));
        let refused = counted(current).into_iter().filter_map(grown).filter(|(_, count)| *count > 0);
        let agent = current.agent.as_ref();
        Self {
            title: agent.map_or_else(
                || "no agent answers: only the kernel's mappings are shown".to_owned(),
                |agent| {
                    format!(
                        "{}: agent {} for {}",
                        agent.node_name,
                        readiness(agent),
                        super::duration(agent.uptime_millis)
                    )
                },
            ),
            rows: rows(&current.inspection.mappings, agent, &Filter::default(), Some(&rates)),
            refused: refused.map(|(reason, count)| (reason.name(), rate(count, elapsed))).collect(),
            problems: agent
                .map(|agent| {
                    agent.refusals.iter().map(|it| format!("{}/{}: {}", it.namespace, it.name, it.reason)).collect()
                })
                .unwrap_or_default(),
        }
    }
}

const fn readiness(agent: &AgentView) -> &'static str {
    if agent.is_ready { "ready" } else { "not ready" }
}
