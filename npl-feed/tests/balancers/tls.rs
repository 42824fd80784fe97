// SPDX-License-Identifier: Apache-2.0
//! Tests TLS with client certificates: the interfaces with TLS answer only clients with a certificate that the feed's
//! client CA has signed.

use std::{
    path::Path,
    process::{Command, Output},
    sync::Arc,
};

use clap::Parser as _;
use npl_feed::{config::Config, connection_limits::ConnectionLimits, run, status::Status};
use tokio::{sync::watch, task::JoinSet};

use crate::{network, scene};

fn openssl(folder: &Path, line: &str) {
    let output = Command::new("openssl").args(line.split(' ')).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "openssl {line}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Creates a CA, and for each of `names` a key and a certificate that this CA has signed.
fn certificates(folder: &Path, ca: &str, names: &[&str]) {
    openssl(
        folder,
        &format!(
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN={ca} -days 2 -keyout {ca}.key -out {ca}.pem"
        ),
    );
    for name in names {
        let extension = "subjectAltName=IP:127.0.0.1";
        openssl(
            folder,
            &format!(
                "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN={name} -addext {extension} -keyout {name}.key -out {name}.csr"
            ),
        );
        openssl(
            folder,
            &format!(
                "x509 -req -in {name}.csr -CA {ca}.pem -CAkey {ca}.key -days 2 -copy_extensions copy -out {name}.pem"
            ),
        );
    }
}

fn curl(folder: &Path, arguments: &str) -> Output {
    let fixed = ["--silent", "--show-error", "--max-time", "20", "--cacert", "ca.pem"];
    Command::new("curl").args(fixed).args(arguments.split(' ')).current_dir(folder).output().unwrap()
}

#[test]
fn only_clients_with_a_certificate_of_the_ca_are_answered() {
    network::inside("tls::only_clients_with_a_certificate_of_the_ca_are_answered", || {
        let folder = scene::Folder::new("tls");
        certificates(&folder, "ca", &["server", "client"]);
        certificates(&folder, "other", &["stranger"]);
        let file = |name: &str| folder.join(name).display().to_string();
        let config = Config::try_parse_from([
            "npl-feed",
            "--http",
            "127.0.0.1:8443",
            "--xds",
            "127.0.0.1:8444",
            "--dns",
            "none",
            "--tls-cert",
            &file("server.pem"),
            "--tls-key",
            &file("server.key"),
            "--tls-client-ca",
            &file("ca.pem"),
        ]);
        let config = config.unwrap();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let (_publisher, published) = watch::channel(None);
        let mut tasks = JoinSet::new();
        runtime
            .block_on(run::serve(
                &config,
                ConnectionLimits::LARGEST,
                &published,
                &Arc::new(Status::default()),
                &mut tasks,
            ))
            .unwrap();
        for port in [8443, 8444] {
            let url = format!("https://127.0.0.1:{port}/healthz");
            let answer = curl(
                &folder,
                &format!("--cert client.pem --key client.key --write-out %{{http_code}}-%{{http_version}} {url}"),
            );
            let text = String::from_utf8_lossy(&answer.stdout).into_owned();
            assert!(answer.status.success(), "{}", String::from_utf8_lossy(&answer.stderr));
            // The test ignores the status code, because the xDS interface does not have this path. The version must be
            // HTTP/2.
            assert!(text.ends_with("-2"), "{text}");
            for refused in ["", "--cert stranger.pem --key stranger.key "] {
                let answer = curl(&folder, &format!("{refused}{url}"));
                assert!(!answer.status.success(), "{refused:?} was answered");
            }
        }
        assert!(!curl(&folder, "http://127.0.0.1:8443/healthz").status.success(), "a client without TLS was answered");
    });
}
