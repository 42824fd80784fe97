// SPDX-License-Identifier: Apache-2.0
//! Real load balancers, with the configuration that docs/load-balancers.md shows.

use std::env;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::echo::Answer;
use crate::netns::Netns;
use crate::process::Process;
use crate::run::Run;
use crate::{tools, traffic};

/// The environment variable with the directory of the load balancers' programs.
const PROGRAMS_VARIABLE: &str = "NPL_BALANCERS_DIR";

/// The timeout of a request, longer than the longest sequence of a load balancer's retries.
const PATIENCE: Duration = Duration::from_mins(1);

/// The page with the configurations.
const PAGE: &str = "docs/load-balancers.md";

/// A load balancer: its program, and the code blocks of docs/load-balancers.md that configure it.
#[derive(Clone, Copy, Debug)]
pub struct LoadBalancer {
    /// The program's name.
    pub name: &'static str,
    arguments: &'static [&'static str],
    files: &'static [&'static str],
}

/// Envoy, which reads the feed by xDS.
pub const ENVOY: LoadBalancer = LoadBalancer {
    name: "envoy",
    arguments: &["--disable-hot-restart", "--concurrency", "1", "--log-level", "warn", "-c", "envoy.yaml"],
    files: &["envoy.yaml"],
};

/// `HAProxy`, which reads the feed by DNS.
pub const HAPROXY: LoadBalancer =
    LoadBalancer { name: "haproxy", arguments: &["-db", "-f", "haproxy.cfg"], files: &["haproxy.cfg"] };

/// nginx, which reads the feed by DNS. nginx runs as a single process, because worker processes would survive if the
/// master process is killed. The process runs as root, because the user namespace of the test has no other user.
pub const NGINX: LoadBalancer = LoadBalancer {
    name: "nginx",
    arguments: &[
        "-p",
        ".",
        "-c",
        "nginx.conf",
        "-e",
        "stderr",
        "-g",
        "daemon off; master_process off; pid nginx.pid; user root;",
    ],
    files: &["nginx.conf"],
};

/// Caddy, which reads the feed by DNS.
pub const CADDY: LoadBalancer = LoadBalancer {
    name: "caddy",
    arguments: &["run", "--adapter", "caddyfile", "--config", "Caddyfile"],
    files: &["Caddyfile"],
};

/// Traefik, which polls the feed by HTTP.
pub const TRAEFIK: LoadBalancer = LoadBalancer {
    name: "traefik",
    arguments: &["--configFile=traefik.yaml"],
    files: &["traefik.yaml", "routers.yaml"],
};

pub const ALL: [LoadBalancer; 5] = [ENVOY, HAPROXY, NGINX, CADDY, TRAEFIK];

impl LoadBalancer {
    /// The path of the program.
    ///
    /// # Errors
    ///
    /// Returns an error if the environment variable `NPL_BALANCERS_DIR` is unset.
    pub fn program(&self) -> Result<PathBuf> {
        Ok(programs()?.join(self.name))
    }

    /// Starts the load balancer in a namespace, with the configuration of docs/load-balancers.md. In this
    /// configuration, the first text of each pair of `replacements` is replaced by the second one.
    ///
    /// # Errors
    ///
    /// Returns an error if the configuration cannot be written, or the program cannot be started.
    pub fn start(&self, run: &Run, netns: &Netns, replacements: &[(&str, &str)]) -> Result<Process> {
        let folder = run.file(&format!("balancer-{}", self.name));
        fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
        let mut command = netns.command(self.program()?)?;
        self.configure(&mut command, &folder, replacements)?;
        Process::spawn(self.name, command, &folder.join("log"))
    }

    /// Writes the configuration into `folder`, with the same replacements as [`Self::start`], and makes `command` use
    /// the configuration.
    ///
    /// # Errors
    ///
    /// Returns an error if the page does not contain the configuration, or a file cannot be written.
    pub fn configure(&self, command: &mut Command, folder: &Path, replacements: &[(&str, &str)]) -> Result<()> {
        for file in self.files {
            let text = replacements.iter().fold(example(file)?, |text, (from, to)| text.replace(from, to));
            fs::write(folder.join(file), text).with_context(|| format!("write {file} into {}", folder.display()))?;
        }
        command.args(self.arguments).current_dir(folder).env("HOME", folder);
        command.env("LD_LIBRARY_PATH", programs()?.join("lib"));
        Ok(())
    }
}

/// Sends a request over a new connection to a load balancer whose Pods are echo servers. Returns the answer of the Pod.
///
/// # Errors
///
/// Returns an error if no Pod has answered.
pub fn ask(balancer: SocketAddr) -> Result<Answer> {
    let mut stream = traffic::open_tcp(balancer, PATIENCE)?;
    stream
        .write_all(b"GET / HTTP/1.1\r\nHost: web.example\r\nConnection: close\r\n\r\n")
        .context("send the request")?;
    let mut text = String::new();
    stream.read_to_string(&mut text).context("read the answer")?;
    let status = text.lines().next().unwrap_or_default();
    ensure!(status.starts_with("HTTP/1.1 200"), "the load balancer answered `{status}`");
    // Take the text from the first to the last brace: the answer is one JSON object, and chunked transfer encoding adds
    // lines before and after the object.
    let object = text.find('{').zip(text.rfind('}')).and_then(|(from, to)| text.get(from..=to));
    serde_json::from_str(object.context("the answer contains no JSON object")?).context("parse the answer")
}

