//! `ks demo replay`: a program in the session streams ten answers of a model; its VM and the daemon are killed with SIGKILL in
//! the middle of one; it gets every byte of every answer, and the provider was asked once for each.

use super::drive::{fresh_name, json, ok, ok_with_input, say, sh, shown, wait};
use super::report;
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const CLIENT: &str = include_str!("replay_client.py");
const LOG: &str = "/workspace/demo/calls.log";
/// Calls that the program makes.
const CALLS: u64 = 10;
/// The checkpoint is taken in the middle of this call.
const CHECKPOINT_IN: u64 = 4;
/// The kill comes in the middle of this one.
const KILL_IN: u64 = 7;
/// What is searched for in the guest and must not be there.
const MARK: &str = "sk-demo-marked-";

/// The stand-in provider, ended with this value.
struct Provider {
    child: Child,
    address: String,
}

impl Drop for Provider {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Provider {
    fn start() -> Result<Self> {
        let program = beside("ks-test-provider")?;
        let mut child = Command::new(&program)
            .args(["--listen", "127.0.0.1:0"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        let out = child.stdout.take().context("the provider has an output")?;
        let mut address = String::new();
        BufReader::new(out).read_line(&mut address).context("reading the provider's address")?;
        let provider = Self { child, address: address.trim().to_owned() };
        ensure!(provider.address.starts_with("127.0.0.1:"), "the stand-in provider did not say where it listens");
        Ok(provider)
    }

    fn http(&self, method: &str, path: &str, body: &[u8]) -> Result<Vec<u8>> {
        let mut s = TcpStream::connect(&self.address).context("connecting to the stand-in provider")?;
        s.set_read_timeout(Some(Duration::from_secs(60)))?;
        write!(
            s,
            "{method} {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\nauthorization: Bearer reference\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n",
            self.address,
            body.len()
        )?;
        s.write_all(body)?;
        let mut got = Vec::new();
        s.read_to_end(&mut got)?;
        let end = got.windows(4).position(|w| w == b"\r\n\r\n").context("an answer has a head")?;
        let head = String::from_utf8_lossy(&got[..end]).to_ascii_lowercase();
        let rest = got.split_off(end + 4);
        if head.contains("transfer-encoding: chunked") { unchunk(&rest) } else { Ok(rest) }
    }

    /// How often each request was bought.
    fn purchases(&self) -> Result<BTreeMap<String, u64>> {
        let books: Value = serde_json::from_slice(&self.http("GET", "/purchases", b"")?)?;
        Ok(serde_json::from_value(books["purchases"].clone())?)
    }
}

fn unchunk(mut rest: &[u8]) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    loop {
        let eol = rest.windows(2).position(|w| w == b"\r\n").context("a chunk has a length")?;
        let n = usize::from_str_radix(std::str::from_utf8(&rest[..eol])?.split(';').next().unwrap_or_default().trim(), 16)?;
        if n == 0 {
            return Ok(out);
        }
        out.extend_from_slice(rest.get(eol + 2..eol + 2 + n).context("a chunk is whole")?);
        rest = rest.get(eol + 4 + n..).context("a chunk has an end")?;
    }
}

/// A program of this installation.
fn beside(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("finding this program")?;
    let places = [std::env::var_os("KS_LIBEXEC").map(PathBuf::from), own.parent().map(PathBuf::from)];
    let found = places.into_iter().flatten().map(|d| d.join(name)).find(|p| p.is_file());
    found.with_context(|| format!("{name} is not beside ks; build it with ./ci/build"))
}

/// What the program in the session has logged.
struct Progress {
    /// Calls that ended: number, word, SHA-256.
    ended: Vec<(u64, String, String)>,
    /// Tokens of the newest call.
    at: (u64, u64),
    finished: bool,
}

fn progress(session: &str) -> Result<Progress> {
    let text = sh(session, &format!("cat {LOG} 2>/dev/null || true"))?;
    let mut p = Progress { ended: vec![], at: (0, 0), finished: false };
    for line in text.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        match words.as_slice() {
            ["finished"] => p.finished = true,
            ["call", n, "begins"] => p.at = (n.parse()?, 0),
            ["call", n, "token", t] => p.at = (n.parse()?, t.parse()?),
            ["call", n, how, rest @ ..] => p.ended.push((n.parse()?, (*how).to_owned(), rest.last().unwrap_or(&"").to_string())),
            _ => {}
        }
    }
    Ok(p)
}

/// Waits for the middle of a call.
fn middle_of(session: &str, call: u64, tokens: u64) -> Result<Progress> {
    wait(&format!("the middle of call {call}"), 300, || {
        let p = progress(session)?;
        if p.at.0 > call {
            bail!("call {call} is over; the answers are too short for this demonstration");
        }
        Ok((p.at.0 == call && p.at.1 >= tokens / 3).then_some(p))
    })
}

struct Run {
    name: String,
    tokens: u64,
    model: String,
    checkpoint: u64,
    killed_in: (u64, u64),
    interruption_s: f64,
    after: (u64, u64),
}

/// Runs the demonstration.
pub fn run(tokens: u64, slow_ms: u64, keep: bool) -> Result<()> {
    ensure!((30..=5000).contains(&tokens), "--tokens has 30 to 5000");
    let provider = Provider::start()?;
    let name = fresh_name("replay");
    let add = [
        "provider",
        "add",
        &name,
        "--dialect",
        "openai",
        "--base-url",
        &format!("http://{}", provider.address),
        "--include-usage",
    ];
    ok(&add)?;
    let key = format!("{MARK}{name}");
    ok_with_input(&["key", "add", &name], key.as_bytes())?;
    let done = calls(&name, tokens, slow_ms).and_then(|run| judge(&provider, &run, &key));
    if !keep {
        let _ = ok(&["rm", &name, "--force"]);
        let _ = ok(&["key", "rm", &name]);
        let _ = ok(&["provider", "rm", &name]);
    }
    done
}

fn calls(name: &str, tokens: u64, slow_ms: u64) -> Result<Run> {
    let dir = std::env::temp_dir().join(format!("ks-demo-replay-{}", std::process::id())).join("demo");
    std::fs::create_dir_all(&dir)?;
    std::fs::write(dir.join("client.py"), CLIENT)?;
    say(&format!("session {name}: a program streams {CALLS} answers of {tokens} tokens each from a stand-in provider"));
    let model = format!("stand-in!tokens={tokens},slow={slow_ms}");
    let url = format!("http://127.0.0.1:4180/{name}/v1/chat/completions");
    let command = format!("python3 /workspace/demo/client.py {url} '{model}' {CALLS} {LOG}; exec bash");
    let sync = dir.display().to_string();
    shown(&["run", "--name", name, "--cadence", "0", "--detach", "--sync", &sync, "--", "bash", "-c", &command])?;
    if let Some(top) = dir.parent() {
        std::fs::remove_dir_all(top).ok();
    }
    middle_of(name, CHECKPOINT_IN, tokens)?;
    let c = json(&["checkpoint", name, "-m", "in the middle of an answer"])?;
    let checkpoint = c["number"].as_u64().unwrap_or(0);
    say(&format!("checkpoint c{checkpoint} in the middle of answer {CHECKPOINT_IN}; it goes on"));
    let before = middle_of(name, KILL_IN, tokens)?;
    say(&format!("answer {} has {} of {tokens} tokens: SIGKILL to the VM and to the daemon", before.at.0, before.at.1));
    let killed = Instant::now();
    ok(&["kill", name, "--with-daemon"])?;
    wait("the session answers again", 120, || {
        Ok(super::drive::ks(&["exec", name, "--", "true"])?.status.success().then_some(()))
    })?;
    let interruption_s = killed.elapsed().as_secs_f64();
    let after = progress(name)?.at;
    say(&format!(
        "back after {interruption_s:.2} s, in answer {} at token {}: it is being replayed from there",
        after.0, after.1
    ));
    wait("the program finishes", 600, || Ok(progress(name)?.finished.then_some(())))?;
    Ok(Run { name: name.to_owned(), tokens, model, checkpoint, killed_in: before.at, interruption_s, after })
}

/// The answer that the provider gives to call `n`, as SHA-256. It is asked directly, after the purchases were counted.
fn reference(provider: &Provider, run: &Run, n: u64) -> Result<String> {
    let message = json!({"role": "user", "content": format!("question {n} of {CALLS}")});
    // As Python's json.dumps(sort_keys=True) writes it: the provider answers by the bytes of the request.
    let body = format!(
        "{{\"messages\": [{{\"content\": {}, \"role\": \"user\"}}], \"model\": {}, \"stream\": true, \"stream_options\": {{\"include_usage\": true}}}}",
        message["content"],
        json!(run.model)
    );
    let answer = provider.http("POST", "/v1/chat/completions", body.as_bytes())?;
    use sha2::Digest as _;
    Ok(hex(&sha2::Sha256::digest(&answer)))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut s, b| {
        let _ = write!(s, "{b:02x}");
        s
    })
}

