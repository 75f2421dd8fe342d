//! Drives `ks` itself: each call is the same program with --json, so that a demo shows what a person would get.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// What makes every following call speak to another fleet than the settings say, and where it does so from.
static CLIENT: OnceLock<Client> = OnceLock::new();

/// A laptop that calls come from.
#[derive(Debug, Clone)]
pub struct Client {
    /// Environment of the calls.
    pub env: Vec<(String, String)>,
    /// Words in front of each call (a namespace to be in).
    pub before: Vec<String>,
}

/// All following calls come from this laptop; only the first one counts.
pub fn come_from(client: Client) {
    let _ = CLIENT.set(client);
}

fn command(args: &[&str]) -> Result<Command> {
    let exe = std::env::current_exe().context("finding this program")?;
    let Some(client) = CLIENT.get() else {
        let mut c = Command::new(exe);
        c.args(args).stdin(Stdio::null());
        return Ok(c);
    };
    let mut c = match client.before.split_first() {
        Some((program, rest)) => {
            let mut c = Command::new(program);
            c.args(rest).arg(exe);
            c
        }
        None => Command::new(exe),
    };
    c.env_remove("KS_HOME").env_remove("KS_API_FILE").env_remove("KS_CONTEXT");
    c.envs(client.env.iter().cloned()).args(args).stdin(Stdio::null());
    Ok(c)
}

/// One `ks` call; its output whatever the outcome.
pub fn ks(args: &[&str]) -> Result<Output> {
    command(args)?.output().context("starting ks")
}

/// One call that must succeed; its standard output, trimmed.
pub fn ok(args: &[&str]) -> Result<String> {
    let o = ks(args)?;
    if !o.status.success() {
        bail!("{} failed ({}): {}", named(args), o.status, String::from_utf8_lossy(&o.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&o.stdout).trim().to_owned())
}

/// As [`ok`], with something on its standard input.
pub fn ok_with_input(args: &[&str], input: &[u8]) -> Result<String> {
    use std::io::Write as _;
    let mut c = command(args)?;
    let mut child = c.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().context("starting ks")?;
    child.stdin.take().context("it has an input")?.write_all(input)?;
    let o = child.wait_with_output()?;
    if !o.status.success() {
        bail!("{} failed ({}): {}", named(args), o.status, String::from_utf8_lossy(&o.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&o.stdout).trim().to_owned())
}

/// The call in one line: a program that was given as text is cut.
fn named(args: &[&str]) -> String {
    let line = format!("ks {}", args.join(" "));
    let short: String = line.lines().next().unwrap_or_default().chars().take(120).collect();
    if short.len() < line.len() { format!("{short}…") } else { short }
}

/// One call with --json that must succeed.
pub fn json(args: &[&str]) -> Result<Value> {
    let all: Vec<&str> = std::iter::once("--json").chain(args.iter().copied()).collect();
    let text = ok(&all)?;
    let last = text.lines().last().unwrap_or_default();
    serde_json::from_str(&text)
        .or_else(|_| serde_json::from_str(last))
        .with_context(|| format!("ks {} did not print JSON: {text}", args.join(" ")))
}

/// One call whose progress the person sees.
pub fn shown(args: &[&str]) -> Result<()> {
    let status = command(args)?.stdout(Stdio::null()).status().context("starting ks")?;
    if !status.success() {
        bail!("{} failed ({status}); what it said is above", named(args));
    }
    Ok(())
}

/// A shell line in the guest; its standard output, trimmed.
pub fn sh(session: &str, line: &str) -> Result<String> {
    ok(&["exec", session, "--", "sh", "-c", line])
}

/// Asks again until `f` gives something, at most `secs`. Errors of single calls are kept for the message.
pub fn wait<T>(what: &str, secs: u64, mut f: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + Duration::from_secs(secs);
    let mut last = String::from("no error");
    loop {
        match f() {
            Ok(Some(v)) => return Ok(v),
            Ok(None) => {}
            Err(e) => last = format!("{e:#}"),
        }
        if Instant::now() > deadline {
            bail!("{what}: nothing after {secs} s ({last})");
        }
        std::thread::park_timeout(Duration::from_millis(50));
    }
}

/// Says what the demo does now.
pub fn say(text: &str) {
    eprintln!("• {text}");
}

/// A name that is free on any node.
pub fn fresh_name(kind: &str) -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_millis());
    format!("demo-{kind}-{}", now % 10_000_000)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_long_call_is_named_in_one_line() {
        assert_eq!(super::named(&["ls", "--all"]), "ks ls --all");
        let program = super::named(&["run", "--", "python3", "-c", "import os\nprint(1)"]);
        assert_eq!(program, "ks run -- python3 -c import os…");
    }
}
