//! Verbs on checkpoints: `ks checkpoint`, `checkpoints`, `tree`, `diff`, `restore`, `fork`.

use super::now_ms;
use super::sessions::checkpoint_line;
use crate::args;
use crate::failure::{Failure, Res};
use crate::host::http::Node;
use crate::human;
use crate::output::{Ctx, with_schema};
use crate::table::{Align, Table, clean};
use crate::target;
use base64::Engine;
use ks_proto::SessionName;
use ks_proto::api::{self, DiffReport, Session, Tree, TreeSession};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Largest file that `--steer` carries.
const STEER_MAX: u64 = 16 << 20;

/// Takes a checkpoint.
pub async fn take(ctx: &Ctx, a: args::Checkpoint) -> Res<u8> {
    let name = target::session(&a.session)?;
    let node = Node::find(ctx)?;
    let body = api::TakeCheckpoint { message: a.message, pin: a.pin };
    let c: api::Checkpoint = node.call(&format!("/v1/sessions/{name}/checkpoint"), &body, &mut ctx.bar()).await?;
    let value = with_schema("ks.checkpoint.v1", serde_json::to_value(&c).unwrap_or_default());
    ctx.result(&value, || format!("{}\n", checkpoint_line(&c)))?;
    Ok(0)
}

/// Lists a session's checkpoints.
pub async fn list(ctx: &Ctx, name: &str) -> Res<u8> {
    let name = target::session(name)?;
    let all: Vec<api::Checkpoint> = Node::find(ctx)?.get(&format!("/v1/sessions/{name}/checkpoints")).await?;
    let now = now_ms();
    ctx.result(&json!({"schema": "ks.checkpoints.v1", "session": name, "checkpoints": all}), || {
        let mut t = Table::new(&[
            ("NAME", Align::Left),
            ("ID", Align::Left),
            ("AGE", Align::Right),
            ("WHY", Align::Left),
            ("LOGICAL", Align::Right),
            ("STORED", Align::Right),
            ("PAUSE", Align::Right),
            ("TOTAL", Align::Right),
            ("KEPT", Align::Left),
            ("HOLDERS", Align::Left),
            ("NOTE", Align::Left),
        ]);
        for c in &all {
            t.row(vec![
                format!("c{}", c.number),
                c.id.short(),
                human::age(now, c.created_unix_ms),
                c.reason.clone(),
                human::mib(c.logical_bytes),
                human::mib(c.stored_bytes),
                human::micros(c.pause_us),
                human::micros(c.total_us),
                kept(c),
                if c.holders.is_empty() { "-".into() } else { c.holders.join(",") },
                c.message.clone(),
            ]);
        }
        t.render()
    })?;
    if all.is_empty() {
        ctx.note(&format!("{name} has no checkpoint yet; take one: ks checkpoint {name}"));
    }
    Ok(0)
}

/// How safe it is and what keeps it.
fn kept(c: &api::Checkpoint) -> String {
    let extra = [(c.pinned, "pinned"), (c.branch, "branch")];
    extra.iter().filter(|e| e.0).fold(c.durability.clone(), |text, e| format!("{text}, {}", e.1))
}

/// Shows the family.
pub async fn tree(ctx: &Ctx, name: &str) -> Res<u8> {
    let name = target::session(name)?;
    let t: Tree = Node::find(ctx)?.get(&format!("/v1/sessions/{name}/tree")).await?;
    ctx.result(&t, || draw(&t, &name))?;
    Ok(0)
}

/// The family as text: children hang below the checkpoint that they left from; the one asked for is marked.
fn draw(t: &Tree, asked: &str) -> String {
    let ids: BTreeSet<_> = t.sessions.iter().map(|s| s.session.id).collect();
    let is_root = |s: &TreeSession| s.session.forked_from.as_ref().is_none_or(|f| !ids.contains(&f.session));
    let mut out = String::new();
    let mut seen = BTreeSet::new();
    for s in t.sessions.iter().filter(|s| is_root(s)) {
        branch(t, s, asked, "", &mut seen, &mut out);
    }
    out
}