fn judge(provider: &Provider, run: &Run, key: &str) -> Result<()> {
    let purchases = provider.purchases()?;
    let most = purchases.values().copied().max().unwrap_or(0);
    let p = progress(&run.name)?;
    let whole = p.ended.iter().filter(|(_, how, _)| how == "whole").count() as u64;
    say("asking the provider for the same answers directly, to compare each byte");
    let mut equal = 0;
    for (n, _, sha) in &p.ended {
        equal += u64::from(*sha == reference(provider, run, *n)?);
    }
    let ledger = json(&["ledger", &run.name])?;
    let verified = super::drive::ks(&["ledger", "verify", &run.name])?.status.success();
    // The pattern is written so that the search does not find itself.
    let (first, rest) = key.split_at(1);
    let hunt = format!("grep -al '[{first}]{rest}' /proc/[0-9]*/environ /workspace -r 2>/dev/null | head -3");
    let key_seen = !sh(&run.name, &hunt)?.is_empty();
    let sum = &ledger["sum"];
    let figures = json!({
        "session": run.name, "calls": p.ended.len(), "whole": whole, "equal_to_provider": equal, "checkpoint": run.checkpoint,
        "checkpoint_in_call": CHECKPOINT_IN, "killed_in_call": run.killed_in.0, "killed_at_token": run.killed_in.1,
        "back_in_call": run.after.0, "interruption_s": run.interruption_s, "tokens_per_answer": run.tokens,
        "requests_bought": purchases.len(), "bought_most_often": most, "ledger": sum, "ledger_verified": verified, "key_in_guest": key_seen,
    });
    let text = text(run, &figures)?;
    let path = report::write("demo-replay", &figures, &text)?;
    eprint!("\n{text}");
    eprintln!("report: {}", path.display());
    let good = whole == CALLS && equal == CALLS && p.ended.len() as u64 == CALLS && purchases.len() as u64 == CALLS && most == 1;
    println!("{}", serde_json::to_string(&figures)?);
    ensure!(good, "not every answer came whole and once: see the report");
    ensure!(sum["served"].as_u64().unwrap_or(0) > 0, "nothing was served again, so nothing was shown");
    ensure!(sum["bought"] == CALLS, "the ledger does not say {CALLS} purchases");
    ensure!(verified, "`ks ledger verify` finds something");
    ensure!(!key_seen, "the provider's key is in the guest");
    Ok(())
}

