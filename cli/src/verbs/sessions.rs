//! Verbs on whole sessions: `ks ls`, `show`, `park`, `wake`, `stop`, `rm`.

use super::node::engine;
use super::now_ms;
use crate::args;
use crate::failure::Res;
use crate::host::http::Node;
use crate::human;
use crate::output::{Ctx, with_schema};
use crate::table::{Align, Table, clean};
use crate::target;
use ks_proto::api::{Checkpoint, InterruptionParts, Session, SessionState};
use serde_json::{Value, json};

/// Characters of a reason; what is longer is in `ks events` and `--json`.
const REASON_MAX: usize = 400;

/// Lists sessions.
pub async fn ls(ctx: &Ctx) -> Res<u8> {
    let node = Node::find(ctx)?;
    let all: Vec<Session> = node.get("/v1/sessions").await?;
    let now = now_ms();
    ctx.result(&json!({"schema": "ks.sessions.v1", "sessions": all}), || {
        let head = [("NAME", Align::Left), ("STATE", Align::Left), ("NODE", Align::Left), ("ENGINE", Align::Left)];
        let size = [("MEMORY", Align::Right)];
        let more =
            [("LAST-CHECKPOINT", Align::Left), ("DURABILITY", Align::Left), ("AGE", Align::Right), ("COMMAND", Align::Left)];
        let mut t = Table::new(&[head.as_slice(), size.as_slice(), more.as_slice()].concat());
        for s in &all {
            t.row(vec![
                s.name.to_string(),
                state(s),
                if s.node.is_empty() { "-".into() } else { s.node.clone() },
                engine(s.engine),
                human::mib(s.memory_mib << 20),
                s.last_checkpoint
                    .as_ref()
                    .map_or("never".into(), |c| format!("c{}, {} ago", c.number, human::age(now, c.created_unix_ms))),
                s.last_checkpoint.as_ref().map_or("-".into(), |c| durability(c, s.copies)),
                human::age(now, s.created_unix_ms),
                human::command(&s.command, 40),
            ]);
        }
        t.render()
    })?;
    if all.is_empty() {
        ctx.note("no sessions; make one: ks run -- CMD");
    }
    for s in all.iter().filter(|s| s.state == SessionState::Failed) {
        ctx.note(&format!("{} failed: {}", s.name, cut(&s.reason)));
    }
    for s in all.iter().filter(|s| s.state == SessionState::Running && !s.reason.is_empty()) {
        ctx.note(&format!("{}: {}", s.name, cut(&s.reason)));
    }
    let still = all.iter().filter(|s| s.paused).count();
    if still > 0 {
        ctx.note(&format!(
            "{} standing still: the lease of the node has run out, and only a quorum grants another (`ks fleet status`)",
            if still == 1 { "1 session is".to_owned() } else { format!("{still} sessions are") }
        ));
    }
    Ok(0)
}

/// The state as it is listed; a guest that stands still is not called running.
fn state(s: &Session) -> String {
    if s.paused { format!("{}, paused", s.state) } else { s.state.to_string() }
}

/// How safe a checkpoint is, with the count of its holders when the fleet tells it.
pub fn durability(c: &Checkpoint, copies: u16) -> String {
    match (c.holders.len(), copies) {
        (0, _) => c.durability.clone(),
        (n, 0) => format!("{} ({n})", c.durability),
        // Fewer nodes than the policy wants copies: all of them is what there can be, and counts.
        (n, of) if c.durability == "durable" && n < usize::from(of) => format!("durable {n}/{n}"),
        (n, of) => format!("{} {n}/{of}", c.durability),
    }
}

/// A reason in one line of bounded length: the kernel's traces are long, and the events have them whole.
fn cut(text: &str) -> String {
    human::cut(&clean(text), REASON_MAX)
}

/// One line about a checkpoint.
pub fn checkpoint_line(c: &Checkpoint) -> String {
    format!(
        "c{}  {} logical, {} stored, pause {}{}{}",
        c.number,
        human::mib(c.logical_bytes),
        human::mib(c.stored_bytes),
        human::micros(c.pause_us),
        if c.pinned { ", pinned" } else { "" },
        if c.message.is_empty() { String::new() } else { format!("  {}", clean(&c.message)) },
    )
}

/// Shows one session.
pub async fn show(ctx: &Ctx, name: &str) -> Res<u8> {
    let name = target::session(name)?;
    let s = Node::find(ctx)?.session(&name).await?;
    ctx.result(&s, || facts(&s, now_ms()))?;
    Ok(0)
}

