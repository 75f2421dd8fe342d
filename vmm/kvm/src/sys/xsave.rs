//! The extended state of a vCPU as plain bytes.
#![expect(unsafe_code, reason = "KVM_GET_XSAVE2 and KVM_SET_XSAVE trust the length of the buffer")]

use kvm_bindings::Xsave;
use kvm_ioctls::{Cap, VcpuFd, VmFd};

/// Bytes of the area before KVM_CAP_XSAVE2.
const AREA_BYTES_MIN: usize = 4096;
/// The most that any processor asks for, with room.
const AREA_BYTES_MAX: usize = 64 * 1024;

/// Length of the area on this host, for vCPUs of `vm`.
pub fn area_bytes(vm: &VmFd) -> usize {
    let asked = usize::try_from(vm.check_extension_int(Cap::Xsave2)).unwrap_or(0);
    asked.clamp(AREA_BYTES_MIN, AREA_BYTES_MAX)
}

fn buffer(bytes: usize) -> std::io::Result<Xsave> {
    Xsave::new((bytes - AREA_BYTES_MIN).div_ceil(4)).map_err(|e| std::io::Error::other(format!("{e:?}")))
}

/// Reads the area: `bytes` is [`area_bytes`] of the VM.
pub fn get(vcpu: &VcpuFd, bytes: usize) -> std::io::Result<Vec<u8>> {
    let mut xsave = buffer(bytes)?;
    // SAFETY: the buffer holds `bytes`, which is what the kernel said that it writes.
    if unsafe { vcpu.get_xsave2(&mut xsave) }.is_err() {
        let old = vcpu.get_xsave().map_err(|e| std::io::Error::from_raw_os_error(e.errno()))?;
        xsave = buffer(AREA_BYTES_MIN)?;
        // SAFETY: only the fixed part is replaced; the length of the flexible part stays as it is.
        unsafe { xsave.as_mut_fam_struct() }.xsave.region = old.region;
    }
    let fam = xsave.as_fam_struct_ref();
    let mut out: Vec<u8> = fam.xsave.region.iter().flat_map(|w| w.to_le_bytes()).collect();
    out.extend(xsave.as_slice().iter().flat_map(|w| w.to_le_bytes()));
    Ok(out)
}

/// Loads an area; refuses one of another length than this host's.
pub fn set(vcpu: &VcpuFd, area: &[u8], bytes: usize) -> std::io::Result<()> {
    let whole = AREA_BYTES_MIN + (bytes - AREA_BYTES_MIN).div_ceil(4) * 4;
    if area.len() != whole && area.len() != AREA_BYTES_MIN {
        return Err(std::io::Error::other(format!("an XSAVE area of {} bytes, this host's has {whole}", area.len())));
    }
    let mut xsave = buffer(bytes)?;
    let words: Vec<u32> = area.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect();
    let (head, tail) = words.split_at(AREA_BYTES_MIN / 4);
    // SAFETY: only the fixed part is replaced; the length of the flexible part stays as it is.
    unsafe { xsave.as_mut_fam_struct() }.xsave.region.copy_from_slice(head);
    let room = xsave.as_mut_slice();
    room[..tail.len()].copy_from_slice(tail);
    // SAFETY: the buffer holds `bytes`, which is what the kernel reads at most.
    unsafe { vcpu.set_xsave2(&xsave) }.map_err(|e| std::io::Error::from_raw_os_error(e.errno()))
}
