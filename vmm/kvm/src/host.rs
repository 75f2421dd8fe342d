//! Facts of this host: which KVM it has, its CPUID, where state components lie, its TSC. Reads only; decides nothing.

use crate::assist::xsave::{Component, Layout};
use crate::profile::Profile;
use core::arch::x86_64::__cpuid_count;
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::{Cap, Kvm};
use std::os::fd::IntoRawFd;
use std::os::fd::OwnedFd;

/// What the engine asks of its host.
pub struct Host {
    /// The KVM device.
    pub kvm: Kvm,
    /// Its profile.
    pub profile: Profile,
    /// What KVM supports.
    pub supported: Vec<kvm_cpuid_entry2>,
    /// The TSC deadline timer is there.
    pub tsc_deadline: bool,
    /// The TSC frequency of a guest can be set.
    pub tsc_control: bool,
}

impl Host {
    /// Looks, through `kvm` if given (a jail), else /dev/kvm; `profile` likewise, if known from before the jail.
    pub fn look(kvm: Option<OwnedFd>, profile: Option<Profile>) -> std::io::Result<Self> {
        let kvm = match kvm {
            Some(fd) => crate::sys::fd::kvm_from(fd.into_raw_fd()),
            None => Kvm::new().map_err(|e| std::io::Error::from_raw_os_error(e.errno()))?,
        };
        let api = kvm.get_api_version();
        if api != 12 {
            return Err(std::io::Error::other(format!("KVM API version {api}, 12 is needed")));
        }
        let supported =
            kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(|e| std::io::Error::from_raw_os_error(e.errno()))?;
        Ok(Self {
            profile: profile.unwrap_or_else(of_this_host),
            supported: supported.as_slice().to_vec(),
            tsc_deadline: kvm.check_extension(Cap::TscDeadlineTimer),
            tsc_control: kvm.check_extension(Cap::TscControl),
            kvm,
        })
    }

    /// The features that a guest here finds. On `soft` the CPUID instruction answers with the host's own bits.
    pub fn features(&self, guest: &[kvm_cpuid_entry2]) -> Vec<String> {
        match self.profile {
            Profile::Hardware => crate::profile::feature_names(guest),
            Profile::Soft => crate::profile::feature_names(&native_cpuid()),
        }
    }
}

/// The profile of this host, from /proc and /sys.
pub fn of_this_host() -> Profile {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = info.lines().find(|l| l.starts_with("flags")).unwrap_or_default();
    Profile::decide(flags, std::path::Path::new("/sys/module/kvm_pvm").exists())
}

/// The leaves that name features, as user code of this host sees them.
fn native_cpuid() -> Vec<kvm_cpuid_entry2> {
    [(1, 0), (7, 0), (7, 1), (0xd, 1), (0x8000_0001, 0)]
        .into_iter()
        .map(|(function, index)| {
            let r = __cpuid_count(function, index);
            kvm_cpuid_entry2 { function, index, eax: r.eax, ebx: r.ebx, ecx: r.ecx, edx: r.edx, ..Default::default() }
        })
        .collect()
}

/// Where this host's state components lie, as far as they fit an area of `area_bytes`.
pub fn xsave_layout(area_bytes: usize) -> Layout {
    let all = __cpuid_count(0xd, 0);
    let supported = u64::from(all.edx) << 32 | u64::from(all.eax);
    let components: Vec<Component> = (2..63u8)
        .filter(|bit| supported >> bit & 1 == 1)
        .filter_map(|bit| {
            let leaf = __cpuid_count(0xd, u32::from(bit));
            let component = Component { bit, offset: leaf.ebx as usize, bytes: leaf.eax as usize };
            (leaf.ecx & 1 == 0 && component.bytes > 0 && component.offset + component.bytes <= area_bytes).then_some(component)
        })
        .collect();
    let mask = components.iter().fold(3, |m, c| m | 1 << c.bit);
    Layout { components, mask }
}