fn programs() -> Result<PathBuf> {
    let folder = env::var_os(PROGRAMS_VARIABLE).map(PathBuf::from);
    folder.with_context(|| {
        format!("{PROGRAMS_VARIABLE} is unset: run the tests by `cargo xtask test`, which downloads the load balancers")
    })
}

/// Returns the example of the configuration file `file` from docs/load-balancers.md.
///
/// # Errors
///
/// Returns an error if the page cannot be read or has no such example.
pub fn example(file: &str) -> Result<String> {
    let page = tools::repository_file(PAGE);
    let page = fs::read_to_string(&page).with_context(|| format!("read {}", page.display()))?;
    block(&page, file).map(str::to_owned).with_context(|| format!("{PAGE} has no code block {file}"))
}

/// Returns the code block with this file name. The file name follows the language in the first line of the block.
fn block<'a>(page: &'a str, name: &str) -> Option<&'a str> {
    let marker = format!(" {name}\n");
    let blocks = page.split("```").skip(1).step_by(2);
    let mut found =
        blocks.filter_map(|block| block.split_once(&marker).filter(|(language, _)| !language.contains('\n')));
    found.next().map(|(_, text)| text)
}

#[cfg(test)]
mod tests {
    use super::{ALL, block, example};

    #[test]
    fn a_block_is_found_by_the_name_after_its_language() {
        let page = "```sh\nls a.yaml\n```\ntext\n```yaml a.yaml\nkey: value\n```\n";
        assert_eq!(block(page, "a.yaml"), Some("key: value\n"));
        assert_eq!(block(page, "b.yaml"), None);
    }

    #[test]
    fn the_page_configures_every_load_balancer() {
        for file in ALL.iter().flat_map(|it| it.files) {
            assert!(!example(file).unwrap().is_empty(), "{file}");
        }
    }

    /// The number of nonblank lines between the comments `npl-feed: begin` and `npl-feed: end`, or in the whole file if
    /// the file has no such comments.
    fn lines_of_the_feed(text: &str) -> usize {
        let marked = text.split("# npl-feed: begin\n").skip(1).filter_map(|part| part.split_once("# npl-feed: end"));
        let marked: Vec<&str> = marked.map(|(lines, _)| lines).collect();
        let counted = if marked.is_empty() { vec![text] } else { marked };
        counted.iter().flat_map(|part| part.lines()).filter(|line| !line.trim().is_empty()).count()
    }

    /// The texts by which the test recognizes settings that repeat requests or check members.
    const RETRIES: [&str; 9] = [
        "retry_policy:",
        "option redispatch",
        "retry-on",
        "retries",
        " check ",
        "proxy_next_upstream",
        "lb_retries",
        "lb_try",
        "middlewares: {retry:",
    ];

    /// Returns the lines that contain settings of [`RETRIES`] and that [`lines_of_the_feed`] does not count.
    fn uncounted_retries(text: &str) -> Vec<&str> {
        if !text.contains("# npl-feed: begin") {
            return Vec::new();
        }
        let mut is_counted = false;
        let uncounted = text.lines().filter(|line| {
            is_counted = (is_counted || line.contains("# npl-feed: begin")) && !line.contains("# npl-feed: end");
            !is_counted
        });
        uncounted.filter(|line| RETRIES.iter().any(|setting| line.contains(setting))).collect()
    }

    #[test]
    fn retries_and_health_checks_are_among_the_counted_lines() {
        let text = "retries 3\n# npl-feed: begin\nretry-on x\n# npl-feed: end\nserver a check inter 1s\n";
        assert_eq!(uncounted_retries(text), ["retries 3", "server a check inter 1s"]);
        let mut found = 0;
        for file in ALL.iter().flat_map(|it| it.files) {
            let text = example(file).unwrap();
            assert_eq!(uncounted_retries(&text), Vec::<&str>::new(), "{file}");
            found += RETRIES.iter().filter(|setting| text.contains(**setting)).count();
        }
        assert!(found >= RETRIES.len() - 1, "{found}: settings of the examples have other names");
    }

    #[test]
    fn at_most_ten_lines_connect_a_load_balancer_to_the_feed() {
        assert_eq!(lines_of_the_feed("a\n  # npl-feed: begin\n  b\n  c\n  # npl-feed: end\nd\n"), 2);
        assert_eq!(
            lines_of_the_feed("# npl-feed: begin\nb\n# npl-feed: end\nc\n# npl-feed: begin\nd\n# npl-feed: end\n"),
            2
        );
        for balancer in ALL {
            let lines: usize = balancer.files.iter().map(|file| lines_of_the_feed(&example(file).unwrap())).sum();
            assert!((1..=10).contains(&lines), "{}: {lines} lines", balancer.name);
        }
        assert!(lines_of_the_feed(&example("bootstrap.json").unwrap()) <= 10, "gRPC clients");
    }
}
