// SPDX-License-Identifier: Apache-2.0
//! Starts and stops a real etcd and kube-apiserver for one run of a test.

mod audit;
mod credentials;
mod etcd_client;
mod etcd_data;
mod pool;
mod rotation;

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

pub use self::audit::{AuditLog, AuditedRequest};
pub use self::credentials::Account;
pub(crate) use self::credentials::write_secret;
use self::credentials::{Tokens, kubeconfig};
use self::etcd_client::EtcdClient;
use self::etcd_data::{EtcdData, Template};
pub use self::pool::{Pool, PooledControlPlane};
pub use self::rotation::SERVICE_ACCOUNT;
use crate::api_client::ApiClient;
use crate::netns::Netns;
use crate::poll;
use crate::process::Process;
use crate::proxy::Proxy;
use crate::run::{Run, random_hex};

/// The service account that `deploy/npl.yaml` creates for the agent.
pub const AGENT_USER: &str = "system:serviceaccount:npl-system:npl-agent";

/// The user with all rights.
const ADMIN: &str = "admin";

/// The file names of kubeconfigs.
const ADMIN_KUBECONFIG: &str = "admin.kubeconfig";
const AGENT_KUBECONFIG: &str = "agent.kubeconfig";

/// The name of etcd's data directory.
const ETCD_DIRECTORY: &str = "etcd";

/// The time limit of a start, which takes 3 s on an idle machine with two cores.
const READY_LIMIT: Duration = Duration::from_mins(1);

/// The time limit for stopping the API server, which open watches delay.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// Environment variables with the directory of etcd and kube-apiserver. The first variable that is set is used.
const ASSET_VARIABLES: [&str; 2] = ["KUBEBUILDER_ASSETS", "NPL_CONTROL_PLANE_DIR"];

/// The HTTPS port, on which Pods and Nodes expect the API server's Service.
const NETWORK_PORT: u16 = 443;

/// The ranges of Service addresses.
pub const SERVICE_RANGE: &str = "10.96.0.0/16,fd00:96::/112";

/// The address of the API server's Service, the first address of the range.
pub const SERVICE_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);

/// etcd's data after a first start of the API server, for all later control planes without kubelets in this process.
static TEMPLATE: Template = Template::new();

/// A running control plane. Dropping this value stops etcd and the API server.
#[derive(Debug)]
pub struct ControlPlane {
    directory: PathBuf,
    /// The namespace of etcd and of the API server.
    netns: Option<Netns>,
    /// Another namespace in which clients reach the API server.
    front: Option<Front>,
    reach: Reach,
    /// Further flags of the API server.
    flags: Vec<String>,
    ports: Ports,
    tokens: Tokens,
    api_server: Option<Process>,
    etcd: Process,
    /// The data that [`Self::back_up_etcd`] has read.
    backup: Option<EtcdData>,
    binaries: Binaries,
}

/// A namespace, and the proxy through which clients in the namespace reach an API server in another namespace.
#[derive(Debug)]
struct Front {
    netns: Netns,
    _proxy: Proxy,
}