fn text(run: &Run, f: &Value) -> Result<String> {
    let sum = &f["ledger"];
    let n = |v: &Value| v.as_u64().unwrap_or(0);
    let tokens = ["input", "cache_read", "cache_write", "output"].iter().map(|k| n(&sum["tokens_served"][k])).sum::<u64>();
    let mut t = String::new();
    writeln!(t, "ks demo replay: {}", run.name)?;
    writeln!(t, "  checkpoint                  c{} in the middle of answer {CHECKPOINT_IN}", run.checkpoint)?;
    writeln!(
        t,
        "  killed                      in answer {} at token {} (SIGKILL to VM and daemon)",
        run.killed_in.0, run.killed_in.1
    )?;
    writeln!(t, "  interruption                {:.2} s, kill to first exec answered", run.interruption_s)?;
    writeln!(t, "  caught up                   in answer {} at token {} when first looked at", run.after.0, run.after.1)?;
    writeln!(t, "  answers whole               {} of {CALLS}", n(&f["whole"]))?;
    writeln!(t, "  equal to the provider's     {} of {CALLS}, byte for byte", n(&f["equal_to_provider"]))?;
    writeln!(
        t,
        "  bought at the provider      {} requests, none more than {} time(s)",
        n(&f["requests_bought"]),
        n(&f["bought_most_often"])
    )?;
    writeln!(t, "  served again, not bought    {} calls, {tokens} tokens", n(&sum["served"]))?;
    writeln!(
        t,
        "  ledger                      {} bought, {} unknown; chain {}",
        n(&sum["bought"]),
        n(&sum["unknown"]),
        if f["ledger_verified"] == true { "holds" } else { "BROKEN" }
    )?;
    writeln!(t, "  provider's key in the guest {}", if f["key_in_guest"] == true { "FOUND" } else { "not found" })?;
    Ok(t)
}

#[cfg(test)]
mod tests {
    #[test]
    fn chunks_are_joined_and_cut_ones_refused() {
        assert_eq!(super::unchunk(b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n").unwrap(), b"abcde");
        assert!(super::unchunk(b"5\r\nabc").is_err());
    }
}
