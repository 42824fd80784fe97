// SPDX-License-Identifier: Apache-2.0
//! Runs a test binary on an emulated machine (a guest) with a kernel of its own. The guest's only disk is an initial
//! RAM disk. The guest reports the result on the serial console.

mod ramdisk;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use self::ramdisk::TEST_BINARY;
use crate::arch::Arch;
use crate::setup::{Kernel, KernelImage};
use crate::{paths, process};

/// The part of the guest's script before the test. The script restarts itself once, with a bind mount as its root
/// directory: containers call `pivot_root`, which the initial root file system does not support.
const START: &str = "#!/bin/busybox sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/ RUST_BACKTRACE=1
if [ $# = 0 ]; then
    /bin/busybox mount --bind / /newroot
    cd /newroot
    /bin/busybox mount --move . /
    exec /bin/busybox chroot . /init again
fi
/bin/busybox --install -s /bin
hostname guest
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
[ -n \"$(ls /tmp)\" ] || mount -t tmpfs tmpfs /tmp
mount -t cgroup2 cgroup2 /sys/fs/cgroup
echo /sbin/modprobe > /proc/sys/kernel/modprobe
modprobe -q virtio_pci
modprobe virtio_net
ip link set lo up
";

/// The line that the guest prints when it has booted.
const UP_LINE: &str = "npl-guest: up";

/// The time limit of the boot, which takes some seconds, or minutes if the machine emulates several guests and is slow.
/// A guest that exceeds this limit counts as hung.
const BOOT_DEADLINE: Duration = Duration::from_mins(10);

/// The prefix of the line in which the guest prints the exit code of the test binary.
const EXIT_LINE: &str = "npl-guest: exit code ";

/// The number of emulator threads that emulate the two processors of a guest.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Threads {
    /// One thread emulates both processors in turn.
    One,
    /// Each processor has an emulator thread of its own. With this setting, a kernel that patches its own code
    /// occasionally crashes. The emulator discards the translated code before it writes the patch. Between these two
    /// steps, the other processor may translate the breakpoint that the patch replaces.
    Each,
}

/// An emulated machine. The machine has only cgroup v2.
#[derive(Debug)]
pub(crate) struct Guest {
    /// The name of the guest and of its RAM disk.
    pub(crate) name: String,
    /// The architecture of the machine and of the test binary.
    pub(crate) arch: Arch,
    pub(crate) kernel: Kernel,
    pub(crate) threads: Threads,
    /// The memory of the guest, for the RAM disk, its unpacked copy and all processes.
    pub(crate) memory_megabytes: u32,
    /// The command of the static test binary, with arguments and environment variables.
    pub(crate) test: Command,
    /// The programs that this guest needs in addition to the programs that every guest has.
    pub(crate) programs: &'static [&'static str],
    /// Files and folders of this machine that are copied to the guest, to the same paths.
    pub(crate) copies: Vec<PathBuf>,
}

impl Guest {
    /// Creates a guest for packet tests.
    pub(crate) fn for_packets(arch: Arch, kernel: Kernel, test: Command) -> Self {
        // The guest needs most of its memory for NPL's largest map.
        let (name, threads) = (arch.mark(&kernel.to_string()), Threads::One);
        Self { name, arch, kernel, threads, memory_megabytes: 2048, test, programs: &[], copies: Vec::new() }
    }

    /// Boots the guest and runs the test. Passes each line that the guest prints to `on_line`. Returns whether the test
    /// succeeded.
    pub(crate) fn run(&self, deadline: Duration, mut on_line: impl FnMut(&str)) -> Result<bool> {
        let image = self.kernel.obtain(self.arch)?;
        let disk = paths::target_dir().join("emulation").join(format!("{}.cpio", self.name));
        ramdisk::write(&disk, &image, self).with_context(|| format!("make the RAM disk of {}", self.name))?;
        let emulator = self.emulator(&image, &disk);
        process::show(&emulator);
        let (booted, mut is_up, mut exit_code) = (Instant::now(), false, None);
        process::stream(emulator, deadline, |line| {
            match line.map(|line| (line, line.split_once(EXIT_LINE))) {
                Some((_, Some((_, code)))) => exit_code = code.trim().parse::<i32>().ok(),
                Some((line, None)) if line.contains(UP_LINE) => is_up = true,
                Some((line, None)) => on_line(line),
                None => {}
            }
            ensure!(is_up || booted.elapsed() < BOOT_DEADLINE, "the guest has not booted within {BOOT_DEADLINE:?}");
            Ok(())
        })?;
        let without = || format!("the guest {} ended without a result: its last output is above", self.name);
        exit_code.with_context(without).map(|code| code == 0)
    }

