//! `ks ledger` and `ks cost`: what was bought, what was served again, and what it cost.

use crate::args;
use crate::failure::{Failure, Res};
use crate::host::http::Node;
use crate::human;
use crate::ledger::{Book, Call, Sum, day, sum};
use crate::output::{Ctx, with_schema};
use crate::table::{Align, Table, clean};
use crate::target;
use ks_proto::api::Session;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Largest usage export: it goes to the gateway in one message. A day of a model is a line of some 200 bytes.
const EXPORT_MAX: u64 = 800 << 10;

/// Does what `ks ledger ...` asks.
pub async fn run(ctx: &Ctx, a: args::Ledger) -> Res<u8> {
    match (a.act, a.session) {
        (Some(act), _) => other(ctx, act).await,
        (None, Some(session)) => show(ctx, &target::session(&session)?, a.csv, a.raw).await,
        (None, None) => Err(Failure::usage("which session?", "no session is named", "`ks ledger SESSION`; `ks ls` lists them")),
    }
}

async fn lines(node: &Node, session: &str) -> Res<Vec<Value>> {
    let mut all = Vec::new();
    node.lines(&format!("/v1/sessions/{session}/ledger"), &mut |v| {
        all.push(v);
        Ok(())
    })
    .await?;
    Ok(all)
}

async fn show(ctx: &Ctx, session: &str, csv: bool, raw: bool) -> Res<u8> {
    let node = Node::find(ctx)?;
    if raw {
        let text = node.get_text(&format!("/v1/sessions/{session}/ledger")).await?;
        ctx.data(&String::from_utf8_lossy(&text))?;
        return Ok(0);
    }
    let book = Book::read(lines(&node, session).await?);
    if csv {
        ctx.data(&as_csv(book.calls.values()))?;
        return Ok(0);
    }
    let total = sum(book.calls.values());
    let calls: Vec<&Call> = book.calls.values().collect();
    let value = json!({
        "schema": "ks.ledger.v1", "session": session, "calls": calls, "sum": total, "diverged": book.diverged,
        "egress": {"asked": book.egress.0, "refused": book.egress.1},
    });
    ctx.result(&value, || table(&calls))?;
    ctx.note(&in_words(&total));
    if total.unknown > 0 {
        let next = format!("`ks ledger reconcile {session} EXPORT --provider P`, or `ks ledger resolve {session} SEQ`");
        ctx.note(&format!("the end of {} is not known; each may have been billed: {next}", human::count(total.unknown, "call")));
    }
    Ok(0)
}

/// What going back to a checkpoint may cost, said before it is done: what was bought since is bought again when it is asked
/// again. Says nothing when nothing was bought, or when the ledger cannot be had.
pub async fn warn_of_price(ctx: &Ctx, node: &Node, session: &str, checkpoint: &str, instead: &str) {
    let all: Vec<ks_proto::api::Checkpoint> = node.get(&format!("/v1/sessions/{session}/checkpoints")).await.unwrap_or_default();
    let named = |c: &&ks_proto::api::Checkpoint| format!("c{}", c.number) == checkpoint || c.id.to_hex().starts_with(checkpoint);
    let (Some(taken), Ok(lines)) = (all.iter().find(named).map(|c| c.created_unix_ms), lines(node, session).await) else {
        return;
    };
    let book = Book::read(lines);
    let since = sum(book.calls.values().filter(|c| c.at_ms > taken));
    if since.bought > 0 {
        let calls = human::count(since.bought, "call");
        let unpriced = if since.unpriced > 0 { format!(", {} of them unpriced", since.unpriced) } else { String::new() };
        ctx.note(&format!(
            "since {checkpoint} {calls} were bought for ${}{unpriced}; what is asked again is bought again{instead}. Pushes and POSTs are not undone.",
            since.cost
        ));
    }
}

fn in_words(s: &Sum) -> String {
    let unpriced = if s.unpriced > 0 { format!(" and {} unpriced", s.unpriced) } else { String::new() };
    format!(
        "{} bought for ${}{unpriced}; {} served again, {} tokens not bought twice",
        human::count(s.bought, "call"),
        s.cost,
        s.served,
        human::thousands(s.tokens_served.total())
    )
}

