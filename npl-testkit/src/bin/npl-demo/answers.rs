// SPDX-License-Identifier: Apache-2.0
//! Sends requests from the client and checks which Pods respond.

use std::time::Instant;

use anyhow::Result;
use npl_testkit::traffic;
use serde_json::json;

use crate::environment::Environment;
use crate::publish::Routes;
use crate::report::{Report, milliseconds};

/// Sends one request per Pod and protocol to the address in the Pod's annotation.
pub(crate) fn run(report: &mut Report, env: &Environment, routes: &Routes) -> Result<()> {
    report.step("Send requests from the client to each node port")?;
    let (mut rows, mut data) = (Vec::new(), Vec::new());
    let (mut right_pods, mut right_clients, mut asked) = (0, 0, 0);
    for (pod, entry) in routes.iter().flat_map(|(pod, entries)| entries.iter().map(move |entry| (pod, entry))) {
        asked += 1;
        let start = Instant::now();
        let answer = traffic::request(env.client(), entry.protocol, entry.address(), "who are you?");
        let took = milliseconds(start.elapsed());
        let to = format!("{}/{}", entry.address(), entry.protocol);
        let (by, saw) = match &answer {
            Ok(answer) => (answer.pod.clone(), answer.client.to_string()),
            Err(err) => (format!("no response: {err:#}"), String::new()),
        };
        right_pods += usize::from(by == *pod);
        right_clients += usize::from(answer.is_ok_and(|answer| answer.client.ip() == env.client_ip()));
        data.push(json!({"to": entry.address(), "protocol": entry.protocol, "answeredBy": by, "clientSeen": saw}));
        rows.push(vec![to, by, saw, took]);
    }
    report.record("answers", &data)?;
    report.table(&["REQUEST TO", "RESPONSE FROM", "CLIENT SEEN BY POD", "TIME (MS)"], rows)?;
    report.claim(
        "each response comes from the Pod to which the node port is mapped",
        right_pods == asked,
        format!("{right_pods} of {asked}"),
    )?;
    report.claim(
        "each Pod sees the client's address without source NAT",
        right_clients == asked,
        format!("{right_clients} of {asked}"),
    )
}
