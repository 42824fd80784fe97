// SPDX-License-Identifier: Apache-2.0
//! Waits for processes of kubectl, and checks for signals and time limits during the wait.

use std::{
    io::{self, BufRead as _, BufReader, Read},
    process::{Child, Output},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::Duration,
};

use anyhow::ensure;

/// The maximum number of bytes that are kept of a process's standard error. The beginning is sufficient, because the
/// text is only shown to the user.
const STDERR_BYTES: usize = 64 << 10;

/// The interval between two checks for signals and time limits.
const PAUSE: Duration = Duration::from_millis(20);

/// Waits for the end of a process and returns its output. If `check` fails before the process has ended, kills the
/// process.
pub(super) fn output(process: Child, check: impl Fn() -> anyhow::Result<()>) -> anyhow::Result<Output> {
    output_within(process, usize::MAX, check)
}

/// Does the same as [`output`], and also kills the process if its standard output has more than `limit` bytes.
pub(super) fn output_within(
    mut process: Child,
    limit: usize,
    check: impl Fn() -> anyhow::Result<()>,
) -> anyhow::Result<Output> {
    let (stdout, stderr) = (whole(process.stdout.take(), limit), beginning(process.stderr.take(), STDERR_BYTES));
    let wait = |process: &mut Child| {
        let stdout = receive(&stdout, &check)?.unwrap_or_default();
        ensure!(stdout.len() <= limit, "the output has more than {limit} bytes");
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

/// Waits for the next value of a channel; `None` if the channel's sender was dropped. Returns an error as soon as
/// `check` returns an error.
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

/// Starts a thread that reads a pipe to its end, but stops when it has read one byte more than `limit`. The thread is
/// not joined: a process that kubectl has started may keep the pipe open longer than kubectl runs.
fn whole(pipe: Option<impl Read + Send + 'static>, limit: usize) -> Receiver<Vec<u8>> {
    read_on_thread(pipe, move |pipe| {
        let mut read = Vec::new();
        // A read error is ignored: the bytes that were read before the error are returned.
        drop(pipe.take((limit as u64).saturating_add(1)).read_to_end(&mut read));
        read
    })
}

/// Does the same as [`whole`], but returns at most `limit` bytes, and discards the remaining bytes, so that the process
/// can continue to write.
fn beginning(pipe: Option<impl Read + Send + 'static>, limit: usize) -> Receiver<Vec<u8>> {
    read_on_thread(pipe, move |mut pipe| {
        let mut read = Vec::new();
        drop(pipe.by_ref().take(limit as u64).read_to_end(&mut read));
        drop(io::copy(&mut pipe, &mut io::sink()));
        read
    })
}

fn read_on_thread<P: Read + Send + 'static>(
    pipe: Option<P>,
    read: impl FnOnce(P) -> Vec<u8> + Send + 'static,
) -> Receiver<Vec<u8>> {
    let (sender, bytes) = mpsc::channel();
    if let Some(pipe) = pipe {
        thread::spawn(move || drop(sender.send(read(pipe))));
    }
    bytes
}

#[cfg(test)]
mod tests {
    use std::{
        process::{Command, Stdio},
        time::Instant,
    };

    use super::*;

    fn shell(script: &str) -> Child {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    #[test]
    fn of_much_standard_error_only_the_beginning_is_kept() {
        let output = output(shell("head -c 10000000 /dev/zero >&2; echo done"), || Ok(())).unwrap();
        assert_eq!((output.stdout, output.stderr.len()), (b"done\n".to_vec(), STDERR_BYTES));
    }

    #[test]
    fn both_outputs_of_a_process_are_returned() {
        let output = output(shell("echo a; echo b >&2; exit 3"), || Ok(())).unwrap();
        assert_eq!((output.stdout, output.stderr), (b"a\n".to_vec(), b"b\n".to_vec()));
        assert_eq!(output.status.code(), Some(3));
    }

    #[test]
    fn a_process_with_too_much_output_is_killed() {
        assert_eq!(output_within(shell("printf abc"), 3, || Ok(())).unwrap().stdout, b"abc");
        let error = output_within(shell("yes"), 3, || Ok(())).unwrap_err();
        assert_eq!(error.to_string(), "the output has more than 3 bytes");
    }

    #[test]
    fn a_process_that_hangs_is_killed_at_the_time_limit() {
        let start = Instant::now();
        let check = || {
            ensure!(start.elapsed() < Duration::from_millis(100), "over");
            Ok(())
        };
        // The shell's child `sleep` keeps the pipes open after the shell is killed. `output` must not wait until the
        // pipes are closed.
        let error = output(shell("sleep 60; true"), check).unwrap_err();
        assert_eq!(error.to_string(), "over");
        assert!(start.elapsed() < Duration::from_secs(30));
    }
}
