//! The prefetcher stands aside while others wait for a processor: what nobody needs yet must not keep a guest waiting.
//!
//! The kernel counts how long a thread was ready to run and did not (second word of `schedstat`). Where it does not,
//! nothing is held back. A low priority of the thread would do the same and worse: it would be stopped while it holds
//! the lock of the page states, and the guest's faults with it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// More than this on the run queue for one chunk is a busy host.
const WAITED: Duration = Duration::from_millis(1);
/// First pause; doubles with each chunk that had to wait, up to the second.
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(160);

/// How long to stand aside, from what was waited.
#[derive(Debug, Default)]
pub struct Pace {
    pause: Duration,
}

impl Pace {
    /// After a chunk for which the thread waited this long on the run queue.
    pub fn after(&mut self, waited: Duration) -> Duration {
        self.pause = if waited < WAITED { Duration::ZERO } else { (self.pause * 2).clamp(PAUSE, PAUSE_MAX) };
        self.pause
    }
}

/// Time that the calling thread waited on the run queue.
pub struct RunQueue {
    file: Option<File>,
    last: Duration,
}

impl RunQueue {
    /// Of the thread that calls this.
    pub fn of_this_thread() -> Self {
        let mut this = Self { file: File::open("/proc/thread-self/schedstat").ok(), last: Duration::ZERO };
        this.waited();
        this
    }
    /// Time waited since the last call; zero where the kernel does not count it.
    pub fn waited(&mut self) -> Duration {
        let mut text = [0u8; 96];
        let Some(n) = self.file.as_ref().and_then(|f| f.read_at(&mut text, 0).ok()) else { return Duration::ZERO };
        let Some(total) = waited_total(&text[..n]) else { return Duration::ZERO };
        total.saturating_sub(std::mem::replace(&mut self.last, total))
    }
}

/// The second word of a `schedstat` line, nanoseconds.
fn waited_total(text: &[u8]) -> Option<Duration> {
    let word = text.split(u8::is_ascii_whitespace).nth(1)?;
    Some(Duration::from_nanos(std::str::from_utf8(word).ok()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_while_the_host_is_busy_and_end_when_it_is_not() {
        let mut p = Pace::default();
        let ms = Duration::from_millis;
        let got: Vec<_> = [0, 2, 2, 30, 1, 900, 0, 1].into_iter().map(|w| p.after(ms(w)).as_millis()).collect();
        assert_eq!(got, [0, 20, 40, 80, 160, 160, 0, 20]);
    }

    #[test]
    fn the_kernels_line_is_read() {
        assert_eq!(waited_total(b"118 2500000 3\n"), Some(Duration::from_micros(2500)));
        for bad in [&b""[..], b"118", b"a b c", b"1 -2 3", b"1  3"] {
            assert_eq!(waited_total(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_thread_that_waited_is_told_so() {
        if !std::path::Path::new("/proc/thread-self/schedstat").exists() {
            return;
        }
        // Two threads for each processor: somebody has to wait.
        let threads = 2 * std::thread::available_parallelism().map_or(1, usize::from);
        let spin = || {
            let mut queue = RunQueue::of_this_thread();
            let end = std::time::Instant::now() + Duration::from_millis(200);
            let mut waited = Duration::ZERO;
            while std::time::Instant::now() < end {
                waited += queue.waited();
            }
            waited
        };
        let all: Vec<_> = (0..threads).map(|_| std::thread::spawn(spin)).collect();
        let most = all.into_iter().map(|t| t.join().unwrap()).max().unwrap();
        assert!(most > Duration::from_millis(5), "{most:?}");
    }
}
