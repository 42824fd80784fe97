// SPDX-License-Identifier: Apache-2.0
//! Detects panics in the tasks of a test. A panic ends only its own task, so a server that panics in the task of a
//! request still answers other requests.

use std::{
    cell::Cell,
    panic::{set_hook, take_hook},
    sync::Once,
};

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

/// Runs a future and all tasks that it spawns on this thread. Fails if one of them panics.
pub(crate) fn run_without(future: impl Future<Output = ()>) {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let report = take_hook();
        set_hook(Box::new(move |panic| {
            COUNT.set(COUNT.get() + 1);
            report(panic);
        }));
    });
    let before = COUNT.get();
    // This runtime runs all tasks on the test's thread, so the panics of other tests are not counted.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(future);
    drop(runtime);
    assert_eq!(COUNT.get(), before, "a task has panicked");
}

#[test]
#[should_panic(expected = "a task has panicked")]
fn a_panic_in_a_task_is_noticed() {
    run_without(async {
        let task = tokio::spawn(async { panic!("deliberate") });
        assert!(task.await.is_err());
    });
}
