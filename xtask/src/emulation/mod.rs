// SPDX-License-Identifier: Apache-2.0
//! Runs a test binary under another kernel: emulated, with an initial RAM disk as its only disk, its result on the
//! serial console.

mod ramdisk;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::setup::{Kernel, KernelImage};
use crate::{paths, process};

/// How the guest says with which exit code the test binary ended.
const EXIT_LINE: &str = "npl-guest: exit code ";

/// Enough for the RAM disk, its unpacked copy and the largest map.
const MEMORY_MEGABYTES: u32 = 2048;

/// Boots `kernel`, runs `binary` there, and hands on each line that it prints; whether it ended with success.
pub(crate) fn run(
    kernel: Kernel,
    binary: &Path,
    arguments: &[&str],
    deadline: Duration,
    mut on_line: impl FnMut(&str),
) -> Result<bool> {
    let image = kernel.obtain()?;
    let disk = paths::target_dir().join("emulation").join(format!("{kernel}.cpio"));
    ramdisk::write(&disk, &image, binary, &init_script(arguments))
        .with_context(|| format!("make the RAM disk of kernel {kernel}"))?;
    let emulator = emulator(&image, &disk);
    process::show(&emulator);
    let mut exit_code = None;
    process::stream(emulator, deadline, |line| {
        let Some(line) = line else { return Ok(()) };
        match line.split_once(EXIT_LINE) {
            Some((_, code)) => exit_code = code.trim().parse::<i32>().ok(),
            None => on_line(line),
        }
        Ok(())
    })?;
    match exit_code {
        Some(code) => Ok(code == 0),
        None => bail!("the guest under kernel {kernel} ended without a result: its last words are above"),
    }
}

/// The kernel's own emulation of the processor: virtualisation of the host may be absent, or be there and hang.
fn emulator(image: &KernelImage, disk: &Path) -> Command {
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", &MEMORY_MEGABYTES.to_string()]);
    command.arg("-kernel").arg(image.vmlinuz()).arg("-initrd").arg(disk);
    // A panic is a reset, and a reset is the end.
    command.args(["-append", "console=ttyS0 quiet panic=-1", "-no-reboot"]);
    command.args(["-display", "none", "-nodefaults", "-serial", "stdio"]);
    // Two network cards at one wire, which leads nowhere else.
    for card in ["one", "two"] {
        command.arg("-netdev").arg(format!("hubport,id={card},hubid=0"));
        command.arg("-device").arg(format!("virtio-net-pci,netdev={card},romfile="));
    }
    command
}

/// The first and only program of the guest.
fn init_script(arguments: &[&str]) -> String {
    format!(
        "#!/bin/busybox sh\n\
         export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/ RUST_BACKTRACE=1\n\
         /bin/busybox --install -s /bin\n\
         mount -t proc proc /proc\n\
         mount -t sysfs sysfs /sys\n\
         mount -t devtmpfs devtmpfs /dev\n\
         mount -t tmpfs tmpfs /run\n\
         mount -t tmpfs tmpfs /tmp\n\
         mount -t cgroup2 cgroup2 /sys/fs/cgroup\n\
         echo /sbin/modprobe > /proc/sys/kernel/modprobe\n\
         modprobe -q virtio_pci\n\
         modprobe virtio_net\n\
         ip link set lo up\n\
         {} {}\n\
         echo \"{EXIT_LINE}$?\"\n\
         poweroff -f\n",
        ramdisk::TEST_BINARY,
        arguments.join(" ")
    )
}

#[cfg(test)]
mod tests {
    use super::{EXIT_LINE, init_script};

    #[test]
    fn the_guest_tells_the_exit_code_right_after_the_test() {
        let script = init_script(&["--test-threads=1"]);
        let lines: Vec<&str> = script.lines().collect();
        let test = lines.iter().position(|line| line.ends_with("--test-threads=1")).unwrap();
        assert_eq!(lines[test + 1], format!("echo \"{EXIT_LINE}$?\""));
        assert!(lines[0].starts_with("#!/bin/busybox"));
    }
}
