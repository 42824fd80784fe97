// SPDX-License-Identifier: Apache-2.0
//! A real etcd and a real kube-apiserver for one run.

use std::env;
use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _};
use serde_json::{Value, json};

use crate::api_client::ApiClient;
use crate::netns::Netns;
use crate::poll;
use crate::process::Process;
use crate::run::{Run, random_hex};

/// The account that `deploy/npl.yaml` makes for the agent.
pub const AGENT_USER: &str = "system:serviceaccount:npl-system:npl-agent";

/// The groups that Kubernetes puts a service account of `npl-system` into.
const AGENT_GROUPS: &str = "system:serviceaccounts,system:serviceaccounts:npl-system,system:authenticated";

/// The file of an account's access, as `kubectl` and the agent take it.
const ADMIN_KUBECONFIG: &str = "admin.kubeconfig";
const AGENT_KUBECONFIG: &str = "agent.kubeconfig";

/// Start-up takes 3 s on an idle machine with two cores.
const READY_LIMIT: Duration = Duration::from_mins(1);

/// How long the API server may take to end when asked; watches that are open hold it up.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// Variables that name the folder of the two binaries, the first that is set wins.
const ASSET_VARIABLES: [&str; 2] = ["KUBEBUILDER_ASSETS", "NPL_CONTROL_PLANE_DIR"];

/// What stands before the point of a P-256 key in a `SubjectPublicKeyInfo` (RFC 5480), in DER.
const P256_PUBLIC_KEY: &[u8] = &[
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce,
    0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];

/// A running control plane; stopped and removed on drop.
#[derive(Debug)]
pub struct ControlPlane {
    directory: PathBuf,
    netns: Option<Netns>,
    ports: Ports,
    admin_token: String,
    api_server: Option<Process>,
    etcd: Process,
    binaries: Binaries,
}

#[derive(Clone, Copy, Debug)]
struct Ports {
    etcd: u16,
    etcd_peer: u16,
    api_server: u16,
}

#[derive(Debug)]
struct Binaries {
    etcd: PathBuf,
    api_server: PathBuf,
}

impl ControlPlane {
    /// Starts both on the loopback address, inside `netns` when one is given, and waits until the API server is ready.
    pub fn start(run: &Run, netns: Option<&Netns>) -> Result<Self> {
        let binaries = Binaries::find()?;
        let directory = run.file(&format!("control-plane-{}", random_hex(2)?));
        fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
        let ports = Ports::free(netns)?;
        let admin_token = write_credentials(&directory, ports.api_server)?;
        let etcd =
            Process::spawn("etcd", etcd_command(&binaries, netns, &directory, ports)?, &directory.join("etcd.log"))?;
        let netns = netns.cloned();
        let mut plane = Self { directory, netns, ports, admin_token, api_server: None, etcd, binaries };
        plane.start_api_server()?;
        Ok(plane)
    }

    /// Starts the API server again, on the same address and the same data.
    pub fn start_api_server(&mut self) -> Result<()> {
        let command = self.api_server_command()?;
        let log = self.directory.join("kube-apiserver.log");
        let mut process = Process::spawn("kube-apiserver", command, &log)?;
        let mut ended = None;
        let ready = poll::until("the readiness of kube-apiserver", READY_LIMIT, || {
            ended = process.exit_status().or_else(|| self.etcd.exit_status());
            (ended.is_some() || self.is_ready()).then_some(())
        });
        let failure = match (ready, ended) {
            (Ok(_), None) => {
                self.api_server = Some(process);
                return Ok(());
            }
            (_, Some(status)) => format!("the control plane ended at its start with {status}"),
            (Err(late), None) => late.to_string(),
        };
        bail!("{failure}\n{}\n{}", process.log_tail(15), self.etcd.log_tail(5))
    }

    /// Stops the API server; etcd keeps the data.
    pub fn stop_api_server(&mut self) -> Result<()> {
        match self.api_server.take() {
            Some(mut process) => process.terminate(STOP_LIMIT).map(drop),
            None => Ok(()),
        }
    }

    /// A client with all rights.
    pub fn client(&self) -> Result<ApiClient> {
        let authority = fs::read(self.certificate()).context("read the API server's certificate")?;
        Ok(ApiClient::new(self.address(), &authority, &self.admin_token, self.netns.as_ref()))
    }

