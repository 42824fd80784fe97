// SPDX-License-Identifier: Apache-2.0
//! Replaces the API server's certificate, and the credentials of a Pod, while the agent runs.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::{AGENT_USER, ControlPlane};
use crate::agent::ServiceAccount;

/// The folder of a service account below `/var/run`.
pub const SERVICE_ACCOUNT: &str = "secrets/kubernetes.io/serviceaccount";

impl ControlPlane {
    /// Replaces the API server's certificate and CA. Returns once the API server is ready again. Clients that were
    /// created before do not trust the new CA.
    pub fn replace_certificate(&mut self) -> Result<()> {
        self.stop_api_server()?;
        // An API server that starts without a CA and a certificate creates both.
        fs::remove_dir_all(self.directory.join("certs")).context("remove the API server's certificate")?;
        self.start_api_server()
    }

    /// Writes the files of the agent's service account, as a kubelet mounts them into a Pod, below the folder that the
    /// Pod sees as `/var/run`.
    pub fn agent_service_account(&self, var_run: &Path) -> Result<ServiceAccount> {
        let folder = var_run.join(SERVICE_ACCOUNT);
        fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
        fs::write(folder.join("namespace"), "npl-system").context("write the namespace")?;
        fs::write(folder.join("token"), self.tokens.of(AGENT_USER)?).context("write the token")?;
        fs::copy(self.certificate(), folder.join("ca.crt")).context("write the CA")?;
        Ok(ServiceAccount { var_run: var_run.to_owned(), server: self.address() })
    }
}
