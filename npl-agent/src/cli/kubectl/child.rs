// SPDX-License-Identifier: Apache-2.0
//! Waits for processes of kubectl, and checks for signals and time limits during the wait.

use std::{
    io::{BufRead as _, BufReader, Read},
    process::{Child, Output},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::Duration,
};

/// The interval between two checks for signals and time limits.
const PAUSE: Duration = Duration::from_millis(20);

/// Waits for the end of a process and returns its output. If `check` fails before the process has ended, kills the
/// process.
pub(super) fn output(mut process: Child, check: impl Fn() -> anyhow::Result<()>) -> anyhow::Result<Output> {
    let (stdout, stderr) = (whole(process.stdout.take()), whole(process.stderr.take()));
    let wait = |process: &mut Child| {
        let stdout = receive(&stdout, &check)?.unwrap_or_default();
        let stderr = receive(&stderr, &check)?.unwrap_or_default();
        loop {
            if let Some(status) = process.try_wait()? {
                return Ok(Output { status, stdout, stderr });
            }
            check()?;
            thread::sleep(PAUSE);
        }
    };
    let output = wait(&mut process);
    if output.is_err() {
        // Errors are ignored, because the process may have ended already.
        drop(process.kill());
        drop(process.wait());
    }
    output
}

/// Waits for the next value of a channel; `None` if the channel's sender has ended. Returns an error as soon as `check`
/// returns an error.
pub(super) fn receive<T>(values: &Receiver<T>, check: impl Fn() -> anyhow::Result<()>) -> anyhow::Result<Option<T>> {
    loop {
        match values.recv_timeout(PAUSE) {
            Ok(value) => return Ok(Some(value)),
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
            Err(RecvTimeoutError::Timeout) => check()?,
        }
    }
}

/// Starts a thread that reads the lines of a pipe. The thread ends when the pipe is closed.
pub(super) fn lines(pipe: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    lines
}

/// Starts a thread that reads all bytes of a pipe. The thread is not joined: a process that kubectl has started may
/// keep the pipe open longer than kubectl runs.
fn whole(pipe: Option<impl Read + Send + 'static>) -> Receiver<Vec<u8>> {
    let (sender, bytes) = mpsc::channel();
    if let Some(mut pipe) = pipe {
        thread::spawn(move || {
            let mut read = Vec::new();
            // A read error is ignored: the bytes that were read before the error are sent.
            drop(pipe.read_to_end(&mut read));
            drop(sender.send(read));
        });
    }
    bytes
}

#[cfg(test)]
mod tests {
    use std::{
        process::{Command, Stdio},
        time::Instant,
    };

    use anyhow::ensure;

    use super::*;

    fn shell(script: &str) -> Child {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    #[test]
    fn both_outputs_of_a_process_are_returned() {
        let output = output(shell("echo a; echo b >&2; exit 3"), || Ok(())).unwrap();
        assert_eq!((output.stdout, output.stderr), (b"a\n".to_vec(), b"b\n".to_vec()));
        assert_eq!(output.status.code(), Some(3));
    }

    #[test]
    fn a_process_that_hangs_is_killed_at_the_time_limit() {
        let start = Instant::now();
        let check = || {
            ensure!(start.elapsed() < Duration::from_millis(100), "over");
            Ok(())
        };
        // The shell's child `sleep` keeps the pipes open after the shell is killed.
        let error = output(shell("sleep 60; true"), check).unwrap_err();
        assert_eq!(error.to_string(), "over");
        assert!(start.elapsed() < Duration::from_secs(30));
    }
}
