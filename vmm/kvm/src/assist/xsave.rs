//! XSAVE and XRSTOR in the standard format over byte buffers: which bytes move, by RFBM and XSTATE_BV.
//!
//! `register` areas are what KVM_GET_XSAVE returns: the standard format with the header at 512. Components whose
//! XSTATE_BV bit is clear are in their initial configuration. Source: Intel SDM volume 1, 13.7 and 13.8.

/// End of the legacy region and start of the header.
pub const HEADER: usize = 512;
/// End of the header and start of the extended region.
pub const EXTENDED: usize = 576;
/// Components in the legacy region.
const X87: u64 = 1;
const SSE: u64 = 2;
const AVX: u64 = 4;
/// Bytes of the x87 part: control to opcode and pointers, then the stack registers.
const X87_PARTS: [(usize, usize); 2] = [(0, 24), (32, 160)];
const MXCSR: (usize, usize) = (24, 32);
const XMM: (usize, usize) = (160, 416);
/// FCW after FNINIT.
const FCW_INIT: u16 = 0x37f;
/// MXCSR after reset.
const MXCSR_INIT: u32 = 0x1f80;

/// Where a component beyond the legacy region lies: (offset, bytes), from CPUID leaf 0xd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Component {
    /// Bit in RFBM and XSTATE_BV, 2-62.
    pub bit: u8,
    /// Offset in the standard format.
    pub offset: usize,
    /// Length.
    pub bytes: usize,
}

/// The layout on this host.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Layout {
    /// User components, ascending by bit.
    pub components: Vec<Component>,
    /// All components that XCR0 may have, x87 and SSE included.
    pub mask: u64,
}

impl Layout {
    /// Bytes from the start to the end of the last of the components in `rfbm`.
    pub fn area_bytes(&self, rfbm: u64) -> usize {
        let last = self.components.iter().filter(|c| rfbm >> c.bit & 1 == 1).map(|c| c.offset + c.bytes).max();
        last.unwrap_or(EXTENDED).max(EXTENDED)
    }
}

/// One stretch to copy to the guest's save area: from this offset of the register area, so many bytes.
pub type Span = (usize, usize);

fn u64_at(area: &[u8], at: usize) -> u64 {
    let mut b = [0; 8];
    b.copy_from_slice(&area[at..at + 8]);
    u64::from_le_bytes(b)
}

/// What XSAVE writes: the spans of the register area to store at the same offsets, and the new XSTATE_BV.
/// `old_bv` is XSTATE_BV of the guest's area before.
pub fn save(layout: &Layout, register: &[u8], rfbm: u64, old_bv: u64) -> (Vec<Span>, u64) {
    let in_use = u64_at(register, HEADER);
    let mut spans = Vec::new();
    if rfbm & X87 != 0 {
        spans.extend(X87_PARTS.map(|(from, to)| (from, to - from)));
    }
    if rfbm & (SSE | AVX) != 0 {
        spans.push((MXCSR.0, MXCSR.1 - MXCSR.0));
    }
    if rfbm & SSE != 0 {
        spans.push((XMM.0, XMM.1 - XMM.0));
    }
    // A component in its initial configuration is written too (KVM's area holds its initial values), as XSAVE does.
    spans.extend(layout.components.iter().filter(|c| rfbm >> c.bit & 1 == 1).map(|c| (c.offset, c.bytes)));
    (spans, (old_bv & !rfbm) | (in_use & rfbm))
}

/// Applies XRSTOR: `area` is the guest's area, at least [`Layout::area_bytes`] of `rfbm`. Changes `register` in place.
/// Refuses a compacted area and a header that names components which are not there.
pub fn restore(layout: &Layout, register: &mut [u8], area: &[u8], rfbm: u64) -> Result<(), String> {
    if area.len() < layout.area_bytes(rfbm) || register.len() < layout.area_bytes(layout.mask) {
        return Err(format!("{} bytes are too few", area.len().min(register.len())));
    }
    let bv = u64_at(area, HEADER);
    if u64_at(area, HEADER + 8) >> 63 != 0 {
        return Err("compacted format".into());
    }
    if bv & !layout.mask != 0 {
        return Err(format!("XSTATE_BV {bv:#x} names components beyond {:#x}", layout.mask));
    }
    if rfbm & X87 != 0 {
        for (from, to) in X87_PARTS {
            if bv & X87 != 0 { register[from..to].copy_from_slice(&area[from..to]) } else { register[from..to].fill(0) }
        }
        if bv & X87 == 0 {
            register[..2].copy_from_slice(&FCW_INIT.to_le_bytes());
        }
    }
    if rfbm & (SSE | AVX) != 0 {
        // The mask beside MXCSR is the processor's, not the guest's.
        register[MXCSR.0..MXCSR.0 + 4].copy_from_slice(&area[MXCSR.0..MXCSR.0 + 4]);
    }
    if rfbm & SSE != 0 {
        if bv & SSE != 0 { register[XMM.0..XMM.1].copy_from_slice(&area[XMM.0..XMM.1]) } else { register[XMM.0..XMM.1].fill(0) }
    }
    for c in layout.components.iter().filter(|c| rfbm >> c.bit & 1 == 1) {
        let range = c.offset..c.offset + c.bytes;
        if bv >> c.bit & 1 == 1 { register[range.clone()].copy_from_slice(&area[range]) } else { register[range].fill(0) }
    }
    // The legacy components were written whole, so they count as in use: KVM then loads those bytes.
    let in_use = (u64_at(register, HEADER) & !rfbm) | (bv & rfbm) | X87 | SSE;
    register[HEADER..HEADER + 8].copy_from_slice(&in_use.to_le_bytes());
    Ok(())
}

