//! KVM_VCPU_TSC_OFFSET: reading and setting the difference between guest and host TSC.
#![expect(unsafe_code, reason = "device attributes of a vCPU have no wrapper on x86")]

use kvm_bindings::{KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, kvm_device_attr};
use kvm_ioctls::VcpuFd;
use std::os::fd::AsRawFd;

/// `_IOW(0xAE, 0xe1, struct kvm_device_attr)`.
const KVM_SET_DEVICE_ATTR: libc::c_ulong = 0x4018_aee1;
/// `_IOW(0xAE, 0xe2, struct kvm_device_attr)`.
const KVM_GET_DEVICE_ATTR: libc::c_ulong = 0x4018_aee2;

fn attr(value: *mut i64) -> kvm_device_attr {
    kvm_device_attr { flags: 0, group: KVM_VCPU_TSC_CTRL, attr: u64::from(KVM_VCPU_TSC_OFFSET), addr: value as u64 }
}

/// The offset, or None where the host does not have this attribute.
pub fn tsc_offset(vcpu: &VcpuFd) -> Option<i64> {
    let mut value = 0i64;
    let attr = attr(&mut value);
    // SAFETY: `attr.addr` points to 8 writable bytes that outlive the call.
    let r = unsafe { libc::ioctl(vcpu.as_raw_fd(), KVM_GET_DEVICE_ATTR, &attr) };
    (r == 0).then_some(value)
}

/// Sets it.
pub fn set_tsc_offset(vcpu: &VcpuFd, mut value: i64) -> Result<(), kvm_ioctls::Error> {
    let attr = attr(&mut value);
    // SAFETY: `attr.addr` points to 8 readable bytes that outlive the call.
    let r = unsafe { libc::ioctl(vcpu.as_raw_fd(), KVM_SET_DEVICE_ATTR, &attr) };
    if r == 0 { Ok(()) } else { Err(kvm_ioctls::Error::last()) }
}
