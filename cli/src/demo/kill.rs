//! `ks demo kill`: an agent moves a repository to a new version of a dependency; between two of its steps its VM and the
//! daemon are killed with SIGKILL; the session comes back by itself and the agent finishes.

use super::drive::{fresh_name, json, ks, ok, say, sh, shown, wait};
use super::{repo, report};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::time::Instant;

/// The agent's log as (nonce, seconds, text) lines.
pub fn log(session: &str) -> Result<Vec<(String, f64, String)>> {
    let text = sh(session, "cat /workspace/demo/agent.log")?;
    Ok(text
        .lines()
        .filter_map(|l| {
            let mut p = l.splitn(3, ' ');
            Some((p.next()?.to_owned(), p.next()?.parse().ok()?, p.next()?.to_owned()))
        })
        .collect())
}

/// The last step that a log says is done.
pub fn steps(log: &[(String, f64, String)]) -> u64 {
    log.iter().filter_map(|(_, _, t)| t.strip_prefix("step ")?.split(' ').next()?.parse().ok()).max().unwrap_or(0)
}

struct Crash {
    at_step: u64,
    interruption_s: f64,
    lost_steps: u64,
    lost_s: f64,
    recorded: Value,
}

/// Runs the demonstration; fails when the session, its process or the work is not what it was.
pub fn run(pace: f64, keep: bool) -> Result<()> {
    let name = fresh_name("kill");
    begin(&name, pace)?;
    let crash = crash(&name)?;
    say("it goes on; waiting for the agent to finish");
    let verdict = finished(&name)?;
    let figures = json!({
        "session": name, "killed_after_step": crash.at_step, "interruption_s": crash.interruption_s, "lost_steps": crash.lost_steps,
        "lost_work_s": crash.lost_s, "recorded": crash.recorded, "doctor_ok": verdict.doctor, "tests_pass": verdict.tests,
        "git_fsck_clean": verdict.fsck, "commits": verdict.commits, "same_process": verdict.same_process,
    });
    let text = text(&name, &crash, &verdict)?;
    let path = report::write("demo-kill", &figures, &text)?;
    eprint!("\n{text}");
    eprintln!("report: {}", path.display());
    if !keep {
        ok(&["rm", &name, "--force"])?;
    }
    ensure!(verdict.good(), "the session came back, but not whole: see the report");
    println!("{}", serde_json::to_string(&figures)?);
    Ok(())
}

/// Starts the session with its agent.
pub fn begin(name: &str, pace: f64) -> Result<()> {
    let dir = tempdir("demo")?;
    repo::write(&dir)?;
    say(&format!("session {name}: a stand-in agent moves a 12-file repository to a new version of its dependency"));
    let start = format!(
        "cd /workspace/demo/repo && git init -q . && git config user.name agent && git config user.email agent@localhost && \
         git add -A && git commit -q -m start && python3 ../agent.py /workspace/demo/repo {pace}; exec bash"
    );
    let sync = dir.display().to_string();
    shown(&["run", "--name", name, "--cadence", "0", "--detach", "--sync", &sync, "--", "bash", "-c", &start])?;
    std::fs::remove_dir_all(&dir).ok();
    Ok(())
}

/// Waits for the agent's end and looks at what it left.
pub fn finished(name: &str) -> Result<Verdict> {
    let last = wait("the agent finishes", 300, || {
        let l = log(name)?;
        Ok(l.iter().any(|(_, _, t)| t == "finished").then_some(l))
    })?;
    verdict(name, &last)
}

