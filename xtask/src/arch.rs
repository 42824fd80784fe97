// SPDX-License-Identifier: Apache-2.0
//! The processor architectures that NPL is built for, with the names that compilers, Debian and the emulator use for
//! each of them.

use std::env::consts::ARCH;
use std::fmt;

use clap::ValueEnum;

/// A processor architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Arch {
    Amd64,
    Arm64,
}

impl Arch {
    /// The architecture of this machine.
    pub(crate) fn native() -> Self {
        if ARCH == Self::Arm64.in_rust() { Self::Arm64 } else { Self::Amd64 }
    }

    pub(crate) fn is_native(self) -> bool {
        self == Self::native()
    }

    /// The name in Debian, in Kubernetes and in container images, which is Go's name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// The name in target triples and in the emulator's name.
    pub(crate) fn in_rust(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64",
            Self::Arm64 => "aarch64",
        }
    }

    /// The name of the architecture's directory in the source of Linux.
    pub(crate) fn in_linux(self) -> &'static str {
        match self {
            Self::Amd64 => "x86",
            Self::Arm64 => "arm64",
        }
    }

    /// The Rust target triple of the agent, npl-feed and the programs of npl-testkit.
    pub(crate) fn target(self) -> String {
        format!("{}-unknown-linux-gnu", self.in_rust())
    }

    /// The prefix of the programs of GNU's compiler and binutils for the architecture.
    pub(crate) fn gnu_prefix(self) -> String {
        format!("{}-linux-gnu", self.in_rust())
    }

    /// Appends the architecture to a file name, if the file is for another architecture than this machine's.
    pub(crate) fn mark(self, file: &str) -> String {
        if self.is_native() { file.to_owned() } else { format!("{file}-{}", self.name()) }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::Arch;

    #[test]
    fn each_architecture_has_its_names_and_a_value_on_the_command_line() {
        let names = |it: Arch| [it.name().to_owned(), it.target(), it.gnu_prefix(), it.in_linux().to_owned()];
        assert_eq!(names(Arch::Amd64), ["amd64", "x86_64-unknown-linux-gnu", "x86_64-linux-gnu", "x86"]);
        assert_eq!(names(Arch::Arm64), ["arm64", "aarch64-unknown-linux-gnu", "aarch64-linux-gnu", "arm64"]);
        for arch in Arch::value_variants() {
            assert_eq!(Arch::from_str(arch.name(), false), Ok(*arch));
            assert_eq!(arch.mark("f"), if arch.is_native() { "f".to_owned() } else { format!("f-{arch}") });
        }
    }
}
