// SPDX-License-Identifier: Apache-2.0
//! Tests an agent while the wall clock of the Node and the API server jumps forward and backward. This test requires a
//! separate machine, which `cargo xtask test` emulates.

use std::fs;
use std::path::{Path, PathBuf};

use nix::sys::time::{TimeSpec, TimeValLike as _};
use nix::time::{ClockId, clock_gettime, clock_settime};
use npl_testkit::agent::Agent;
use npl_testkit::kernel;
use serde_json::json;

use crate::faults::Bystander;
use crate::world::World;

/// The shortest token lifetime that the API server accepts.
const TOKEN_SECONDS: i64 = 600;

/// A jump of the clock forward, in seconds: more than the lifetime of a token.
const FORTH: i64 = 1800;

/// A jump of the clock backward, in seconds. The test jumps forward by [`FORTH`] first, so after both jumps, the clock
/// is half an hour before the test's start. An earlier time is not possible, because the API server's certificate is
/// valid only from one hour before its creation.
const BACK: i64 = -3600;

/// The agent's log message about a rejected token.
const REFUSED: &str = "does not accept the agent's credentials";

/// The API path for tokens of the agents' service account.
const TOKENS: &str = "/api/v1/namespaces/npl-system/serviceaccounts/npl-agent/token";

/// Moves the wall clock of this machine by a number of seconds. Panics unless the machine is emulated.
fn set_clock(seconds: i64) {
    assert!(
        kernel::is_own_machine().unwrap(),
        "this test sets the machine's clock: run it on an emulated machine with `cargo xtask test --step clock`"
    );
    let now = clock_gettime(ClockId::CLOCK_REALTIME).unwrap();
    clock_settime(ClockId::CLOCK_REALTIME, now + TimeSpec::seconds(seconds)).unwrap();
}

/// Replaces the token in the file atomically, as a kubelet does.
fn renew_token(world: &World, file: &Path) {
    let request = json!({"spec": {"expirationSeconds": TOKEN_SECONDS}});
    let answer = world.cluster.client().create(TOKENS, &request).unwrap();
    let new = file.with_extension("new");
    fs::write(&new, answer["status"]["token"].as_str().unwrap()).unwrap();
    fs::rename(&new, file).unwrap();
}

/// Returns a kubeconfig of the agent that reads its token from a file, as in a Pod.
fn kubeconfig_with(world: &World, former: &Path, token: &Path) -> PathBuf {
    let text = fs::read_to_string(former).unwrap();
    let (before, _) = text.split_once("{token: ").unwrap();
    let path = world.run.file("token-file.kubeconfig");
    fs::write(&path, format!("{before}{{tokenFile: \"{}\"}}}}]\n", token.display())).unwrap();
    path
}

#[test]
#[ignore = "sets the clock of the machine; `cargo xtask test` runs it on an emulated machine"]
fn clock_jumps_do_not_interrupt_an_agent_with_a_valid_token() {
    // The API server does not serve other tests after its clock has jumped.
    let mut world = World::with_own_plane().through_proxy();
    let token = world.run.file("token");
    renew_token(&world, &token);
    let mut options = world.agent_options(&[]);
    options.kubeconfig = kubeconfig_with(&world, &options.kubeconfig, &token);
    world.agent = Some(Agent::start(options).unwrap());
    let bystander = Bystander::begin(&mut world);
    for (seconds, pod) in [(FORTH, "web-1"), (BACK, "web-2")] {
        let said = world.agent_log().len();
        set_clock(seconds);
        // The API server rejects the token, which has expired or is not valid yet.
        world.cut_until_logged(REFUSED, said);
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
