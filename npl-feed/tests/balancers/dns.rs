// SPDX-License-Identifier: Apache-2.0
//! Two independent DNS clients, `dig` of BIND and `kdig` of Knot, read the feed's answers.

use std::process::Command;

use npl_feed::core::model::Change;

use crate::{
    api_server,
    network::{self, NODES},
    scene::{self, Feed},
};

/// The client programs. Both have the same options, and print answers in the same format.
const CLIENTS: [&str; 2] = ["dig", "kdig"];

const WEB: &str = "_http._tcp.web.default.npl.internal.";

/// More members than fit into an answer over UDP.
const MANY: u16 = 300;

/// A parsed answer.
#[derive(Debug)]
pub(crate) struct Answer {
    /// The response code, such as `NOERROR`.
    code: String,
    is_authoritative: bool,
    is_truncated: bool,
    /// The records of each section, sorted, as `NAME TTL CLASS TYPE DATA`.
    pub(crate) answers: Vec<String>,
    authorities: Vec<String>,
    additionals: Vec<String>,
    pub(crate) text: String,
}

fn ask(program: &str, question: &str) -> Answer {
    ask_at(&format!("{}:30153", NODES[0]), program, question)
}

/// Asks the server at this address and port.
pub(crate) fn ask_at(server: &str, program: &str, question: &str) -> Answer {
    let (address, port) = server.rsplit_once(':').unwrap();
    let mut command = Command::new(program);
    command.args([&format!("@{address}"), "-p", port, "+norecurse", "+time=10"]).args(question.split(' '));
    let output = command.output().unwrap_or_else(|error| panic!("run {program}: {error}"));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{program} {question}: {text}{}", String::from_utf8_lossy(&output.stderr));
    let code = text.split_once("status: ").map(|(_, after)| after.split([';', ',']).next().unwrap_or_default());
    let flags = text.to_lowercase();
    let flags = flags.split_once("flags: ").map(|(_, after)| after.split(';').next().unwrap_or_default());
    let flags: Vec<&str> = flags.unwrap_or_default().split_whitespace().collect();
    let section = |name: &str| {
        let lines = text.lines().skip_while(|line| !line.starts_with(&format!(";; {name} SECTION")));
        let lines = lines.skip(1).take_while(|line| !line.is_empty());
        let mut records: Vec<String> =
            lines.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        records.sort();
        records
    };
    Answer {
        code: code.unwrap_or_default().trim().to_owned(),
        is_authoritative: flags.contains(&"aa"),
        is_truncated: flags.contains(&"tc"),
        answers: section("ANSWER"),
        authorities: section("AUTHORITY"),
        additionals: section("ADDITIONAL"),
        text,
    }
}

fn pods(count: u16) -> Vec<npl_feed::core::model::Pod> {
    (0..count).map(|number| scene::pod(&format!("web-{number}"), "web", number)).collect()
}

fn members_have_records_with_addresses(program: &str) {
    for transport in ["+bufsize=1232", "+tcp"] {
        let answer = ask(program, &format!("{transport} SRV {WEB}"));
        assert_eq!((answer.code.as_str(), answer.is_authoritative, answer.is_truncated), ("NOERROR", true, false));
        assert_eq!(answer.answers.len(), 2, "{}", answer.text);
        assert_eq!(answer.additionals.len(), 2, "{}", answer.text);
        for (number, record) in answer.answers.iter().enumerate() {
            let [name, ttl, class, kind, _priority, _weight, port, target] =
                record.split(' ').collect::<Vec<_>>().try_into().unwrap();
            assert_eq!((name, ttl, class, kind), (WEB, "1", "IN", "SRV"));
            assert_eq!(port, (61_000 + number).to_string());
            let address = format!("{target} 1 IN A {}", NODES[number]);
            assert!(answer.additionals.contains(&address), "{address}: {}", answer.text);
            assert_eq!(ask(program, &format!("A {target}")).answers, [address]);
            // The name exists, but the member has no IPv6 address.
            expect_denial(&ask(program, &format!("AAAA {target}")), "NOERROR");
        }
    }
}

/// Checks a negative answer: it has no record except the zone's SOA record, which resolvers need to cache the answer.
fn expect_denial(answer: &Answer, code: &str) {
    assert_eq!((answer.code.as_str(), answer.is_authoritative), (code, true), "{}", answer.text);
    assert!(answer.answers.is_empty(), "{}", answer.text);
    assert_eq!(answer.authorities.len(), 1, "{}", answer.text);
    assert!(answer.authorities[0].starts_with("npl.internal. 1 IN SOA "), "{}", answer.text);
}

fn denials_are_right(program: &str) {
    for name in ["_http._tcp.none.default.npl.internal.", "_https._tcp.web.default.npl.internal.", "none.npl.internal."]
    {
        expect_denial(&ask(program, &format!("SRV {name}")), "NXDOMAIN");
    }
    for question in [format!("A {WEB}"), "SRV web.default.npl.internal.".to_owned(), "A npl.internal.".to_owned()] {
        expect_denial(&ask(program, &question), "NOERROR");
    }
    let soa = ask(program, "SOA npl.internal.");
    assert_eq!((soa.code.as_str(), soa.answers.len()), ("NOERROR", 1), "{}", soa.text);
    let foreign = ask(program, "SRV _http._tcp.web.default.example.");
    assert_eq!((foreign.code.as_str(), foreign.answers.len()), ("REFUSED", 0), "{}", foreign.text);
}

/// Checks that an answer over UDP does not contain the members of `WEB`, even if the client accepts large datagrams.
pub(crate) fn expect_truncation_by_udp() {
    for size in ["+noedns", "+bufsize=65535"] {
        let answer = ask("dig", &format!("{size} +ignore SRV {WEB}"));
        assert_eq!((answer.is_truncated, answer.answers.len()), (true, 0), "{}", answer.text);
    }
}

/// If the answer over UDP is truncated, `dig` and `kdig` repeat the query over TCP, unless `+ignore` is given.
fn large_answers_are_complete_by_tcp(program: &str) {
    let answer = ask(program, &format!("+bufsize=1232 +ignore SRV {WEB}"));
    assert_eq!((answer.is_truncated, answer.answers.len()), (true, 0), "{}", answer.text);
    let answer = ask(program, &format!("+bufsize=1232 SRV {WEB}"));
    assert_eq!((answer.is_truncated, answer.answers.len()), (false, usize::from(MANY)), "{}", answer.text);
    assert_eq!(answer.additionals.len(), usize::from(MANY));
}

#[test]
fn two_independent_clients_read_the_answers() {
    network::inside("dns::two_independent_clients_read_the_answers", || {
        let feed = Feed::start(NODES[0], pods(2));
        let count = || ask("dig", &format!("+tcp SRV {WEB}")).answers.len();
        api_server::until("two members", || (count() == 2).then_some(()));
        for program in CLIENTS {
            members_have_records_with_addresses(program);
            denials_are_right(program);
        }
        feed.send(Change::Pods(pods(MANY)));
        api_server::until("all members", || (count() == usize::from(MANY)).then_some(()));
        for program in CLIENTS {
            large_answers_are_complete_by_tcp(program);
        }
    });
}