/// FNINIT on a register area.
pub fn x87_init(register: &mut [u8]) {
    let in_use = u64_at(register, HEADER);
    if in_use & (SSE | AVX) == 0 {
        register[MXCSR.0..MXCSR.0 + 4].copy_from_slice(&MXCSR_INIT.to_le_bytes());
    }
    register[..24].fill(0);
    register[..2].copy_from_slice(&FCW_INIT.to_le_bytes());
    register[HEADER..HEADER + 8].copy_from_slice(&(in_use | X87).to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> Layout {
        let components = vec![
            Component { bit: 2, offset: 576, bytes: 256 },
            Component { bit: 5, offset: 1088, bytes: 64 },
            Component { bit: 6, offset: 1152, bytes: 512 },
        ];
        Layout { components, mask: 0x67 }
    }
    fn filled(byte: u8, bv: u64) -> Vec<u8> {
        let mut a = vec![byte; 4096];
        a[HEADER..EXTENDED].fill(0);
        a[HEADER..HEADER + 8].copy_from_slice(&bv.to_le_bytes());
        a
    }
    fn apply(spans: &[Span], bv: u64, register: &[u8], area: &mut [u8]) {
        for &(at, n) in spans {
            area[at..at + n].copy_from_slice(&register[at..at + n]);
        }
        area[HEADER..HEADER + 8].copy_from_slice(&bv.to_le_bytes());
    }

    #[test]
    fn save_writes_what_rfbm_asks_and_xstate_bv_says_what_is_in_use() {
        let register = filled(7, 0x7);
        let mut area = filled(1, 0x60);
        let (spans, bv) = save(&layout(), &register, 0x25, u64_at(&area, HEADER));
        apply(&spans, bv, &register, &mut area);
        assert_eq!(bv, 0x45, "bit 5 asked and not in use: cleared; bit 6 not asked: kept");
        assert_eq!((area[0], area[24], area[32], area[160]), (7, 7, 7, 1), "no XMM without SSE; MXCSR goes with AVX");
        assert_eq!((area[576], area[1088], area[1152]), (7, 7, 1));
    }

    #[test]
    fn restore_loads_or_initialises_by_xstate_bv() {
        let mut register = filled(7, 0x67);
        let area = filled(1, 0x4);
        restore(&layout(), &mut register, &area, 0x7).unwrap();
        assert_eq!(u16::from_le_bytes([register[0], register[1]]), FCW_INIT, "x87 asked, absent: initial");
        assert_eq!((register[32], register[160]), (0, 0));
        assert_eq!(register[24..28], [1; 4], "MXCSR is loaded even when SSE is initial");
        assert_eq!(register[28..32], [7; 4], "the mask is not");
        assert_eq!((register[576], register[1088], register[1152]), (1, 7, 7), "AVX loaded, the others not asked");
        assert_eq!(u64_at(&register, HEADER), 0x67);
    }

    #[test]
    fn two_processes_take_turns_and_each_finds_its_own_state() {
        let l = layout();
        let mut cpu = filled(0, 0);
        let (mut a, mut b) = (filled(0, 0), filled(0, 0));
        let run = |cpu: &mut Vec<u8>, byte: u8| *cpu = filled(byte, 0x67);
        run(&mut cpu, 0xa);
        let (s, bv) = save(&l, &cpu, l.mask, 0);
        apply(&s, bv, &cpu, &mut a);
        restore(&l, &mut cpu, &b, l.mask).unwrap();
        assert_eq!((cpu[160], cpu[576], cpu[1152]), (0, 0, 0), "nothing of the first shows");
        run(&mut cpu, 0xb);
        let (s, bv) = save(&l, &cpu, l.mask, 0);
        apply(&s, bv, &cpu, &mut b);
        restore(&l, &mut cpu, &a, l.mask).unwrap();
        assert_eq!((cpu[0], cpu[160], cpu[576], cpu[1088], cpu[1152]), (0xa, 0xa, 0xa, 0xa, 0xa));
    }

    #[test]
    fn hostile_areas_are_refused() {
        let l = layout();
        let mut register = filled(7, 0x7);
        let before = register.clone();
        let mut compacted = filled(1, 0x4);
        compacted[HEADER + 15] = 0x80;
        assert!(restore(&l, &mut register, &compacted, 0x7).is_err());
        assert!(restore(&l, &mut register, &filled(1, 1 << 40), 0x7).is_err());
        assert!(restore(&l, &mut register, &[0; 600], 0x67).is_err());
        assert_eq!(register, before);
    }

    #[test]
    fn fninit_touches_only_the_x87_part() {
        let mut register = filled(7, 0x6);
        x87_init(&mut register);
        assert_eq!(u16::from_le_bytes([register[0], register[1]]), FCW_INIT);
        assert_eq!((register[2], register[24], register[32], register[160]), (0, 7, 7, 7));
        assert_eq!(u64_at(&register, HEADER), 0x7);
    }
}
