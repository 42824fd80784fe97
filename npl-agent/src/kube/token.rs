// SPDX-License-Identifier: Apache-2.0
//! The service account token, which the kubelet replaces in its file long before it expires.
//!
//! kube reads the file again by the wall clock. On a Node whose clock is set back by a day, the agent would use a token
//! for a day that is valid for an hour. So the file is read again by the monotonic clock, and at once after a token is
//! refused.

use std::{
    fs,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use http::{HeaderValue, Request, Response, StatusCode, header::AUTHORIZATION};
use kube::{client::AuthError, config::AuthInfo};
use tokio::time::Instant;

/// How long a token is cached; as in client-go.
const KEPT: Duration = Duration::from_mins(1);

/// A token file and its cached content. Clones share them.
#[derive(Clone)]
pub(super) struct TokenFile(Arc<Mutex<Cached>>);

struct Cached {
    path: PathBuf,
    header: HeaderValue,
    /// When the file was read; `None` after a token was refused.
    read_at: Option<Instant>,
}

impl TokenFile {
    /// Takes the token file over from a configuration, unless it has other credentials that take precedence.
    pub(super) fn of(access: &mut AuthInfo) -> kube::Result<Option<Self>> {
        if access.token.is_some() || access.username.is_some() {
            return Ok(None);
        }
        let Some(path) = access.token_file.take().map(PathBuf::from) else { return Ok(None) };
        let header = read(&path).map_err(kube::Error::Auth)?;
        Ok(Some(Self(Arc::new(Mutex::new(Cached { path, header, read_at: Some(Instant::now()) })))))
    }

    /// Adds the token to a request, if there is a token file.
    pub(super) fn authorize<B>(file: Option<&Self>, mut request: Request<B>) -> Request<B> {
        if let Some(Self(cached)) = file {
            let header = cached.lock().unwrap_or_else(PoisonError::into_inner).header();
            request.headers_mut().insert(AUTHORIZATION, header);
        }
        request
    }

    /// Has the file read again before the next request, if the answer is 401.
    pub(super) fn heed<B>(file: Option<&Self>, response: Response<B>) -> Response<B> {
        if let Some(Self(cached)) = file.filter(|_| response.status() == StatusCode::UNAUTHORIZED) {
            cached.lock().unwrap_or_else(PoisonError::into_inner).read_at = None;
        }
        response
    }
}

impl Cached {
    /// If the file cannot be read, for instance while it is replaced, the cached token is used.
    fn header(&mut self) -> HeaderValue {
        if self.read_at.is_none_or(|at| at.elapsed() >= KEPT) {
            self.read_at = Some(Instant::now());
            if let Ok(header) = read(&self.path) {
                self.header = header;
            }
        }
        self.header.clone()
    }
}

fn read(path: &PathBuf) -> Result<HeaderValue, AuthError> {
    let token = fs::read_to_string(path).map_err(|source| AuthError::ReadTokenFile(source, path.clone()))?;
    let mut header =
        HeaderValue::try_from(format!("Bearer {}", token.trim())).map_err(AuthError::InvalidBearerToken)?;
    header.set_sensitive(true);
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(file: Option<&TokenFile>) -> Option<String> {
        let request = TokenFile::authorize(file, Request::new(()));
        request.headers().get(AUTHORIZATION).map(|header| header.to_str().unwrap().to_owned())
    }

    /// A token file for a test.
    fn access_by_file(test: &str) -> (PathBuf, AuthInfo) {
        let path = std::env::temp_dir().join(format!("npl-token-{test}-{}", std::process::id()));
        fs::write(&path, "first\n").unwrap();
        let token_file = Some(path.display().to_string());
        (path, AuthInfo { token_file, ..AuthInfo::default() })
    }

    fn answered(file: &TokenFile, status: StatusCode) {
        let answer = Response::builder().status(status).body(()).unwrap();
        TokenFile::heed(Some(file), answer);
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_that_is_refused_is_read_again_at_once() {
        let (path, mut access) = access_by_file("refused");
        let file = TokenFile::of(&mut access).unwrap().unwrap();
        fs::write(&path, "second").unwrap();
        for status in [StatusCode::OK, StatusCode::FORBIDDEN] {
            answered(&file, status);
            assert_eq!(sent(Some(&file)).as_deref(), Some("Bearer first"));
        }
        answered(&file, StatusCode::UNAUTHORIZED);
        assert_eq!(sent(Some(&file)).as_deref(), Some("Bearer second"));
        fs::write(&path, "third").unwrap();
        assert_eq!(sent(Some(&file)).as_deref(), Some("Bearer second"), "one refusal is one look");
        fs::remove_file(&path).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_that_was_replaced_is_used_a_minute_later_whatever_the_wall_clock_says() {
        let (path, mut access) = access_by_file("replaced");
        let file = TokenFile::of(&mut access).unwrap();
        assert_eq!(access.token_file, None, "kube's own way to read it would come on top");
        fs::write(&path, "second").unwrap();
        assert_eq!(sent(file.as_ref()).as_deref(), Some("Bearer first"));
        tokio::time::advance(KEPT).await;
        assert_eq!(sent(file.as_ref()).as_deref(), Some("Bearer second"));
        fs::remove_file(&path).unwrap();
        tokio::time::advance(KEPT).await;
        assert_eq!(sent(file.as_ref()).as_deref(), Some("Bearer second"));
    }

    #[test]
    fn an_inline_token_is_ahead_of_a_file() {
        let mut access =
            AuthInfo { token: Some("inline".into()), token_file: Some("nowhere".into()), ..<_>::default() };
        assert!(TokenFile::of(&mut access).unwrap().is_none());
        assert_eq!(sent(None), None);
    }
}