    /// Kubeconfig of an administrator.
    pub fn admin_kubeconfig(&self) -> PathBuf {
        self.directory.join(ADMIN_KUBECONFIG)
    }

    /// Kubeconfig of the agent's service account.
    pub fn agent_kubeconfig(&self) -> PathBuf {
        self.directory.join(AGENT_KUBECONFIG)
    }

    /// The same by another port of the loopback address, behind which the API server is too.
    pub fn agent_kubeconfig_by(&self, port: u16) -> Result<PathBuf> {
        let path = self.directory.join(format!("agent-{port}.kubeconfig"));
        if path.exists() {
            return Ok(path);
        }
        let text = fs::read_to_string(self.agent_kubeconfig()).context("read the agent's kubeconfig")?;
        write_secret(&path, &text.replace(&self.address().to_string(), &format!("127.0.0.1:{port}")))?;
        Ok(path)
    }

    /// Has etcd forget everything before the newest state, so that no watch can begin earlier.
    pub fn compact(&self) -> Result<()> {
        let list = self.client()?.get("/api/v1/namespaces?limit=1")?;
        let version = list.pointer("/metadata/resourceVersion").and_then(Value::as_str).context("a list's version")?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.ports.etcd));
        let body = json!({ "revision": version, "physical": true }).to_string();
        let compacted = || ureq::post(format!("http://{address}/v3/kv/compaction")).send(body.as_str()).map(drop);
        match &self.netns {
            Some(netns) => netns.run(compacted)?,
            None => compacted(),
        }
        .context("compact etcd")
    }

    /// Where the API server listens, in its namespace.
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.ports.api_server).into()
    }

    /// The namespace that it listens in.
    pub fn netns(&self) -> Option<&Netns> {
        self.netns.as_ref()
    }

    /// The folder of its data and logs.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    fn is_ready(&self) -> bool {
        // The certificate is written early in the API server's start.
        self.client().and_then(|client| client.text("/readyz")).is_ok_and(|text| text == "ok")
    }

    fn certificate(&self) -> PathBuf {
        self.directory.join("certs").join("apiserver.crt")
    }

    fn api_server_command(&self) -> Result<Command> {
        let mut command = command_in(self.netns.as_ref(), &self.binaries.api_server)?;
        let file = |name: &str| self.directory.join(name).display().to_string();
        command
            .arg(format!("--etcd-servers=http://127.0.0.1:{}", self.ports.etcd))
            .arg(format!("--cert-dir={}", file("certs")))
            .arg(format!("--secure-port={}", self.ports.api_server))
            .arg(format!("--service-account-key-file={}", file("sa.pub")))
            .arg(format!("--service-account-signing-key-file={}", file("sa.key")))
            .arg(format!("--token-auth-file={}", file("tokens.csv")))
            .args([
                "--bind-address=127.0.0.1",
                // Asked for by the start-up checks, and used by nobody here.
                "--advertise-address=192.0.2.1",
                "--endpoint-reconciler-type=none",
                "--service-account-issuer=https://kubernetes.default.svc",
                "--service-cluster-ip-range=10.96.0.0/16,fd00:96::/112",
                "--authorization-mode=RBAC",
                // There is no controller that would make the default service account of each namespace.
                "--disable-admission-plugins=ServiceAccount",
                "--allow-privileged=true",
            ]);
        Ok(command)
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        // Killed and not asked: the data is thrown away, and open watches would hold up an orderly end.
        self.api_server = None;
        if let Err(err) = self.etcd.kill().and_then(|_| Ok(fs::remove_dir_all(&self.directory)?)) {
            crate::process::report(&format!("stop the control plane: {err:#}"));
        }
    }
}

impl Ports {
    /// Asks the kernel for three at once, so that they differ.
    fn free(netns: Option<&Netns>) -> Result<Self> {
        let bind = || -> std::io::Result<[u16; 3]> {
            let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
            let listeners = [TcpListener::bind(any)?, TcpListener::bind(any)?, TcpListener::bind(any)?];
            let [a, b, c] = &listeners;
            Ok([a.local_addr()?.port(), b.local_addr()?.port(), c.local_addr()?.port()])
        };
        let ports = match netns {
            Some(netns) => netns.run(bind)?,
            None => bind(),
        };
        let [etcd, etcd_peer, api_server] = ports.context("ask the kernel for free ports")?;
        Ok(Self { etcd, etcd_peer, api_server })
    }
}

