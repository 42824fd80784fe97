// SPDX-License-Identifier: Apache-2.0
//! Reads the SELinux type of this process. Error messages contain the type, because a denial by SELinux causes the same
//! error as a missing capability.

use std::fs;

/// The file that contains 1 if SELinux enforces its policy, and 0 otherwise. The file is absent in most containers.
const ENFORCE: &str = "/sys/fs/selinux/enforce";
/// The file with the security label of this process: a label of SELinux or of AppArmor, or an empty text.
const LABEL: &str = "/proc/self/attr/current";

/// Returns the SELinux type of this process; `None` if SELinux is absent or known to be permissive.
pub fn enforced_type() -> Option<String> {
    let enforce = fs::read_to_string(ENFORCE).ok();
    enforced(enforce.as_deref(), &fs::read_to_string(LABEL).unwrap_or_default())
}

fn enforced(enforce: Option<&str>, label: &str) -> Option<String> {
    let is_known_to_enforce = enforce.is_some_and(|text| text.trim() == "1");
    if enforce.is_some() && !is_known_to_enforce {
        return None;
    }
    // A label of SELinux has the form user:role:type:level. A label of AppArmor is the name of a profile, followed by
    // the profile's mode in parentheses.
    let fields: Vec<&str> = label.trim_end_matches(['\0', '\n']).split(':').collect();
    match *fields {
        [_, _, kind, _, ..] if !label.contains('(') => Some(kind.to_owned()),
        _ => is_known_to_enforce.then(|| "unknown".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::enforced;

    #[test]
    fn only_an_enforced_selinux_label_counts() {
        let container = "system_u:system_r:container_t:s0:c4,c9\0";
        for (enforce, label, kind) in [
            (Some("1"), container, Some("container_t")),
            (None, container, Some("container_t")),
            (Some("1\n"), "", Some("unknown")),
            (Some("0"), container, None),
            (None, "", None),
            (None, "cri-containerd.apparmor.d (enforce)\n", None),
            (None, "root//:a:b:c (enforce)\n", None),
            (None, "unconfined\n", None),
        ] {
            assert_eq!(enforced(enforce, label).as_deref(), kind, "{enforce:?} {label:?}");
        }
    }
}