/// Lets the agent work, takes a checkpoint, lets it work on, then kills VM and daemon.
fn crash(name: &str) -> Result<Crash> {
    let reach = |n: u64| {
        wait(&format!("step {n}"), 180, || {
            let l = log(name)?;
            Ok((steps(&l) >= n).then_some(l))
        })
    };
    reach(3)?;
    let c = json(&["checkpoint", name, "-m", "in the middle of the work"])?;
    let checkpoint_unix = c["created_unix_ms"].as_f64().unwrap_or(0.0) / 1000.0;
    say(&format!(
        "checkpoint taken in the middle of the work, guest stopped for {:.0} ms",
        c["pause_us"].as_f64().unwrap_or(0.0) / 1000.0
    ));
    let before = reach(steps(&log(name)?) + 2)?;
    let at_step = steps(&before);
    say(&format!("step {at_step} is done: SIGKILL to the VM and to the daemon"));
    let killed = Instant::now();
    let unix = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64());
    ks(&["kill", name, "--with-daemon"])?;
    wait("the session answers again", 120, || Ok(ks(&["exec", name, "--", "true"])?.status.success().then_some(())))?;
    let interruption_s = killed.elapsed().as_secs_f64();
    let after = steps(&log(name)?);
    let recorded = json(&["show", name])?["last_interruption"].clone();
    say(&format!("the session answers again after {interruption_s:.2} s"));
    Ok(Crash {
        at_step,
        interruption_s,
        lost_steps: at_step.saturating_sub(after),
        lost_s: (unix - checkpoint_unix).max(0.0),
        recorded,
    })
}

/// What the session was like at the end.
#[derive(Debug)]
pub struct Verdict {
    /// `ks doctor` finds nothing.
    pub doctor: bool,
    /// The repository's own tests pass.
    pub tests: bool,
    /// `git fsck` finds nothing.
    pub fsck: bool,
    /// Commits, of 14.
    pub commits: u64,
    /// One process wrote the whole log.
    pub same_process: bool,
}
impl Verdict {
    /// Whole?
    pub fn good(&self) -> bool {
        // One commit at the start, one for the new version, one for each of the 12 files.
        self.doctor && self.tests && self.fsck && self.commits == 14 && self.same_process
    }
}

fn verdict(name: &str, log: &[(String, f64, String)]) -> Result<Verdict> {
    let first = log.first().context("the agent's log is empty")?;
    Ok(Verdict {
        doctor: json(&["doctor", name]).is_ok_and(|d| d["ok"] == true),
        tests: ks(&["exec", name, "--", "sh", "-c", "cd /workspace/demo/repo && python3 -m unittest -q"])?.status.success(),
        fsck: ks(&["exec", name, "--", "git", "-C", "/workspace/demo/repo", "fsck", "--strict"])?.status.success(),
        commits: sh(name, "git -C /workspace/demo/repo rev-list --count HEAD")?.parse().unwrap_or(0),
        same_process: log.iter().all(|(nonce, _, _)| *nonce == first.0),
    })
}

fn text(name: &str, c: &Crash, v: &Verdict) -> Result<String> {
    let yes = |b: bool| if b { "yes" } else { "NO" };
    let mut t = String::new();
    writeln!(t, "ks demo kill: {name}")?;
    writeln!(t, "  killed after step             {} (SIGKILL to VM and daemon)", c.at_step)?;
    writeln!(t, "  interruption                  {:.2} s, kill to first exec answered", c.interruption_s)?;
    writeln!(t, "  work since the checkpoint     {:.1} s, {} steps done again by the same process", c.lost_s, c.lost_steps)?;
    writeln!(t, "  same process went on          {}", yes(v.same_process))?;
    writeln!(t, "  the repository's tests pass   {}", yes(v.tests))?;
    writeln!(t, "  git fsck is clean             {}, {} commits of 14", yes(v.fsck), v.commits)?;
    writeln!(t, "  ks doctor                     {}", if v.doctor { "all checks pass" } else { "NOT WELL" })?;
    Ok(t)
}

/// A scratch folder whose last part is `last`, so that it appears under that name in the guest.
fn tempdir(last: &str) -> Result<std::path::PathBuf> {
    let dir = std::env::temp_dir().join(format!("ks-demo-{}", std::process::id())).join(last);
    std::fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
    Ok(dir)
}
