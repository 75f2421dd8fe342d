//! The person's terminal in raw mode, and every way back out of it.
//!
//! What must be undone is kept in one place ([`SAVED`]) that a normal end, an error, a panic and a signal all reach; a
//! child process (guard.rs) undoes it when `ks` is killed outright.

use super::guard::Guard;
use crate::failure::{Failure, Res};
use crate::modes::Modes;
use rustix::termios::{OptionalActions, QueueSelector, Termios, tcflush, tcgetattr, tcgetwinsize, tcsetattr};
use std::io::IsTerminal;
use std::sync::{Mutex, MutexGuard, PoisonError};

struct Saved {
    termios: Termios,
    reset: Vec<u8>,
    guard: Option<Guard>,
}

/// What undoes raw mode; None when there is nothing to undo.
static SAVED: Mutex<Option<Saved>> = Mutex::new(None);

fn saved() -> MutexGuard<'static, Option<Saved>> {
    SAVED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The terminal in raw mode until this is dropped.
#[derive(Debug)]
pub struct Raw(());

impl Raw {
    /// Takes the terminal on stdin and stdout into raw mode.
    pub fn enter() -> Res<Self> {
        let bad = |e: &dyn std::fmt::Display| Failure::local("cannot use the terminal", e, "is it still there?");
        let stdin = rustix::stdio::stdin();
        let termios = tcgetattr(stdin).map_err(|e| bad(&e))?;
        let guard = Guard::start();
        let mut raw = termios.clone();
        raw.make_raw();
        *saved() = Some(Saved { termios, reset: Modes::default().reset(), guard });
        set_reset(&Modes::default());
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            restore();
            before(info);
            std::process::exit(i32::from(crate::failure::FAILED));
        }));
        if let Err(e) = tcsetattr(stdin, OptionalActions::Flush, &raw) {
            restore();
            return Err(bad(&e));
        }
        Ok(Self(()))
    }
}
impl Drop for Raw {
    fn drop(&mut self) {
        restore();
    }
}

/// A terminal that shows nothing of what is typed, until this is dropped.
#[derive(Debug)]
pub struct NoEcho(Termios);

impl NoEcho {
    /// On standard input.
    pub fn enter() -> Res<Self> {
        let bad = |e: rustix::io::Errno| Failure::local("cannot use the terminal", e, "is it still there?");
        let before = tcgetattr(rustix::stdio::stdin()).map_err(bad)?;
        let mut quiet = before.clone();
        quiet.local_modes.remove(rustix::termios::LocalModes::ECHO);
        tcsetattr(rustix::stdio::stdin(), OptionalActions::Flush, &quiet).map_err(bad)?;
        Ok(Self(before))
    }
}
impl Drop for NoEcho {
    fn drop(&mut self) {
        let _ = tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, &self.0);
    }
}

/// Remembers what undoes the program's modes from now on; before they reach the terminal.
pub fn set_reset(modes: &Modes) {
    let mut all = saved();
    if let Some(s) = all.as_mut() {
        s.reset = modes.reset();
        if let Some(g) = s.guard.as_mut() {
            g.set_reset(&s.reset);
        }
    }
}

/// Puts the terminal back: modes, then line discipline. Does nothing the second time.
pub fn restore() {
    let Some(mut s) = saved().take() else { return };
    write_all(&s.reset);
    // Answers to queries that arrive now would be typed into the shell.
    let _ = tcflush(rustix::stdio::stdin(), QueueSelector::IFlush);
    let _ = tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, &s.termios);
    if let Some(g) = s.guard.take() {
        g.dismiss();
    }
}

/// Writes to the terminal; a terminal that is gone takes nothing, and nobody is left to tell.
pub fn write_all(mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match rustix::io::write(rustix::stdio::stdout(), bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => {
                let mut fds = [rustix::event::PollFd::from_borrowed_fd(rustix::stdio::stdout(), rustix::event::PollFlags::OUT)];
                let _ = rustix::event::poll(&mut fds, None);
            }
            Err(_) => return,
        }
    }
}

/// Columns and rows; 80x24 where the terminal does not know.
pub fn size() -> (u16, u16) {
    match tcgetwinsize(rustix::stdio::stdout()) {
        Ok(w) if w.ws_col > 0 && w.ws_row > 0 => (w.ws_col, w.ws_row),
        _ => (80, 24),
    }
}

/// TERM as the person has it.
pub fn term() -> String {
    std::env::var("TERM").ok().filter(|t| !t.is_empty()).unwrap_or_else(|| "xterm-256color".into())
}

/// Are stdin and stdout both terminals?
pub fn both() -> bool {
    std::io::stdin().is_terminal() && std::io::stdout().is_terminal()
}
