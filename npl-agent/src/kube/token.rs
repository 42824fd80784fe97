// SPDX-License-Identifier: Apache-2.0
//! Reads the service account token from a file that the kubelet replaces before the token expires.
//!
//! kube decides by the wall clock when to read the file again. If the Node's clock is set back by a day, kube reads the
//! file a day too late, although a token is valid for only one hour. This module uses the monotonic clock instead, and
//! also reads the file again after the API server has answered 401.

use std::{
    fs,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use http::{HeaderValue, Request, Response, StatusCode, header::AUTHORIZATION};
use kube::{client::AuthError, config::AuthInfo};
use tokio::time::Instant;

/// Time after which the token file is read again. The library client-go uses the same time.
const MAX_AGE: Duration = Duration::from_mins(1);

/// The file with the service account token, and the cached token. Clones share the cached token.
#[derive(Clone)]
pub(super) struct TokenFile(Arc<Mutex<Cached>>);

struct Cached {
    path: PathBuf,
    header: HeaderValue,
    /// When the token file was last read; `None` after the API server has rejected the token.
    read_at: Option<Instant>,
}

impl TokenFile {
    /// Removes the token file from a configuration, and returns the token file. Returns `None` if the configuration has
    /// no token file, or has a token or user name, which takes precedence over the token file.
    pub(super) fn take(access: &mut AuthInfo) -> kube::Result<Option<Self>> {
        if access.token.is_some() || access.username.is_some() {
            return Ok(None);
        }
        let Some(path) = access.token_file.take().map(PathBuf::from) else { return Ok(None) };
        let header = read(&path).map_err(kube::Error::Auth)?;
        Ok(Some(Self(Arc::new(Mutex::new(Cached { path, header, read_at: Some(Instant::now()) })))))
    }

    /// Adds the token to a request if there is a token file.
    pub(super) fn authorize<B>(file: Option<&Self>, mut request: Request<B>) -> Request<B> {
        if let Some(Self(cached)) = file {
            let header = cached.lock().unwrap_or_else(PoisonError::into_inner).header();
            request.headers_mut().insert(AUTHORIZATION, header);
        }
        request
    }

    /// If the API server has answered 401, marks the cached token as outdated, so that the next request reads the file
    /// again.
    pub(super) fn invalidate_if_refused<B>(file: Option<&Self>, response: Response<B>) -> Response<B> {
        if let Some(Self(cached)) = file.filter(|_| response.status() == StatusCode::UNAUTHORIZED) {
            cached.lock().unwrap_or_else(PoisonError::into_inner).read_at = None;
        }
        response
    }
}

impl Cached {
    /// Returns the current token as the value of the header `Authorization`. If the token file cannot be read, for
    /// example while the kubelet replaces it, returns the cached token.
    fn header(&mut self) -> HeaderValue {
        if self.read_at.is_none_or(|at| at.elapsed() >= MAX_AGE) {
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

    /// Creates a token file for the test of this name, and a configuration that names the file.
    fn access_by_file(test: &str) -> (PathBuf, AuthInfo) {
        let path = std::env::temp_dir().join(format!("npl-token-{test}-{}", std::process::id()));
        fs::write(&path, "first\n").unwrap();
        let token_file = Some(path.display().to_string());
        (path, AuthInfo { token_file, ..AuthInfo::default() })
    }

    fn respond(file: &TokenFile, status: StatusCode) {
        let answer = Response::builder().status(status).body(()).unwrap();
        TokenFile::invalidate_if_refused(Some(file), answer);
    }

    #[tokio::test(start_paused = true)]
    async fn the_token_file_is_read_again_after_a_401() {
        let (path, mut access) = access_by_file("refused");
        let file = TokenFile::take(&mut access).unwrap().unwrap();
        fs::write(&path, "second").unwrap();
        for status in [StatusCode::OK, StatusCode::FORBIDDEN] {
            respond(&file, status);
            assert_eq!(sent(Some(&file)).as_deref(), Some("Bearer first"));
        }
        respond(&file, StatusCode::UNAUTHORIZED);
        assert_eq!(sent(Some(&file)).as_deref(), Some("Bearer second"));
        fs::write(&path, "third").unwrap();
        assert_eq!(sent(Some(&file)).as_deref(), Some("Bearer second"), "one refusal causes one read");
        fs::remove_file(&path).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_replaced_token_is_used_within_a_minute_of_monotonic_time() {
        let (path, mut access) = access_by_file("replaced");
        let file = TokenFile::take(&mut access).unwrap();
        assert_eq!(access.token_file, None, "kube must not read the file as well");
        fs::write(&path, "second").unwrap();
        assert_eq!(sent(file.as_ref()).as_deref(), Some("Bearer first"));
        tokio::time::advance(MAX_AGE).await;
        assert_eq!(sent(file.as_ref()).as_deref(), Some("Bearer second"));
        fs::remove_file(&path).unwrap();
        tokio::time::advance(MAX_AGE).await;
        assert_eq!(sent(file.as_ref()).as_deref(), Some("Bearer second"));
    }

    #[test]
    fn an_inline_token_takes_precedence_over_a_file() {
        let mut access =
            AuthInfo { token: Some("inline".into()), token_file: Some("nowhere".into()), ..<_>::default() };
        assert!(TokenFile::take(&mut access).unwrap().is_none());
        assert_eq!(sent(None), None);
    }
}
