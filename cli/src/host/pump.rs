//! Carries bytes between the terminal and a link, both ways at once, neither side able to block the other.
//!
//! ```text
//!  keyboard thread ─▶ late-reply filter ─▶ escape keys ─▶ queue ─▶ sender task ─▶ link
//!  screen thread ◀─ mode tracker ◀─ one message at a time ◀─────────────────────── link
//! ```
//! The keyboard is read even while the link takes nothing (so that `Enter ~ .` works on a dead one), until
//! [`QUEUE_MAX`] bytes wait. The link is read only while the screen takes bytes, so that a program that floods it is
//! slowed down instead of filling memory.

use super::link::{Incoming, Receiver, STDIN_CHUNK, Sender};
use super::terminal;
use crate::escape::{Action, Escape, HOLD_MS};
use crate::failure::{Failure, Res};
use crate::modes::Modes;
use crate::replies::{LATE_MS, REST_MS, Replies};
use ks_proto::api::ApiError;
use ks_proto::guest::ExecFrame;
use std::collections::VecDeque;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

/// Typed or pasted bytes that may wait for the link.
pub const QUEUE_MAX: usize = 1 << 20;
const READ_BYTES: usize = 64 * 1024;
/// How long detaching waits for what was typed before it.
const LEAVE_WAIT: Duration = Duration::from_secs(1);

/// Why the pump stopped.
#[derive(Debug, PartialEq, Eq)]
pub enum Ended {
    /// The program ended.
    Exit { code: u8, signal: u8 },
    /// `Enter ~ d`.
    Detached,
    /// `Enter ~ .`.
    Cut,
    /// The link broke; why, and whether anything had come over it.
    Lost { why: String, alive: bool },
    /// The node refuses.
    Refused(ApiError),
    /// `ks` itself was told to end by this signal.
    Signal(u8),
}

enum Paint {
    Bytes(Vec<u8>),
    /// A line at the bottom while the link is down; "" takes it away.
    Status(String),
    /// A new link is about to draw: modes of the old one off.
    Fresh,
    /// Answer when all before this is on the terminal.
    Done(oneshot::Sender<()>),
}

/// The person's side: keyboard, screen, signals. Outlives links.
#[derive(Debug)]
pub struct Person {
    keys: mpsc::Receiver<Vec<u8>>,
    screen: mpsc::Sender<Paint>,
    escape: Escape,
    replies: Replies,
    winch: Signal,
    term: Signal,
    hup: Signal,
    int: Signal,
    held_since: Instant,
    rest_since: Instant,
    linked_since: Instant,
}

/// What a pause of the keyboard asks for.
enum Pause {
    Prefix,
    Rest,
    Late,
}

impl Person {
    /// Takes over keyboard, screen and signals. Raw mode must be on.
    pub fn new(detach: bool) -> Res<Self> {
        let on = |k| signal(k).map_err(|e| Failure::local("cannot listen for signals", e, "report this"));
        let (keys_tx, keys) = mpsc::channel(4);
        let (screen, screen_rx) = mpsc::channel(8);
        let threads = || -> std::io::Result<()> {
            std::thread::Builder::new().name("keyboard".into()).spawn(move || read_keys(&keys_tx))?;
            std::thread::Builder::new().name("screen".into()).spawn(move || paint(screen_rx))?;
            Ok(())
        };
        threads().map_err(|e| Failure::local("cannot start a thread", e, "free some memory"))?;
        let now = Instant::now();
        Ok(Self {
            keys,
            screen,
            escape: Escape::new(detach),
            replies: Replies::default(),
            winch: on(SignalKind::window_change())?,
            term: on(SignalKind::terminate())?,
            hup: on(SignalKind::hangup())?,
            int: on(SignalKind::interrupt())?,
            held_since: now,
            rest_since: now,
            linked_since: now,
        })
    }

    /// Carries bytes until something ends it; `moved` may end it as lost, with its reason.
    pub async fn pump(&mut self, tx: Sender, mut rx: Receiver, moved: impl Future<Output = String>) -> Ended {
        let (out, out_rx) = mpsc::channel(2);
        let sender = tokio::spawn(send_frames(tx, out_rx));
        self.linked_since = Instant::now();
        let ended = self.carry(&out, &mut rx, moved).await;
        drop(out);
        if !matches!(ended, Ended::Cut | Ended::Lost { .. }) {
            let _ = tokio::time::timeout(LEAVE_WAIT, sender).await;
        } else {
            sender.abort();
        }
        self.replies.link_lost();
        ended
    }

