//! QEMU's command line and the guest kernel's. Pure.

use crate::tsc;
use ks_vmm_core::engine::EngineSetup;

/// Code cache of TCG in MiB; counted in the jail's overhead.
const TB_SIZE_MIB: u32 = 256;
/// The only CPU model used; its meaning is fixed by QEMU's version, not by the host.
pub const CPU_MODEL: &str = "max";
/// The guest port's name.
pub const PORT_NAME: &str = ks_proto::guest::PORT_NAME;

/// Descriptor numbers in the child.
#[derive(Debug, Clone, Copy)]
pub struct Numbers {
    /// Guest memory.
    pub memory: u32,
    /// QMP.
    pub qmp: u32,
    /// Serial console.
    pub console: u32,
    /// NBD.
    pub disk: u32,
    /// The guest port.
    pub port: u32,
    /// Kernel and initramfs; None on a restore, which finds them in memory.
    pub boot: Option<(u32, u32)>,
}

/// Arguments, with the program's name first.
pub fn arguments(setup: &EngineSetup, n: &Numbers, cmdline: &str) -> Vec<String> {
    let bytes = setup.config.memory_bytes;
    let mut a: Vec<String> = Vec::new();
    let mut add = |words: &[&str]| a.extend(words.iter().map(|w| (*w).to_owned()));
    add(&["ks-qemu", "-name", &setup.config.name.replace(',', "."), "-nodefaults", "-no-user-config", "-no-reboot"]);
    add(&["-display", "none", "-S", "-accel", &format!("tcg,tb-size={TB_SIZE_MIB}"), "-cpu", CPU_MODEL]);
    add(&["-machine", "microvm,acpi=on,rtc=on,memory-backend=mem", "-global", "virtio-mmio.force-legacy=false"]);
    add(&["-m", &format!("{}M", bytes >> 20), "-smp", &setup.config.vcpus.to_string()]);
    let memory = format!("memory-backend-file,id=mem,size={bytes},mem-path=/proc/self/fd/{},share=on", n.memory);
    add(&["-object", &memory]);
    add(&["-chardev", &format!("socket,id=qmp,fd={}", n.qmp), "-mon", "chardev=qmp,mode=control"]);
    add(&["-chardev", &format!("socket,id=con,fd={}", n.console), "-serial", "chardev:con"]);
    let disk = format!("driver=nbd,node-name=disk,server.type=fd,server.str={},discard=unmap,cache.direct=on", n.disk);
    add(&["-blockdev", &disk, "-device", "virtio-blk-device,drive=disk,werror=report,rerror=report"]);
    add(&["-device", "virtio-serial-device", "-chardev", &format!("socket,id=ch,fd={}", n.port)]);
    add(&["-device", &format!("virtserialport,chardev=ch,name={PORT_NAME}")]);
    add(&["-device", "virtio-rng-device", "-device", "virtio-balloon-device,free-page-reporting=on"]);
    add(&["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"]);
    match n.boot {
        Some((kernel, initrd)) => {
            add(&["-kernel", &format!("/proc/self/fd/{kernel}")]);
            if !setup.initrd_hash.is_empty() {
                add(&["-initrd", &format!("/proc/self/fd/{initrd}")]);
            }
            add(&["-append", cmdline]);
        }
        None => add(&["-incoming", "defer"]),
    }
    a
}

/// The guest kernel's command line: ours, unless `extra` sets the same key, then `extra`. `{tsc_khz}` is filled in.
pub fn kernel_cmdline(extra: &str, tsc_khz: u32) -> String {
    let extra = extra.replace("{tsc_khz}", &tsc_khz.to_string());
    let key = |word: &str| word.split('=').next().unwrap_or(word).to_owned();
    let given: Vec<String> = extra.split_whitespace().map(key).collect();
    let ours = format!("console=ttyS0 quiet panic=-1 reboot=t tsc_early_khz={tsc_khz} tsc=reliable");
    let words = ours.split_whitespace().filter(|w| !given.contains(&key(w))).chain(extra.split_whitespace());
    words.collect::<Vec<_>>().join(" ")
}

/// The host's TSC frequency.
pub fn host_tsc_khz() -> u32 {
    tsc::khz()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_learns_the_tsc_once_and_given_words_win() {
        assert_eq!(kernel_cmdline("", 2_600_000), "console=ttyS0 quiet panic=-1 reboot=t tsc_early_khz=2600000 tsc=reliable");
        assert_eq!(
            kernel_cmdline("console=ttyS0 tsc_early_khz={tsc_khz} foo", 5),
            "quiet panic=-1 reboot=t tsc=reliable console=ttyS0 tsc_early_khz=5 foo"
        );
    }
}
