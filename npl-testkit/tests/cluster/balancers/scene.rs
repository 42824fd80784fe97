// SPDX-License-Identifier: Apache-2.0
//! Real load balancers outside of the cluster, each under its own load, and two replicas of the feed as a Deployment.

use std::collections::BTreeSet;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use npl_testkit::api_client::ApiClient;
use npl_testkit::cluster::{pods_with_label, timeout_option};
use npl_testkit::load_balancers::{self, LoadBalancer};
use npl_testkit::process::Process;
use npl_testkit::real_cluster::CLIENT;
use npl_testkit::{poll, tools};

use super::load::{self, Load};
use crate::load::{NAMESPACE, pods, set_up};
use crate::world::{AGENT_NAMESPACE, LIMIT, World};

/// The manifest of the feed.
const FEED: &str = "deploy/npl-feed.yaml";

/// The node port of the feed's DNS in the manifest.
const DNS_PORT: u16 = 30153;

/// The time between two queries of the feed's DNS, and the time limit of a query.
const QUERY_INTERVAL: Duration = Duration::from_millis(50);
const QUERY_LIMIT: Duration = Duration::from_secs(2);

/// The port of the first load balancer; each further load balancer has the next port.
const FIRST_PORT: u16 = 8000;

/// The time between two lists of the Service's Pods. Every Pod that answers exists for longer than this time, so it
/// appears in at least one list.
const LIST_INTERVAL: Duration = Duration::from_millis(500);

/// The shortest time after which Caddy gives up a request: 16 retries (`lb_retries`) at intervals of 50 ms
/// (`lb_try_interval`).
const CADDY_RETRIES: Duration = Duration::from_millis(16 * 50);

/// A load balancer under load. When this value is dropped, the load ends before the load balancer.
struct Running {
    name: &'static str,
    load: Load,
    process: Process,
}

/// The names of all Pods that the Service has had.
struct Names {
    seen: Arc<Mutex<BTreeSet<String>>>,
    stop: Option<mpsc::Sender<()>>,
    worker: Option<JoinHandle<()>>,
}

/// All load balancers, the names of the Service's Pods, and the failures so far.
pub(crate) struct Scene {
    balancers: Vec<Running>,
    names: Names,
    failures: Vec<String>,
}

impl Scene {
    /// Installs the feed as a user does, and starts the load balancers.
    pub(crate) fn start(world: &mut World) -> Self {
        set_up(world);
        for manifest in ["npl-testkit/tests/cluster/manifests/balanced.yaml", FEED] {
            world.kubectl(&["apply", "--filename", tools::repository_file(manifest).to_str().unwrap()]);
        }
        world.wait_for_rollout(AGENT_NAMESPACE, "deployment/npl-feed");
        let names = Names::follow(world.cluster.cluster().client());
        let processes: Vec<(LoadBalancer, u16, Process)> = load_balancers::ALL
            .into_iter()
            .zip(FIRST_PORT..)
            .map(|(balancer, port)| (balancer, port, launch(world, &balancer, port)))
            .collect();
        let client = world.cluster.client().clone();
        for (balancer, port, process) in &processes {
            let answers = || client.run(|| load::request(*port, CLIENT.0).ok()).unwrap();
            let first = poll::until(&format!("the first answer by {}", balancer.name), LIMIT, answers);
            assert!(first.is_ok(), "{first:?}\n{}", process.log_tail(20));
        }
        let run = |(balancer, port, process): (LoadBalancer, u16, Process)| Running {
            name: balancer.name,
            load: Load::start(&client, port, CLIENT.0),
            process,
        };
        let mut scene = Self { balancers: processes.into_iter().map(run).collect(), names, failures: Vec::new() };
        scene.during(world, "nothing changes", |_world| {});
        scene
    }

    /// Runs an event under load, and waits until every ready Pod has answered through each load balancer. No request
    /// may be lost.
    pub(crate) fn during(&mut self, world: &mut World, event: &str, run: impl FnOnce(&mut World)) {
        self.observe(world, event, run, |_name, &()| 0);
    }

