//! Progress lines: JSON on standard output for programs, plain lines on standard error for people.

use std::io::Write;

/// Numbered steps of one command. A lost reader of the lines never fails the build.
pub struct Progress {
    json: bool,
    n: u32,
    of: u32,
}

#[derive(serde::Serialize)]
struct Line<'a> {
    schema: &'static str,
    step: &'a str,
    n: u32,
    of: u32,
    detail: &'a str,
}

impl Progress {
    /// Reports `of` steps, as JSON when `json`.
    pub fn new(json: bool, of: u32) -> Self {
        Self { json, n: 0, of }
    }

    /// Begins the next step.
    pub fn step(&mut self, step: &str, detail: &str) {
        self.n += 1;
        self.of = self.of.max(self.n);
        if self.json {
            let line = Line { schema: "ks.image.progress.v1", step, n: self.n, of: self.of, detail };
            if let Ok(text) = serde_json::to_string(&line) {
                let mut out = std::io::stdout().lock();
                let _ = writeln!(out, "{text}").and_then(|()| out.flush());
            }
        } else {
            let _ = writeln!(std::io::stderr(), "[{}/{}] {step}: {detail}", self.n, self.of);
        }
    }
}
