// SPDX-License-Identifier: Apache-2.0
//! The sections of the documents to which NPL's messages refer. A test checks that each of these sections exists in its
//! document.

macro_rules! pages {
    ($( $(#[doc = $doc:literal])+ $name:ident = $page:literal; )+) => {
        $( $(#[doc = $doc])+ pub const $name: &str = $page; )+

        /// All document sections to which NPL's messages refer.
        pub const ALL: &[&str] = &[ $( $name, )+ ];
    };
}

pages! {
    /// The section about a Pod without an annotation.
    NO_ANNOTATION = "docs/troubleshoot.md#a-pod-has-no-annotation";
    /// The section about a published Pod that clients cannot reach.
    NO_CONNECTION = "docs/troubleshoot.md#published-but-clients-do-not-connect";
    /// The section about an annotation that does not match the kernel's mappings.
    DIFFERENCE = "docs/troubleshoot.md#the-annotation-and-the-mappings-differ";
    /// The section about an agent that does not start or is not ready.
    NOT_READY = "docs/troubleshoot.md#the-agent-is-not-ready";
    /// The section about the reasons why packets were not translated.
    REASONS = "docs/troubleshoot.md#packet-reasons";
    /// The section about the Events on Pods and Services.
    EVENTS = "docs/troubleshoot.md#events";
    /// The section about the doctor's checks.
    DOCTOR = "docs/troubleshoot.md#doctor-checks";
    /// The section about programs of other software that run ahead of NPL's programs.
    PROGRAM_AHEAD = "docs/troubleshoot.md#a-program-runs-ahead-of-npls";
    /// The section about metrics that signal trouble, such as failures of the API server.
    SIGNALS = "docs/troubleshoot.md#metrics-that-signal-trouble";
    /// The section about the sizes of maps and of the port range.
    SIZES = "docs/operate.md#sizes";
    /// The section about the agent's local socket.
    LOCAL_SOCKET = "docs/operate.md#the-local-socket";
    /// The section about the states of a node port.
    STATES = "docs/operate.md#states-of-a-node-port";
    /// The section about drain and quarantine.
    WITHDRAWAL = "docs/operate.md#what-withdrawal-does-drain-and-quarantine";
    /// The section about changes of NPL's kernel objects by other software.
    OTHER_SOFTWARE = "docs/operate.md#changes-by-other-software";
    /// The section about limits such as the limit of open files.
    LIMITS = "docs/operate.md#other-limits";
    /// The section about the agent's options.
    OPTIONS = "docs/install.md#options";
    /// The section about an upgrade between ABI versions.
    ABI_UPGRADE = "docs/upgrade.md#between-abi-versions";
    /// The section about Antrea's agent and NPL's agent on the same Node.
    BOTH_AGENTS = "docs/antrea-compatibility.md#both-agents-run";
    /// The section about failures of the feed and of the components on which the feed depends.
    FEED_FAILURES = "docs/load-balancers.md#when-something-fails";
    /// The section about the feed's DNS interface.
    FEED_DNS = "docs/load-balancers.md#dns";
    /// The section about the feed's tokens and certificates, and about forged annotations.
    FEED_SECURITY = "docs/load-balancers.md#security";
}

/// The URL of the repository's root directory, to which the paths of the documents are relative.
const REPOSITORY: &str = concat!(env!("CARGO_PKG_REPOSITORY"), "/blob/main/");

/// Returns the URL of a document or of a section of a document, such as [`EVENTS`]. Readers of Events, alerts and
/// log lines have no copy of the documents.
pub fn url(page: &str) -> String {
    format!("{REPOSITORY}{page}")
}

/// Returns the section about an Event's reason, such as `PortRangeExhausted`.
pub fn of_event(reason: &str) -> String {
    format!("docs/reference/events.md#{}", reason.to_lowercase())
}

/// Returns the section about a check of the doctor, such as `rp_filter`.
pub fn of_check(key: &str) -> String {
    format!("docs/reference/doctor.md#{key}")
}

#[cfg(test)]
mod tests {
    use super::{ALL, url};

    const DOCUMENTS: [(&str, &str); 6] = [
        ("docs/troubleshoot.md", include_str!("../../../docs/troubleshoot.md")),
        ("docs/operate.md", include_str!("../../../docs/operate.md")),
        ("docs/install.md", include_str!("../../../docs/install.md")),
        ("docs/upgrade.md", include_str!("../../../docs/upgrade.md")),
        ("docs/antrea-compatibility.md", include_str!("../../../docs/antrea-compatibility.md")),
        ("docs/load-balancers.md", include_str!("../../../docs/load-balancers.md")),
    ];
    const VALUES: &str = include_str!("../../../deploy/chart/npl/values.yaml");

    /// The anchor that GitHub generates for a heading.
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
            let (_, text) = DOCUMENTS.into_iter().find(|(name, _)| *name == file).expect(page);
            let headings = text.lines().filter(|line| line.starts_with('#'));
            let found = headings.map(|line| anchor(line.trim_start_matches('#').trim())).any(|it| it == wanted);
            assert!(found, "{page}");
        }
    }

    #[test]
    fn the_charts_default_link_of_alerts_is_the_url_of_the_document() {
        assert!(VALUES.contains(&format!("runbookUrl: {}\n", url("docs/alerts.md"))));
    }
}