    /// Runs an event as [`Self::during`] does. During the event, no replica of the feed runs for the time that `run`
    /// returns. In this time, each client of Caddy may lose one request per sequence of retries, because Caddy looks up
    /// a member's address in the feed's DNS for each new connection to a Pod. The other load balancers keep the
    /// addresses and must lose no request.
    pub(crate) fn during_outage_of_the_feed(
        &mut self,
        world: &mut World,
        event: &str,
        run: impl FnOnce(&mut World) -> Duration,
    ) {
        let sequences = |outage: &Duration| outage.as_millis() / CADDY_RETRIES.as_millis() + 1;
        let most = |name: &str, outage: &Duration| {
            let sequences = if name == load_balancers::CADDY.name { sequences(outage) } else { 0 };
            u128::from(load::CLIENTS) * sequences
        };
        self.observe(world, event, run, most);
    }

    fn observe<T>(
        &mut self,
        world: &mut World,
        event: &str,
        run: impl FnOnce(&mut World) -> T,
        most: impl Fn(&str, &T) -> u128,
    ) {
        let start = Instant::now();
        let outcome = run(world);
        let after = start.elapsed();
        self.settle(world, event);
        let took = start.elapsed();
        println!("    {event} ({:.1} s, {:.1} s until all answer):", after.as_secs_f32(), took.as_secs_f32());
        let known = self.names.seen.lock().unwrap().clone();
        for Running { name, load, process } in &mut self.balancers {
            let seen = load.take();
            println!("        {name}: {seen}");
            let wrong: Vec<_> = seen.answers.keys().filter(|pod| !known.contains(*pod)).collect();
            if !wrong.is_empty() {
                self.failures
                    .push(format!("{event}, {name}: answered by Pods that the Service has not had: {wrong:?}"));
            }
            let (lost, most) = (seen.lost.len() as u128, most(name, &outcome));
            if lost > most {
                let first: Vec<_> = seen.lost.iter().take(5).collect();
                let log = process.log_tail(5);
                self.failures.push(format!("{event}, {name}: {lost} requests lost, at most {most}: {first:?}\n{log}"));
            }
            world.answered += seen.answers.values().sum::<u64>();
        }
    }

    /// Ends all load balancers, removes the feed, and checks that no event had a failure: more lost requests than
    /// allowed, or an answer of a Pod that the Service has never had.
    pub(crate) fn finish(self, world: &World) {
        let Self { balancers, names, failures } = self;
        drop(balancers);
        drop(names);
        world.kubectl(&["delete", "--filename", tools::repository_file(FEED).to_str().unwrap(), timeout_option()]);
        world.kubectl(&["delete", "service/web", "--namespace", NAMESPACE]);
        assert!(failures.is_empty(), "{}", failures.join("\n"));
    }

    /// Waits until each load balancer has received an answer of every ready Pod, counted from this call on.
    fn settle(&mut self, world: &World, event: &str) {
        let before: Vec<_> = self.balancers.iter().map(|it| it.load.seen().answers).collect();
        let mut missing = Vec::new();
        let complete = || {
            let pods = pods(world);
            missing.clear();
            for (balancer, before) in self.balancers.iter_mut().zip(&before) {
                assert_eq!(balancer.process.exit_status(), None, "{}", balancer.process.log_tail(20));
                let now = balancer.load.seen().answers;
                let is_silent = |pod: &&String| now.get(*pod) == before.get(*pod);
                let silent = pods.iter().map(|pod| &pod.name).filter(is_silent);
                missing.extend(silent.map(|pod| format!("{pod} by {}", balancer.name)));
            }
            (missing.is_empty() && pods.iter().all(|pod| pod.is_ready)).then_some(())
        };
        let done = poll::until("every Pod to answer through every load balancer", LIMIT, complete);
        assert!(done.is_ok(), "{event}: {done:?}: {missing:?}");
    }
}

