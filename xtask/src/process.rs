// SPDX-License-Identifier: Apache-2.0
//! Runs the programs that xtask needs. Each command is printed before it runs, so that a developer can repeat the
//! command by hand.
//!
//! Messages go to standard error, because another program may parse the results on standard output.

use std::borrow::Cow;
use std::env;
use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, PipeReader};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};

/// The maximum number of output lines that are printed if a program that runs quietly fails.
const SHOWN_LINES: usize = 40;

/// Prints one line about the action that xtask begins, and about the purpose of the action.
pub(crate) fn say(text: &str) {
    eprintln!("==> {text}");
}

/// Prints a detail of the action that [`say`] has announced.
pub(crate) fn detail(text: &str) {
    eprintln!("    {text}");
}

/// Formats a duration as seconds with one decimal place; from one minute on, as minutes and seconds.
pub(crate) fn elapsed(time: Duration) -> String {
    let seconds = time.as_secs();
    if seconds < 60 {
        format!("{:.1} s", time.as_secs_f64())
    } else {
        format!("{} min {:02} s", seconds / 60, seconds % 60)
    }
}

/// Runs a program with the standard input, output and error of xtask.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let started = Instant::now();
    show(command);
    let status = command.status().with_context(|| cannot_start(command))?;
    check(command, status)?;
    detail(&format!("done in {}", elapsed(started.elapsed())));
    Ok(())
}

/// Replaces the process of xtask with the program, so that only the program handles Ctrl-C.
pub(crate) fn become_program(command: &mut Command) -> Result<()> {
    show(command);
    become_program_quietly(command)
}

/// Replaces the process of xtask with the program as [`become_program`] does, but does not print the command.
pub(crate) fn become_program_quietly(command: &mut Command) -> Result<()> {
    // `exec` returns only if it has failed.
    Err(command.exec()).with_context(|| cannot_start(command))
}

/// Runs a program quietly. If the program fails, prints the end of its output.
pub(crate) fn run_quietly(command: &mut Command) -> Result<()> {
    let started = Instant::now();
    show(command);
    let output = command.stdin(Stdio::null()).output().with_context(|| cannot_start(command))?;
    if !output.status.success() {
        let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        print_end(&text);
    }
    check(command, output.status)?;
    detail(&format!("done in {}", elapsed(started.elapsed())));
    Ok(())
}

/// Runs a program without printing the command or the output, and returns the output.
pub(crate) fn ask(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| cannot_start(command))?;
    if !output.status.success() {
        bail!("`{}` failed: {}", line(command), String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("read the output of `{}`", line(command)))
}

/// Runs a program, passes each line that the program prints to `watch`, and kills the program at the deadline.
///
/// `watch` is also called without a line, several times a second. If `watch` returns an error, this function kills the
/// program before the deadline.
pub(crate) fn stream(
    mut command: Command,
    deadline: Duration,
    mut watch: impl FnMut(Option<&str>) -> Result<()>,
) -> Result<ExitStatus> {
    let started = Instant::now();
    let shown = line(&command);
    let (reader, writer) = std::io::pipe().context("create a pipe")?;
    command.stdin(Stdio::null()).stdout(writer.try_clone().context("share a pipe")?).stderr(writer);
    let mut child = command.spawn().with_context(|| cannot_start(&command))?;
    // The command holds write ends of the pipe. If the command were not dropped, the reader would never receive
    // end-of-file.
    drop(command);
    let lines = lines_of(reader);
    let watched = loop {
        let line = match lines.recv_timeout(Duration::from_millis(200)) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => break Ok(()),
        };
        if started.elapsed() > deadline {
            break Err(anyhow!("`{shown}` was killed after {}, its time limit", elapsed(deadline)));
        }
        let watched = watch(line.as_deref());
        if watched.is_err() {
            break watched;
        }
    };
    finish(&mut child, watched).with_context(|| format!("run `{shown}`"))
}

/// Prints the last lines of a text.
pub(crate) fn print_end(text: &str) {
    let lines: Vec<&str> = text.lines().collect();
    for line in lines.iter().skip(lines.len().saturating_sub(SHOWN_LINES)) {
        detail(line);
    }
}

/// Prints a command in the syntax of a shell, with its environment variables.
pub(crate) fn show(command: &Command) {
    detail(&format!("$ {}", line(command)));
}

/// Finds a program in the search path or in the directories for administrators' programs (`sbin`).
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|folder| folder.join(program))
        .find(|candidate| is_executable(candidate))
}

/// If the program has failed, returns an error that names the command.
pub(crate) fn check(command: &Command, status: ExitStatus) -> Result<()> {
    if status.success() {
        return Ok(());
    }
    let program = Path::new(command.get_program()).display();
    match status.code() {
        Some(code) => bail!("`{program}` failed with exit code {code}: `{}`", line(command)),
        None => bail!("`{program}` was killed by a signal: `{}`", line(command)),
    }
}

fn lines_of(reader: PipeReader) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut reader = BufReader::new(reader);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            line.clear();
            if sender.send(text).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Waits for the end of a program whose output is closed. If `watched` is an error, kills the program first.
fn finish(child: &mut Child, watched: Result<()>) -> Result<ExitStatus> {
    if watched.is_err() {
        child.kill().context("kill the program")?;
    }
    let status = child.wait().context("wait for the end of the program")?;
    watched.map(|()| status)
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    path.metadata().is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
}

fn cannot_start(command: &Command) -> String {
    format!("start `{}`", line(command))
}

fn line(command: &Command) -> String {
    let variables =
        command.get_envs().filter_map(|(name, value)| Some(format!("{}={}", name.display(), quoted(value?))));
    let words = [command.get_program()].into_iter().chain(command.get_args()).map(|word| quoted(word).into_owned());
    variables.chain(words).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &OsStr) -> Cow<'_, str> {
    let text = word.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./:,+@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text;
    }
    Cow::Owned(format!("'{}'", text.replace('\x1f', " ").replace('\'', r"'\''")))
}

#[cfg(test)]
mod tests {
    use super::{Command, Duration, bail, elapsed, line, stream};

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn lines_arrive_in_the_order_in_which_they_are_printed() {
        let mut seen = Vec::new();
        let status = stream(shell("echo one; echo two >&2; exit 3"), Duration::from_secs(10), |line| {
            seen.extend(line.map(str::to_owned));
            Ok(())
        });
        assert_eq!(status.unwrap().code(), Some(3));
        assert_eq!(seen, ["one", "two"]);
    }

    #[test]
    fn a_program_is_killed_at_its_deadline_and_after_an_error_of_its_watcher() {
        let endless = "while true; do echo x; done";
        let late = stream(shell(endless), Duration::from_millis(50), |_| Ok(())).unwrap_err();
        assert!(format!("{late:#}").contains("was killed after"), "{late:#}");
        let stopped = stream(shell(endless), Duration::from_secs(10), |_| bail!("enough")).unwrap_err();
        assert!(format!("{stopped:#}").contains("enough"), "{stopped:#}");
    }

    #[test]
    fn a_command_is_printed_in_the_syntax_of_a_shell() {
        let mut command = Command::new("cargo");
        command.env("RUSTFLAGS", "-C linker=l").args(["build", "it's"]);
        assert_eq!(line(&command), r"RUSTFLAGS='-C linker=l' cargo build 'it'\''s'");
    }

    #[test]
    fn short_times_have_a_tenth_and_long_ones_minutes() {
        assert_eq!(elapsed(Duration::from_millis(1_240)), "1.2 s");
        assert_eq!(elapsed(Duration::from_secs(125)), "2 min 05 s");
    }
}
