//! The CPU profile of a host: `hardware` (VMX or SVM) or `soft` (KVM without them), and what each means for the guest's
//! command line, its CPUID and the features that a restore needs. Pure: facts of the host come in as values.

use kvm_bindings::kvm_cpuid_entry2;
use std::collections::BTreeSet;

/// What `soft` guests get on their command line: the host's CPUID shows through there, and those features'
/// instructions are not emulated for kernel code.
pub const SOFT_CMDLINE: &str = "console=ttyS0 panic=-1 reboot=k tsc=reliable lpj=10000 mitigations=off pci=off ks_soft \
nosmap nosmep nopku nofsgsbase noxsaves noxsaveopt \
clearcpuid=popcnt,smap,smep,fsgsbase,invpcid,pcid,umip,rdpid,rdtscp,clflushopt,clwb,pku,erms,fsrm,xsavec,xgetbv1";

/// Which kind of KVM this host has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// Hardware virtualization.
    Hardware,
    /// Software KVM: user code runs natively, kernel code is emulated.
    Soft,
}

impl Profile {
    /// As manifests and placement spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hardware => "hardware",
            Self::Soft => "soft",
        }
    }
    /// Decides from the flags line of /proc/cpuinfo and from whether /sys/module/kvm_pvm is there.
    pub fn decide(cpu_flags: &str, kvm_pvm_loaded: bool) -> Self {
        let has = |f| cpu_flags.split_whitespace().any(|w| w == f);
        if kvm_pvm_loaded || !(has("vmx") || has("svm")) { Self::Soft } else { Self::Hardware }
    }
    /// The most vCPUs that this profile runs.
    pub fn vcpus_max(self) -> u16 {
        match self {
            Self::Hardware => 64,
            Self::Soft => 1,
        }
    }
}

/// The whole command line: the profile's part, then the image's with `{tsc_khz}` filled in; with `acpi=off` the
/// virtio-mmio windows are named too, because nothing else does then.
pub fn cmdline(profile: Profile, image: &str, tsc_khz: u32, nodes: &[crate::acpi::MmioNode]) -> String {
    let mut words: Vec<String> = Vec::new();
    let image = image.replace("{tsc_khz}", &tsc_khz.to_string());
    let says = |word| image.split_whitespace().any(|w| w == word);
    // An image made for `soft` says all of it itself.
    if profile == Profile::Soft && !says("ks_soft") {
        words.push(SOFT_CMDLINE.to_owned());
    }
    let acpi_off = says("acpi=off");
    if !image.trim().is_empty() {
        words.push(image.trim().to_owned());
    }
    if acpi_off {
        words.extend(nodes.iter().map(|n| format!("virtio_mmio.device=4K@{:#x}:{}", n.base, n.gsi)));
    }
    words.join(" ")
}

#[derive(Clone, Copy)]
enum Reg {
    Eax,
    Ebx,
    Ecx,
    Edx,
}