/// The programs that can reach the control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reach {
    /// Only programs of this run, over the loopback device; there are no kubelets and controllers.
    Loopback,
    /// Also Nodes and Pods: the API server has this address in its network namespace.
    Network(Ipv4Addr),
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
    /// Starts etcd and the API server on the loopback address, inside `netns` if given, and waits until both are ready.
    ///
    /// No kubelets or controllers run: tests write the updates of kubelets and controllers to the API server.
    pub fn start(run: &Run, netns: Option<&Netns>) -> Result<Self> {
        Self::start_with_flags(run, netns, &[])
    }

    /// Starts etcd and the API server as [`Self::start`] does, with further flags of the API server.
    pub fn start_with_flags(run: &Run, netns: Option<&Netns>, flags: &[String]) -> Result<Self> {
        let template = TEMPLATE.get(|| Self::make_template(run))?;
        let plane = Self::launch(run, netns, Reach::Loopback, &[Account::agent()], flags, template)?;
        write_secret(&plane.agent_kubeconfig(), &plane.kubeconfig(AGENT_USER)?)?;
        Ok(plane)
    }

    /// Starts etcd and the API server for kubelets and controllers, at `address` of `netns`.
    pub fn start_for_nodes(run: &Run, netns: &Netns, address: Ipv4Addr, accounts: &[Account]) -> Result<Self> {
        Self::launch(run, Some(netns), Reach::Network(address), accounts, &[], None)
    }

    /// Starts a control plane once and returns etcd's data.
    fn make_template(run: &Run) -> Result<EtcdData> {
        let mut plane = Self::launch(run, None, Reach::Loopback, &[], &[], None)?;
        plane.kill_api_server()?;
        // etcd writes its database to the file only at intervals, and when etcd exits after SIGTERM.
        plane.etcd.terminate(STOP_LIMIT)?;
        EtcdData::read(&plane.etcd_directory())
    }

    fn launch(
        run: &Run,
        netns: Option<&Netns>,
        reach: Reach,
        accounts: &[Account],
        flags: &[String],
        data: Option<&EtcdData>,
    ) -> Result<Self> {
        let binaries = Binaries::find()?;
        let directory = run.file(&format!("control-plane-{}", random_hex(2)?));
        fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
        let ports = Ports::free(netns, reach)?;
        let tokens = Tokens::write(&directory.join("tokens.csv"), &[&[Account::admin()], accounts].concat())?;
        credentials::write_signing_key(&directory.join("sa.key"), &directory.join("sa.pub"))?;
        if let Some(data) = data {
            data.write(&directory.join(ETCD_DIRECTORY))?;
        }
        let etcd =
            Process::spawn("etcd", etcd_command(&binaries, netns, &directory, ports)?, &directory.join("etcd.log"))?;
        let (netns, flags) = (netns.cloned(), flags.to_vec());
        let (front, api_server, backup) = (None, None, None);
        let mut plane =
            Self { directory, netns, front, reach, flags, ports, tokens, api_server, etcd, backup, binaries };
        plane.start_api_server()?;
        write_secret(&plane.admin_kubeconfig(), &plane.kubeconfig(ADMIN)?)?;
        Ok(plane)
    }

    /// Starts the API server, for the first time or after a stop, with the address and the data of this control plane.
    pub fn start_api_server(&mut self) -> Result<()> {
        let mut process = self.spawn_api_server()?;
        // On a busy emulated processor, the start can exceed the API server's own limit of one minute, and the API
        // server exits. In this case, this function restarts the API server, as a kubelet does; the second start takes
        // less time.
        let mut restarts = if poll::patience() > 1 { 2 } else { 0 };
        let mut ended = None;
        let ready = poll::until("the readiness of kube-apiserver", READY_LIMIT, || {
            ended = process.exit_status();
            if ended.is_some() && restarts > 0 {
                restarts -= 1;
                if let Ok(again) = self.spawn_api_server() {
                    (process, ended) = (again, None);
                }
            }
            ended = ended.or_else(|| self.etcd.exit_status());
            (ended.is_some() || self.is_ready()).then_some(())
        });
        let failure = match (ready, ended) {
            (Ok(_), None) => {
                self.api_server = Some(process);
                return Ok(());
            }
            (_, Some(status)) => format!("the control plane exited during startup: {status}"),
            (Err(late), None) => late.to_string(),
        };
        bail!("{failure}\n{}\n{}", process.log_tail(15), self.etcd.log_tail(5))
    }

    fn spawn_api_server(&self) -> Result<Process> {
        Process::spawn("kube-apiserver", self.api_server_command()?, &self.directory.join("kube-apiserver.log"))
    }

    /// Stops the API server. etcd keeps running with the data.
    pub fn stop_api_server(&mut self) -> Result<()> {
        match self.api_server.take() {
            Some(mut process) => process.terminate(STOP_LIMIT).map(drop),
            None => Ok(()),
        }
    }

    /// Kills the API server, so that all its connections are closed immediately. etcd keeps running with the data.
    ///
    /// After SIGTERM, an API server would serve open watches for up to a minute and reject new requests. After such an
    /// outage, the controllers would treat the Nodes as failed.
    pub fn kill_api_server(&mut self) -> Result<()> {
        match self.api_server.take() {
            Some(mut process) => process.kill().map(drop),
            None => Ok(()),
        }
    }

    /// Kills etcd, copies its data, and starts etcd again. Returns once the API server is ready again.
    pub fn back_up_etcd(&mut self) -> Result<()> {
        self.etcd.kill()?;
        self.backup = Some(EtcdData::read(&self.etcd_directory())?);
        self.restart_etcd()
    }

    /// Restores etcd's data from the copy that [`Self::back_up_etcd`] made. The resource versions in the restored data
    /// are older than those that clients have seen since.
    pub fn restore_etcd(&mut self) -> Result<()> {
        self.stop_api_server()?;
        self.etcd.kill()?;
        fs::remove_dir_all(self.etcd_directory()).context("remove the data of etcd")?;
        self.backup.as_ref().context("etcd has no backup")?.write(&self.etcd_directory())?;
        let command = etcd_command(&self.binaries, self.netns.as_ref(), &self.directory, self.ports)?;
        self.etcd = Process::spawn("etcd", command, &self.directory.join("etcd.log"))?;
        self.start_api_server()
    }

    /// Kills etcd and starts it again with the same data. Returns once the API server is ready again.
    pub fn restart_etcd(&mut self) -> Result<()> {
        self.etcd.kill()?;
        let command = etcd_command(&self.binaries, self.netns.as_ref(), &self.directory, self.ports)?;
        self.etcd = Process::spawn("etcd", command, &self.directory.join("etcd.log"))?;
        let ready = poll::until("an API server that reaches etcd", READY_LIMIT, || self.is_ready().then_some(()));
        ready.map(drop).with_context(|| self.etcd.log_tail(5))
    }

    /// Returns a client with all rights.
    pub fn client(&self) -> Result<ApiClient> {
        self.client_with(self.tokens.of(ADMIN)?)
    }

    /// Returns a client that authenticates with this token.
    pub fn client_with(&self, token: &str) -> Result<ApiClient> {
        let authority = fs::read(self.certificate()).context("read the API server's certificate")?;
        Ok(ApiClient::new(self.address(), &authority, token, self.netns.as_ref()))
    }

    /// Returns a self-contained kubeconfig for one of the accounts.
    pub fn kubeconfig(&self, user: &str) -> Result<String> {
        let certificate = fs::read(self.certificate()).context("read the API server's certificate")?;
        Ok(kubeconfig(self.address(), &certificate, user, self.tokens.of(user)?))
    }

    /// The administrator's kubeconfig.
    pub fn admin_kubeconfig(&self) -> PathBuf {
        self.directory.join(ADMIN_KUBECONFIG)
    }

    /// The kubeconfig of the agent's service account.
    pub fn agent_kubeconfig(&self) -> PathBuf {
        self.directory.join(AGENT_KUBECONFIG)
    }

    /// Returns the agent's kubeconfig with another loopback port, such as the port of a proxy in front of the API
    /// server.
    pub fn agent_kubeconfig_by(&self, port: u16) -> Result<PathBuf> {
        let path = self.directory.join(format!("agent-{port}.kubeconfig"));
        if path.exists() {
            return Ok(path);
        }
        let text = fs::read_to_string(self.agent_kubeconfig()).context("read the agent's kubeconfig")?;
        write_secret(&path, &text.replace(&self.address().to_string(), &format!("127.0.0.1:{port}")))?;
        Ok(path)
    }

    /// Compacts etcd to the newest revision, so that watches from older resource versions fail.
    pub fn compact(&mut self) -> Result<()> {
        let list = self.client()?.get("/api/v1/namespaces?limit=1")?;
        let version = list
            .pointer("/metadata/resourceVersion")
            .and_then(Value::as_str)
            .context("the list of namespaces has no resource version")?;
        self.etcd_client().compact(version)
    }

    fn etcd_client(&self) -> EtcdClient<'_> {
        EtcdClient::new(self.ports.etcd, self.netns.as_ref())
    }

    /// The address of the API server in its namespace.
    pub fn address(&self) -> SocketAddr {
        let address = match self.reach {
            Reach::Loopback => Ipv4Addr::LOCALHOST,
            Reach::Network(address) => address,
        };
        (address, self.ports.api_server).into()
    }

    /// The namespace in which clients reach the API server.
    pub fn netns(&self) -> Option<&Netns> {
        self.front.as_ref().map(|front| &front.netns).or(self.netns.as_ref())
    }

    fn etcd_directory(&self) -> PathBuf {
        self.directory.join(ETCD_DIRECTORY)
    }

    /// The directory of data and logs.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The key that signs service account tokens.
    pub fn signing_key(&self) -> PathBuf {
        self.directory.join("sa.key")
    }

    fn is_ready(&self) -> bool {
        // The API server writes its certificate early during its start. Without the certificate, no client can be
        // created, and the server is not ready.
        self.client().and_then(|client| client.text("/readyz")).is_ok_and(|text| text == "ok")
    }

    /// The self-signed certificate that the API server creates at its first start.
    pub fn certificate(&self) -> PathBuf {
        self.directory.join("certs").join("apiserver.crt")
    }

    fn api_server_command(&self) -> Result<Command> {
        let mut command = command_in(self.netns.as_ref(), &self.binaries.api_server)?;
        if self.reach == Reach::Loopback {
            // Garbage collection takes a fifth of the processor time of a start, and the heap remains below 1 GiB.
            command.env("GOGC", "off").env("GOMEMLIMIT", "1GiB");
        }
        let file = |name: &str| self.directory.join(name).display().to_string();
        command
            .arg(format!("--etcd-servers=http://127.0.0.1:{}", self.ports.etcd))
            .arg(format!("--cert-dir={}", file("certs")))
            .arg(format!("--secure-port={}", self.ports.api_server))
            .arg(format!("--service-account-key-file={}", file("sa.pub")))
            .arg(format!("--service-account-signing-key-file={}", file("sa.key")))
            .arg(format!("--token-auth-file={}", file("tokens.csv")))
            .arg(format!("--service-cluster-ip-range={SERVICE_RANGE}"))
            .args(["--service-account-issuer=https://kubernetes.default.svc", "--allow-privileged=true"])
            .args(self.reach.flags())
            .args(&self.flags);
        Ok(command)
    }
}

