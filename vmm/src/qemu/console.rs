//! The serial console as a file of bounded size, and its tail for people.

use ks_vmm_core::confine::{Kind, enter};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// A console log moves to `console.log.old` when it has grown to this.
const LOG_BYTES_MAX: u64 = 4 * 1024 * 1024;
/// Bytes of a tail.
const TAIL_BYTES: u64 = 2048;
/// Bytes looked through for a panic, whose report is longer than a tail.
const PANIC_BYTES: u64 = 32 * 1024;
/// How the kernel begins its last report.
const PANIC: &str = "Kernel panic";

/// Copies what the guest prints into `path` until QEMU closes its end. A full log moves to `.old` by its contents: this
/// process may write both files, but not rename them.
pub fn start(mut from: UnixStream, path: &Path) -> std::io::Result<std::thread::JoinHandle<()>> {
    let open = |p: &Path| OpenOptions::new().create(true).read(true).append(true).open(p);
    let mut file = open(path)?;
    let mut old = open(&path.with_extension("log.old"))?;
    std::thread::Builder::new().name("ks-console".into()).spawn(move || {
        enter(Kind::Device);
        let mut written = file.seek(SeekFrom::End(0)).unwrap_or(0);
        let mut buffer = [0u8; 4096];
        while let Ok(n @ 1..) = from.read(&mut buffer) {
            if written + n as u64 > LOG_BYTES_MAX {
                if let Err(e) = turn_over(&mut file, &mut old) {
                    return tracing::warn!("the console log ends: {e}");
                }
                written = 0;
            }
            if file.write_all(&buffer[..n]).is_ok() {
                written += n as u64;
            }
        }
    })
}

fn turn_over(file: &mut File, old: &mut File) -> std::io::Result<()> {
    old.set_len(0)?;
    file.rewind()?;
    let mut buffer = vec![0u8; 64 * 1024];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            n => old.write_all(&buffer[..n])?,
        }
    }
    file.set_len(0)
}

/// The last printable part of a log; "" when there is none.
pub fn tail(path: &Path) -> String {
    end_of(path, TAIL_BYTES)
}

/// The beginning of the kernel's last panic, if the log ends with one.
pub fn panic(path: &Path) -> Option<String> {
    let text = end_of(path, PANIC_BYTES);
    let at = text.rfind(PANIC)?;
    Some(text[at..].chars().take(TAIL_BYTES as usize).collect())
}

fn end_of(path: &Path, bytes_max: u64) -> String {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut f = File::open(path)?;
        let len = f.metadata()?.len();
        f.seek(SeekFrom::Start(len.saturating_sub(bytes_max)))?;
        let mut bytes = Vec::new();
        f.take(bytes_max).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let clean = text.chars().filter(|c| *c == '\n' || !c.is_control()).collect::<String>();
    clean.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_stays_bounded_and_its_tail_is_plain_text() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let (mut guest, ours) = UnixStream::pair().unwrap();
        let t = start(ours, &path).unwrap();
        let line = [b'x'; 4096];
        for _ in 0..(LOG_BYTES_MAX / 4096 + 10) {
            guest.write_all(&line).unwrap();
        }
        guest.write_all(b"\n\x1b[31mKernel panic\x07 - not syncing\r\n").unwrap();
        drop(guest);
        t.join().unwrap();
        assert!(std::fs::metadata(&path).unwrap().len() < 100_000);
        assert!(std::fs::metadata(dir.path().join("console.log.old")).unwrap().len() > LOG_BYTES_MAX - 8192);
        assert!(tail(&path).ends_with("[31mKernel panic - not syncing"), "{:?}", tail(&path));
        assert_eq!(panic(&path).as_deref(), Some("Kernel panic - not syncing"));
        std::fs::write(&path, format!("Kernel panic - not syncing: why\n{}", "trace\n".repeat(2000))).unwrap();
        assert!(panic(&path).is_some_and(|p| p.starts_with("Kernel panic - not syncing: why\ntrace")));
        assert!(!tail(&path).contains("panic"));
        assert_eq!(tail(&dir.path().join("none")), "");
    }
}