impl Binaries {
    fn find() -> Result<Self> {
        let named = ASSET_VARIABLES.iter().find_map(|name| env::var_os(name).map(|value| (name, PathBuf::from(value))));
        let Some((variable, directory)) = named else {
            bail!("no etcd and kube-apiserver are known: run `cargo xtask setup`, or set {}", ASSET_VARIABLES[0]);
        };
        let find = |names: &[&str]| {
            let found = names.iter().map(|name| directory.join(name)).find(|path| path.exists());
            found.with_context(|| format!("{variable} is {}, where no {} is", directory.display(), names.join(" or ")))
        };
        // `go build` names a program for its folder, and etcd's is called server.
        Ok(Self { etcd: find(&["etcd", "server"])?, api_server: find(&["kube-apiserver"])? })
    }
}

fn etcd_command(binaries: &Binaries, netns: Option<&Netns>, directory: &Path, ports: Ports) -> Result<Command> {
    let client = format!("http://127.0.0.1:{}", ports.etcd);
    let peer = format!("http://127.0.0.1:{}", ports.etcd_peer);
    let mut command = command_in(netns, &binaries.etcd)?;
    command.arg("--data-dir").arg(directory.join("etcd")).args(["--unsafe-no-fsync", "--log-level", "error"]);
    command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
    command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
    command.args(["--initial-cluster", &format!("default={peer}")]);
    Ok(command)
}

fn command_in(netns: Option<&Netns>, program: impl AsRef<OsStr>) -> Result<Command> {
    netns.map_or_else(|| Ok(Command::new(program.as_ref())), |netns| netns.command(program.as_ref()))
}

/// Writes keys, tokens and kubeconfigs; returns the administrator's token.
fn write_credentials(directory: &Path, port: u16) -> Result<String> {
    let (admin, agent) = (random_hex(16)?, random_hex(16)?);
    let tokens = format!("{admin},admin,1,\"system:masters\"\n{agent},{AGENT_USER},2,\"{AGENT_GROUPS}\"\n");
    write_secret(&directory.join("tokens.csv"), &tokens)?;
    write_signing_key(directory)?;
    let authority = directory.join("certs").join("apiserver.crt");
    write_secret(&directory.join(ADMIN_KUBECONFIG), &kubeconfig(port, &authority, "admin", &admin))?;
    write_secret(&directory.join(AGENT_KUBECONFIG), &kubeconfig(port, &authority, "npl-agent", &agent))?;
    Ok(admin)
}

/// Makes a key pair for service account tokens. The API server reads public keys from files of their own only.
fn write_signing_key(directory: &Path) -> Result<()> {
    let algorithm = &ECDSA_P256_SHA256_FIXED_SIGNING;
    let random = SystemRandom::new();
    let private = EcdsaKeyPair::generate_pkcs8(algorithm, &random).ok().context("make a signing key")?;
    let pair = EcdsaKeyPair::from_pkcs8(algorithm, private.as_ref(), &random).ok().context("read a signing key")?;
    let public = [P256_PUBLIC_KEY, pair.public_key().as_ref()].concat();
    write_secret(&directory.join("sa.key"), &pem("PRIVATE KEY", private.as_ref()))?;
    write_secret(&directory.join("sa.pub"), &pem("PUBLIC KEY", &public))
}

fn pem(label: &str, content: &[u8]) -> String {
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", STANDARD.encode(content))
}

fn kubeconfig(port: u16, authority: &Path, user: &str, token: &str) -> String {
    let authority = authority.display();
    format!(
        "apiVersion: v1
kind: Config
current-context: npl
contexts: [{{name: npl, context: {{cluster: npl, user: {user}}}}}]
clusters: [{{name: npl, cluster: {{server: \"https://127.0.0.1:{port}\", certificate-authority: \"{authority}\"}}}}]
users: [{{name: {user}, user: {{token: \"{token}\"}}}}]
"
    )
}

fn write_secret(path: &Path, text: &str) -> Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("create {}", path.display()))?;
    file.write_all(text.as_bytes()).with_context(|| format!("write {}", path.display()))
}
