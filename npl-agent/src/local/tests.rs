// SPDX-License-Identifier: Apache-2.0

use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf};

use tokio::sync::mpsc;

use super::{AskError, Request, SOCKET, ask, bind, serve};
use crate::core::view::AgentView;

/// A temporary directory, which is removed with its content when this value is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("npl-local-{}-{name}", std::process::id()));
        drop(fs::remove_dir_all(&path));
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

#[tokio::test]
async fn a_command_reads_the_state_that_the_main_loop_sends() {
    let folder = Folder::new("state");
    let listener = bind(&folder.0).unwrap();
    let (requests, mut received) = mpsc::channel(1);
    let server = tokio::spawn(serve(listener, requests));
    let main_loop = tokio::spawn(async move {
        while let Some(request) = received.recv().await {
            let Request::State(reply) = request else { panic!("{request:?}") };
            reply.send(AgentView { node_name: "node-1".to_owned(), ..AgentView::default() }).unwrap();
        }
    });
    for _ in 0..2 {
        assert_eq!(ask(&folder.0).await.unwrap().node_name, "node-1");
    }
    main_loop.abort();
    assert!(main_loop.await.unwrap_err().is_cancelled());
    let ended = ask(&folder.0).await.unwrap_err();
    assert!(matches!(&ended, AskError::Refused(text) if text.contains("main loop has ended")), "{ended}");
    server.abort();
}

#[tokio::test]
async fn a_main_loop_that_hangs_is_reported() {
    let folder = Folder::new("hang");
    let listener = bind(&folder.0).unwrap();
    let (requests, received) = mpsc::channel(1);
    let server = tokio::spawn(serve(listener, requests));
    let silent = ask(&folder.0).await.unwrap_err();
    assert!(matches!(&silent, AskError::Refused(text) if text.contains("it hangs")), "{silent}");
    drop(received);
    server.abort();
}

#[tokio::test]
async fn only_root_may_connect_and_a_left_socket_is_replaced() {
    let folder = Folder::new("mode");
    drop(bind(&folder.0).unwrap());
    assert!(
        matches!(ask(&folder.0).await, Err(AskError::Absent { .. })),
        "no agent listens on the socket that the former agent left"
    );
    let _listener = bind(&folder.0).unwrap();
    let mode = |path: PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(folder.0.clone()), mode(folder.0.join(SOCKET))), (0o700, 0o600));
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let file = Folder::new("file");
    fs::write(&file.0, "").unwrap();
    let refused = bind(&file.0.join("below")).unwrap_err();
    assert!(refused.to_string().contains(SOCKET), "{refused}");
    fs::remove_file(&file.0).unwrap();
}
