// SPDX-License-Identifier: Apache-2.0
//! The oldest supported kernel of each processor architecture.

use std::fmt;

/// The oldest supported kernel on all architectures except arm64.
pub const KERNEL_FLOOR_TEXT: &str = "5.10";

/// The oldest kernel that NPL supports on an architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelFloor {
    /// Major and minor version.
    pub version: (u8, u8),
    text: &'static str,
    /// The reason why this architecture needs a newer kernel than [`KERNEL_FLOOR_TEXT`]; `None` if that version
    /// suffices.
    reason: Option<&'static str>,
}

impl KernelFloor {
    /// Returns the oldest supported kernel on an architecture. `arch` is the architecture's name in Rust, such as
    /// `aarch64`.
    pub fn of(arch: &str) -> Self {
        match arch {
            "aarch64" => Self {
                version: (6, 1),
                text: "6.1",
                reason: Some("arm64 kernels before 6.0 refuse programs with both tail calls and subprograms"),
            },
            _ => Self { version: (5, 10), text: KERNEL_FLOOR_TEXT, reason: None },
        }
    }
}

impl fmt::Display for KernelFloor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Linux {} or newer", self.text)?;
        self.reason.map_or(Ok(()), |reason| write!(f, " ({reason})"))
    }
}

#[cfg(test)]
mod tests {
    use super::KernelFloor;

    #[test]
    fn arm64_needs_a_newer_kernel_and_the_reason_is_given() {
        let of = |arch| (KernelFloor::of(arch).version, KernelFloor::of(arch).to_string());
        assert_eq!(of("x86_64"), ((5, 10), "Linux 5.10 or newer".to_owned()));
        let sentence =
            "Linux 6.1 or newer (arm64 kernels before 6.0 refuse programs with both tail calls and subprograms)";
        assert_eq!(of("aarch64"), ((6, 1), sentence.to_owned()));
    }

    #[test]
    fn the_version_is_the_one_of_the_text() {
        for arch in ["x86_64", "aarch64"] {
            let KernelFloor { version: (major, minor), text, .. } = KernelFloor::of(arch);
            assert_eq!(text, format!("{major}.{minor}"));
        }
    }
}
