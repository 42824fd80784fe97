// SPDX-License-Identifier: Apache-2.0
//! Running other programs: each command is printed before it runs, so that it can be repeated by hand.

use std::borrow::Cow;
use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

/// Lines of a quiet program's output that are shown when it fails.
const SHOWN_LINES: usize = 40;

/// Says what happens next and why, in one line.
pub(crate) fn say(text: &str) {
    println!("==> {text}");
}

/// Adds a detail to what was said last.
pub(crate) fn detail(text: &str) {
    println!("    {text}");
}

/// Seconds with a tenth, or minutes and seconds.
pub(crate) fn elapsed(time: Duration) -> String {
    let seconds = time.as_secs();
    if seconds < 60 {
        format!("{:.1} s", time.as_secs_f64())
    } else {
        format!("{} min {:02} s", seconds / 60, seconds % 60)
    }
}

/// Runs a program on our own terminal.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let started = Instant::now();
    show(command);
    let status = command.status().with_context(|| cannot_start(command))?;
    check(command, status)?;
    detail(&format!("done in {}", elapsed(started.elapsed())));
    Ok(())
}

/// Runs a program whose output matters only when it fails.
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

/// Asks a program something; nothing is printed.
pub(crate) fn ask(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| cannot_start(command))?;
    if !output.status.success() {
        bail!("`{}` answered: {}", line(command), String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("read the answer of `{}`", line(command)))
}

/// Prints the last lines of a text.
pub(crate) fn print_end(text: &str) {
    let lines: Vec<&str> = text.lines().collect();
    for line in lines.iter().skip(lines.len().saturating_sub(SHOWN_LINES)) {
        detail(line);
    }
}

/// Prints a command as a shell would take it, with the variables and the folder that it is given.
pub(crate) fn show(command: &Command) {
    detail(&format!("$ {}", line(command)));
}

/// Where a program is, also where only root's search path looks.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|folder| folder.join(program))
        .find(|candidate| is_executable(candidate))
}

/// What a program's end means: an error that names the command, unless it succeeded.
pub(crate) fn check(command: &Command, status: ExitStatus) -> Result<()> {
    if status.success() {
        return Ok(());
    }
    let program = Path::new(command.get_program()).display();
    match status.code() {
        Some(code) => bail!("`{program}` ended with exit code {code}: `{}`", line(command)),
        None => bail!("`{program}` was ended by a signal: `{}`", line(command)),
    }
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
    use super::{Command, Duration, elapsed, line};

    #[test]
    fn a_command_is_shown_as_a_shell_takes_it() {
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
