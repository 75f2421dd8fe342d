//! Questions about the ledger: its lines, whether it adds up, what it cost, and what a provider's export says of it.

use super::admin::Refused;
use super::node::Node;
use ks_gateway::dialect::Outcome;
use ks_gateway::ledger::{ByWhom, Entry, Export, Ledger, Resolution, Totals, day_of, reconcile as compare, verify_tree};
use ks_gateway::money::Money;
use ks_gateway::price::PriceTable;
use ks_gateway::usage::Usage;
use ks_proto::SessionId;
use ks_proto::gateway::{AdminAnswer, LINES_MAX};
use serde_json::json;
use std::sync::Arc;

/// Bytes of lines in one answer at most; a message holds 1 MiB with its escapes.
const ANSWER_BYTES_MAX: usize = 256 * 1024;

/// Splits lines over as many answers as they need.
fn answers(lines: Vec<String>) -> Vec<AdminAnswer> {
    let mut out: Vec<Vec<String>> = vec![Vec::new()];
    let mut bytes = 0;
    for line in lines {
        let last = out.last().map_or(0, Vec::len);
        if last >= LINES_MAX || (last > 0 && bytes + line.len() > ANSWER_BYTES_MAX) {
            out.push(Vec::new());
            bytes = 0;
        }
        bytes += line.len();
        if let Some(chunk) = out.last_mut() {
            chunk.push(line);
        }
    }
    let n = out.len();
    out.into_iter().enumerate().map(|(i, lines)| AdminAnswer::Lines { lines, more: i + 1 < n }).collect()
}

/// Entries of a journal from number `from` on.
///
/// # Errors
/// If it cannot be read.
pub async fn ledger(node: &Arc<Node>, session: SessionId, from: u64) -> Result<Vec<AdminAnswer>, Refused> {
    let text = text(node, session).await?;
    let wanted = |row: &&str| {
        let seq = serde_json::from_str::<serde_json::Value>(row).ok().and_then(|v| v["seq"].as_u64());
        seq.is_none_or(|s| s >= from)
    };
    Ok(answers(text.lines().filter(wanted).map(str::to_owned).collect()))
}

/// The durable lines of a journal; empty if there is none.
async fn text(node: &Arc<Node>, session: SessionId) -> Result<String, Refused> {
    let Some(open) = node.known(session).await else { return Ok(String::new()) };
    let read = tokio::task::spawn_blocking(move || {
        let (_, len) = *open.journal().durable().borrow();
        open.journal().read(0, len)
    });
    let failed =
        |why: String| Refused::new("disk", format!("the journal of {session} was not read"), why, "see the gateway's log");
    let bytes = read.await.map_err(|e| failed(e.to_string()))?.map_err(|e| failed(e.to_string()))?;
    String::from_utf8(bytes).map_err(|e| failed(e.to_string()))
}

/// The ledgers of those sessions that have one.
async fn ledgers(node: &Arc<Node>, sessions: &[SessionId]) -> Result<Vec<Ledger>, Refused> {
    let mut all = Vec::new();
    for session in sessions {
        let text = text(node, *session).await?;
        if text.is_empty() {
            continue;
        }
        let read = Ledger::read(&session.to_hex(), &text);
        all.push(read.map_err(|e| {
            Refused::new("damaged", "the ledger was not read", e.to_string(), "restore its file from another node or a copy")
        })?);
    }
    Ok(all)
}

/// Checks chains, sums and the tree of forks.
///
/// # Errors
/// If a journal cannot be read; a ledger that is not in order is an answer.
pub async fn verify(node: &Arc<Node>, sessions: &[SessionId]) -> Result<AdminAnswer, Refused> {
    let tables = [node.prices().clone(), PriceTable::built_in()];
    let (mut read, mut problems, mut lines) = (Vec::new(), Vec::new(), 0);
    for session in sessions {
        let path = node.dir().join("journal").join(session.to_hex()).join("ledger.jsonl");
        let text = match node.known(*session).await {
            Some(_) => text(node, *session).await?,
            // One that cannot be opened is read as it is.
            None => std::fs::read_to_string(path).unwrap_or_default(),
        };
        match Ledger::read(&session.to_hex(), &text) {
            Ok(ledger) => {
                lines += ledger.lines.len();
                if let Err(e) = ledger.check(&tables) {
                    problems.push(e.to_string());
                }
                read.push(ledger);
            }
            Err(e) => problems.push(e.to_string()),
        }
    }
    if let Err(e) = verify_tree(&read) {
        problems.push(e.to_string());
    }
    let totals = Totals::of(&read.iter().flat_map(Ledger::purchases).collect::<Vec<_>>());
    let report =
        json!({"ok": problems.is_empty(), "sessions": sessions.len(), "lines": lines, "totals": totals, "problems": problems});
    Ok(AdminAnswer::Report { report })
}

