// SPDX-License-Identifier: Apache-2.0
//! Sends a request on each path: from this process, or by `kubectl exec` from a client Pod or echo Pod.

use std::{
    collections::{BTreeMap, BTreeSet},
    iter,
    net::{IpAddr, SocketAddr},
    thread,
};

use anyhow::{Context as _, ensure};

use super::scene::{Scene, client_pod, echo_pod};
use crate::{
    cli::echo,
    core::path_test::{Client, Observation, Path, Probe},
};

/// The kubelet's port. Every Node has a kubelet, so a Node that is reachable answers a connection attempt to this port.
const KUBELET: u16 = 10_250;

/// Where a client runs: in the Pod with this name; if `None`, in this process.
type Place = Option<String>;

fn place(path: &Path) -> Place {
    let index = path.client_server?;
    Some(if path.client == Client::Itself { echo_pod(index) } else { client_pod(index) })
}

/// Sends a request on each path, and returns the observations in the order of the paths. All clients send at the same
/// time.
pub(super) fn observe(scene: &Scene<'_>, paths: &[Path]) -> Vec<Observation> {
    let mut places: BTreeMap<Place, Vec<(usize, Probe)>> = BTreeMap::new();
    for (index, path) in paths.iter().enumerate() {
        places.entry(place(path)).or_default().push((index, path.probe));
    }
    let mut observed: Vec<Observation> =
        paths.iter().map(|_path| Observation::NotSent("the client's thread panicked".to_owned())).collect();
    thread::scope(|scope| {
        let send = |(place, probes): (&Place, &Vec<(usize, Probe)>)| {
            let requests: Vec<Probe> = probes.iter().map(|(_index, probe)| *probe).collect();
            match place {
                None => echo::ask_all(&requests),
                Some(pod) => ask_in(scene, pod, &requests).unwrap_or_else(|error| {
                    requests.iter().map(|_request| Observation::NotSent(format!("Pod {pod}: {error:#}"))).collect()
                }),
            }
        };
        let running: Vec<_> = places.iter().map(|entry| (entry.1, scope.spawn(move || send(entry)))).collect();
        for (probes, client) in running {
            for ((index, _probe), observation) in probes.iter().zip(client.join().unwrap_or_default()) {
                if let Some(observed) = observed.get_mut(*index) {
                    *observed = observation;
                }
            }
        }
    });
    observed
}

/// Sends requests from a Pod of the test, and returns the observations.
pub(super) fn ask_in(scene: &Scene<'_>, pod: &str, requests: &[Probe]) -> anyhow::Result<Vec<Observation>> {
    let probes: Vec<String> = requests.iter().map(Probe::to_string).collect();
    let arguments: Vec<&str> = iter::once("ask").chain(probes.iter().map(String::as_str)).collect();
    let (_code, text) = scene.kubectl.output(&scene.exec_arguments(pod, &[], &arguments))?;
    let observed: Vec<Observation> = serde_json::from_str(&text).context("decode the observations")?;
    ensure!(observed.len() == requests.len(), "{} observations for {} requests", observed.len(), requests.len());
    Ok(observed)
}

/// Returns the node addresses that this process cannot reach: no request to the address got a reply, not even a
/// refusal, and the kubelet does not reply either.
pub(super) fn unreachable(paths: &[Path], observed: &[Observation]) -> BTreeSet<IpAddr> {
    let outside = || paths.iter().zip(observed).filter(|(path, _observation)| path.client == Client::Outside);
    let has_replied = |ip: IpAddr| {
        let is_reply = |it: &Observation| matches!(it, Observation::Answered(_) | Observation::Refused(_));
        outside().any(|(path, it)| path.probe.address.ip() == ip && is_reply(it))
    };
    let silent: BTreeSet<IpAddr> =
        outside().map(|(path, _observation)| path.probe.address.ip()).filter(|ip| !has_replied(*ip)).collect();
    thread::scope(|scope| {
        #[expect(clippy::needless_collect, reason = "all threads start before the first is joined")]
        let attempts: Vec<_> = silent
            .iter()
            .map(|ip| (*ip, scope.spawn(move || echo::is_reachable(SocketAddr::new(*ip, KUBELET)))))
            .collect();
        attempts.into_iter().filter_map(|(ip, attempt)| (!attempt.join().ok()?).then_some(ip)).collect()
    })
}