fn branch(t: &Tree, s: &TreeSession, asked: &str, indent: &str, seen: &mut BTreeSet<ks_proto::SessionId>, out: &mut String) {
    if !seen.insert(s.session.id) {
        return;
    }
    let name = s.session.name.as_str();
    let mark = if name == asked || s.session.id.to_hex() == asked { "  <- here" } else { "" };
    out.push_str(&format!("{name}  {}{mark}\n", s.session.state));
    let children: Vec<&TreeSession> =
        t.sessions.iter().filter(|c| c.session.forked_from.as_ref().is_some_and(|f| f.session == s.session.id)).collect();
    let point = |c: &TreeSession| c.session.forked_from.as_ref().map_or(0, |f| f.number);
    let known: BTreeSet<u64> = s.checkpoints.iter().map(|c| c.number).collect();
    let points = known.iter().copied().chain(children.iter().map(|c| point(c))).collect::<BTreeSet<u64>>();
    for (i, n) in points.iter().enumerate() {
        let last = i + 1 == points.len();
        let note = s.checkpoints.iter().find(|c| c.number == *n);
        let text = note.map_or("(deleted)".to_owned(), |c| {
            let pin = match (c.pinned, c.branch) {
                (false, false) => "",
                (true, false) => " pinned",
                (false, true) => " side branch",
                (true, true) => " pinned side branch",
            };
            let message = if c.message.is_empty() { String::new() } else { format!("  {}", clean(&c.message)) };
            format!("{}{pin}{message}", clean(&c.reason))
        });
        out.push_str(&format!("{indent}{} c{n}  {text}\n", if last { "`-" } else { "|-" }));
        let deeper = format!("{indent}{}", if last { "   " } else { "|  " });
        let here: Vec<_> = children.iter().filter(|c| point(c) == *n).collect();
        for (i, c) in here.iter().enumerate() {
            let (mark, below) = if i + 1 == here.len() { ("`-", "   ") } else { ("|-", "|  ") };
            out.push_str(&format!("{deeper}{mark} "));
            branch(t, c, asked, &format!("{deeper}{below}"), seen, out);
        }
    }
}

/// Lists the files that differ.
pub async fn diff(ctx: &Ctx, a: args::Diff) -> Res<u8> {
    let from = target::point(&a.from)?;
    let Some(older) = from.checkpoint else {
        let next = format!("write {}@cN; list them with `ks checkpoints {}`", from.session, from.session);
        return Err(Failure::usage("which checkpoint is the older one?", format!("{} names a session only", a.from), next));
    };
    let newer = match a.to.split_once('@') {
        Some((s, c)) if s == from.session => target::checkpoint(c)?,
        Some((s, _)) => {
            let why = format!("{} and {s} are two sessions", from.session);
            return Err(Failure::usage(
                "cannot compare these by number",
                why,
                "give the other one's checkpoint by its id (`ks checkpoints`)",
            ));
        }
        None => target::checkpoint(&a.to)?,
    };
    let body = api::Diff { from: older, to: newer, path: a.path };
    let node = Node::find(ctx)?;
    let r: DiffReport = node.call(&format!("/v1/sessions/{}/diff", from.session), &body, &mut ctx.bar()).await?;
    ctx.result(&r, || {
        let mut t =
            Table::new(&[("CHANGE", Align::Left), ("BEFORE", Align::Right), ("AFTER", Align::Right), ("FILE", Align::Left)]);
        for f in &r.files {
            let size = |there: bool, b: u64| if there { human::mib(b) } else { "-".into() };
            t.row(vec![
                f.change.clone(),
                size(f.change != "added", f.bytes_from),
                size(f.change != "removed", f.bytes_to),
                f.path.clone(),
            ]);
        }
        if r.files.is_empty() { String::new() } else { t.render() }
    })?;
    let verb = if r.files.len() == 1 { "differs" } else { "differ" };
    ctx.note(&format!("{} {verb}", human::count(r.files.len() as u64, "file")));
    Ok(0)
}

/// Puts a session back.
pub async fn restore(ctx: &Ctx, a: args::Restore) -> Res<u8> {
    let p = target::point(&a.point)?;
    let Some(checkpoint) = p.checkpoint else {
        let next = format!("write {}@cN; list them with `ks checkpoints {}`", p.session, p.session);
        return Err(Failure::usage("which checkpoint?", format!("{} names a session only", a.point), next));
    };
    let body = api::Restore { checkpoint: checkpoint.clone(), verify_eager: a.verify };
    let node = Node::find(ctx)?;
    super::ledger::warn_of_price(ctx, &node, &p.session, &checkpoint, "").await;
    let newest = numbers(&node, &p.session).await.map(|all| all.into_iter().map(|c| c.number).max().unwrap_or(0));
    let begun = std::time::Instant::now();
    let got: Value = node.call(&format!("/v1/sessions/{}/restore", p.session), &body, &mut ctx.bar()).await?;
    let us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
    let mut value = with_schema("ks.session.v1", got);
    value["took_us"] = us.into();
    let before = match newest {
        Some(n) => kept_before(&node, &p.session, n).await,
        None => None,
    };
    value["before"] = before.into();
    ctx.result(&value, || format!("{} is back at {checkpoint} after {}\n", p.session, human::micros(us)))?;
    if let Some(n) = before {
        ctx.note(&format!("what was there is kept as c{n}; to go back to it: ks restore {}@c{n}", p.session));
    }
    Ok(0)
}

/// A session's checkpoints; None when the node does not tell (a restore goes on without).
async fn numbers(node: &Node, session: &str) -> Option<Vec<api::Checkpoint>> {
    node.get(&format!("/v1/sessions/{session}/checkpoints")).await.ok()
}

/// The number of the checkpoint that the node took of the present before it went back: newer than `newest`.
async fn kept_before(node: &Node, session: &str, newest: u64) -> Option<u64> {
    let all = numbers(node, session).await?;
    all.iter().filter(|c| c.number > newest && c.message.starts_with("before restore")).map(|c| c.number).max()
}