/// Queries the feed's DNS at every Node during an event. Returns the time from the start of the event until the last
/// query without an answer, or zero if every query was answered.
pub(crate) fn outage_during(world: &mut World, run: impl FnOnce(&mut World)) -> Duration {
    let client = world.cluster.client().clone();
    let feeds: Vec<SocketAddr> =
        world.cluster.nodes().iter().map(|node| (node.number().v4(), DNS_PORT).into()).collect();
    let (stop, stopped) = mpsc::channel::<()>();
    let start = Instant::now();
    let worker = thread::spawn(move || {
        let mut outage = Duration::ZERO;
        while stopped.recv_timeout(QUERY_INTERVAL) == Err(mpsc::RecvTimeoutError::Timeout) {
            if !client.run(|| feeds.iter().all(|feed| is_answered(*feed))).unwrap() {
                outage = start.elapsed();
            }
        }
        outage
    });
    run(world);
    drop(stop);
    let outage = worker.join().unwrap();
    println!("    the last DNS query without an answer was after {:.1} s", outage.as_secs_f32());
    outage
}

/// Whether the feed answers a DNS query over TCP with the code NOERROR.
fn is_answered(feed: SocketAddr) -> bool {
    let name = format!("_http._tcp.web.{NAMESPACE}.npl.internal");
    let labels =
        name.split('.').flat_map(|label| [&[u8::try_from(label.len()).unwrap()][..], label.as_bytes()].concat());
    // The header of a DNS query with one question. After the header follow the name, the type SRV (33) and the class IN
    // (1).
    let header = [0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    let query: Vec<u8> = header.into_iter().chain(labels).chain([0, 0, 33, 0, 1]).collect();
    let ask = || -> io::Result<u8> {
        let limit = poll::extended(QUERY_LIMIT);
        let mut stream = TcpStream::connect_timeout(&feed, limit)?;
        stream.set_read_timeout(Some(limit))?;
        stream.write_all(&[&u16::try_from(query.len()).unwrap().to_be_bytes()[..], &query].concat())?;
        // The length of the answer in two bytes, and the first four bytes of the DNS header. The lowest four bits of
        // the last byte are the response code.
        let mut start = [0; 6];
        stream.read_exact(&mut start)?;
        Ok(start[5] & 0xf)
    };
    ask().is_ok_and(|code| code == 0)
}

/// Starts a load balancer in the client's namespace. Its configuration names the Nodes of the cluster.
fn launch(world: &World, balancer: &LoadBalancer, port: u16) -> Process {
    let [first, second] = [0, 1].map(|at: usize| world.cluster.nodes()[at].number().v4().to_string());
    let (port, service) = (port.to_string(), format!("web.{NAMESPACE}"));
    let replacements = [
        ("192.0.2.11", second.as_str()),
        ("192.0.2.10", first.as_str()),
        ("web.default", service.as_str()),
        ("8000", port.as_str()),
    ];
    balancer.start(world.cluster.run(), world.cluster.client(), &replacements).unwrap()
}

impl Names {
    /// Lists the Pods until this value is dropped.
    fn follow(client: &ApiClient) -> Self {
        let seen = Arc::<Mutex<BTreeSet<String>>>::default();
        let (stop, stopped) = mpsc::channel::<()>();
        let (client, names) = (client.clone(), Arc::clone(&seen));
        let worker = thread::spawn(move || {
            loop {
                // An error is ignored, because the API server is down during one of the events.
                let list = client.get(&pods_with_label(NAMESPACE, "load=yes")).unwrap_or_default();
                let name = |pod: &serde_json::Value| pod["metadata"]["name"].as_str().map(str::to_owned);
                names.lock().unwrap().extend(list["items"].as_array().into_iter().flatten().filter_map(name));
                if stopped.recv_timeout(LIST_INTERVAL) != Err(mpsc::RecvTimeoutError::Timeout) {
                    return;
                }
            }
        });
        Self { seen, stop: Some(stop), worker: Some(worker) }
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        self.stop = None;
        // A worker that panicked has already printed its message, so the error is ignored.
        drop(self.worker.take().map(JoinHandle::join));
    }
}
