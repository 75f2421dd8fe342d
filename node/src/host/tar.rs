//! The one archive that the node makes itself: a single file, for steering a fork. Format: POSIX ustar.

use ks_proto::api::ApiError;

/// An archive with one regular file, mode 0644.
///
/// # Errors
/// If the name does not fit a plain header.
pub fn one_file(name: &str, bytes: &[u8]) -> Result<Vec<u8>, ApiError> {
    if name.is_empty() || name == "." || name == ".." || name.len() > 99 || name.contains('\0') {
        let why = format!("{name:?} is not a file name of 1-99 bytes");
        return Err(ApiError::new("usage", "the file cannot be put into the guest", why, "give a path like /workspace/NOTE"));
    }
    let mut h = [0u8; 512];
    let mut put = |at: usize, text: &str| h[at..at + text.len()].copy_from_slice(text.as_bytes());
    put(0, name);
    put(100, "0000644\0");
    put(108, "0000000\0");
    put(116, "0000000\0");
    put(124, &format!("{:011o}\0", bytes.len()));
    put(136, "00000000000\0");
    put(148, "        ");
    put(156, "0");
    put(257, "ustar\u{0}00");
    let sum: u32 = h.iter().map(|b| u32::from(*b)).sum();
    h[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let mut out = h.to_vec();
    out.extend_from_slice(bytes);
    out.resize(out.len().next_multiple_of(512) + 1024, 0);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_archive_has_one_file_with_a_right_checksum_and_padding() {
        let a = one_file("note", b"hello").unwrap();
        assert_eq!(a.len(), 512 + 512 + 1024);
        let sum: u32 = a[..512].iter().enumerate().map(|(i, b)| if (148..156).contains(&i) { 32 } else { u32::from(*b) }).sum();
        assert_eq!(std::str::from_utf8(&a[148..154]).unwrap(), format!("{sum:06o}"));
        assert_eq!(&a[512..518], b"hello\0");
        assert!(one_file("..", b"").is_err() && one_file("", b"").is_err());
    }
}
