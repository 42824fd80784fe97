// SPDX-License-Identifier: Apache-2.0
//! A script that takes the place of kubectl in tests.

use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf, process};

use super::Kubectl;
use crate::config::kubectl_args::ConnectionArgs;

/// A directory with a script that takes the place of kubectl. The directory is removed at the end of the test.
pub(super) struct Script(pub(super) PathBuf);

impl Script {
    pub(super) fn new(name: &str, script: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("npl-agent-{name}-{}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("kubectl");
        fs::write(&path, format!("#!/bin/sh\ncd {}\n{script}", folder.display())).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        Self(folder)
    }

    /// Calls `use_it` with the script in the place of kubectl.
    pub(super) fn with_kubectl<T>(&self, use_it: impl FnOnce(Kubectl<'_>) -> T) -> T {
        let connection = ConnectionArgs {
            context: Some("lab".to_owned()),
            kubeconfig: None,
            agent_namespace: "npl-system".to_owned(),
            annotation_domain: "nodeportlocal.antrea.io".to_owned(),
        };
        let program = self.0.join("kubectl");
        use_it(Kubectl { program: program.to_str().unwrap(), connection: &connection, interrupt: None })
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}
