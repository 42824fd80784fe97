// SPDX-License-Identifier: Apache-2.0
//! Draws the screen of `top`, which fits a terminal of 80 columns and 24 lines.

use ratatui::{
    Frame,
    layout::{Constraint, Layout},
    style::{Color, Modifier, Style},
    text::{Line, Text},
    widgets::{Row, Table},
};

use crate::cli::mappings::rows::MappingRow;

/// The maximum number of lines about refused packets. The same number limits the lines about problems.
const MOST_LINES: usize = 4;

/// The order in which the screen lists the mappings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// The mapping with the most packets per second comes first.
    Packets,
    /// The mapping with the most new flows per second comes first.
    NewFlows,
}

/// The data that the screen of `top` shows.
#[derive(Debug)]
pub(super) struct Screen {
    pub(super) title: String,
    pub(super) rows: Vec<MappingRow>,
    /// The drop and pass reasons that have counted packets since the previous reading, each with the packets per
    /// second.
    pub(super) refused: Vec<(&'static str, f64)>,
    /// Pods and Services that are not served as requested.
    pub(super) problems: Vec<String>,
}

/// Draws the title, the mappings, refused packets, problems and the help for keys.
pub(super) fn draw(frame: &mut Frame<'_>, screen: &Screen, order: Order) {
    let below = refusals(screen);
    let height = u16::try_from(below.lines.len()).unwrap_or_default();
    let parts = Layout::vertical([
        Constraint::Length(2),
        Constraint::Min(3),
        Constraint::Length(height),
        Constraint::Length(1),
    ]);
    let [head, middle, bottom, foot] = parts.areas(frame.area());
    frame.render_widget(heading(screen), head);
    frame.render_widget(mappings(screen, order), middle);
    frame.render_widget(below, bottom);
    let keys =
        Line::styled("q quit   p sort by packets   f sort by new flows", Style::new().add_modifier(Modifier::DIM));
    frame.render_widget(keys, foot);
}

fn heading(screen: &Screen) -> Text<'_> {
    // `fold` starts at 0.0, because `sum()` of an empty iterator of floats is -0.0, which would be printed as `-0`.
    let sum =
        |rate: fn(&MappingRow) -> Option<f64>| screen.rows.iter().filter_map(rate).fold(0.0, |sum, one| sum + one);
    let totals = format!(
        "{} node ports   {:.0} requests/s   {:.0} replies/s   {:.0} new flows/s",
        screen.rows.len(),
        sum(|row| row.request_packets_per_second),
        sum(|row| row.reply_packets_per_second),
        sum(|row| row.new_flows_per_second),
    );
    Text::from(vec![Line::styled(screen.title.clone(), Style::new().add_modifier(Modifier::BOLD)), Line::from(totals)])
}

fn mappings(screen: &Screen, order: Order) -> Table<'static> {
    let mut rows: Vec<&MappingRow> = screen.rows.iter().collect();
    let rank = |row: &MappingRow| match order {
        Order::Packets => {
            row.request_packets_per_second.unwrap_or_default() + row.reply_packets_per_second.unwrap_or_default()
        }
        Order::NewFlows => row.new_flows_per_second.unwrap_or_default(),
    };
    rows.sort_by(|one, other| rank(other).total_cmp(&rank(one)).then(one.node_port.cmp(&other.node_port)));
    let rate = |rate: Option<f64>| rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.0}"));
    let cells = rows.into_iter().map(|row| {
        let pod = row.namespace.as_ref().zip(row.pod.as_ref());
        let address = || crate::cli::mappings::rows::target(row);
        Row::new([
            format!("{}/{}", row.node_port, row.protocol),
            pod.map_or_else(address, |(namespace, pod)| format!("{namespace}/{pod}")),
            row.state.map_or("-", |state| state.as_str()).to_owned(),
            rate(row.request_packets_per_second),
            rate(row.reply_packets_per_second),
            rate(row.new_flows_per_second),
            row.established_flows.to_string(),
        ])
    });
    let widths = [
        Constraint::Length(10),
        Constraint::Min(20),
        Constraint::Length(11),
        Constraint::Length(8),
        Constraint::Length(8),
        Constraint::Length(7),
        Constraint::Length(8),
    ];
    let header = Row::new(["NODE PORT", "POD", "STATE", "REQ/S", "REPLY/S", "NEW/S", "FLOWS"]);
    Table::new(cells, widths).header(header.style(Style::new().add_modifier(Modifier::BOLD)))
}

fn refusals(screen: &Screen) -> Text<'_> {
    let style = Style::new().fg(Color::Yellow);
    let refused = screen.refused.iter().map(|(reason, rate)| format!("not translated: {reason} {rate:.0}/s"));
    let problems = screen.problems.iter().map(|problem| format!("not served: {problem}"));
    let lines = refused.take(MOST_LINES).chain(problems.take(MOST_LINES));
    lines.map(|line| Line::styled(line, style)).collect::<Vec<_>>().into()
}

#[cfg(test)]
mod tests {
    use ratatui::{Terminal, backend::TestBackend};

    use super::{Order, Screen, draw};
    use crate::{cli::mappings::rows::MappingRow, core::view::PortState};

    fn row(node_port: u16, packets: f64, flows: f64) -> MappingRow {
        MappingRow {
            node_port,
            protocol: "tcp",
            namespace: Some("shop".to_owned()),
            pod: Some(format!("web-{node_port}")),
            state: Some(PortState::Published),
            request_packets_per_second: Some(packets),
            reply_packets_per_second: Some(packets),
            new_flows_per_second: Some(flows),
            established_flows: 12,
            ..MappingRow::default()
        }
    }

    fn lines(screen: &Screen, order: Order) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
        terminal.draw(|frame| draw(frame, screen, order)).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |y| (0..80).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
        (0..24).map(line).collect()
    }

    #[test]
    fn a_terminal_of_80_by_24_shows_the_busiest_mappings_first() {
        let many = (0..40).map(|index| row(61_000 + index, f64::from(index), f64::from(40 - index))).collect();
        let screen = Screen {
            title: "node-1: agent ready for 3m0s".to_owned(),
            rows: many,
            refused: vec![("source_refused", 7.0)],
            problems: vec!["shop/web: UnresolvedTargetPort".to_owned()],
        };
        let shown = lines(&screen, Order::Packets);
        assert_eq!(shown[0], "node-1: agent ready for 3m0s");
        assert!(shown[1].starts_with("40 node ports   780 requests/s"), "{}", shown[1]);
        assert!(shown[2].starts_with("NODE PORT  POD"), "{}", shown[2]);
        let fields: Vec<&str> = shown[3].split_whitespace().collect();
        assert_eq!(fields, ["61039/tcp", "shop/web-61039", "published", "39", "39", "1", "12"]);
        assert_eq!(
            shown[21..],
            [
                "not translated: source_refused 7/s",
                "not served: shop/web: UnresolvedTargetPort",
                "q quit   p sort by packets   f sort by new flows"
            ]
        );
        assert!(lines(&screen, Order::NewFlows)[3].starts_with("61000/tcp"));
        let idle = Screen { rows: Vec::new(), ..screen };
        assert!(lines(&idle, Order::Packets)[1].starts_with("0 node ports   0 requests/s"));
    }
}