/// Leaf, subleaf, register, and the names of bits 0-31 (empty: not a feature that programs look for).
type Table = (u32, u32, Reg, &'static str);

// Names as in /proc/cpuinfo; `-` stands for a bit that is not a feature to require.
const TABLES: &[Table] = &[
    (
        1,
        0,
        Reg::Ecx,
        "pni pclmulqdq - - - - - - - ssse3 - - fma cx16 - - - pcid - sse4_1 sse4_2 - movbe popcnt - aes xsave - avx f16c rdrand -",
    ),
    (1, 0, Reg::Edx, "fpu - - - - msr - - cx8 - - sep - - - cmov - - - clflush - - - mmx fxsr sse sse2 - - - - -"),
    (
        7,
        0,
        Reg::Ebx,
        "fsgsbase - - bmi1 hle avx2 - smep bmi2 erms invpcid rtm - - - - avx512f avx512dq rdseed adx smap avx512ifma - clflushopt clwb - - - avx512cd sha_ni avx512bw avx512vl",
    ),
    (
        7,
        0,
        Reg::Ecx,
        "- avx512vbmi umip pku - waitpkg avx512_vbmi2 - gfni vaes vpclmulqdq avx512_vnni avx512_bitalg - avx512_vpopcntdq - la57 - - - - - rdpid - - cldemote - movdiri movdir64b - - -",
    ),
    (
        7,
        0,
        Reg::Edx,
        "- - avx512_4vnniw avx512_4fmaps fsrm - - - avx512_vp2intersect - - - - - serialize - tsxldtrk - - - - - amx_bf16 avx512_fp16 amx_tile amx_int8 - - - - - -",
    ),
    (7, 1, Reg::Eax, "- - - - avx_vnni avx512_bf16 - - - - - - - - - - - - - - - - - - - - - - - - - -"),
    (0xd, 1, Reg::Eax, "xsaveopt xsavec xgetbv1 xsaves - - - - - - - - - - - - - - - - - - - - - - - - - - - -"),
    (0x8000_0001, 0, Reg::Ecx, "lahf_lm - - - - abm sse4a - 3dnowprefetch - - xop - - - - fma4 - - - - tbm - - - - - - - - - -"),
    (0x8000_0001, 0, Reg::Edx, "- - - - - - - - - - - syscall - - - - - - - - nx - - - - - pdpe1gb rdtscp - lm - -"),
];

fn register(entry: &kvm_cpuid_entry2, reg: Reg) -> u32 {
    match reg {
        Reg::Eax => entry.eax,
        Reg::Ebx => entry.ebx,
        Reg::Ecx => entry.ecx,
        Reg::Edx => entry.edx,
    }
}

/// Names of the features that these CPUID entries show, sorted.
pub fn feature_names(entries: &[kvm_cpuid_entry2]) -> Vec<String> {
    let mut names = BTreeSet::new();
    for (leaf, subleaf, reg, bits) in TABLES {
        let Some(entry) = entries.iter().find(|e| e.function == *leaf && e.index == *subleaf) else { continue };
        let value = register(entry, *reg);
        names.extend(bits.split(' ').enumerate().filter(|(i, n)| *n != "-" && value >> i & 1 == 1).map(|(_, n)| n.to_owned()));
    }
    names.into_iter().collect()
}

/// Those of `needed` that `have` lacks.
pub fn missing_features(needed: &[String], have: &[String]) -> Vec<String> {
    needed.iter().filter(|n| !have.contains(n)).cloned().collect()
}

const CX16: u32 = 1 << 13;
const X2APIC: u32 = 1 << 21;
const TSC_DEADLINE: u32 = 1 << 24;
const HYPERVISOR: u32 = 1 << 31;
/// Asynchronous page faults (4, 10, 14): pages come lazily, and a token of a fault must not outlive a restore.
/// On `soft` also everything that a hypercall serves (2, 7, 9, 11, 13, 16), because one makes no progress there.
const KVM_PV_MASK: u32 = 1 << 4 | 1 << 10 | 1 << 14;
const KVM_PV_HYPERCALLS: u32 = 1 << 2 | 1 << 7 | 1 << 9 | 1 << 11 | 1 << 13 | 1 << 16;

/// The CPUID of one vCPU from what KVM supports on this host.
pub fn guest_cpuid(
    supported: &[kvm_cpuid_entry2],
    profile: Profile,
    vcpu: u8,
    vcpus: u16,
    tsc_deadline: bool,
) -> Vec<kvm_cpuid_entry2> {
    let mut out = supported.to_vec();
    for e in &mut out {
        match e.function {
            1 => {
                e.ebx = (e.ebx & 0x0000_ffff) | u32::from(vcpu) << 24 | u32::from(vcpus) << 16;
                e.edx = if vcpus > 1 { e.edx | 1 << 28 } else { e.edx & !(1 << 28) };
                match profile {
                    Profile::Soft => e.ecx &= !CX16,
                    Profile::Hardware => {
                        e.ecx |= HYPERVISOR | X2APIC;
                        if tsc_deadline {
                            e.ecx |= TSC_DEADLINE;
                        }
                    }
                }
            }
            // Deterministic cache parameters: no sharing beyond this VM.
            4 if e.eax & 0x1f != 0 => e.eax = (e.eax & 0x0000_3fff) | u32::from(vcpus - 1) << 26,
            0xb | 0x1f => topology(e, vcpu, vcpus),
            0x4000_0001 => {
                e.eax &= !KVM_PV_MASK;
                if profile == Profile::Soft {
                    e.eax &= !KVM_PV_HYPERCALLS;
                }
            }
            _ => {}
        }
    }
    out
}

fn topology(e: &mut kvm_cpuid_entry2, vcpu: u8, vcpus: u16) {
    e.edx = u32::from(vcpu);
    match e.index {
        0 => (e.eax, e.ebx, e.ecx) = (0, 1, 1 << 8),
        1 => (e.eax, e.ebx, e.ecx) = (u32::from(vcpus).next_power_of_two().trailing_zeros(), u32::from(vcpus), 1 | 2 << 8),
        i => (e.eax, e.ebx, e.ecx) = (0, 0, i),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_profile_follows_the_flags_and_the_software_module() {
        assert_eq!(Profile::decide("fpu vmx sse", false), Profile::Hardware);
        assert_eq!(Profile::decide("fpu svm sse", false), Profile::Hardware);
        assert_eq!(Profile::decide("fpu vmx sse", true), Profile::Soft);
        assert_eq!(Profile::decide("fpu svm_lock sse", false), Profile::Soft);
    }

    #[test]
    fn every_table_names_32_bits() {
        for (leaf, sub, _, bits) in TABLES {
            assert_eq!(bits.split(' ').count(), 32, "leaf {leaf:#x}.{sub}");
        }
    }

    #[test]
    fn a_missing_feature_is_named() {
        let with = [kvm_cpuid_entry2 { function: 7, ebx: 1 << 5 | 1 << 16, ..Default::default() }];
        let without = [kvm_cpuid_entry2 { function: 7, ebx: 1 << 5, ..Default::default() }];
        assert_eq!(feature_names(&with), ["avx2", "avx512f"]);
        assert_eq!(missing_features(&feature_names(&with), &feature_names(&without)), ["avx512f"]);
        assert_eq!(missing_features(&feature_names(&without), &feature_names(&with)), Vec::<String>::new());
    }

    #[test]
    fn soft_guests_see_no_cx16_and_no_hypercall_features() {
        let host = [
            kvm_cpuid_entry2 { function: 1, ecx: CX16 | 1, ..Default::default() },
            kvm_cpuid_entry2 { function: 0x4000_0001, eax: u32::MAX, ..Default::default() },
        ];
        let soft = guest_cpuid(&host, Profile::Soft, 0, 1, true);
        assert_eq!(soft[0].ecx, 1);
        assert_eq!(soft[1].eax & (KVM_PV_HYPERCALLS | KVM_PV_MASK), 0);
        let hard = guest_cpuid(&host, Profile::Hardware, 3, 4, true);
        assert_eq!(hard[0].ecx, CX16 | 1 | X2APIC | TSC_DEADLINE | HYPERVISOR);
        assert_eq!(hard[0].ebx >> 16, 3 << 8 | 4);
        assert_eq!(hard[1].eax & KVM_PV_MASK, 0);
        assert_ne!(hard[1].eax & KVM_PV_HYPERCALLS, 0);
    }

    #[test]
    fn windows_are_on_the_command_line_only_without_acpi() {
        let nodes = [crate::acpi::MmioNode { base: 0xd000_0000, gsi: 5 }];
        assert_eq!(cmdline(Profile::Hardware, "quiet tsc_early_khz={tsc_khz}", 7, &nodes), "quiet tsc_early_khz=7");
        assert_eq!(cmdline(Profile::Hardware, "acpi=off", 7, &nodes), "acpi=off virtio_mmio.device=4K@0xd0000000:5");
        assert!(cmdline(Profile::Soft, "", 7, &nodes).contains("clearcpuid=popcnt,"));
        assert_eq!(cmdline(Profile::Soft, "quiet ks_soft", 7, &nodes), "quiet ks_soft", "a soft image's own line is whole");
    }
}
