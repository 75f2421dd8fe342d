//! Lines on the console. Short on purpose: every byte is an exit to the host.

use std::io::Write;

/// One line with the program's name before it, to standard error (the console for PID 1). Never fails.
pub fn line(text: &str) {
    let _ = std::io::stderr().write_all(format!("ks-guest: {text}\n").as_bytes());
}

/// Text as it is, to standard output.
pub fn plain(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}