    async fn carry(&mut self, out: &mpsc::Sender<ExecFrame>, rx: &mut Receiver, moved: impl Future<Output = String>) -> Ended {
        tokio::pin!(moved);
        let mut queue: VecDeque<ExecFrame> = VecDeque::new();
        let mut queued = 0usize;
        let mut to_screen: VecDeque<Paint> = VecDeque::new();
        let mut alive = false;
        let mut ending: Option<Ended> = None;
        let mut patience = None;
        let screen = self.screen.clone();
        loop {
            let waited = patience.is_some_and(|p| p <= Instant::now());
            if let Some(end) = ending.take_if(|_| waited || (to_screen.is_empty() && queue.is_empty())) {
                return end;
            }
            let pause = self.pause();
            tokio::select! {
                read = self.keys.recv(), if queued < QUEUE_MAX && ending.is_none() => {
                    let Some(read) = read else { return Ended::Signal(1) };
                    let read = self.filtered(&read);
                    ending = self.typed(&read, &mut queue, &mut queued);
                }
                permit = out.reserve(), if !queue.is_empty() => match (permit, queue.pop_front()) {
                    (Ok(p), Some(f)) => {
                        if let ExecFrame::Stdin(b) = &f {
                            queued -= b.len();
                        }
                        p.send(f);
                    }
                    // The sender has ended: the receiver will say why.
                    _ => { queue.clear(); queued = 0; }
                },
                permit = screen.reserve(), if !to_screen.is_empty() => match (permit, to_screen.pop_front()) {
                    (Ok(p), Some(item)) => p.send(item),
                    _ => return Ended::Signal(1),
                },
                got = rx.next(), if to_screen.is_empty() && ending.is_none() => match got {
                    Incoming::Frame(ExecFrame::Stdout(b) | ExecFrame::Stderr(b)) => {
                        if !alive {
                            alive = true;
                            to_screen.push_back(Paint::Fresh);
                        }
                        self.replies.watch_output(&b);
                        to_screen.push_back(Paint::Bytes(b));
                    }
                    Incoming::Frame(ExecFrame::Exit { code, signal }) => return Ended::Exit { code, signal },
                    Incoming::Frame(ExecFrame::Stdin(_) | ExecFrame::StdinEof | ExecFrame::Resize(..) | ExecFrame::Signal(_)) => {}
                    // The node says so when the guest's side of the link breaks.
                    Incoming::Refused(e) if e.code == "guest-silent" => return Ended::Lost { why: e.why, alive },
                    Incoming::Refused(e) => return Ended::Refused(e),
                    Incoming::Lost(why) => return Ended::Lost { why, alive },
                },
                _ = self.winch.recv() => {
                    let (c, r) = terminal::size();
                    queue.retain(|f| !matches!(f, ExecFrame::Resize(..)));
                    queue.push_back(ExecFrame::Resize(c, r));
                }
                _ = self.term.recv() => return Ended::Signal(15),
                _ = self.hup.recv() => return Ended::Signal(1),
                _ = self.int.recv() => return Ended::Signal(2),
                why = &mut moved, if ending.is_none() => return Ended::Lost { why, alive },
                () = sleep_until(patience) => {}
                () = sleep_until(pause.as_ref().map(|p| p.0)) => if let Some((_, what)) = pause {
                    let bytes = self.paused(&what);
                    enqueue(bytes, &mut queue, &mut queued);
                }
            }
            // Cutting waits for nobody; detaching waits for what was typed before it.
            if ending.as_ref().is_some_and(|e| *e == Ended::Cut) {
                return Ended::Cut;
            }
            if ending.is_some() && patience.is_none() {
                patience = Some(Instant::now() + LEAVE_WAIT);
            }
        }
    }

    /// Waits without a link for `for_how_long`. Keys are not kept: what they were meant for may not be there any more.
    pub async fn wait(&mut self, for_how_long: Duration) -> Option<Ended> {
        let until = Instant::now() + for_how_long;
        loop {
            let pause = self.pause();
            tokio::select! {
                () = tokio::time::sleep_until(until) => return None,
                read = self.keys.recv() => {
                    let Some(read) = read else { return Some(Ended::Signal(1)) };
                    let read = self.filtered(&read);
                    let (mut queue, mut queued) = (VecDeque::new(), 0);
                    if let Some(end) = self.typed(&read, &mut queue, &mut queued) {
                        return Some(end);
                    }
                }
                _ = self.winch.recv() => {}
                _ = self.term.recv() => return Some(Ended::Signal(15)),
                _ = self.hup.recv() => return Some(Ended::Signal(1)),
                _ = self.int.recv() => return Some(Ended::Signal(2)),
                () = sleep_until(pause.as_ref().map(|p| p.0)) => if let Some((_, what)) = pause {
                    self.paused(&what);
                }
            }
        }
    }

