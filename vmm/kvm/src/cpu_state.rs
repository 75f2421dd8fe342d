//! Reading and loading the state of vCPUs and of the in-kernel devices, in the order of DESIGN section 6:
//! CPUID, MP state, regs, sregs, XSAVE, XCRS, debug registers, LAPIC, MSRs, irqchip, PIT, clock, events last.
//!
//! A step that fails is an error that names the step; nothing is skipped.

use crate::state::{VcpuState, VmState};
use crate::sys::{attr, run, xsave};
use kvm_bindings::{CpuId, Msrs, kvm_clock_data, kvm_irqchip, kvm_msr_entry};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};

/// MSR_IA32_TSC.
const MSR_TSC: u32 = 0x10;
/// MSR_IA32_TSC_DEADLINE: only after TSC and LAPIC.
const MSR_TSC_DEADLINE: u32 = 0x6e0;
/// MSRs in one call.
const MSR_BATCH: usize = 64;

/// A step of saving or loading that failed.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// An ioctl.
    #[error("{step}: {source}")]
    Step {
        /// Which.
        step: &'static str,
        /// Cause.
        source: std::io::Error,
    },
    /// The host does not take a saved MSR.
    #[error("the host refuses MSR {index:#x} (value {value:#x})")]
    Msr {
        /// Its number.
        index: u32,
        /// The saved value.
        value: u64,
    },
}

fn step(step: &'static str) -> impl Fn(kvm_ioctls::Error) -> StateError {
    move |e| StateError::Step { step, source: std::io::Error::from_raw_os_error(e.errno()) }
}
fn io_step(step: &'static str) -> impl Fn(std::io::Error) -> StateError {
    move |source| StateError::Step { step, source }
}

/// The MSRs that this host saves, in setting order.
pub fn msr_indices(kvm: &Kvm) -> Result<Vec<u32>, StateError> {
    let list = kvm.get_msr_index_list().map_err(step("KVM_GET_MSR_INDEX_LIST"))?;
    let mut indices: Vec<u32> = list.as_slice().to_vec();
    indices.sort_by_key(|i| (*i == MSR_TSC_DEADLINE, *i == MSR_TSC));
    Ok(indices)
}

/// Reads `indices`; those that the vCPU does not have are left out.
fn read_msrs(vcpu: &VcpuFd, indices: &[u32]) -> Result<Vec<kvm_msr_entry>, StateError> {
    let mut out = Vec::new();
    let mut rest = indices;
    while !rest.is_empty() {
        let ask: Vec<kvm_msr_entry> =
            rest.iter().take(MSR_BATCH).map(|i| kvm_msr_entry { index: *i, ..Default::default() }).collect();
        let mut msrs = Msrs::from_entries(&ask).map_err(|e| io_step("MSR list")(std::io::Error::other(format!("{e:?}"))))?;
        let got = vcpu.get_msrs(&mut msrs).map_err(step("KVM_GET_MSRS"))?;
        out.extend_from_slice(&msrs.as_slice()[..got]);
        // The kernel stops at the first that it cannot read.
        rest = &rest[if got < ask.len() { got + 1 } else { got }..];
    }
    Ok(out)
}

fn write_msrs(vcpu: &VcpuFd, entries: &[kvm_msr_entry]) -> Result<(), StateError> {
    let mut rest = entries;
    while !rest.is_empty() {
        let batch = &rest[..rest.len().min(MSR_BATCH)];
        let msrs = Msrs::from_entries(batch).map_err(|e| io_step("MSR list")(std::io::Error::other(format!("{e:?}"))))?;
        let set = vcpu.set_msrs(&msrs).map_err(step("KVM_SET_MSRS"))?;
        if let Some(refused) = batch.get(set) {
            // Some MSRs are readable only; one that has the value already needs no setting.
            let now = read_msrs(vcpu, &[refused.index])?;
            if now.first().map(|e| e.data) != Some(refused.data) {
                return Err(StateError::Msr { index: refused.index, value: refused.data });
            }
            rest = &rest[set + 1..];
        } else {
            rest = &rest[set..];
        }
    }
    Ok(())
}