fn table(calls: &[&Call]) -> String {
    let (l, r) = (Align::Left, Align::Right);
    let mut t = Table::new(&[
        ("SEQ", r),
        ("DAY", l),
        ("PROVIDER", l),
        ("MODEL", l),
        ("STATUS", r),
        ("END", l),
        ("IN", r),
        ("CACHED", r),
        ("OUT", r),
        ("COST", r),
        ("SERVED", r),
    ]);
    for c in calls {
        let tokens = |f: fn(&crate::ledger::Tokens) -> u64| c.tokens.as_ref().map_or("-".into(), |t| human::thousands(f(t)));
        t.row(vec![
            c.seq.to_string(),
            day(c.at_ms),
            c.provider.clone(),
            c.model.clone(),
            c.status.filter(|s| *s > 0).map_or("-".into(), |s| s.to_string()),
            c.outcome.clone(),
            tokens(|t| t.input + t.cache_write),
            tokens(|t| t.cache_read),
            tokens(|t| t.output),
            c.cost.map_or("-".into(), |m| format!("${m}")),
            c.served.to_string(),
        ]);
    }
    t.render()
}

fn as_csv<'a>(calls: impl Iterator<Item = &'a Call>) -> String {
    let mut out = String::from(
        "seq,at_unix_ms,provider,model,status,outcome,input,cache_read,cache_write,output,cost_usd,served,took_ms,bought_by\r\n",
    );
    for c in calls {
        let n = |v: Option<u64>| v.map(|v| v.to_string()).unwrap_or_default();
        let t = |f: fn(&crate::ledger::Tokens) -> u64| c.tokens.as_ref().map(|t| f(t).to_string()).unwrap_or_default();
        let cells = [
            c.seq.to_string(),
            c.at_ms.to_string(),
            c.provider.clone(),
            c.model.clone(),
            n(c.status),
            c.outcome.clone(),
            t(|t| t.input),
            t(|t| t.cache_read),
            t(|t| t.cache_write),
            t(|t| t.output),
            c.cost.map(|m| m.to_string()).unwrap_or_default(),
            c.served.to_string(),
            n(c.took_ms),
            c.bought_by.clone().unwrap_or_default(),
        ];
        out.push_str(&cells.map(|c| csv_cell(&c)).join(","));
        out.push_str("\r\n");
    }
    out
}

/// Quoted where RFC 4180 wants it; a spreadsheet must not take a guest's text for a formula.
fn csv_cell(text: &str) -> String {
    let text = clean(text);
    let text = if text.starts_with(['=', '+', '-', '@']) { format!("'{text}") } else { text };
    if text.contains([',', '"']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text }
}

async fn other(ctx: &Ctx, act: args::LedgerAct) -> Res<u8> {
    let node = Node::find(ctx)?;
    match act {
        args::LedgerAct::Verify { session, tree } => {
            let name = target::session(&session)?;
            let got: Value =
                node.call(&format!("/v1/sessions/{name}/ledger/verify"), &json!({ "tree": tree }), &mut ctx.bar()).await?;
            let ok = got["ok"].as_bool().unwrap_or(false);
            let text = verified(&name, &got);
            ctx.result(&with_schema("ks.ledger-verify.v1", got), || text)?;
            Ok(u8::from(!ok))
        }
        args::LedgerAct::Reconcile { session, file, provider, apply } => {
            let name = target::session(&session)?;
            let export = read_export(&file)?;
            let body = json!({ "provider": provider, "export": export, "apply": apply });
            let got: Value = node.call(&format!("/v1/sessions/{name}/ledger/reconcile"), &body, &mut ctx.bar()).await?;
            let (text, hint) = (reconciled(&got), hint(&got, apply));
            ctx.result(&with_schema("ks.ledger-reconcile.v1", got), || text)?;
            ctx.note(&hint);
            Ok(0)
        }
        args::LedgerAct::Resolve { session, seq, outcome, cost, note } => {
            let name = target::session(&session)?;
            let body = json!({ "seq": seq, "outcome": outcome, "cost": cost, "note": note });
            let _: Value = node.call(&format!("/v1/sessions/{name}/ledger/resolve"), &body, &mut ctx.bar()).await?;
            let done = json!({"schema": "ks.ledger-resolve.v1", "session": name, "seq": seq, "outcome": outcome});
            ctx.result(&done, || format!("{name}: call {seq} is {outcome}\n"))?;
            Ok(0)
        }
    }
}

