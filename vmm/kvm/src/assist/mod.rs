//! Instructions that a `soft` host's emulator leaves to the VMM: decoding and applying, pure over byte buffers.
//!
//! KVM stops with an emulation failure and RIP on the instruction. [`decode`] says what it is and where its memory
//! operand lies; [`xsave`] moves the state components; the vCPU thread reads and writes guest memory and registers.
//! Anything not named here is refused with RIP and bytes. Source: Intel SDM volumes 1 (13) and 2.

pub mod xsave;

use iced_x86::{Code, Decoder, DecoderOptions, Instruction, MemorySize, Register};
use kvm_bindings::{kvm_regs, kvm_sregs};

/// Longest x86 instruction.
pub const INSTRUCTION_BYTES_MAX: usize = 15;

/// What to do for the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Assist {
    /// Deliver exception vector 3 after the instruction.
    Breakpoint,
    /// Nothing (x87 exceptions are masked and none is pending): FWAIT, FNCLEX.
    Skip,
    /// FNINIT: the x87 part back to its reset values.
    X87Init,
    /// XSAVE or XSAVEOPT at this linear address.
    Save {
        /// Linear address of the save area.
        address: u64,
    },
    /// XRSTOR from this linear address.
    Restore {
        /// Linear address of the save area.
        address: u64,
    },
}

/// A decoded instruction: what to do, and the RIP after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// What to do.
    pub assist: Assist,
    /// RIP of the next instruction.
    pub next_rip: u64,
}

/// Why the guest cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AssistError {
    /// Not one of the instructions known here.
    #[error("instruction at {rip:#x} is neither emulated by this host nor by the VMM: {text} ({bytes})")]
    Unknown { rip: u64, text: String, bytes: String },
    /// Not decodable: the bytes are cut off or are no instruction.
    #[error("no instruction at {rip:#x} ({bytes})")]
    Undecodable { rip: u64, bytes: String },
    /// The save area is not aligned to 64 bytes or its header asks for what does not exist.
    #[error("bad save area at {address:#x}: {why}")]
    BadArea { address: u64, why: String },
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect::<Vec<_>>().join(" ")
}

/// Decodes the instruction at RIP, of which `bytes` are the first ones, as many as could be read.
pub fn decode(bytes: &[u8], regs: &kvm_regs, sregs: &kvm_sregs) -> Result<Step, AssistError> {
    let bitness = if sregs.cs.l != 0 {
        64
    } else if sregs.cs.db != 0 {
        32
    } else {
        16
    };
    let bytes = &bytes[..bytes.len().min(INSTRUCTION_BYTES_MAX)];
    let mut decoder = Decoder::with_ip(bitness, bytes, regs.rip, DecoderOptions::NONE);
    let instruction = decoder.decode();
    if instruction.is_invalid() {
        return Err(AssistError::Undecodable { rip: regs.rip, bytes: hex(bytes) });
    }
    let address = |i: &Instruction| -> Result<u64, AssistError> {
        let linear = linear_address(i, regs, sregs).ok_or_else(|| AssistError::Unknown {
            rip: regs.rip,
            text: "a strange operand".into(),
            bytes: hex(bytes),
        })?;
        if linear % 64 == 0 {
            Ok(linear)
        } else {
            Err(AssistError::BadArea { address: linear, why: "not aligned to 64 bytes".into() })
        }
    };
    let assist = match instruction.code() {
        Code::Int3 => Assist::Breakpoint,
        Code::Wait | Code::Fnclex | Code::Fclex => Assist::Skip,
        Code::Fninit | Code::Finit => Assist::X87Init,
        Code::Xsave_mem | Code::Xsave64_mem | Code::Xsaveopt_mem | Code::Xsaveopt64_mem => {
            Assist::Save { address: address(&instruction)? }
        }
        Code::Xrstor_mem | Code::Xrstor64_mem => Assist::Restore { address: address(&instruction)? },
        other => {
            let text = format!("{other:?}");
            return Err(AssistError::Unknown { rip: regs.rip, text, bytes: hex(&bytes[..instruction.len()]) });
        }
    };
    Ok(Step { assist, next_rip: instruction.next_ip() })
}

fn linear_address(i: &Instruction, regs: &kvm_regs, sregs: &kvm_sregs) -> Option<u64> {
    debug_assert_ne!(i.memory_size(), MemorySize::Unknown);
    i.virtual_address(0, 0, |register, _, _| register_value(register, regs, sregs))
}

