// SPDX-License-Identifier: Apache-2.0

use std::{collections::BTreeSet, env, fs, path::Path};

use super::{FURTHER, Page, pages};

/// The variable with which expect-test updates files too.
const UPDATE: &str = "UPDATE_EXPECT";

#[test]
fn committed_pages_are_current() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference");
    let pages = pages();
    if env::var_os(UPDATE).is_some() {
        fs::create_dir_all(&folder).unwrap();
        for Page { file, text } in &pages {
            fs::write(folder.join(file), text).unwrap();
        }
    }
    for Page { file, text } in &pages {
        let committed = fs::read_to_string(folder.join(file)).unwrap_or_default();
        let difference = text.lines().zip(committed.lines()).find(|(new, old)| new != old);
        assert!(committed == *text, "docs/reference/{file} is not current: run `cargo xtask docs`. {difference:#?}");
    }
    let further = FURTHER.iter().map(|(file, ..)| (*file).to_owned());
    let known: BTreeSet<_> = pages.iter().map(|page| page.file.to_owned()).chain(further).collect();
    let files = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(files.collect::<BTreeSet<_>>(), known, "docs/reference/ contains generated pages only");
}