/// What `verify` found, in words.
fn verified(name: &str, got: &Value) -> String {
    let n = |v: &Value| v.as_u64().unwrap_or(0);
    let mut out = String::new();
    for problem in got["problems"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        out += &format!("{}\n", clean(problem));
    }
    let totals = &got["totals"];
    out += &format!(
        "{}: {} lines, {} bought for ${}, {} of unknown end, {} served again: {}\n",
        clean(name),
        n(&got["lines"]),
        human::count(n(&totals["purchases"]), "call"),
        totals["cost"].as_str().unwrap_or("?"),
        n(&totals["unknown"]),
        n(&totals["served"]),
        if got["ok"] == true { "chain and sums are right" } else { "not in order" },
    );
    out
}

/// Tokens of one side: all input, and output.
fn tokens(v: &Value) -> String {
    let n = |k: &str| v[k].as_u64().unwrap_or(0);
    let input = ["input", "cache_read", "cache_write_5m", "cache_write_1h"].iter().fold(0u64, |sum, k| sum.saturating_add(n(k)));
    format!("{input} + {}", n("output"))
}

/// Day by day and model by model, what each side says; then what that means for calls of unknown end.
fn reconciled(got: &Value) -> String {
    let (l, r) = (Align::Left, Align::Right);
    let mut t =
        Table::new(&[("DAY", l), ("MODEL", l), ("LEDGER IN + OUT", r), ("PROVIDER IN + OUT", r), ("UNKNOWN", r), ("VERDICT", l)]);
    let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
    for c in got["compared"].as_array().into_iter().flatten() {
        let unknown = c["unknown"].as_array().map_or(0, Vec::len);
        t.row(vec![
            text(&c["day"]),
            text(&c["model"]),
            tokens(&c["ours"]),
            tokens(&c["theirs"]),
            unknown.to_string(),
            text(&c["verdict"]),
        ]);
    }
    let mut out = t.render();
    for p in got["proposals"].as_array().into_iter().flatten() {
        let what = &p["resolution"];
        let found = match what["found"].as_str() {
            Some("billed") => {
                let cost = what["cost"].as_str().map_or_else(|| "no price is known".to_owned(), |c| format!("${c}"));
                format!("billed, {} tokens, {cost}", tokens(&what["usage"]))
            }
            _ => "not billed".to_owned(),
        };
        out += &format!("call {} of session {}: {found}\n", p["of"].as_u64().unwrap_or(0), clean(&text(&p["session"])));
    }
    out
}

fn hint(got: &Value, apply: bool) -> String {
    let all = |v: &Value| v.as_array().map_or(0, Vec::len);
    let proposals = all(&got["proposals"]);
    let unknown: usize = got["compared"].as_array().into_iter().flatten().map(|c| all(&c["unknown"])).sum();
    let of = |n: usize, what: &str| human::count(n as u64, what);
    match (proposals, unknown) {
        (0, 0) => "no call of this provider has an unknown end".to_owned(),
        (0, n) => {
            format!("the export does not tell what became of {}; `ks ledger resolve SESSION CALL` says it by hand", of(n, "call"))
        }
        (n, _) if apply => format!("{} resolved in the ledger", of(n, "call")),
        (n, _) => format!("nothing was changed; --apply writes what it says of {} into the ledger", of(n, "call")),
    }
}

fn read_export(file: &std::path::Path) -> Res<String> {
    let bad =
        |why: String| Failure::usage(format!("cannot read {}", file.display()), why, "give the provider's CSV or JSON export");
    let size = std::fs::metadata(file).map_err(|e| bad(e.to_string()))?.len();
    if size > EXPORT_MAX {
        return Err(bad(format!(
            "it has {}, at most {} are read: export fewer days, grouped by model",
            human::mib(size),
            human::mib(EXPORT_MAX)
        )));
    }
    std::fs::read_to_string(file).map_err(|e| bad(e.to_string()))
}

