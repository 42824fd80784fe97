// SPDX-License-Identifier: Apache-2.0
//! The local socket of the running agent: a Unix socket from which only root on the same Node can read the agent's
//! state.
//!
//! The agent answers only GET requests on the socket, and no GET request changes the agent's state. The protocol is
//! HTTP, so that `curl --unix-socket` can also read the state.

mod client;
mod server;

use std::{
    io,
    path::{Path, PathBuf},
};

use tokio::sync::oneshot;

pub use self::{
    client::{AskError, ask, ask_why},
    server::{bind, serve},
};
use crate::core::{
    view::AgentView,
    why::{Explanation, Question},
};

/// The file name of the socket in the runtime directory.
pub const SOCKET: &str = "agent.sock";

/// A request that the main loop answers.
#[derive(Debug)]
pub enum Request {
    /// Asks for the state of the agent.
    State(oneshot::Sender<AgentView>),
    /// Asks why the agent serves, or does not serve, a Pod or a Service.
    Why(Question, oneshot::Sender<Explanation>),
}

/// Why the agent cannot create the local socket. The error is not fatal: the agent serves Pods without the socket.
#[derive(Debug, thiserror::Error)]
#[error("open the local socket {}", socket.display())]
pub struct SocketError {
    /// The path of the socket.
    pub socket: PathBuf,
    /// The kernel's error.
    #[source]
    pub source: io::Error,
}

fn socket(folder: &Path) -> PathBuf {
    folder.join(SOCKET)
}

#[cfg(test)]
mod tests;
