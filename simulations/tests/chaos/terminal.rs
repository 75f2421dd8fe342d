//! The attached window in a real terminal (a tmux server of the test's own), with a full-screen program in a real guest.

use crate::harness::{Node, node};
use std::process::Command;
use std::time::{Duration, Instant};

/// A terminal window on this machine that runs one `ks attach`.
struct Window<'a> {
    node: &'a Node,
    socket: String,
}

impl<'a> Window<'a> {
    fn open(node: &'a Node, session: &str, columns: u16, rows: u16, term: &str) -> Self {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let n = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let w = Self { node, socket: format!("{}/term{n}.sock", node.home.display()) };
        let ks = node.command();
        let mut line: Vec<String> =
            ks.get_envs().filter_map(|(k, v)| Some(format!("{}={}", k.to_str()?, v?.to_str()?))).collect();
        line.push(format!("TERM={term}"));
        let program = ks.get_args().last().expect("the program").to_str().expect("a path").to_owned();
        line.extend([program, "attach".into(), session.into()]);
        let (c, r) = (columns.to_string(), rows.to_string());
        let mut args = vec!["-f", "/dev/null", "new-session", "-d", "-x", &c, "-y", &r, "env"];
        args.extend(line.iter().map(String::as_str));
        w.tmux(&args);
        // tmux keeps one row for its own status line unless told not to.
        w.tmux(&["set-option", "-g", "status", "off"]);
        w.tmux(&["resize-window", "-x", &c, "-y", &r]);
        w
    }
    fn tmux(&self, args: &[&str]) -> String {
        let o = Command::new("tmux").args(["-u", "-S", &self.socket]).args(args).output().expect("tmux starts");
        assert!(o.status.success(), "tmux {args:?}: {}", crate::harness::show(&o));
        String::from_utf8_lossy(&o.stdout).into_owned()
    }
    fn screen(&self) -> Vec<String> {
        self.tmux(&["capture-pane", "-p"]).lines().map(|l| l.trim_end().to_owned()).collect()
    }
    /// Waits until the screen is as told, and gives it.
    fn wait(&self, what: &str, done: impl Fn(&[String]) -> bool) -> Vec<String> {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            let s = self.screen();
            if done(&s) {
                return s;
            }
            assert!(Instant::now() < end, "{what} never showed; the screen is\n{}", s.join("\n"));
            std::thread::park_timeout(Duration::from_millis(100));
        }
    }
    fn keys(&self, keys: &[&str]) {
        let mut all = vec!["send-keys"];
        all.extend(keys);
        self.tmux(&all);
    }
}

impl Drop for Window<'_> {
    fn drop(&mut self) {
        // SIGKILL to the program in it: no goodbye of any kind reaches the node.
        if let Ok(o) = Command::new("tmux").args(["-S", &self.socket, "display-message", "-p", "#{pane_pid}"]).output() {
            let pid = String::from_utf8_lossy(&o.stdout).trim().to_owned();
            if pid.parse::<u32>().is_ok() {
                drop(Command::new("kill").args(["-KILL", &pid]).output());
            }
        }
        drop(Command::new("tmux").args(["-S", &self.socket, "kill-server"]).output());
        assert!(self.node.home.exists());
    }
}

/// A pager that shows numbered lines on all rows but the last of the guest's own status line.
fn full(screen: &[String], rows: usize) -> bool {
    let shown = screen.iter().take(rows - 2).filter(|l| l.trim().parse::<u32>().is_ok()).count();
    screen.len() >= rows - 1 && shown == rows - 2
}

#[test]
fn t2_a_cut_window_comes_back_in_another_size_and_again_in_the_same() {
    let Some(n) = node() else { return };
    n.run("win", &["sh", "-c", "stty size >/workspace/first; seq 1 1000 >/workspace/lines; exec less /workspace/lines"]);
    {
        let w = Window::open(&n, "win", 200, 50, "xterm-256color");
        w.wait("the pager on all of 50 rows", |s| full(s, 50));
        assert_eq!(n.sh("win", "tmux display-message -p '#{client_width}x#{client_height}'"), "200x50");
        w.keys(&["G"]);
        w.wait("the last line", |s| s.iter().any(|l| l.trim() == "1000"));
    }
    for again in ["another size", "the same size again"] {
        let w = Window::open(&n, "win", 100, 30, "xterm-256color");
        let s = w.wait(again, |s| full(s, 30) && s.iter().any(|l| l.trim().parse().is_ok_and(|n: u32| n > 950)));
        assert!(s.len() <= 30, "{again}: {s:?}");
        assert_eq!(n.sh("win", "tmux display-message -p '#{client_width}x#{client_height}'"), "100x30", "{again}");
    }
    n.remove("win");
}

#[test]
fn t6_a_terminal_that_the_guest_does_not_know_works() {
    let Some(n) = node() else { return };
    n.run("odd", &["bash"]);
    let w = Window::open(&n, "odd", 100, 30, "xterm-ghostty");
    w.wait("a prompt", |s| s.iter().any(|l| l.contains('#') || l.contains('$')));
    w.keys(&["tput cols && echo is-$((40+2))", "Enter"]);
    let s = w.wait("the answer", |s| s.iter().any(|l| l == "is-42"));
    assert!(s.iter().any(|l| l == "100"), "{s:?}");
    drop(w);
    n.remove("odd");
}