impl Reach {
    fn flags(self) -> Vec<String> {
        let flags: &[&str] = match self {
            Self::Loopback => &[
                "--bind-address=127.0.0.1",
                // The API server does not start without this flag; the address is never used.
                "--advertise-address=192.0.2.1",
                "--endpoint-reconciler-type=none",
                "--authorization-mode=RBAC",
                // This plug-in would reject every Pod, because without controllers, no default service account exists.
                "--disable-admission-plugins=ServiceAccount",
            ],
            Self::Network(_) => &[
                "--bind-address=0.0.0.0",
                "--authorization-mode=Node,RBAC",
                "--enable-admission-plugins=NodeRestriction",
                // Names of Nodes cannot be resolved, so the API server connects to kubelets by address.
                "--kubelet-preferred-address-types=InternalIP",
            ],
        };
        let advertised = match self {
            Self::Loopback => None,
            Self::Network(address) => Some(format!("--advertise-address={address}")),
        };
        flags.iter().map(ToString::to_string).chain(advertised).collect()
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        // The API server is killed instead of stopped: its data is temporary, and open watches would delay an orderly
        // end.
        self.api_server = None;
        if let Err(err) = self.etcd.kill().and_then(|_| Ok(fs::remove_dir_all(&self.directory)?)) {
            crate::process::report(&format!("stop the control plane: {err:#}"));
        }
    }
}

