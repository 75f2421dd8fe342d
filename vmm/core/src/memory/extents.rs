//! Which pages of a memory file hold data, by SEEK_DATA: never by reading through a mapping, which would fill holes.

use super::state::CHUNK_PAGES;
use super::uffd::PAGE_BYTES;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use std::os::fd::BorrowedFd;

/// One mask per chunk: the pages that are not holes.
pub fn data_pages(file: BorrowedFd<'_>, bytes: u64) -> Result<Vec<u16>, Errno> {
    let mut masks = vec![0u16; (bytes / PAGE_BYTES / CHUNK_PAGES) as usize];
    let mut at = 0;
    while at < bytes {
        let start = match seek(file, SeekFrom::Data(at)) {
            Ok(s) if s < bytes => s,
            Ok(_) | Err(Errno::NXIO) => break,
            Err(e) => return Err(e),
        };
        let end = seek(file, SeekFrom::Hole(start))?.min(bytes);
        mark(&mut masks, start / PAGE_BYTES, end.div_ceil(PAGE_BYTES));
        at = end;
    }
    Ok(masks)
}

/// Sets the bits of pages `first..end`.
pub fn mark(masks: &mut [u16], first: u64, end: u64) {
    each(first, end, |chunk, bits| masks[chunk] |= bits);
}

/// Clears the bits of pages `first..end`.
pub fn clear(masks: &mut [u16], first: u64, end: u64) {
    each(first, end, |chunk, bits| masks[chunk] &= !bits);
}

fn each(first: u64, end: u64, mut apply: impl FnMut(usize, u16)) {
    let mut page = first;
    while page < end {
        let chunk = page / CHUNK_PAGES;
        let stop = end.min((chunk + 1) * CHUNK_PAGES);
        let bits = ((1u32 << (stop - page)) - 1) << (page % CHUNK_PAGES);
        apply(chunk as usize, bits as u16);
        page = stop;
    }
}
