//! What the run page says beyond what kvm-ioctls passes on, and the host's TSC.
#![expect(unsafe_code, reason = "a union of the run page; rdtsc")]

use kvm_ioctls::VcpuFd;

/// After KVM_EXIT_INTERNAL_ERROR: its suberror.
pub fn internal_suberror(vcpu: &mut VcpuFd) -> u32 {
    // SAFETY: the exit reason was KVM_EXIT_INTERNAL_ERROR, so the kernel filled this member; any bits are a valid u32.
    unsafe { vcpu.get_kvm_run().__bindgen_anon_1.internal.suberror }
}

/// The host's time stamp counter.
pub fn host_tsc() -> u64 {
    // SAFETY: every x86-64 processor has it, and user code may read it here (nobody sets CR4.TSD for this process).
    unsafe { core::arch::x86_64::_rdtsc() }
}