/// Makes children.
pub async fn fork(ctx: &Ctx, a: args::Fork) -> Res<u8> {
    let p = target::point(&a.point)?;
    let names: Vec<SessionName> = a
        .name
        .iter()
        .map(|n| n.parse().map_err(|e| Failure::usage(format!("{n:?} is no name"), format!("{e}"), "choose another with --name")))
        .collect::<Res<_>>()?;
    if names.len() > a.n as usize {
        let why = format!("{} for {}", human::count(names.len() as u64, "name"), human::count(a.n.into(), "child"));
        return Err(Failure::usage("more names than children", why, "raise -n"));
    }
    let steer: Vec<(String, String)> = a.steer.iter().map(|s| steering_file(s)).collect::<Res<_>>()?;
    let node = Node::find(ctx)?;
    if let (Some(checkpoint), None) = (&p.checkpoint, &a.replay) {
        let instead = " by each child (--replay parent serves it instead)";
        super::ledger::warn_of_price(ctx, &node, &p.session, checkpoint, instead).await;
    }
    let body = api::Fork { checkpoint: p.checkpoint, n: a.n, steer, names, replay_parent: a.replay.is_some() };
    let got: Value = node.call(&format!("/v1/sessions/{}/fork", p.session), &body, &mut ctx.bar()).await?;
    let children = children(got)?;
    ctx.result(&json!({"schema": "ks.fork.v1", "parent": p.session, "children": children}), || {
        children.iter().map(|s| format!("{}\n", s.name)).collect()
    })?;
    Ok(0)
}

/// The children from the node's answer: a list, or an object that holds it.
fn children(mut got: Value) -> Res<Vec<Session>> {
    let list = ["children", "sessions"].iter().find(|k| got.get(**k).is_some()).map(|k| got[*k].take()).unwrap_or(got);
    serde_json::from_value(list).map_err(|e| {
        Failure::new("internal", "fork: the answer is not understood", e.to_string(), "the children may exist: look with `ks ls`")
    })
}

fn steering_file(text: &str) -> Res<(String, String)> {
    let (file, guest) = target::steer(text)?;
    let bad = |why: String| Failure::usage(format!("cannot steer with {file}"), why, "give a readable file of at most 16 MiB");
    let size = std::fs::metadata(&file).map_err(|e| bad(e.to_string()))?.len();
    if size > STEER_MAX {
        return Err(bad(format!("it has {}", human::mib(size))));
    }
    let bytes = std::fs::read(&file).map_err(|e| bad(e.to_string()))?;
    Ok((guest, base64::engine::general_purpose::STANDARD.encode(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(id: u8, name: &str, from: Option<(u8, u64)>, checkpoints: &[(u64, &str)]) -> Value {
        let hex = |b: u8, n: usize| format!("{b:02x}").repeat(n);
        json!({
            "session": {
                "schema": "ks.session.v1", "id": hex(id, 16), "name": name, "state": "running", "reason": "", "engine": "qemu",
                "profile": "tcg", "engine_why": "", "image": "default", "memory_mib": 512, "vcpus": 1,
                "token": {"generation": 0, "epoch": 1, "run": 1}, "created_unix_ms": 0,
                "forked_from": from.map(|(s, n)| json!({"session": hex(s, 16), "name": "x", "number": n, "checkpoint": hex(9, 32)})),
                "last_checkpoint": null, "checkpoints": 0, "cadence_s": 0, "idle_park_s": 0, "command": [],
                "last_interruption": null, "vmm_pid": null
            },
            "checkpoints": checkpoints.iter().map(|(n, m)| json!({
                "number": n, "id": hex(7, 32), "parent": null, "created_unix_ms": 0, "message": m, "reason": "demand", "pinned": false,
                "durability": "durable", "logical_bytes": 0, "stored_bytes": 0, "pause_us": 0, "total_us": 0
            })).collect::<Vec<_>>()
        })
    }

    #[test]
    fn the_tree_hangs_children_below_their_checkpoint() {
        let t: Tree = serde_json::from_value(json!({"schema": "ks.tree.v1", "sessions": [
            session(1, "otter", None, &[(1, ""), (7, "tests green"), (8, "")]),
            session(2, "otter.1", Some((1, 7)), &[(1, "")]),
            session(3, "otter.2", Some((1, 7)), &[]),
            session(4, "otter.1.1", Some((2, 1)), &[]),
            session(5, "stray", Some((99, 1)), &[]),
        ]}))
        .unwrap();
        let want = "\
otter  running
|- c1  demand
|- c7  demand  tests green
|  |- otter.1  running  <- here
|  |  `- c1  demand
|  |     `- otter.1.1  running
|  `- otter.2  running
`- c8  demand
stray  running
";
        assert_eq!(draw(&t, "otter.1"), want);
    }

    #[test]
    fn children_come_as_a_list_or_in_an_object() {
        let one = session(2, "a.1", None, &[])["session"].clone();
        for v in [json!([one]), json!({"children": [one]}), json!({"schema": "x", "sessions": [one]})] {
            assert_eq!(children(v).unwrap()[0].name.as_str(), "a.1");
        }
        assert!(children(json!("x")).is_err());
    }
}
