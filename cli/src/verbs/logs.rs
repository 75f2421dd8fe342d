//! `ks logs`: what the main window has printed, and with --follow what it prints.

use crate::args;
use crate::failure::Res;
use crate::host::http::Node;
use crate::output::Ctx;
use crate::target;
use ks_proto::api::SessionState;
use serde_json::json;
use std::time::Duration;

/// Time between two looks. A window's text is looked at whole: a program may also draw over it.
const LOOK: Duration = Duration::from_secs(1);

/// Shows what the main window has printed; with --follow until Ctrl-C or until the session no longer runs.
pub async fn run(ctx: &Ctx, a: args::Logs) -> Res<u8> {
    let name = target::session(&a.session)?;
    let node = Node::find(ctx)?;
    let path = format!("/v1/sessions/{name}/logs?lines={}", a.lines);
    let mut before = String::from_utf8_lossy(&node.get_text(&path).await?).into_owned();
    show(ctx, &name, &before)?;
    if !a.follow {
        return Ok(0);
    }
    loop {
        tokio::time::sleep(LOOK).await;
        let state = node.session(&name).await?.state;
        match state {
            SessionState::Running => {}
            // It comes back by itself, with the text of its checkpoint.
            SessionState::Creating | SessionState::Starting | SessionState::Recovering => continue,
            SessionState::Parked | SessionState::Stopped | SessionState::Failed => {
                ctx.note(&format!("{name} is {state}: nothing more to follow"));
                return Ok(0);
            }
        }
        let now = String::from_utf8_lossy(&node.get_text(&path).await?).into_owned();
        let new = fresh(&before, &now);
        if !new.is_empty() {
            show(ctx, &name, new)?;
        }
        before = now;
    }
}

fn show(ctx: &Ctx, name: &str, text: &str) -> Res<()> {
    ctx.result(&json!({"schema": "ks.logs.v1", "session": name, "text": text}), || text.to_owned())
}

/// What `now` has after what `before` ended with, in whole lines. When nothing of `before` is found again, all of it.
fn fresh<'a>(before: &str, now: &'a str) -> &'a str {
    let old: Vec<&str> = before.split_inclusive('\n').collect();
    let new: Vec<&str> = now.split_inclusive('\n').collect();
    // The window slides: an end of the old text is a beginning of the new one.
    let common = (0..=old.len().min(new.len())).rev().find(|n| old[old.len() - n..] == new[..*n]).unwrap_or(0);
    let at: usize = new[..common].iter().map(|l| l.len()).sum();
    &now[at..]
}

#[cfg(test)]
mod tests {
    use super::fresh;

    #[test]
    fn only_what_is_new_is_shown() {
        for (before, now, want) in [
            ("", "a\n", "a\n"),
            ("a\n", "a\n", ""),
            ("a\nb\n", "a\nb\nc\n", "c\n"),
            ("a\nb\n", "b\nc\nd\n", "c\nd\n"),
            ("a\na\n", "a\na\na\n", "a\n"),
            ("a\nb\n", "x\ny\n", "x\ny\n"),
            ("a\npart", "a\npart of a line\n", "a\npart of a line\n"),
            ("a\n", "", ""),
        ] {
            assert_eq!(fresh(before, now), want, "{before:?} {now:?}");
        }
    }
}
