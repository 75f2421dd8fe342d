//! `ks kill`: crashes a session's VM and measures how long the session is away.

use super::now_ms;
use crate::args;
use crate::failure::{Failure, Res};
use crate::host::http::Node;
use crate::human;
use crate::output::Ctx;
use crate::target;
use ks_proto::api::{self, Session, SessionState};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(20);

/// Kills and waits until the session works again.
pub async fn run(ctx: &Ctx, a: args::Kill) -> Res<u8> {
    let name = target::session(&a.session)?;
    let mut node = Node::find(ctx)?;
    let before = node.session(&name).await?;
    let asked_ms = now_ms();
    let begun = Instant::now();
    let body = api::Kill { with_daemon: a.with_daemon };
    let killed: Res<Value> = node.call(&format!("/v1/sessions/{name}/kill"), &body, &mut ctx.bar()).await;
    match killed {
        Ok(_) => {}
        // The daemon that should answer was killed too.
        Err(f) if a.with_daemon && matches!(f.error.code.as_str(), "link-lost" | "node-down") => {}
        Err(f) => return Err(f),
    }
    let until = begun + Duration::from_secs(a.timeout);
    let mut bar = ctx.bar();
    let after = loop {
        bar.step(&format!("{name} is coming back"), 0, 0);
        match node.session(&name).await {
            Ok(s) if is_back(&before, &s) => break s,
            Ok(s) if s.state == SessionState::Failed => {
                return Err(Failure::new(
                    "failed",
                    format!("{name} did not come back"),
                    s.reason,
                    format!("its checkpoints remain: `ks checkpoints {name}`"),
                ));
            }
            Ok(_) => {}
            Err(f) if matches!(f.error.code.as_str(), "node-down" | "link-lost" | "timeout") => {
                // A new daemon has a new address.
                if let Ok(n) = Node::find(ctx) {
                    node = n;
                }
            }
            Err(f) => return Err(f),
        }
        if Instant::now() >= until {
            let why = format!("after {} s it is not running", a.timeout);
            return Err(Failure::new(
                "timeout",
                format!("{name} has not come back yet"),
                why,
                format!("look with `ks show {name}` and `ks events`"),
            ));
        }
        tokio::time::sleep(POLL).await;
    };
    bar.clear();
    let away_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
    let i = after.last_interruption.clone();
    let value = json!({
        "schema": "ks.kill.v1", "session": name, "with_daemon": a.with_daemon, "asked_unix_ms": asked_ms,
        "away_us": away_us, "interruption": i, "token_before": before.token, "token_after": after.token,
    });
    ctx.result(&value, || {
        let what = if a.with_daemon { "VM and daemon killed" } else { "VM killed" };
        let mut line = format!("{name}: {what}; running again after {}", human::micros(away_us));
        if let Some(i) = &i {
            let lost = human::millis(i.lost_ms);
            line.push_str(&format!(
                " (the node measured {}) from c{}; {lost} of work since it lost",
                human::millis(i.ready_ms),
                i.checkpoint
            ));
        }
        line + "\n"
    })?;
    Ok(0)
}

/// It runs, and it is another run than before.
fn is_back(before: &Session, now: &Session) -> bool {
    now.state == SessionState::Running && now.token > before.token
}
