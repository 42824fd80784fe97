// SPDX-License-Identifier: Apache-2.0
//! Requests that a mapping translates.

use npl_testkit::packet::tcp_flags::SYN;

use super::scene::{client, node, pod, tcp, to, with_mappings};
use crate::counters::first_request;

#[test]
fn tcp_request_goes_to_the_pod() {
    with_mappings(|lab| {
        let request = tcp(client(), node(), SYN, b"");
        lab.ingress(&request).is(&to(&request, pod()), first_request("61000/tcp", 54));
    });
}
