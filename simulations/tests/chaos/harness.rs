//! One real node for all chaos tests: real `ks`, `ksd`, `ks-vmm` and QEMU, in a scratch folder, taken down at the end.
//!
//! Everything goes through the `ks` program, as a person would use it; only killing and damage go around it.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

/// The longest that any one `ks` call may take here; the first one builds the golden checkpoint.
const CALL_S: u64 = 420;

pub struct Node {
    pub home: PathBuf,
    libexec: PathBuf,
}

/// The shared node, or None with a loud line when its parts are not built. Tests take it in turn: two cores.
pub fn node() -> Option<MutexGuard<'static, Node>> {
    static NODE: OnceLock<Option<Mutex<Node>>> = OnceLock::new();
    let slot = NODE.get_or_init(|| match start() {
        Ok(n) => Some(Mutex::new(n)),
        Err(why) => {
            eprintln!("no node: {why}");
            None
        }
    });
    match slot {
        Some(m) => Some(m.lock().unwrap_or_else(|poisoned| poisoned.into_inner())),
        None => {
            println!("skipped: the programs are not built (run ./dev test)");
            None
        }
    }
}

fn start() -> Result<Node, String> {
    let libexec = PathBuf::from(std::env::var("KS_LIBEXEC").map_err(|_| "KS_LIBEXEC is not set".to_owned())?);
    if !libexec.join("ks").exists() || !libexec.join("ksd").exists() {
        return Err(format!("{} holds no ks and ksd", libexec.display()));
    }
    let home = tempfile::Builder::new().prefix("ks-chaos-").tempdir().map_err(|e| e.to_string())?.keep();
    reaper(&libexec, &home)?;
    let node = Node { home, libexec };
    let up = node.ks(&["up"]);
    assert!(up.status.success(), "ks up: {}", show(&up));
    let image = node.ks(&["image", "build"]);
    assert!(image.status.success(), "ks image build: {}", show(&image));
    Ok(node)
}

/// A watcher that takes the node down and removes its folder once this test process is gone, however it ends.
fn reaper(libexec: &Path, home: &Path) -> Result<(), String> {
    let script = r#"
        while kill -0 "$1" 2>/dev/null; do sleep 0.5; done
        KS_HOME="$2" KS_LIBEXEC="$3" "$3/ks" down --force >/dev/null 2>&1
        pkill -KILL -f -- "$2/" 2>/dev/null
        rm -rf -- "$2"
    "#;
    Command::new("setsid")
        .args(["bash", "-c", script, "reaper"])
        .arg(std::process::id().to_string())
        .arg(home)
        .arg(libexec)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map(|_| ())
        .map_err(|e| format!("setsid: {e}"))
}

pub fn show(o: &Output) -> String {
    format!("{}\nstdout: {}\nstderr: {}", o.status, String::from_utf8_lossy(&o.stdout), String::from_utf8_lossy(&o.stderr))
}

impl Node {
    pub fn command(&self) -> Command {
        let mut c = Command::new("timeout");
        c.args(["-k", "5", &CALL_S.to_string()]).arg(self.libexec.join("ks"));
        c.env("KS_HOME", &self.home).env("KS_LIBEXEC", &self.libexec).env("NO_COLOR", "1").stdin(Stdio::null());
        c
    }
    /// One call, whatever it answers.
    pub fn ks(&self, args: &[&str]) -> Output {
        self.command().args(args).output().expect("ks starts")
    }
    /// One call that must succeed; its standard output.
    pub fn ok(&self, args: &[&str]) -> String {
        let o = self.ks(args);
        assert!(o.status.success(), "ks {}: {}", args.join(" "), show(&o));
        String::from_utf8_lossy(&o.stdout).into_owned()
    }
    /// One call with --json that must succeed; the last JSON value printed.
    pub fn json(&self, args: &[&str]) -> Value {
        let mut all = vec!["--json"];
        all.extend(args);
        let out = self.ok(&all);
        let line = out.lines().rev().find(|l| !l.trim().is_empty());
        serde_json::from_str(&out)
            .ok()
            .or_else(|| line.and_then(|l| serde_json::from_str(l).ok()))
            .unwrap_or_else(|| panic!("not JSON: {out}"))
    }
    /// A new session without a viewer.
    pub fn run(&self, name: &str, argv: &[&str]) {
        let mut args = vec!["run", "--name", name, "--memory", "512", "--cadence", "0", "-d", "--"];
        args.extend(argv);
        self.ok(&args);
        self.wait_for(name, "running");
    }
    /// A shell line in the guest; its standard output, trimmed.
    pub fn sh(&self, name: &str, line: &str) -> String {
        self.ok(&["exec", name, "--", "sh", "-c", line]).trim().to_owned()
    }
    pub fn session(&self, name: &str) -> Value {
        self.json(&["show", name])
    }
    /// Waits until the session is in `state`; returns it.
    pub fn wait_for(&self, name: &str, state: &str) -> Value {
        self.wait_until(name, state, |s| s["state"] == state)
    }
    /// Waits until `done` holds of the session, with a deadline.
    pub fn wait_until(&self, name: &str, what: &str, done: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            let s = self.session(name);
            if done(&s) {
                return s;
            }
            assert!(Instant::now() < deadline, "{name} never became {what}: {s}");
            std::thread::park_timeout(Duration::from_millis(100));
        }
    }
    pub fn remove(&self, name: &str) {
        self.ok(&["rm", name, "--force"]);
    }
    /// Process id of ksd now.
    pub fn ksd_pid(&self) -> i64 {
        let text = std::fs::read_to_string(self.home.join("api.json")).expect("api.json is there");
        serde_json::from_str::<Value>(&text).expect("api.json is JSON")["pid"].as_i64().expect("a pid")
    }
    /// SIGKILL to one process.
    pub fn sigkill(&self, pid: i64) {
        let o = Command::new("kill").args(["-KILL", &pid.to_string()]).output().expect("kill starts");
        assert!(o.status.success(), "{}", show(&o));
    }
    /// Waits until ksd answers again with another process id.
    pub fn wait_for_new_ksd(&self, old: i64) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.ksd_pid() == old || !self.ks(&["ls"]).status.success() {
            assert!(Instant::now() < deadline, "ksd did not come back");
            std::thread::park_timeout(Duration::from_millis(100));
        }
    }
}
