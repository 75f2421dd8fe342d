//! Guest memory in this process: one shared mapping of the whole memory file, seen as guest-physical regions, and
//! handed to KVM as memory slots. The pager and the dirty tracker of the core watch the same mapping.
#![expect(unsafe_code, reason = "mmap, raw vm-memory regions and KVM_SET_USER_MEMORY_REGION")]

use crate::layout::{self, RamSlot};
use ks_vmm_core::memory::Memory;
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use rustix::mm::{MapFlags, ProtFlags};
use std::sync::Arc;
use vm_memory::mmap::MmapRegion;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap};

/// Address and length of the mapping; unmapped on drop.
struct Mapping {
    base: *mut core::ffi::c_void,
    bytes: usize,
}

// SAFETY: the pointer is only used to build regions (whose accesses are volatile copies) and to unmap once.
unsafe impl Send for Mapping {}
// SAFETY: as above; nothing in `Mapping` changes after it is made.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `base` and `bytes` are those of the mmap in `Ram::map`; `Ram` drops its regions first, and whoever
        // gave the slots to a VM keeps the `Ram` until the VM is gone.
        let _ = unsafe { rustix::mm::munmap(self.base, self.bytes) };
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        // The pager and the prefetcher place pages in the mapping: they end before it goes.
        self.owner.shutdown();
    }
}

/// Guest memory: by guest-physical address for devices, by slot for KVM.
pub struct Ram {
    // Invariant: declared before `mapping`, so that the regions go first.
    memory: GuestMemoryMmap,
    slots: Vec<RamSlot>,
    mapping: Mapping,
    owner: Arc<Memory>,
}

impl Ram {
    /// Maps the whole memory file, shared; its pager is shut down before it is unmapped.
    pub fn map(owner: Arc<Memory>) -> std::io::Result<Self> {
        let (fd, bytes) = (owner.fd(), owner.bytes());
        let length = usize::try_from(bytes).map_err(std::io::Error::other)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), length, prot, MapFlags::SHARED | MapFlags::NORESERVE, fd, 0) }?;
        let mapping = Mapping { base, bytes: length };
        let slots = layout::ram_slots(bytes);
        let mut regions = Vec::new();
        for slot in &slots {
            // SAFETY: `slot` lies within the mapping, because the slots add up to `bytes`.
            let at = unsafe { base.cast::<u8>().add(slot.offset as usize) };
            // SAFETY: `at` is valid for `slot.bytes` for the life of `mapping`, which outlives the region (see `Ram`).
            let region = unsafe { MmapRegion::build_raw(at, slot.bytes as usize, prot.bits() as i32, libc::MAP_SHARED) }
                .map_err(std::io::Error::other)?;
            let region = GuestRegionMmap::new(region, GuestAddress(slot.guest))
                .ok_or_else(|| std::io::Error::other("guest memory does not fit the address space"))?;
            regions.push(region);
        }
        let memory = GuestMemoryMmap::from_regions(regions).map_err(std::io::Error::other)?;
        Ok(Self { memory, slots, mapping, owner })
    }
    /// For devices.
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }
    /// Address of offset 0 in this process.
    pub fn base(&self) -> u64 {
        self.mapping.base as u64
    }
    /// Bytes mapped.
    pub fn bytes(&self) -> u64 {
        self.mapping.bytes as u64
    }
    /// Offset in the memory file of a guest-physical range, if it is RAM.
    pub fn file_offset(&self, addr: u64, len: u64) -> Option<u64> {
        layout::file_offset(&self.slots, addr, len)
    }
    /// Gives all slots to `vm`. The caller keeps `self` until `vm` and its vCPUs are closed.
    pub fn register(&self, vm: &VmFd) -> Result<(), kvm_ioctls::Error> {
        for (i, slot) in self.slots.iter().enumerate() {
            let region = kvm_userspace_memory_region {
                slot: i as u32,
                flags: 0,
                guest_phys_addr: slot.guest,
                memory_size: slot.bytes,
                userspace_addr: self.base() + slot.offset,
            };
            // SAFETY: the range is mapped and stays so until after the VM is closed; slots do not overlap.
            unsafe { vm.set_user_memory_region(region) }?;
        }
        Ok(())
    }
}
