// SPDX-License-Identifier: Apache-2.0
//! The clock of the Node and of the API server is set, forth and back. Only a machine of their own allows that:
//! `cargo xtask test` emulates one.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::time::{TimeSpec, TimeValLike as _};
use nix::time::{ClockId, clock_gettime, clock_settime};
use npl_testkit::agent::Agent;
use npl_testkit::poll;
use serde_json::json;

use crate::faults::Bystander;
use crate::world::{LIMIT, World};

/// The emulated machine has this in the command line of its kernel.
const OWN_MACHINE: &str = "npl.guest=1";

/// The shortest life that the API server gives to a token.
const TOKEN_SECONDS: i64 = 600;

/// Beyond a token's life.
const FORTH: i64 = 1800;

/// To before everything began, but for the API server's certificate, which it makes valid an hour ago.
const BACK: i64 = -3600;

/// What the agent says of it.
const REFUSED: &str = "does not accept the agent's credentials";

/// Between two connections, each of which may ask for a while.
const PAUSE: Duration = Duration::from_secs(5);

/// Where the agents' service account gets its tokens.
const TOKENS: &str = "/api/v1/namespaces/npl-system/serviceaccounts/npl-agent/token";

/// Moves the wall clock of this machine, if it is ours to move.
fn set_clock(seconds: i64) {
    let command_line = fs::read_to_string("/proc/cmdline").unwrap();
    assert!(
        command_line.split_whitespace().any(|word| word == OWN_MACHINE),
        "this test sets the machine's clock: have it run on an emulated one, by `cargo xtask test --step clock`"
    );
    let now = clock_gettime(ClockId::CLOCK_REALTIME).unwrap();
    clock_settime(ClockId::CLOCK_REALTIME, now + TimeSpec::seconds(seconds)).unwrap();
}

/// Puts a new token into the file, as a kubelet does: the old one is there until the new one is.
fn renew_token(world: &World, file: &Path) {
    let request = json!({"spec": {"expirationSeconds": TOKEN_SECONDS}});
    let answer = world.cluster.client().create(TOKENS, &request).unwrap();
    let new = file.with_extension("new");
    fs::write(&new, answer["status"]["token"].as_str().unwrap()).unwrap();
    fs::rename(&new, file).unwrap();
}

/// The agent's access by a file with a token, as a Pod has it.
fn kubeconfig_with(world: &World, former: &Path, token: &Path) -> PathBuf {
    let text = fs::read_to_string(former).unwrap();
    let (before, _) = text.split_once("{token: ").unwrap();
    let path = world.run.file("token-file.kubeconfig");
    fs::write(&path, format!("{before}{{tokenFile: \"{}\"}}}}]\n", token.display())).unwrap();
    path
}

/// Has the agent connect anew until it is refused, and says so after these bytes of its log. What the API server once found
/// to be valid, it believes for ten seconds more.
fn wait_for_refusal(world: &mut World, bytes: usize) {
    let mut cut: Option<Instant> = None;
    let is_refused = || {
        if cut.is_none_or(|at| at.elapsed() >= PAUSE) {
            cut = Some(Instant::now());
            world.proxy().cut();
        }
        world.agent_log().get(bytes..).is_some_and(|log| log.contains(REFUSED)).then_some(())
    };
    poll::until("a refusal of the agent's token", LIMIT, is_refused).unwrap();
}

#[test]
#[ignore = "sets the clock of its machine; `cargo xtask test` runs it on an emulated one"]
fn a_clock_that_is_set_forth_and_back_is_noticed_by_nobody_who_has_a_valid_token() {
    let mut world = World::behind_proxy_without_agent();
    let token = world.run.file("token");
    renew_token(&world, &token);
    let mut options = world.agent_options(&[]);
    options.kubeconfig = kubeconfig_with(&world, &options.kubeconfig, &token);
    world.agent = Some(Agent::start(options).unwrap());
    let bystander = Bystander::begin(&mut world);
    for (seconds, pod) in [(FORTH, "web-1"), (BACK, "web-2")] {
        let said = world.agent_log().len();
        set_clock(seconds);
        // The token has expired, or is of the future.
        wait_for_refusal(&mut world, said);
        world.create_pod(pod);
        renew_token(&world, &token);
        world.assert_served(pod);
        assert_eq!(world.writes(pod), 1, "{:?}", world.annotations.history(pod));
    }
    world.delete_pod("web-1");
    world.wait_for_kernel_mappings(4);
    world.agent().restart().unwrap();
    world.assert_served("web-2");
    assert_eq!(world.writes("web-2"), 1, "{:?}", world.annotations.history("web-2"));
    bystander.end(&world);
}
