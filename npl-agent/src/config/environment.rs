// SPDX-License-Identifier: Apache-2.0
//! Finds environment variables with the prefix `NPL_` that belong to no flag, such as misspelled variables.

use std::collections::BTreeSet;

use clap::CommandFactory as _;

use super::args::Cli;
use crate::process::telemetry::FILTER_VARIABLE;

/// The prefix of the agent's variables.
const PREFIX: &str = "NPL_";
/// The suffix of the variable by which Kubernetes announces a Service of the agent's namespace.
const SERVICE: &str = "_SERVICE_HOST";

/// Returns the variables of this process that begin with `NPL_` and that no command reads.
pub fn unknown_variables() -> Vec<String> {
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    unknown(&names.collect(), &known())
}

/// The variables that set flags or select log lines.
pub(super) fn known() -> BTreeSet<String> {
    let command = Cli::command();
    let arguments = command.get_subcommands().flat_map(clap::Command::get_arguments);
    let names = arguments.filter_map(|argument| argument.get_env()?.to_str().map(str::to_owned));
    names.chain([FILTER_VARIABLE.to_owned()]).collect()
}

/// Returns the unknown variables, except those that Kubernetes sets for each Service of the namespace, such as
/// `NPL_AGENT_PORT` for a Service `npl-agent`.
pub(super) fn unknown(names: &BTreeSet<String>, known: &BTreeSet<String>) -> Vec<String> {
    let services: Vec<&str> = names.iter().filter_map(|name| name.strip_suffix(SERVICE)).collect();
    let is_of_service = |name: &str| {
        let rest = services.iter().filter_map(|service| name.strip_prefix(service));
        rest.into_iter().any(|rest| rest.starts_with("_SERVICE_") || rest == "_PORT" || rest.starts_with("_PORT_"))
    };
    let is_unknown = |name: &&String| name.starts_with(PREFIX) && !known.contains(*name) && !is_of_service(name);
    names.iter().filter(is_unknown).cloned().collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{known, unknown};

    fn found(names: &[&str]) -> Vec<String> {
        unknown(&names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>(), &known())
    }

    #[test]
    fn a_misspelled_variable_is_found_and_the_agents_own_are_not() {
        let names =
            ["NPL_PORT_RANGE", "NPL_NODE_NAME", "NPL_BPFFS", "NPL_LOG", "NPL_LOG_FORMAT", "HOME", "NPL_PORTRANGE"];
        assert_eq!(found(&names), ["NPL_PORTRANGE"]);
    }

    #[test]
    fn variables_of_services_are_not_misspelled_flags() {
        let of_service = ["NPL_AGENT_SERVICE_HOST", "NPL_AGENT_SERVICE_PORT", "NPL_AGENT_SERVICE_PORT_METRICS"];
        let links = ["NPL_AGENT_PORT", "NPL_AGENT_PORT_9911_TCP", "NPL_AGENT_PORT_9911_TCP_ADDR"];
        assert_eq!(found(&[&of_service[..], &links].concat()), Vec::<String>::new());
        assert_eq!(found(&links), links, "without a Service");
    }
}
