// SPDX-License-Identifier: Apache-2.0
//! Kills processes of tests at system calls, by strace.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result};

use crate::extent;

/// The system calls that change maps, programs, links and pins, and those that send netlink requests. `sendto` also
/// sends requests to the API server.
const SYSTEM_CALLS: &str = "bpf,sendto,rename,unlink,mkdir,rmdir";

/// A system call of a process.
#[derive(Clone, Debug)]
pub struct Call {
    pub name: String,
    /// The position among all calls with this name of one thread, counted from 1.
    pub position: usize,
    /// The call, its arguments and its result, as strace shows them.
    pub text: String,
}

impl Call {
    /// The arguments with which strace kills a process at this system call.
    pub fn injection(&self) -> [String; 2] {
        let Self { name, position, .. } = self;
        ["-e".to_owned(), format!("inject={name}:signal=KILL:when={position}")]
    }
}

/// Returns strace's arguments ahead of the program: trace [`SYSTEM_CALLS`] into a file, and do what `further` says.
pub fn arguments(trace: &Path, further: &[String]) -> Vec<String> {
    let fixed = ["-f", "-qq", "-o", &trace.display().to_string(), "-e"].map(str::to_owned);
    [&fixed[..], &[format!("trace={SYSTEM_CALLS}")], further].concat()
}

/// Returns the system calls in strace's output, whose lines are `PID NAME(ARGUMENTS`.
pub fn calls(trace: &str) -> Vec<Call> {
    let mut counts = BTreeMap::<(&str, &str), usize>::new();
    let call = |line| {
        let (pid, text) = str::split_once(line, ' ')?;
        let text = text.trim_start();
        let (name, _) = text.split_once('(')?;
        if !SYSTEM_CALLS.split(',').any(|known| known == name) {
            return None;
        }
        let position = counts.entry((pid, name)).or_default();
        *position += 1;
        Some(Call { name: name.to_owned(), position: *position, text: text.to_owned() })
    };
    trace.lines().filter_map(call).collect()
}

/// Returns the number of processes that a test kills: `NPL_FAULT_POINTS` or, if the variable is not set, `usual`.
///
/// # Errors
///
/// If the value of the variable is not a number.
pub fn number_of_kills(usual: usize) -> Result<usize> {
    let number = extent::number("NPL_FAULT_POINTS")?;
    number.map_or(Ok(usual), |number| usize::try_from(number).context("NPL_FAULT_POINTS is too large"))
}

#[cfg(test)]
mod tests {
    use super::calls;

    #[test]
    fn calls_are_counted_for_each_thread() {
        let trace = "7 bpf(BPF_OBJ_GET, {}, 12) = 3\n8 bpf(BPF_OBJ_PIN, {}, 12) = 0\n7 write(1, \"\", 0) = 0\n\
                     7  bpf(BPF_OBJ_PIN, {}, 12) = 0\n7 +++ killed by SIGKILL +++\n";
        let shown: Vec<_> = calls(trace).into_iter().map(|call| (call.position, call.text)).collect();
        let expected = [(1, "bpf(BPF_OBJ_GET, {}, 12) = 3"), (1, "bpf(BPF_OBJ_PIN, {}, 12) = 0")];
        let expected = [expected[0], expected[1], (2, "bpf(BPF_OBJ_PIN, {}, 12) = 0")];
        assert_eq!(shown, expected.map(|(position, text)| (position, text.to_owned())));
    }
}