/// Reads one stopped vCPU.
pub fn save_vcpu(vcpu: &VcpuFd, xsave_bytes: usize, msr_indices: &[u32]) -> Result<VcpuState, StateError> {
    let cpuid = vcpu.get_cpuid2(kvm_bindings::KVM_MAX_CPUID_ENTRIES).map_err(step("KVM_GET_CPUID2"))?;
    // MP state first: reading it makes pending INIT and SIPI take effect.
    let mp_state = vcpu.get_mp_state().map_err(step("KVM_GET_MP_STATE"))?;
    Ok(VcpuState {
        cpuid: cpuid.as_slice().to_vec(),
        mp_state,
        regs: vcpu.get_regs().map_err(step("KVM_GET_REGS"))?,
        sregs: vcpu.get_sregs().map_err(step("KVM_GET_SREGS"))?,
        xsave: xsave::get(vcpu, xsave_bytes).map_err(io_step("KVM_GET_XSAVE2"))?,
        xcrs: vcpu.get_xcrs().map_err(step("KVM_GET_XCRS"))?,
        debug_regs: vcpu.get_debug_regs().map_err(step("KVM_GET_DEBUGREGS"))?,
        lapic: vcpu.get_lapic().map_err(step("KVM_GET_LAPIC"))?,
        msrs: read_msrs(vcpu, msr_indices)?,
        tsc_offset: attr::tsc_offset(vcpu),
        events: vcpu.get_vcpu_events().map_err(step("KVM_GET_VCPU_EVENTS"))?,
    })
}

/// Sets the CPUID; must come before everything else.
pub fn load_cpuid(vcpu: &VcpuFd, state: &VcpuState) -> Result<(), StateError> {
    let cpuid = CpuId::from_entries(&state.cpuid).map_err(|e| io_step("CPUID")(std::io::Error::other(format!("{e:?}"))))?;
    vcpu.set_cpuid2(&cpuid).map_err(step("KVM_SET_CPUID2"))
}

/// Loads all but the events. `saved_host_tsc` is the host's TSC at the save.
pub fn load_vcpu(vcpu: &VcpuFd, s: &VcpuState, xsave_bytes: usize, saved_host_tsc: u64) -> Result<(), StateError> {
    load_cpuid(vcpu, s)?;
    vcpu.set_mp_state(s.mp_state).map_err(step("KVM_SET_MP_STATE"))?;
    vcpu.set_regs(&s.regs).map_err(step("KVM_SET_REGS"))?;
    vcpu.set_sregs(&s.sregs).map_err(step("KVM_SET_SREGS"))?;
    xsave::set(vcpu, &s.xsave, xsave_bytes).map_err(io_step("KVM_SET_XSAVE"))?;
    vcpu.set_xcrs(&s.xcrs).map_err(step("KVM_SET_XCRS"))?;
    vcpu.set_debug_regs(&s.debug_regs).map_err(step("KVM_SET_DEBUGREGS"))?;
    vcpu.set_lapic(&s.lapic).map_err(step("KVM_SET_LAPIC"))?;
    // With an offset every vCPU's TSC goes on from the same instant; without, from when its MSR is written.
    let by_offset = match s.tsc_offset {
        Some(offset) if attr::tsc_offset(vcpu).is_some() => {
            let away = saved_host_tsc.wrapping_sub(run::host_tsc()).cast_signed();
            attr::set_tsc_offset(vcpu, offset.wrapping_add(away)).map_err(step("KVM_VCPU_TSC_OFFSET"))?;
            true
        }
        _ => false,
    };
    let msrs: Vec<kvm_msr_entry> = s.msrs.iter().filter(|e| !(by_offset && e.index == MSR_TSC)).copied().collect();
    write_msrs(vcpu, &msrs)
}

/// Events, after everything else of the VM.
pub fn load_events(vcpu: &VcpuFd, s: &VcpuState) -> Result<(), StateError> {
    vcpu.set_vcpu_events(&s.events).map_err(step("KVM_SET_VCPU_EVENTS"))
}

/// Reads interrupt controllers, timer and clock.
pub fn save_vm(vm: &VmFd) -> Result<VmState, StateError> {
    let mut irqchips: [kvm_irqchip; 3] = Default::default();
    for (i, chip) in irqchips.iter_mut().enumerate() {
        chip.chip_id = i as u32;
        vm.get_irqchip(chip).map_err(step("KVM_GET_IRQCHIP"))?;
    }
    Ok(VmState {
        irqchips,
        pit: vm.get_pit2().map_err(step("KVM_GET_PIT2"))?,
        clock: vm.get_clock().map_err(step("KVM_GET_CLOCK"))?,
        host_tsc: run::host_tsc(),
    })
}

/// Loads them.
pub fn load_vm(vm: &VmFd, s: &VmState) -> Result<(), StateError> {
    for chip in &s.irqchips {
        vm.set_irqchip(chip).map_err(step("KVM_SET_IRQCHIP"))?;
    }
    vm.set_pit2(&s.pit).map_err(step("KVM_SET_PIT2"))?;
    // Without flags: kvm-clock goes on from the saved value, whatever time has passed outside.
    let clock = kvm_clock_data { clock: s.clock.clock, ..Default::default() };
    vm.set_clock(&clock).map_err(step("KVM_SET_CLOCK"))
}

/// Tells a guest that uses kvm-clock that it was stopped, so that its watchdogs forgive it.
pub fn was_stopped(vcpu: &VcpuFd) {
    // EINVAL: this guest does not use kvm-clock.
    let _ = vcpu.kvmclock_ctrl();
}
