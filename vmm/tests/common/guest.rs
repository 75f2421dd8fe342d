//! The line protocol of examples/test_guest.rs over the guest channel.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// A connection to the guest.
pub struct Lines {
    pub stream: BufReader<UnixStream>,
}

impl Lines {
    pub fn connect(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(super::BOUND)).unwrap();
        Self { stream: BufReader::new(stream) }
    }
    pub fn send(&mut self, line: &str) {
        self.stream.get_mut().write_all(format!("{line}\n").as_bytes()).unwrap();
    }
    pub fn answer(&mut self) -> Result<String, std::io::Error> {
        let mut line = String::new();
        match self.stream.read_line(&mut line)? {
            0 => Err(std::io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(line.trim_end().to_owned()),
        }
    }
    pub fn say(&mut self, line: &str) -> String {
        self.send(line);
        self.answer().unwrap_or_else(|e| panic!("{line:?}: {e}"))
    }
    /// A number out of an answer like `mono=12 real=5`.
    pub fn number(answer: &str, key: &str) -> i64 {
        let found = answer.split(' ').find_map(|w| w.strip_prefix(key)?.strip_prefix('=')?.parse().ok());
        found.unwrap_or_else(|| panic!("no {key} in {answer:?}"))
    }
}