    /// Does `work` while escape keys and signals stay alive.
    pub async fn during<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Ended> {
        tokio::pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return Ok(done),
                ended = self.wait(Duration::from_secs(3600)) => if let Some(e) = ended {
                    return Err(e);
                }
            }
        }
    }

    /// Shows a line at the bottom of the screen; "" takes it away.
    pub async fn status(&self, text: &str) {
        // A screen that takes nothing shows no status either.
        let _ = tokio::time::timeout(Duration::from_millis(200), self.screen.send(Paint::Status(text.into()))).await;
    }

    /// Waits until the screen has everything and late answers of the terminal are swallowed; a short while at most.
    pub async fn finish(&mut self) {
        let (tx, rx) = oneshot::channel();
        let flushed = async {
            if self.screen.send(Paint::Done(tx)).await.is_ok() {
                let _ = rx.await;
            }
        };
        let _ = tokio::time::timeout(Duration::from_secs(2), flushed).await;
        let until = Instant::now() + Duration::from_millis(100);
        while self.replies.expecting() {
            match tokio::time::timeout_at(until, self.keys.recv()).await {
                Ok(Some(read)) => drop(self.replies.filter_input(&read)),
                Ok(None) | Err(_) => break,
            }
        }
    }

    fn filtered(&mut self, read: &[u8]) -> Vec<u8> {
        let pass = self.replies.filter_input(read);
        self.rest_since = Instant::now();
        pass
    }

    fn typed(&mut self, read: &[u8], queue: &mut VecDeque<ExecFrame>, queued: &mut usize) -> Option<Ended> {
        for action in self.escape.feed(read) {
            match action {
                Action::Send(bytes) => enqueue(bytes, queue, queued),
                Action::Detach => return Some(Ended::Detached),
                Action::Cut => return Some(Ended::Cut),
            }
        }
        if self.escape.holding() {
            self.held_since = Instant::now();
        }
        None
    }

    fn pause(&self) -> Option<(Instant, Pause)> {
        let ms = Duration::from_millis;
        let prefix = self.escape.holding().then(|| (self.held_since + ms(HOLD_MS), Pause::Prefix));
        let rest = self.replies.holding().then(|| (self.rest_since + ms(REST_MS), Pause::Rest));
        let late = self.replies.expecting_late().then(|| (self.linked_since + ms(LATE_MS), Pause::Late));
        prefix.into_iter().chain(rest).chain(late).min_by_key(|p| p.0)
    }

    fn paused(&mut self, what: &Pause) -> Vec<u8> {
        match what {
            Pause::Prefix => self.escape.tick(),
            Pause::Rest => self.replies.release(),
            Pause::Late => self.replies.expire(),
        }
    }
}

fn enqueue(bytes: Vec<u8>, queue: &mut VecDeque<ExecFrame>, queued: &mut usize) {
    *queued += bytes.len();
    queue.extend(bytes.chunks(STDIN_CHUNK).map(|c| ExecFrame::Stdin(c.to_vec())));
}

async fn sleep_until(when: Option<Instant>) {
    match when {
        Some(t) => tokio::time::sleep_until(t).await,
        None => std::future::pending().await,
    }
}

async fn send_frames(mut tx: Sender, mut frames: mpsc::Receiver<ExecFrame>) {
    while let Some(f) = frames.recv().await {
        if tx.send(&f).await.is_err() {
            return;
        }
    }
    tx.close().await;
}

fn read_keys(keys: &mpsc::Sender<Vec<u8>>) {
    let mut buffer = vec![0; READ_BYTES];
    loop {
        match rustix::io::read(rustix::stdio::stdin(), &mut buffer) {
            Ok(0) => return,
            Ok(n) => {
                if keys.blocking_send(buffer[..n].to_vec()).is_err() {
                    return;
                }
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => {
                let mut fds = [rustix::event::PollFd::from_borrowed_fd(rustix::stdio::stdin(), rustix::event::PollFlags::IN)];
                let _ = rustix::event::poll(&mut fds, None);
            }
            Err(_) => return,
        }
    }
}

fn paint(mut items: mpsc::Receiver<Paint>) {
    let mut modes = Modes::default();
    let mut drawn = false;
    let mut status = String::new();
    while let Some(item) = items.blocking_recv() {
        match item {
            Paint::Bytes(b) => {
                if modes.watch(&b) {
                    terminal::set_reset(&modes);
                }
                terminal::write_all(&b);
                drawn = true;
            }
            Paint::Status(text) if text == status => {}
            Paint::Status(text) => {
                let (cols, rows) = terminal::size();
                let line: String = crate::table::clean(&text).chars().take(usize::from(cols)).collect();
                let look = if line.is_empty() { "" } else { "\x1b[7m" };
                terminal::write_all(format!("\x18\x1b7\x1b[{rows};1H\x1b[0m\x1b[2K{look}{line}\x1b[0m\x1b8").as_bytes());
                status = text;
            }
            Paint::Fresh => {
                if drawn {
                    terminal::write_all(&modes.reset());
                    modes.forget();
                    terminal::set_reset(&modes);
                }
            }
            Paint::Done(tx) => {
                let _ = tx.send(());
            }
        }
    }
}
