//! How people name things: `quiet-otter`, `quiet-otter@c7`, `quiet-otter:/path`. Pure.

use crate::failure::{Failure, Res};
use ks_proto::{SessionId, SessionName};

/// Checks that `text` can be a session's name or id; the text is then safe inside a URL path.
pub fn session(text: &str) -> Res<String> {
    if text.parse::<SessionName>().is_ok() || text.parse::<SessionId>().is_ok() {
        return Ok(text.to_owned());
    }
    let why = match text.parse::<SessionName>() {
        Err(e) => e.to_string(),
        Ok(_) => String::new(),
    };
    Err(Failure::usage(format!("{text:?} is no session"), why, "list the sessions with `ks ls`"))
}

/// A session with, perhaps, one of its checkpoints: `S` or `S@cN`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Point {
    /// Session name or id.
    pub session: String,
    /// `c7`, a full id, or a beginning of one.
    pub checkpoint: Option<String>,
}

/// Reads `S` or `S@CHECKPOINT`.
pub fn point(text: &str) -> Res<Point> {
    let Some((s, c)) = text.split_once('@') else {
        return Ok(Point { session: session(text)?, checkpoint: None });
    };
    Ok(Point { session: session(s)?, checkpoint: Some(checkpoint(c)?) })
}

/// Reads a checkpoint: `c7`, `7`, a full id, or at least 8 hex digits of one.
pub fn checkpoint(text: &str) -> Res<String> {
    let digits = text.strip_prefix('c').unwrap_or(text);
    let is_number = !digits.is_empty() && digits.len() <= 7 && digits.bytes().all(|b| b.is_ascii_digit());
    if is_number {
        return Ok(format!("c{digits}"));
    }
    let is_id = (8..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    if is_id {
        return Ok(text.to_owned());
    }
    Err(Failure::usage(
        format!("{text:?} is no checkpoint"),
        "a checkpoint is written c7, or as 8 or more digits of its id",
        "list them with `ks checkpoints SESSION`",
    ))
}

/// One side of `ks cp`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A path here.
    Here(String),
    /// A path in a session.
    There { session: String, path: String },
}

/// Reads `PATH` or `SESSION:PATH`. A path with a colon in it is written `./a:b`. Relative paths in a session start
/// at /workspace.
pub fn place(text: &str) -> Res<Place> {
    let colon = text.find(':');
    let slash = text.find('/');
    let Some(c) = colon.filter(|c| slash.is_none_or(|s| *c < s)) else {
        return Ok(Place::Here(text.to_owned()));
    };
    let (s, p) = (&text[..c], &text[c + 1..]);
    let path = if p.starts_with('/') { p.to_owned() } else { format!("/workspace/{p}") };
    Ok(Place::There { session: session(s)?, path })
}

/// `K=V` of `--env`; `K` alone takes the value from our own environment.
pub fn env(text: &str, own: impl Fn(&str) -> Option<String>) -> Res<(String, String)> {
    let (k, v) = match text.split_once('=') {
        Some((k, v)) => (k, Some(v.to_owned())),
        None => (text, own(text)),
    };
    let ok = !k.is_empty() && k.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') && !k.as_bytes()[0].is_ascii_digit();
    match v {
        Some(v) if ok => Ok((k.to_owned(), v)),
        Some(_) => Err(Failure::usage(
            format!("--env {text:?} is no variable"),
            "a name has letters, digits and '_'",
            "write --env NAME=VALUE",
        )),
        None => Err(Failure::usage(
            format!("--env {text} has no value"),
            "it is not set here either",
            format!("write --env {text}=VALUE"),
        )),
    }
}

/// `FILE[:GUESTPATH]` of `ks fork --steer`; without a guest path the file lands in /workspace under its own name.
pub fn steer(text: &str) -> Res<(String, String)> {
    let (file, guest) = match text.split_once(":/") {
        Some((f, g)) => (f, format!("/{g}")),
        None => (text, String::new()),
    };
    let name = file.rsplit('/').next().unwrap_or_default();
    if file.is_empty() || name.is_empty() {
        return Err(Failure::usage(
            format!("--steer {text:?} names no file"),
            "it is empty or a folder",
            "write --steer FILE[:/path/in/guest]",
        ));
    }
    let guest = if guest.is_empty() { format!("/workspace/{name}") } else { guest };
    Ok((file.to_owned(), guest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_and_checkpoints() {
        let p = |s: &str, c: Option<&str>| Point { session: s.into(), checkpoint: c.map(str::to_owned) };
        assert_eq!(point("quiet-otter").unwrap(), p("quiet-otter", None));
        assert_eq!(point("quiet-otter.1@c7").unwrap(), p("quiet-otter.1", Some("c7")));
        assert_eq!(point("a@7").unwrap(), p("a", Some("c7")));
        assert_eq!(point("a@deadbeef01").unwrap(), p("a", Some("deadbeef01")));
        for bad in ["", "a@", "a@x", "../v1", "a/b", "a@c", "a@../..", "a@dead", "A"] {
            assert_eq!(point(bad).unwrap_err().exit, 2, "{bad}");
        }
    }

    #[test]
    fn places() {
        let there = |s: &str, p: &str| Place::There { session: s.into(), path: p.into() };
        assert_eq!(place("a:/etc/x").unwrap(), there("a", "/etc/x"));
        assert_eq!(place("a:repo/x").unwrap(), there("a", "/workspace/repo/x"));
        assert_eq!(place("./a:b").unwrap(), Place::Here("./a:b".into()));
        assert_eq!(place("/tmp/a:b").unwrap(), Place::Here("/tmp/a:b".into()));
        assert_eq!(place("notes.txt").unwrap(), Place::Here("notes.txt".into()));
        assert!(place("A B:/x").is_err());
    }

    #[test]
    fn variables_and_steering_files() {
        assert_eq!(env("A=b=c", |_| None).unwrap(), ("A".into(), "b=c".into()));
        assert_eq!(env("A", |_| Some("1".into())).unwrap(), ("A".into(), "1".into()));
        for bad in ["=x", "A B=1", "1A=2", "A"] {
            assert_eq!(env(bad, |_| None).unwrap_err().exit, 2, "{bad}");
        }
        assert_eq!(steer("d/plan.md").unwrap(), ("d/plan.md".into(), "/workspace/plan.md".into()));
        assert_eq!(steer("plan.md:/workspace/r/p").unwrap(), ("plan.md".into(), "/workspace/r/p".into()));
        assert!(steer("").is_err() && steer("d/").is_err());
    }
}
