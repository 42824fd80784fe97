// SPDX-License-Identifier: Apache-2.0
//! The sections of the documents that messages refer to. A test checks that each exists.

macro_rules! pages {
    ($( $(#[doc = $doc:literal])+ $name:ident = $page:literal; )+) => {
        $( $(#[doc = $doc])+ pub const $name: &str = $page; )+

        /// Every section.
        pub const ALL: &[&str] = &[ $( $name, )+ ];
    };
}

pages! {
    /// A Pod without an annotation.
    NO_ANNOTATION = "docs/troubleshoot.md#a-pod-has-no-annotation";
    /// A published Pod that clients do not reach.
    NO_CONNECTION = "docs/troubleshoot.md#published-but-clients-do-not-connect";
    /// An annotation that does not match the kernel's mappings.
    DIFFERENCE = "docs/troubleshoot.md#the-annotation-and-the-mappings-differ";
    /// An agent that does not start or is not ready.
    NOT_READY = "docs/troubleshoot.md#the-agent-is-not-ready";
    /// The reasons of packets that were not translated.
    REASONS = "docs/troubleshoot.md#drop-reasons";
    /// The Events about Pods and Services.
    EVENTS = "docs/troubleshoot.md#events";
    /// The checks of the doctor.
    DOCTOR = "docs/troubleshoot.md#doctor-checks";
    /// A program of other software ahead of NPL's.
    PROGRAM_AHEAD = "docs/troubleshoot.md#a-program-runs-ahead-of-npls";
    /// Metrics, and the API server's failures behind them.
    SIGNALS = "docs/troubleshoot.md#metrics-that-signal-trouble";
    /// The limits of maps and of the port range.
    SIZES = "docs/operate.md#sizes";
    /// The local socket of the agent.
    LOCAL_SOCKET = "docs/operate.md#the-local-socket";
    /// The life of a node port.
    STATES = "docs/operate.md#states-of-a-node-port";
}

#[cfg(test)]
mod tests {
    use super::ALL;

    const TROUBLESHOOT: &str = include_str!("../../../docs/troubleshoot.md");
    const OPERATE: &str = include_str!("../../../docs/operate.md");

    /// The anchor of a heading, as code hosts make it.
    fn anchor(heading: &str) -> String {
        let kept = heading
            .to_lowercase()
            .chars()
            .filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c))
            .collect::<String>();
        kept.trim().replace(' ', "-")
    }

    #[test]
    fn every_page_has_the_section() {
        for page in ALL {
            let (file, wanted) = page.split_once('#').unwrap();
            assert!(["docs/operate.md", "docs/troubleshoot.md"].contains(&file), "{page}");
            let text = if file == "docs/operate.md" { OPERATE } else { TROUBLESHOOT };
            let headings = text.lines().filter(|line| line.starts_with('#'));
            let found = headings.map(|line| anchor(line.trim_start_matches('#').trim())).any(|it| it == wanted);
            assert!(found, "{page}");
        }
    }
}
