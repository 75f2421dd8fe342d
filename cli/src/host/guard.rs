//! A child process that puts the terminal back when `ks` is killed so hard that it cannot do so itself.
//!
//! It runs in a session of its own (job control does not stop it from touching the terminal) and waits on a socket:
//! frames of a little-endian u32 length and the bytes that undo the program's modes; a length of `u32::MAX` dismisses
//! it. When the socket ends without that, it writes the bytes and restores the line discipline, unless the shell has
//! done so already.

use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const DISMISS: u32 = u32::MAX;
const RESET_MAX: u32 = 64 * 1024;
const READY_TIMEOUT: Duration = Duration::from_secs(3);

/// The parent's end.
#[derive(Debug)]
pub struct Guard {
    socket: UnixStream,
    child: Child,
}

impl Guard {
    /// Starts the child; None when it does not come up (then only SIGKILL leaves the terminal raw).
    pub fn start() -> Option<Self> {
        let (mine, theirs) = UnixStream::pair().ok()?;
        let tty_in = rustix::stdio::stdin().try_clone_to_owned().ok()?;
        let child = Command::new(std::env::current_exe().ok()?)
            .arg(crate::TTY_GUARD)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::inherit())
            .stderr(Stdio::from(tty_in))
            .spawn()
            .ok()?;
        let mut guard = Self { socket: mine, child };
        // It has read the line discipline when it says so; only then may it change.
        guard.socket.set_read_timeout(Some(READY_TIMEOUT)).ok()?;
        guard.socket.set_write_timeout(Some(READY_TIMEOUT)).ok()?;
        let mut ready = [0];
        if guard.socket.read_exact(&mut ready).is_err() {
            guard.dismiss();
            return None;
        }
        Some(guard)
    }
    /// From now on these bytes undo the program's modes.
    pub fn set_reset(&mut self, bytes: &[u8]) {
        let len = u32::try_from(bytes.len()).unwrap_or(RESET_MAX).min(RESET_MAX);
        let mut frame = len.to_le_bytes().to_vec();
        frame.extend_from_slice(&bytes[..len as usize]);
        // A guard that has died guards nothing; the session goes on.
        let _ = self.socket.write_all(&frame);
    }
    /// The terminal is back; the child may go.
    pub fn dismiss(mut self) {
        let _ = self.socket.write_all(&DISMISS.to_le_bytes());
        let _ = self.child.wait();
    }
}

/// The child: socket on stdin, terminal for writing on stdout and for its line discipline on stderr.
pub fn run() -> u8 {
    // Failing means that it is its own session already.
    let _ = rustix::process::setsid();
    let tty = rustix::stdio::stderr();
    let Ok(before) = tcgetattr(tty) else { return 1 };
    let Ok(fd) = rustix::stdio::stdin().try_clone_to_owned() else { return 1 };
    let mut socket = UnixStream::from(fd);
    if socket.write_all(&[1]).is_err() {
        return 1;
    }
    let mut reset = Vec::new();
    while let Ok(Some(bytes)) = frame(&mut socket) {
        match bytes {
            Some(b) => reset = b,
            None => return 0,
        }
    }
    super::terminal::write_all(&reset);
    let mut raw = before.clone();
    raw.make_raw();
    let same = tcgetattr(tty).is_ok_and(|now| now.local_modes == raw.local_modes && now.input_modes == raw.input_modes);
    if same {
        let _ = tcsetattr(tty.as_fd(), OptionalActions::Now, &before);
    }
    0
}

/// The next frame: bytes, or Some(None) to be dismissed; None or an error at the end of the socket.
fn frame(socket: &mut UnixStream) -> std::io::Result<Option<Option<Vec<u8>>>> {
    let mut len = [0; 4];
    socket.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len);
    if len == DISMISS {
        return Ok(Some(None));
    }
    if len > RESET_MAX {
        return Ok(None);
    }
    let mut bytes = vec![0; len as usize];
    socket.read_exact(&mut bytes)?;
    Ok(Some(Some(bytes)))
}
