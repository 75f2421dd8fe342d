//! A running guest's memory as a file, and the way of the service that we follow on it: fixed 4 MiB chunks named by SHA-256.
//!
//! The memory is read through `/proc/PID/fd` of ks-vmm (root, or the same user): only a benchmark does this.

use anyhow::{Context, Result, ensure};
use rustix::fs::{SeekFrom, seek};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Their chunk size.
const CHUNK: usize = 4 * 1024 * 1024;
const PAGE: usize = 4096;

/// Opens the guest's memory file: the largest memfd that the VMM process `pid` or a process below it holds. The process that
/// the node knows is the keeper; the memory is held by the jailed one below it.
pub fn open(pid: u64) -> Result<File> {
    let (mut best, mut todo): (Option<(u64, File)>, _) = (None, vec![pid]);
    while let Some(pid) = todo.pop() {
        // Each thread has children of its own.
        for task in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            todo.extend(children.split_whitespace().filter_map(|c| c.parse::<u64>().ok()));
        }
        for e in std::fs::read_dir(format!("/proc/{pid}/fd")).context("reading the VMM's descriptors (root is needed)")?.flatten()
        {
            let is_memfd = std::fs::read_link(e.path()).is_ok_and(|l| l.to_string_lossy().starts_with("/memfd:"));
            if !is_memfd {
                continue;
            }
            let f = File::open(e.path()).context("opening guest memory")?;
            let len = f.metadata().context("guest memory's size")?.len();
            if best.as_ref().is_none_or(|(l, _)| len > *l) {
                best = Some((len, f));
            }
        }
    }
    let (len, file) = best.context("the VMM holds no memory file")?;
    ensure!(len >= 64 << 20, "the largest memory file has only {len} bytes");
    Ok(file)
}

/// Ranges that hold data; holes are zeros that were never touched.
fn extents(f: &File) -> Result<Vec<(u64, u64)>> {
    let len = f.metadata().context("size")?.len();
    let (mut at, mut out) = (0, Vec::new());
    while at < len {
        let Ok(start) = seek(f, SeekFrom::Data(at)) else { break };
        let end = seek(f, SeekFrom::Hole(start)).context("finding a hole")?;
        out.push((start, end));
        at = end;
    }
    Ok(out)
}

/// Bytes of pages that are not all zeros.
pub fn nonzero_bytes(f: &File) -> Result<u64> {
    let mut buf = vec![0u8; CHUNK];
    let mut n = 0;
    for (start, end) in extents(f)? {
        let mut at = start;
        while at < end {
            let k = CHUNK.min((end - at) as usize);
            f.read_exact_at(&mut buf[..k], at).context("reading guest memory")?;
            n += buf[..k].chunks(PAGE).filter(|p| p.iter().any(|&b| b != 0)).map(|p| p.len() as u64).sum::<u64>();
            at += k as u64;
        }
    }
    Ok(n)
}

/// Calls `with` for each 4 MiB chunk that holds data: its place, its name, its bytes as they were when it was named (the guest
/// goes on writing meanwhile).
fn each_chunk(f: &File, mut with: impl FnMut(u64, [u8; 32], &[u8]) -> Result<()>) -> Result<()> {
    let len = f.metadata().context("size")?.len();
    let (mut buf, mut next) = (vec![0u8; CHUNK], 0);
    for (start, end) in extents(f)? {
        let first = (start / CHUNK as u64 * CHUNK as u64).max(next);
        for at in (first..end).step_by(CHUNK) {
            let k = CHUNK.min((len - at) as usize);
            f.read_exact_at(&mut buf[..k], at).context("reading guest memory")?;
            with(at, Sha256::digest(&buf[..k]).into(), &buf[..k])?;
            next = at + CHUNK as u64;
        }
    }
    Ok(())
}

/// Adds the sizes of all 4 MiB chunks that hold data to `seen`, by name.
pub fn reference_chunks(f: &File, seen: &mut HashMap<[u8; 32], u64>) -> Result<()> {
    each_chunk(f, |_, name, bytes| {
        seen.entry(name).or_insert(bytes.len() as u64);
        Ok(())
    })
}

/// The memory stored their way in `dir`: one file per distinct chunk. Returns the places and names.
pub fn store_reference(f: &File, dir: &Path) -> Result<Vec<(u64, [u8; 32])>> {
    let mut names = Vec::new();
    each_chunk(f, |at, name, bytes| {
        std::fs::write(dir.join(hex(&name)), bytes).context("storing a reference chunk")?;
        names.push((at, name));
        Ok(())
    })?;
    Ok(names)
}

/// Rebuilds the whole memory from the chunks, each checked, into a fresh file; the time it took.
pub fn rebuild_reference(names: &[(u64, [u8; 32])], len: u64, dir: &Path) -> Result<Duration> {
    let t = Instant::now();
    let out = tempfile::tempfile_in("/dev/shm").or_else(|_| tempfile::tempfile()).context("a file for the rebuilt memory")?;
    out.set_len(len).context("sizing the rebuilt memory")?;
    for (at, name) in names {
        let bytes = std::fs::read(dir.join(hex(name))).context("a reference chunk")?;
        let got: [u8; 32] = Sha256::digest(&bytes).into();
        ensure!(got == *name, "a reference chunk does not match its name");
        out.write_all_at(&bytes, *at).context("writing the rebuilt memory")?;
    }
    Ok(t.elapsed())
}

/// Drops the host's clean page cache, so that packs and programs come from the disk again.
pub fn drop_caches() -> Result<()> {
    rustix::fs::sync();
    std::fs::write("/proc/sys/vm/drop_caches", "3").context("dropping the page cache (root is needed for cold figures)")
}

/// Bytes that a folder's files take on disk.
pub fn disk_bytes(dir: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let mut n = 0;
    for e in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        match e.metadata() {
            Ok(m) if m.is_dir() => n += disk_bytes(&e.path()),
            Ok(m) => n += m.blocks() * 512,
            Err(_) => {}
        }
    }
    n
}

fn hex(name: &[u8; 32]) -> String {
    name.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_way_rebuilds_what_it_stored() {
        let dir = tempfile::tempdir().unwrap();
        let f = tempfile::tempfile().unwrap();
        f.set_len(40 << 20).unwrap();
        f.write_all_at(&[7; 5000], 9 << 20).unwrap();
        f.write_all_at(&[8; 100], (40 << 20) - 100).unwrap();
        let names = store_reference(&f, dir.path()).unwrap();
        assert_eq!(names.iter().map(|n| n.0).collect::<Vec<_>>(), [8 << 20, 36 << 20]);
        assert!(nonzero_bytes(&f).unwrap() >= 2 * 4096);
        rebuild_reference(&names, 40 << 20, dir.path()).unwrap();
        std::fs::write(dir.path().join(hex(&names[0].1)), b"rot").unwrap();
        assert!(rebuild_reference(&names, 40 << 20, dir.path()).is_err());
    }
}
