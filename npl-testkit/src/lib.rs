// SPDX-License-Identifier: Apache-2.0
//! Infrastructure of NPL's tests, demo and benchmarks: network namespaces, topologies, packets, traffic, and a real API
//! server. This crate is never released. Its library does not depend on the agent; only the benchmark and some tests
//! use the agent's code.
//!
//! A [`run::Run`] owns all objects that a test creates outside its process. Dropping the run removes these objects:
//!
//! ```no_run
//! use npl_testkit::{echo::EchoServer, run::Run, topology::{self, Topology}, traffic};
//!
//! # fn main() -> anyhow::Result<()> {
//! let run = Run::start()?;
//! let mut topology = Topology::new(&run, "", topology::Options::default())?;
//! let pod = topology.add_pod(&run, "web-0")?;
//! let server = EchoServer::start_in(&pod.netns, &pod.name, &[8080])?;
//! let answer = traffic::tcp_request(&topology.client().netns, (pod.ip(), 8080).into(), "hello")?;
//! assert_eq!(answer.pod, "web-0");
//! # Ok(())
//! # }
//! ```

pub use npl_echo::{interrupt, poll, reaper};

pub mod abi;
pub mod agent;
pub mod antrea;
pub mod api_client;
pub mod balancer;
mod bpf;
pub mod cgroups;
pub mod client_cgroup;
pub mod cluster;
pub mod consumers;
pub mod control_plane;
pub mod echo;
pub mod extent;
pub mod foreign;
pub mod helm;
pub mod http;
pub mod kernel;
pub mod live_frames;
pub mod load_balancers;
pub mod maps;
pub mod meter;
pub mod mounts;
pub mod netns;
pub mod node_state;
pub mod open_vswitch;
pub mod packet;
pub mod process;
pub mod prometheus;
pub mod proxy;
pub mod random;
pub mod real_cluster;
pub mod residue;
pub mod rtnl;
pub mod run;
pub mod strace;
pub mod terminal;
pub mod test_run;
pub mod tools;
pub mod topology;
pub mod traffic;
pub mod tun;
