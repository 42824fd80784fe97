// SPDX-License-Identifier: Apache-2.0
//! Copies of etcd's data: backups, and the template from which control planes start. The first start of an API server
//! with empty data writes several hundred objects, and takes twice as much processor time as a start with the data of
//! an earlier start.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};

/// The files of etcd's data, in memory, so that a run does not need the files of another run.
#[derive(Debug)]
pub(super) struct EtcdData {
    files: Vec<DataFile>,
}

#[derive(Debug)]
struct DataFile {
    /// The path below etcd's data directory.
    path: PathBuf,
    /// The contents up to the last byte that is not zero.
    bytes: Vec<u8>,
    /// The size of the file in bytes. etcd allocates its log in advance, as 64 MB of zeros.
    size: u64,
}

impl EtcdData {
    /// Reads the data of an etcd that has stopped.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read.
    pub(super) fn read(data: &Path) -> Result<Self> {
        let mut files = Vec::new();
        let mut folders = vec![data.to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).with_context(|| format!("list {}", folder.display()))? {
                let path = entry.with_context(|| format!("list {}", folder.display()))?.path();
                // etcd creates its next log file in advance with this suffix, and creates the file again if it is
                // missing.
                if path.extension().is_some_and(|extension| extension == "tmp") {
                    continue;
                }
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let mut bytes = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
                let size = u64::try_from(bytes.len()).context("convert the size of a file")?;
                bytes.truncate(bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1));
                bytes.shrink_to_fit();
                let path = path.strip_prefix(data).context("find the path of a file below etcd's data")?.to_owned();
                files.push(DataFile { path, bytes, size });
            }
        }
        Ok(Self { files })
    }

    /// Writes the data for an etcd that has not started.
    ///
    /// # Errors
    /// Returns an error if a file cannot be written.
    pub(super) fn write(&self, data: &Path) -> Result<()> {
        for DataFile { path, bytes, size } in &self.files {
            let path = data.join(path);
            let folder = path.parent().unwrap_or(data);
            fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
            fs::write(&path, bytes).with_context(|| format!("write {}", path.display()))?;
            let file = fs::File::options().write(true).open(&path);
            file.and_then(|file| file.set_len(*size)).with_context(|| format!("extend {}", path.display()))?;
        }
        Ok(())
    }
}

/// The template of this process, which the second start of a control plane creates. A process that starts one control
/// plane needs no template.
#[derive(Debug)]
pub(super) struct Template(Mutex<State>);

#[derive(Debug)]
enum State {
    Unused,
    Wanted,
    Made(&'static EtcdData),
}

impl Template {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(State::Unused))
    }

    /// Returns `None` at the first call, and the template at each later call. The second call makes the template with
    /// `make`, and concurrent calls wait for the template.
    ///
    /// # Errors
    /// Returns the error of `make`. After an error, the next call makes the template.
    pub(super) fn get(&self, make: impl FnOnce() -> Result<EtcdData>) -> Result<Option<&'static EtcdData>> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match *state {
            State::Unused => {
                *state = State::Wanted;
                Ok(None)
            }
            State::Wanted => {
                // The leak is harmless: the template has a few hundred kilobytes, and is used until this process ends.
                let template: &'static EtcdData = Box::leak(Box::new(make()?));
                *state = State::Made(template);
                Ok(Some(template))
            }
            State::Made(template) => Ok(Some(template)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{env, fs, process};

    use anyhow::anyhow;

    use super::{EtcdData, Template};

    #[test]
    fn written_data_equals_the_data_that_was_read() {
        let folder = env::temp_dir().join(format!("npl-template-{}", process::id()));
        let (data, copy) = (folder.join("data"), folder.join("copy"));
        fs::create_dir_all(data.join("member/wal")).unwrap();
        let log = [&b"entries"[..], &[0; 5000]].concat();
        for (name, bytes) in [("member/wal/0.wal", &log[..]), ("member/wal/1.tmp", b"next"), ("empty", b"")] {
            fs::write(data.join(name), bytes).unwrap();
        }
        let template = EtcdData::read(&data).unwrap();
        assert!(template.files.iter().all(|file| file.bytes.len() < 10), "zeros at the end take no memory");
        template.write(&copy).unwrap();
        assert_eq!(fs::read(copy.join("member/wal/0.wal")).unwrap(), log);
        assert_eq!(fs::read(copy.join("empty")).unwrap(), b"");
        assert!(!copy.join("member/wal/1.tmp").exists());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn the_second_start_makes_the_template_that_all_later_starts_use() {
        let (shared, empty) = (Template::new(), || Ok(EtcdData { files: Vec::new() }));
        assert!(shared.get(|| Err(anyhow!("not needed"))).unwrap().is_none());
        assert!(shared.get(|| Err(anyhow!("no etcd"))).is_err());
        assert!(shared.get(empty).unwrap().is_some());
        assert!(shared.get(|| Err(anyhow!("made twice"))).unwrap().is_some());
    }
}