/// Compares purchases with a provider's export; with `apply`, appends what it says of unknown ones.
///
/// # Errors
/// If the export is none that is known, or a journal cannot be read or written.
pub async fn reconcile(
    node: &Arc<Node>,
    sessions: &[SessionId],
    provider: &str,
    export: &str,
    apply: bool,
) -> Result<AdminAnswer, Refused> {
    let export = Export::parse(export)
        .map_err(|e| Refused::new("export", "nothing was compared", e.to_string(), "export the usage again, grouped by model"))?;
    let purchases: Vec<_> = ledgers(node, sessions).await?.iter().flat_map(Ledger::purchases).collect();
    let (compared, proposals) = compare(provider, &purchases, &export, node.prices());
    let mut applied = 0;
    if apply {
        for p in &proposals {
            let Some(session) = p.session.parse().ok() else { continue };
            let note = "from the provider's usage export".to_owned();
            settle(node, session, p.of, ByWhom::Reconcile, p.resolution.clone(), note).await?;
            applied += 1;
        }
    }
    let report = json!({"provider": provider, "compared": compared, "proposals": proposals, "applied": applied});
    Ok(AdminAnswer::Report { report })
}

/// A person says what became of an unknown purchase: `not-billed`, or `billed` with a cost.
///
/// # Errors
/// If it is not unknown, or the words are others.
pub async fn resolve(
    node: &Arc<Node>,
    session: SessionId,
    seq: u64,
    outcome: &str,
    cost: Option<&str>,
    note: String,
) -> Result<AdminAnswer, Refused> {
    let what = "the call was not resolved";
    let cost = cost.map(|text| {
        Money::parse(text)
            .ok_or_else(|| Refused::new("amount", what, format!("{text:?} is not an amount of dollars"), "write 0.42"))
    });
    let resolution = match (outcome, cost.transpose()?) {
        ("not-billed", None) => Resolution::NotBilled,
        ("billed", cost) => Resolution::Billed { usage: Usage::default(), cost, price_table: node.price_table() },
        ("not-billed", Some(_)) => {
            return Err(Refused::new("outcome", what, "what was not billed has no cost", "leave the cost out, or say billed"));
        }
        _ => return Err(Refused::new("outcome", what, format!("{outcome:?} is not known"), "say billed or not-billed")),
    };
    let unknown = ledgers(node, &[session]).await?.iter().flat_map(Ledger::purchases).find(|p| p.seq == seq);
    match unknown {
        Some(p) if p.outcome == Some(Outcome::Unknown) && !p.resolved => {}
        Some(p) => {
            let why = match p.outcome {
                _ if p.resolved => format!("call {seq} was resolved before"),
                Some(end) => format!("the end of call {seq} is known: {end:?}").to_lowercase(),
                None => format!("call {seq} is under way"),
            };
            return Err(Refused::new("outcome", what, why, "only a call whose end is unknown can be resolved, once"));
        }
        None => return Err(Refused::new("no-entry", what, format!("there is no purchase {seq}"), "ks ledger shows them")),
    }
    settle(node, session, seq, ByWhom::Hand, resolution, note).await?;
    Ok(AdminAnswer::Done {})
}

async fn settle(
    node: &Arc<Node>,
    session: SessionId,
    of: u64,
    by: ByWhom,
    resolution: Resolution,
    note: String,
) -> Result<(), Refused> {
    let what = "the call was not resolved";
    let open = node.known(session).await.ok_or_else(|| {
        Refused::new(
            "no-session",
            what,
            format!("there is no journal of {session} on this node"),
            "ask the node that owns the session",
        )
    })?;
    let entry = Entry::Resolved { of, by, resolution, note };
    let done = open.journal().append(entry).await;
    done.map(|_| ()).map_err(|e| Refused::new("disk-full", what, e.to_string(), "free some space and try again"))
}

/// One line per session and day.
///
/// # Errors
/// If a journal cannot be read.
pub async fn cost(node: &Arc<Node>, sessions: &[SessionId]) -> Result<Vec<AdminAnswer>, Refused> {
    let mut lines = Vec::new();
    for ledger in ledgers(node, sessions).await? {
        let purchases = ledger.purchases();
        let users = Totals::by(&purchases, |p| p.user.clone());
        let days = Totals::by(&purchases, |p| day_of(p.at_ms));
        let models = Totals::by(&purchases, |p| format!("{}/{}", p.provider, p.model));
        let total = Totals::of(&purchases);
        let line = json!({"session": ledger.session, "total": total, "days": days, "users": users, "models": models});
        lines.push(line.to_string());
    }
    Ok(answers(lines))
}