fn facts(s: &Session, now: u64) -> String {
    let every = |n: u64| if n == 0 { "never".to_owned() } else { human::seconds(n) };
    let cadence = if s.cadence_s == 0 { "none by itself".into() } else { format!("one every {}", human::seconds(s.cadence_s)) };
    let mut all: Vec<(&str, String)> = vec![
        ("name", s.name.to_string()),
        ("id", s.id.to_string()),
        ("state", if s.reason.is_empty() { state(s) } else { format!("{}: {}", state(s), cut(&s.reason)) }),
        ("command", human::command(&s.command, 200)),
        ("engine", format!("{} ({}): {}", engine(s.engine), clean(&s.profile), clean(&s.engine_why))),
        ("image", clean(&s.image)),
        ("size", format!("{} memory, {}", human::mib(s.memory_mib << 20), human::count(s.vcpus.into(), "vCPU"))),
        ("run", s.token.to_string()),
        ("created", format!("{} UTC ({} ago)", human::utc(s.created_unix_ms), human::age(now, s.created_unix_ms))),
        ("checkpoints", format!("{}, {cadence}", s.checkpoints)),
        ("parks after", every(s.idle_park_s)),
    ];
    if !s.node.is_empty() {
        all.push(("node", clean(&s.node)));
        let replicas = s.replicas.iter().map(|n| clean(n)).collect::<Vec<_>>().join(", ");
        all.push(("replicas", if replicas.is_empty() { "none chosen yet".into() } else { replicas }));
    }
    if s.copies > 0 {
        let fewer = s.last_checkpoint.as_ref().filter(|c| c.durability == "durable").map(|c| c.holders.len());
        all.push((
            "copies",
            match fewer.filter(|n| *n > 0 && *n < usize::from(s.copies)) {
                Some(n) => format!("{} make a checkpoint durable; {n} until there are more nodes", s.copies),
                None => format!("{} make a checkpoint durable", s.copies),
            },
        ));
    }
    if let Some(c) = s.last_checkpoint.as_ref().filter(|c| !c.holders.is_empty()) {
        all.push(("held by", c.holders.iter().map(|n| clean(n)).collect::<Vec<_>>().join(", ")));
    }
    if let Some(c) = &s.last_checkpoint {
        all.push((
            "last",
            format!("{} ({} ago, {})", checkpoint_line(c), human::age(now, c.created_unix_ms), clean(&c.durability)),
        ));
    }
    if let Some(f) = &s.forked_from {
        all.push(("forked from", format!("{}@c{}", clean(&f.name), f.number)));
    }
    if let Some(i) = &s.last_interruption {
        all.push((
            "interrupted",
            format!(
                "{} ago ({}): back after {} from c{}, {} of work lost",
                human::age(now, i.at_unix_ms),
                cut(&i.cause),
                human::millis(i.ready_ms),
                i.checkpoint,
                human::millis(i.lost_ms)
            ),
        ));
        if let Some(parts) = i.parts.as_ref().and_then(parts) {
            all.push(("its parts", parts));
        }
    }
    if let Some(p) = s.vmm_pid {
        all.push(("vmm process", p.to_string()));
    }
    all.iter().map(|(k, v)| format!("{k:<12} {v}\n")).collect()
}

/// What the time of an interruption went into; None when nothing of it is known.
fn parts(p: &InterruptionParts) -> Option<String> {
    let lease = p.lease_ms.map(|ms| match p.election_ms {
        Some(new) => format!("lease {} ({} of it a new leader's wait)", human::millis(ms), human::millis(new)),
        None => format!("lease {}", human::millis(ms)),
    });
    let one = |name: &str, ms: Option<u64>| ms.map(|ms| format!("{name} {}", human::millis(ms)));
    let all: Vec<String> = [lease, one("restore", p.restore_ms), one("hook", p.hook_ms)].into_iter().flatten().collect();
    (!all.is_empty()).then(|| all.join(", "))
}

/// Parks, wakes or stops each of the sessions.
pub async fn each(ctx: &Ctx, verb: &str, names: &[String]) -> Res<u8> {
    each_at(ctx, &Node::find(ctx)?, verb, names).await
}

/// As [`each`], at this node. A refusal is told and does not keep the others: the worst code is the result.
pub async fn each_at(ctx: &Ctx, node: &Node, verb: &str, names: &[String]) -> Res<u8> {
    let names: Vec<String> = names.iter().map(|n| target::session(n)).collect::<Res<_>>()?;
    let mut worst = 0;
    for name in names {
        let mut bar = ctx.bar();
        let begun = std::time::Instant::now();
        let got: Value = match node.call(&format!("/v1/sessions/{name}/{verb}"), &json!({}), &mut bar).await {
            Ok(got) => got,
            Err(f) => {
                worst = worst.max(f.exit);
                crate::output::report(&f, ctx.json);
                continue;
            }
        };
        let us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
        let state = got["state"].as_str().unwrap_or(verb).to_owned();
        let mut value = with_schema("ks.session.v1", got);
        value["took_us"] = us.into();
        ctx.result(&value, || format!("{name} {} in {}\n", clean(&state), human::micros(us)))?;
        // An older checkpoint than the newest, say: whoever woke it must hear that.
        if let Some(reason) = value["reason"].as_str().filter(|r| !r.is_empty()) {
            ctx.note(&format!("{name}: {}", cut(reason)));
        }
    }
    Ok(worst)
}

/// Deletes sessions. The node says what would be lost when it refuses.
pub async fn rm(ctx: &Ctx, a: args::Rm) -> Res<u8> {
    let node = Node::find(ctx)?;
    let names: Vec<String> = a.sessions.iter().map(|n| target::session(n)).collect::<Res<_>>()?;
    let mut worst = 0;
    for name in names {
        let path = format!("/v1/sessions/{name}{}", if a.force { "?force=1" } else { "" });
        match node.delete(&path).await {
            Ok(_) => {
                ctx.result(&json!({"schema": "ks.rm.v1", "session": name, "removed": true}), || format!("{name} removed\n"))?
            }
            // The others are still removed.
            Err(f) => {
                worst = worst.max(f.exit);
                crate::output::report(&f, ctx.json);
            }
        }
    }
    Ok(worst)
}