/// `ks cost`.
pub async fn cost(ctx: &Ctx, a: args::Cost) -> Res<u8> {
    let node = Node::find(ctx)?;
    let names = match &a.session {
        None => node.get::<Vec<Session>>("/v1/sessions").await?.iter().map(|s| s.name.to_string()).collect(),
        Some(s) => {
            let name = target::session(s)?;
            if a.tree { descendants(&node, &name).await? } else { vec![name] }
        }
    };
    let mut groups: BTreeMap<String, Vec<Call>> = BTreeMap::new();
    for name in &names {
        for (_, call) in Book::read(lines(&node, name).await?).calls {
            let key = match a.by.as_str() {
                "day" => day(call.at_ms),
                "model" if call.bought_by.is_some() => "(bought by a parent)".to_owned(),
                "model" => format!("{}/{}", call.provider, call.model),
                _ => name.clone(),
            };
            groups.entry(key).or_default().push(call);
        }
    }
    let rows: Vec<(String, Sum)> = groups.iter().map(|(k, calls)| (k.clone(), sum(calls))).collect();
    let total = sum(groups.values().flatten());
    let json_rows: Vec<Value> = rows.iter().map(|(k, s)| json!({ "of": k, "sum": s })).collect();
    let value = json!({"schema": "ks.cost.v1", "by": a.by, "sessions": names, "rows": json_rows, "total": total});
    ctx.result(&value, || cost_table(&a.by, &rows, &total))?;
    Ok(0)
}

fn cost_table(by: &str, rows: &[(String, Sum)], total: &Sum) -> String {
    let (l, r) = (Align::Left, Align::Right);
    let head = match by {
        "day" => "DAY (UTC)",
        "model" => "MODEL",
        _ => "SESSION",
    };
    let mut t =
        Table::new(&[(head, l), ("BOUGHT", r), ("TOKENS", r), ("COST", r), ("UNPRICED", r), ("UNKNOWN", r), ("SERVED", r)]);
    let all = ("all".to_owned(), *total);
    for (key, s) in rows.iter().chain(std::iter::once(&all).filter(|_| rows.len() != 1)) {
        t.row(vec![
            key.clone(),
            s.bought.to_string(),
            human::thousands(s.tokens.total()),
            format!("${}", s.cost),
            s.unpriced.to_string(),
            s.unknown.to_string(),
            s.served.to_string(),
        ]);
    }
    t.render()
}

/// The session and everything that was forked from it.
async fn descendants(node: &Node, name: &str) -> Res<Vec<String>> {
    let root = node.session(name).await?;
    let all: Vec<Session> = node.get("/v1/sessions").await?;
    let mut family = vec![root.clone()];
    let mut at = 0;
    while let Some(parent) = family.get(at).map(|s| s.id) {
        let born = |s: &&Session| s.forked_from.as_ref().is_some_and(|f| f.session == parent);
        family.extend(all.iter().filter(born).cloned());
        at += 1;
    }
    Ok(family.iter().map(|s| s.name.to_string()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_compared_is_told_in_words() {
        let usage = |i: u64, o: u64| json!({"input": i, "cache_read": 1, "cache_write_5m": 0, "cache_write_1h": 0, "output": o});
        let mut got = json!({
            "provider": "anthropic",
            "compared": [{"day": "2026-11-30", "model": "m\u{1b}[2J", "ours": usage(2, 5), "theirs": usage(4, 9), "unknown": [["ab", 7]], "verdict": "more"}],
            "proposals": [{"session": "ab", "of": 7, "resolution": {"found": "billed", "usage": usage(1, 4), "cost": "0.25"}}],
        });
        let text = reconciled(&got);
        assert!(
            text.contains("3 + 5")
                && text.contains("5 + 9")
                && text.contains("call 7 of session ab: billed, 2 + 4 tokens, $0.25")
        );
        assert!(!text.contains('\u{1b}'), "{text:?}");
        assert!(hint(&got, false).contains("--apply") && hint(&got, true).starts_with("1 call resolved"));
        got["proposals"] = json!([]);
        assert!(hint(&got, false).contains("ks ledger resolve"));
        got["compared"] = json!([]);
        assert!(hint(&got, false).contains("no call"));
        let told =
            json!({"ok": false, "lines": 3, "problems": ["line 2 is another"], "totals": {"purchases": 1, "cost": "0.05"}});
        let text = verified("a", &told);
        assert!(
            text.starts_with("line 2 is another\na: 3 lines, 1 call bought for $0.05") && text.contains("not in order"),
            "{text}"
        );
    }

    #[test]
    fn cells_are_quoted_and_no_formula_gets_through() {
        assert_eq!(csv_cell("a,\"b\""), "\"a,\"\"b\"\"\"");
        assert_eq!(csv_cell("=1+1"), "'=1+1");
        let calls = [Call { seq: 2, model: "m,n".into(), ..Call::default() }];
        let text = as_csv(calls.iter());
        assert_eq!(text.lines().nth(1), Some("2,0,,\"m,n\",,,,,,,,0,,"));
    }
}