    /// Returns the command line of the emulator. The emulator does not use hardware virtualization, which may be
    /// missing on this machine, or hang.
    fn emulator(&self, image: &KernelImage, disk: &Path) -> Command {
        let mut command = Command::new(format!("qemu-system-{}", self.arch.in_rust()));
        let threads = match self.threads {
            Threads::One => "tcg,thread=single",
            Threads::Each => "tcg,thread=multi",
        };
        // The emulator has no default board for arm64; the board `virt` has only virtual devices. Without
        // `pauth-impdef`, the emulator spends ten times longer on the boot, because the kernel signs return addresses
        // (pointer authentication).
        let (processor, board, console): (_, &[&str], _) = match self.arch {
            Arch::Amd64 => ("max", &[], "ttyS0"),
            Arch::Arm64 => ("max,pauth-impdef=on", &["-machine", "virt"], "ttyAMA0"),
        };
        command.args(board).args(["-accel", threads, "-cpu", processor, "-smp", "2"]);
        command.arg("-m").arg(self.memory_megabytes.to_string());
        command.arg("-kernel").arg(image.vmlinuz()).arg("-initrd").arg(disk);
        // With `panic=-1` and `-no-reboot`, a panic resets the guest, and a reset ends the emulator. Without
        // `no_timer_check`, a kernel that boots on a busy machine would treat its timer as broken. `npl.guest=1`
        // permits tests to change settings of the machine, such as the clock.
        command.arg("-append").arg(format!("console={console} quiet panic=-1 no_timer_check npl.guest=1"));
        command.arg("-no-reboot");
        command.args(["-display", "none", "-nodefaults", "-serial", "stdio"]);
        // The guest has two network cards on the same network segment, which is isolated from this machine.
        for card in ["one", "two"] {
            command.arg("-netdev").arg(format!("hubport,id={card},hubid=0"));
            command.arg("-device").arg(format!("virtio-net-pci,netdev={card},romfile="));
        }
        command
    }

    /// Returns the shell script that is the guest's init program.
    fn init_script(&self) -> String {
        let pair =
            |(name, value): (&OsStr, Option<&OsStr>)| Some(format!("export {}='{}'", name.to_str()?, value?.to_str()?));
        let environment: Vec<String> = self.test.get_envs().filter_map(pair).collect();
        let arguments: Vec<_> = self.test.get_args().map(OsStr::to_string_lossy).collect();
        let (environment, arguments) = (environment.join("\n"), arguments.join(" "));
        format!(
            "{START}{environment}\necho \"{UP_LINE}\"\n{TEST_BINARY} {arguments}\necho \"{EXIT_LINE}$?\"\npoweroff -f\n"
        )
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::{EXIT_LINE, Guest, UP_LINE};
    use crate::arch::Arch;
    use crate::setup::KernelName;

    #[test]
    fn the_guest_reports_that_it_is_up_before_the_test_and_the_exit_code_after_it() {
        let mut test = Command::new("kernel-1f");
        test.arg("--test-threads=1").env("NPL_PATIENCE", "10");
        let kernel = "latest".parse::<KernelName>().unwrap().0.unwrap();
        let script = Guest::for_packets(Arch::native(), kernel, test).init_script();
        let lines: Vec<&str> = script.lines().collect();
        let test = lines.iter().position(|line| line.ends_with("--test-threads=1")).unwrap();
        assert_eq!(lines[test - 2], "export NPL_PATIENCE='10'");
        assert_eq!(lines[test - 1], format!("echo \"{UP_LINE}\""));
        assert_eq!(lines[test + 1], format!("echo \"{EXIT_LINE}$?\""));
        assert!(lines[0].starts_with("#!/bin/busybox"));
    }
}
