//! Writes initramfs archives: cpio "newc" (Linux Documentation/driver-api/early-userspace/buffer-format.rst).
//!
//! Owner is root, times are zero and inodes count up, so the same input gives the same bytes.

/// An archive under construction.
pub(crate) struct Cpio {
    bytes: Vec<u8>,
    entries: u32,
}

const MODE_DIR: u32 = 0o040_755;
const MODE_FILE: u32 = 0o100_000;
const MODE_CHAR: u32 = 0o020_600;

impl Cpio {
    pub(crate) fn new() -> Self {
        Self { bytes: Vec::new(), entries: 0 }
    }

    /// Adds a directory; its parents must have been added.
    pub(crate) fn dir(&mut self, name: &str) {
        self.entry(name, MODE_DIR, (0, 0), &[]);
    }

    /// Adds a file with permission bits `permissions`.
    pub(crate) fn file(&mut self, name: &str, permissions: u32, content: &[u8]) {
        self.entry(name, MODE_FILE | permissions, (0, 0), content);
    }

    /// Adds a character device.
    pub(crate) fn char_device(&mut self, name: &str, major: u32, minor: u32) {
        self.entry(name, MODE_CHAR, (major, minor), &[]);
    }

    /// The finished archive.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.pad(512);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(content.len()).expect("initramfs files are far below 4 GiB");
        let name_size = u32::try_from(name.len() + 1).expect("names are short");
        let links = if mode & 0o170_000 == 0o040_000 { 2 } else { 1 };
        let fields = [self.entries, mode, 0, 0, links, 0, size, 0, 0, device.0, device.1, name_size, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad(4);
        self.bytes.extend_from_slice(content);
        self.pad(4);
    }

    fn pad(&mut self, to: usize) {
        self.bytes.resize(self.bytes.len().next_multiple_of(to), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes() {
        let mut cpio = Cpio::new();
        cpio.dir("ks");
        cpio.file("init", 0o755, b"abc");
        let bytes = cpio.finish();
        assert_eq!(bytes.len(), 512);
        let text = String::from_utf8_lossy(&bytes);
        assert!(text.starts_with(
            "07070100000001000041ED00000000000000000000000200000000000000000000000000000000000000000000000000000003\
             00000000ks\0"
        ));
        assert!(text.contains(
            "07070100000002000081ED000000000000000000000001000000000000000300000000000000000000000000000000000000\
             0500000000init\0\0abc\0"
        ));
        assert!(text.contains("TRAILER!!!\0"));
    }
}