fn register_value(register: Register, regs: &kvm_regs, sregs: &kvm_sregs) -> Option<u64> {
    Some(match register {
        // In long mode only FS and GS have a base.
        Register::CS | Register::DS | Register::ES | Register::SS if sregs.cs.l != 0 => 0,
        Register::CS => sregs.cs.base,
        Register::DS => sregs.ds.base,
        Register::ES => sregs.es.base,
        Register::SS => sregs.ss.base,
        Register::FS => sregs.fs.base,
        Register::GS => sregs.gs.base,
        other => {
            let full = match other.full_register() {
                Register::RAX => regs.rax,
                Register::RBX => regs.rbx,
                Register::RCX => regs.rcx,
                Register::RDX => regs.rdx,
                Register::RSI => regs.rsi,
                Register::RDI => regs.rdi,
                Register::RBP => regs.rbp,
                Register::RSP => regs.rsp,
                Register::R8 => regs.r8,
                Register::R9 => regs.r9,
                Register::R10 => regs.r10,
                Register::R11 => regs.r11,
                Register::R12 => regs.r12,
                Register::R13 => regs.r13,
                Register::R14 => regs.r14,
                Register::R15 => regs.r15,
                _ => return None,
            };
            match other.size() {
                8 => full,
                4 => full & 0xffff_ffff,
                2 => full & 0xffff,
                _ => return None,
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn long_mode() -> kvm_sregs {
        let mut s = kvm_sregs::default();
        s.cs.l = 1;
        s.gs.base = 0xffff_8880_0000_0000;
        s
    }
    fn at(bytes: &[u8], regs: kvm_regs) -> Result<Step, AssistError> {
        decode(bytes, &regs, &long_mode())
    }

    #[test]
    fn simple_ones() {
        let regs = kvm_regs { rip: 0x1000, ..Default::default() };
        assert_eq!(at(&[0xcc, 0x90], regs), Ok(Step { assist: Assist::Breakpoint, next_rip: 0x1001 }));
        assert_eq!(at(&[0x9b, 0x90], regs), Ok(Step { assist: Assist::Skip, next_rip: 0x1001 }));
        assert_eq!(at(&[0xdb, 0xe2], regs), Ok(Step { assist: Assist::Skip, next_rip: 0x1002 }));
        assert_eq!(at(&[0xdb, 0xe3], regs), Ok(Step { assist: Assist::X87Init, next_rip: 0x1002 }));
    }

    #[test]
    fn addresses_come_from_base_index_displacement_rip_and_segment() {
        let regs = kvm_regs { rip: 0x1000, rdi: 0x2000, rbx: 0x40, r12: 0x8000, rcx: 0x10, ..Default::default() };
        // xsave [rdi]
        assert_eq!(at(&[0x0f, 0xae, 0x27], regs).unwrap().assist, Assist::Save { address: 0x2000 });
        // xsave64 [rdi+0x40]
        assert_eq!(
            at(&[0x48, 0x0f, 0xae, 0x67, 0x40], regs).unwrap(),
            Step { assist: Assist::Save { address: 0x2040 }, next_rip: 0x1005 }
        );
        // xrstor64 [rdi+rbx*1+0x100]
        assert_eq!(at(&[0x48, 0x0f, 0xae, 0xac, 0x1f, 0, 1, 0, 0], regs).unwrap().assist, Assist::Restore { address: 0x2140 });
        // xsaveopt64 [r12]
        assert_eq!(at(&[0x49, 0x0f, 0xae, 0x34, 0x24], regs).unwrap().assist, Assist::Save { address: 0x8000 });
        // xrstor [rip+0x38]: the next RIP is 0x1007, so 0x103f: not aligned
        assert!(matches!(at(&[0x0f, 0xae, 0x2d, 0x38, 0, 0, 0], regs), Err(AssistError::BadArea { address: 0x103f, .. })));
        assert_eq!(at(&[0x0f, 0xae, 0x2d, 0x39, 0, 0, 0], regs).unwrap().assist, Assist::Restore { address: 0x1040 });
        // gs xsave [rcx*4]
        assert_eq!(
            at(&[0x65, 0x0f, 0xae, 0x24, 0x8d, 0, 0, 0, 0], regs).unwrap().assist,
            Assist::Save { address: 0xffff_8880_0000_0040 }
        );
    }

    #[test]
    fn everything_else_is_refused_with_rip_and_bytes() {
        let regs = kvm_regs { rip: 0xabc0, ..Default::default() };
        // xsavec64 [rdi]: the compacted format is masked, so nobody should ask for it
        let error = at(&[0x48, 0x0f, 0xc7, 0x27, 0x90], regs).unwrap_err().to_string();
        assert!(error.contains("0xabc0") && error.contains("48 0f c7 27") && !error.contains("90"), "{error}");
        // popcnt eax, eax
        assert!(matches!(at(&[0xf3, 0x0f, 0xb8, 0xc0], regs), Err(AssistError::Unknown { .. })));
        assert!(matches!(at(&[], regs), Err(AssistError::Undecodable { .. })));
        assert!(matches!(at(&[0x0f, 0xae], regs), Err(AssistError::Undecodable { .. })));
        assert!(matches!(at(&[0xf0; 15], regs), Err(AssistError::Undecodable { .. })));
    }
}
