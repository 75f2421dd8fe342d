//! Where results, notes and progress go: data on stdout, the rest on stderr, nothing decorative off a terminal.

use crate::args::Global;
use crate::config::Layer;
use crate::failure::{Failure, Res};
use crate::table::clean;
use serde::Serialize;
use serde_json::Value;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// What every verb needs to know about its surroundings.
#[derive(Debug, Clone)]
pub struct Ctx {
    /// `--json`.
    pub json: bool,
    /// `--quiet`.
    pub quiet: bool,
    /// May we ask? False with `--no-input`, `--json`, or without a terminal.
    pub may_ask: bool,
    /// Colour on stdout?
    pub color: bool,
    /// Progress on stderr?
    pub progress: bool,
    /// Settings, all layers merged.
    pub settings: Layer,
    /// The folder of the node on this machine.
    pub data_dir: PathBuf,
    /// Was that folder named by KS_HOME?
    pub home_given: bool,
}

impl Ctx {
    /// From the options, the environment and the terminals.
    pub fn new(global: &Global, settings: Layer, data_dir: PathBuf) -> Self {
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|t| t == "dumb");
        let (inp, out, err) = (std::io::stdin().is_terminal(), std::io::stdout().is_terminal(), std::io::stderr().is_terminal());
        Self {
            json: global.json,
            quiet: global.quiet,
            may_ask: !global.no_input && !global.json && inp && err,
            color: out && !no_color && !dumb && !global.json,
            progress: err && !global.quiet && !global.json && !dumb,
            settings,
            data_dir,
            home_given: std::env::var_os("KS_HOME").is_some_and(|v| !v.is_empty()),
        }
    }

    /// Writes data to stdout. A reader that went away ends `ks` quietly, as it ends other programs.
    pub fn data(&self, text: &str) -> Res<()> {
        let mut out = std::io::stdout().lock();
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            Ok(()) => Ok(()),
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(141),
            Err(e) => Err(Failure::local("cannot write the result", e, "check where stdout goes")),
        }
    }
    /// Writes one JSON object and a newline to stdout.
    pub fn json_line(&self, value: &impl Serialize) -> Res<()> {
        let text =
            serde_json::to_string(value).map_err(|e| Failure::local("cannot write the result as JSON", e, "report this"))?;
        self.data(&format!("{text}\n"))
    }
    /// The result of a verb: `value` under `--json`, else the text.
    pub fn result(&self, value: &impl Serialize, text: impl FnOnce() -> String) -> Res<()> {
        if self.json { self.json_line(value) } else { self.data(&text()) }
    }
    /// A note for people on stderr.
    pub fn note(&self, text: &str) {
        if !self.quiet && !self.json {
            // Nothing sensible is left to do when stderr is gone.
            let _ = writeln!(std::io::stderr(), "{text}");
        }
    }
    /// Text in a colour (an SGR number) when stdout has colours.
    pub fn paint(&self, sgr: u8, text: &str) -> String {
        if self.color { format!("\x1b[{sgr}m{text}\x1b[0m") } else { text.to_owned() }
    }
    /// A question with yes as the answer to Enter. False where we may not ask.
    pub fn ask(&self, question: &str) -> bool {
        if !self.may_ask {
            return false;
        }
        let mut err = std::io::stderr();
        let _ = write!(err, "{question} [Y/n] ").and_then(|()| err.flush());
        let mut line = String::new();
        let got = std::io::stdin().read_line(&mut line).unwrap_or(0);
        got > 0 && matches!(line.trim().to_ascii_lowercase().as_str(), "" | "y" | "yes")
    }
    /// A question with no as the answer to Enter. False where we may not ask.
    pub fn ask_no(&self, question: &str) -> bool {
        if !self.may_ask {
            return false;
        }
        let mut err = std::io::stderr();
        let _ = write!(err, "{question} [y/N] ").and_then(|()| err.flush());
        let mut line = String::new();
        let got = std::io::stdin().read_line(&mut line).unwrap_or(0);
        got > 0 && matches!(line.trim().to_ascii_lowercase().as_str(), "y" | "yes")
    }
    /// A progress line on stderr.
    pub fn bar(&self) -> Bar {
        Bar { on: self.progress, born: Instant::now(), drawn: None, turn: 0 }
    }
}

/// Prints a failure where it belongs: JSON on stdout, or what, why and what next on stderr.
pub fn report(failure: &Failure, json: bool) {
    if json {
        let _ = writeln!(std::io::stdout(), "{}", failure.to_json());
        return;
    }
    let color = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    let (red, bold, off) = if color { ("\x1b[31m", "\x1b[1m", "\x1b[0m") } else { ("", "", "") };
    let e = &failure.error;
    let lines = |t: &str| t.lines().map(clean).collect::<Vec<_>>().join("\n");
    let _ = writeln!(std::io::stderr(), "{red}error:{off} {bold}{}{off}", lines(&e.what));
    for (label, text) in [("why", &e.why), ("next", &e.next)] {
        if !text.is_empty() {
            let _ = writeln!(std::io::stderr(), "  {label:<4}  {}", lines(text));
        }
    }
}

/// A value with a `schema` field in front, for results that have none of their own.
pub fn with_schema(schema: &str, value: Value) -> Value {
    let mut map = serde_json::Map::new();
    map.insert("schema".into(), schema.into());
    match value {
        Value::Object(o) => map.extend(o.into_iter().filter(|(k, _)| k != "schema")),
        other => {
            map.insert("value".into(), other);
        }
    }
    Value::Object(map)
}

/// One line of progress, redrawn in place; silent off a terminal and for the first moments.
#[derive(Debug)]
pub struct Bar {
    on: bool,
    born: Instant,
    drawn: Option<Instant>,
    turn: usize,
}

impl Bar {
    const QUIET_FOR: Duration = Duration::from_millis(400);
    const EVERY: Duration = Duration::from_millis(80);

    /// Shows a step; `total` 0 means unknown.
    pub fn step(&mut self, what: &str, done: u64, total: u64) {
        let due = self.drawn.is_none_or(|d| d.elapsed() >= Self::EVERY);
        if !self.on || self.born.elapsed() < Self::QUIET_FOR || !due {
            return;
        }
        self.turn += 1;
        let head = if total > 0 {
            let share = done.min(total) as f64 / total as f64;
            let full = (share * 20.0) as usize;
            format!("[{}{}] {:3.0} %", "#".repeat(full), "-".repeat(20 - full), share * 100.0)
        } else {
            ["|", "/", "-", "\\"][self.turn % 4].to_owned()
        };
        let what: String = clean(what).chars().take(50).collect();
        let line = format!("\r\x1b[2K{head} {what} {}", crate::human::seconds(self.born.elapsed().as_secs()));
        let mut err = std::io::stderr();
        let _ = err.write_all(line.as_bytes()).and_then(|()| err.flush());
        self.drawn = Some(Instant::now());
    }
    /// Takes the line away.
    pub fn clear(&mut self) {
        if self.drawn.take().is_some() {
            let mut err = std::io::stderr();
            let _ = err.write_all(b"\r\x1b[2K").and_then(|()| err.flush());
        }
    }
}
impl Drop for Bar {
    fn drop(&mut self) {
        self.clear();
    }
}