impl Ports {
    /// Allocates free ports for all servers at the same time, so that the ports differ.
    fn free(netns: Option<&Netns>, reach: Reach) -> Result<Self> {
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
        let [etcd, etcd_peer, free] = ports.context("find free ports")?;
        let api_server = if reach == Reach::Loopback { free } else { NETWORK_PORT };
        Ok(Self { etcd, etcd_peer, api_server })
    }
}

impl Binaries {
    fn find() -> Result<Self> {
        let named = ASSET_VARIABLES.iter().find_map(|name| env::var_os(name).map(|value| (name, PathBuf::from(value))));
        let Some((variable, directory)) = named else {
            bail!("etcd and kube-apiserver not found: run `cargo xtask setup`, or set {}", ASSET_VARIABLES[0]);
        };
        let find = |names: &[&str]| {
            let found = names.iter().map(|name| directory.join(name)).find(|path| path.exists());
            found.with_context(|| {
                format!("{variable} is {}, which does not contain {}", directory.display(), names.join(" or "))
            })
        };
        // `go build` names the binary after its directory, which is `server` for etcd.
        Ok(Self { etcd: find(&["etcd", "server"])?, api_server: find(&["kube-apiserver"])? })
    }
}

fn etcd_command(binaries: &Binaries, netns: Option<&Netns>, directory: &Path, ports: Ports) -> Result<Command> {
    let client = format!("http://127.0.0.1:{}", ports.etcd);
    let peer = format!("http://127.0.0.1:{}", ports.etcd_peer);
    let mut command = command_in(netns, &binaries.etcd)?;
    command.arg("--data-dir").arg(directory.join(ETCD_DIRECTORY)).args(["--unsafe-no-fsync", "--log-level", "error"]);
    command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
    command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
    command.args(["--initial-cluster", &format!("default={peer}")]);
    Ok(command)
}

fn command_in(netns: Option<&Netns>, program: impl AsRef<OsStr>) -> Result<Command> {
    netns.map_or_else(|| Ok(Command::new(program.as_ref())), |netns| netns.command(program.as_ref()))
}
