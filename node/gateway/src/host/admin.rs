//! What ksd asks and orders on a standing connection: keys, leases, providers, allow-lists, budgets, and the ledger.

use super::node::Node;
use super::session::Session;
use super::upstream::{self, Outgoing};
use super::wire::{read_message, write_message};
use super::{books, files};
use bytes::Bytes;
use ks_gateway::budget::Account;
use ks_gateway::money::Money;
use ks_proto::SessionId;
use ks_proto::gateway::{AdminAnswer, AdminAsk, GatewayAsk, PROTOCOL};
use serde_json::json;
use std::sync::Arc;
use tokio::net::UnixStream;

/// Not done, in words.
#[derive(Debug)]
pub struct Refused {
    code: &'static str,
    what: String,
    why: String,
    next: String,
}

impl Refused {
    /// What was not done, why, and what next.
    pub fn new(code: &'static str, what: impl Into<String>, why: impl Into<String>, next: impl Into<String>) -> Self {
        Self { code, what: what.into(), why: why.into(), next: next.into() }
    }
    fn of(code: &'static str, what: &str, e: &dyn std::error::Error) -> Self {
        Self::new(code, what, upstream::chain(e), "see the gateway's log")
    }
}

type Answered = Result<AdminAnswer, Refused>;

/// Answers asks until the connection ends.
pub async fn serve(node: Arc<Node>, first: AdminAsk, mut stream: UnixStream) {
    let mut ask = first;
    loop {
        let answers = match answer(&node, ask).await {
            Ok(answers) => answers,
            Err(r) => vec![AdminAnswer::Refused { code: r.code.to_owned(), what: r.what, why: r.why, next: r.next }],
        };
        for a in answers {
            if write_message(&mut stream, &a).await.is_err() {
                return;
            }
        }
        ask = match read_message::<GatewayAsk>(&mut stream).await {
            Ok(Some(GatewayAsk::Admin(next))) => *next,
            Ok(Some(GatewayAsk::Stream(_)) | None) | Err(_) => return,
        };
    }
}

async fn answer(node: &Arc<Node>, ask: AdminAsk) -> Result<Vec<AdminAnswer>, Refused> {
    let one = |a: Answered| a.map(|a| vec![a]);
    match ask {
        AdminAsk::Hello { protocol } => one(hello(node, protocol)),
        AdminAsk::Unseal { key_hex } => {
            let key_hex = zeroize::Zeroizing::new(key_hex);
            node.vault().unseal(&key_hex).map_err(|e| Refused::of("vault", "the vault was not opened", &e))?;
            Ok(vec![AdminAnswer::Done {}])
        }
        AdminAsk::Lease { session, token, deadline_boottime_ms } => {
            node.told(session, token, deadline_boottime_ms);
            Ok(vec![AdminAnswer::Done {}])
        }
        AdminAsk::Forget { session } => {
            node.forget(session).await.map_err(|e| Refused::of("disk", "the session's journal was not removed", &e))?;
            Ok(vec![AdminAnswer::Done {}])
        }
        AdminAsk::KeyAdd { user, provider, secret } => one(key_add(node, &user, &provider, &secret.0)),
        AdminAsk::KeyList { user } => {
            let keys = node.vault().list(&user).map_err(|e| Refused::of("vault", "the keys were not listed", &e))?;
            Ok(vec![AdminAnswer::Keys { keys }])
        }
        AdminAsk::KeyRemove { user, provider } => one(key_remove(node, &user, &provider)),
        AdminAsk::KeyTest { user, provider } => one(key_test(node, &user, &provider).await),
        AdminAsk::ProviderAdd { provider } => {
            node.providers().add(provider).map_err(|e| Refused::of("provider", "the provider was not added", &e))?;
            Ok(vec![AdminAnswer::Done {}])
        }
        AdminAsk::ProviderList {} => Ok(vec![AdminAnswer::Providers { providers: node.providers().list() }]),
        AdminAsk::ProviderRemove { name } => {
            node.providers().remove(&name).map_err(|e| Refused::of("provider", "the provider was not removed", &e))?;
            Ok(vec![AdminAnswer::Done {}])
        }
        AdminAsk::EgressSet { session, allow } => {
            node.set_allow(session, &allow).await.map_err(|e| {
                Refused::new("pattern", "the allow-list was not set", e, "write host, host:port, *.domain, or an address")
            })?;
            Ok(vec![AdminAnswer::Done {}])
        }
        AdminAsk::EgressList { session } => Ok(vec![AdminAnswer::Egress { allow: node.allow(session) }]),
        AdminAsk::BudgetSet { user, session, limit } => one(budget_set(node, user, session, limit.as_deref())),
        AdminAsk::BudgetList { user, sessions } => Ok(vec![budget_list(node, &user, &sessions)]),
        AdminAsk::Copy { session, epoch, copy } => Ok(vec![AdminAnswer::Copy { copy: node.copy(session, epoch, copy).await }]),
        AdminAsk::CopyList {} => {
            let sessions = node.copies().list().map_err(|e| Refused::of("disk", "the copies were not listed", &e))?;
            Ok(vec![AdminAnswer::Copies { sessions }])
        }
        AdminAsk::Stats {} => Ok(vec![AdminAnswer::Report { report: stats(node) }]),
        AdminAsk::Ledger { session, from } => books::ledger(node, session, from).await,
        AdminAsk::Verify { sessions } => one(books::verify(node, &sessions).await),
        AdminAsk::Reconcile { sessions, provider, export, apply } => {
            one(books::reconcile(node, &sessions, &provider, &export, apply).await)
        }
        AdminAsk::Resolve { session, seq, outcome, cost, note } => {
            one(books::resolve(node, session, seq, &outcome, cost.as_deref(), note).await)
        }
        AdminAsk::Cost { sessions } => books::cost(node, &sessions).await,
    }
}

fn hello(node: &Node, protocol: u32) -> Answered {
    if protocol != PROTOCOL {
        let why = format!("it speaks protocol {PROTOCOL} and was asked in {protocol}");
        return Err(Refused::new("protocol", "this gateway cannot serve this node", why, "end ksgw; the node starts its own"));
    }
    let version = env!("CARGO_PKG_VERSION").to_owned();
    Ok(AdminAnswer::Hello { protocol: PROTOCOL, version, pid: std::process::id(), unsealed: node.vault().is_open() })
}

fn key_add(node: &Node, user: &str, provider: &str, secret: &str) -> Answered {
    if node.provider(provider).is_none() {
        let next = format!("ks provider ls shows those that there are; ks provider add {provider} adds one");
        return Err(Refused::new("no-provider", "the key was not added", format!("there is no provider {provider:?}"), next));
    }
    let info = node.vault().add(user, provider, secret, files::unix_ms());
    info.map(|info| AdminAnswer::Keys { keys: vec![info] }).map_err(|e| Refused::of("vault", "the key was not added", &e))
}

fn key_remove(node: &Node, user: &str, provider: &str) -> Answered {
    match node.vault().remove(user, provider) {
        Ok(true) => Ok(AdminAnswer::Done {}),
        Ok(false) => {
            let why = format!("there is none for {provider}");
            Err(Refused::new("no-key", "no key was removed", why, "ks key ls shows those that there are"))
        }
        Err(e) => Err(Refused::of("vault", "the key was not removed", &e)),
    }
}

/// Lists the provider's models, which no provider bills.
async fn key_test(node: &Node, user: &str, provider: &str) -> Answered {
    let what = "the key was not tested";
    let settings = node.provider(provider).ok_or_else(|| {
        Refused::new(
            "no-provider",
            what,
            format!("there is no provider {provider:?}"),
            "ks provider ls shows those that there are",
        )
    })?;
    let key = node.key(user, provider).map_err(|e| Refused::of("vault", what, &e))?.ok_or_else(|| {
        Refused::new("no-key", what, format!("none is stored for {provider}"), format!("ks key add {provider}"))
    })?;
    let path = if settings.dialect == "gemini" { "/v1beta/models" } else { "/v1/models" };
    let out = Outgoing { method: "GET", path, headers: &[], body: Bytes::new(), key: &key };
    let asked = tokio::time::timeout(std::time::Duration::from_secs(20), node.upstreams.send(&settings, out)).await;
    let answer = asked
        .map_err(|_| Refused::new("unreached", what, format!("{provider} did not answer within 20 s"), "try again"))?
        .map_err(|e| Refused::new("unreached", what, e.to_string(), "check the provider's base URL and certificate"))?;
    let status = answer.status().as_u16();
    let verdict = match status {
        200..=299 => "accepted",
        401 | 403 => "refused",
        _ => "unclear",
    };
    Ok(AdminAnswer::Report { report: json!({"provider": provider, "status": status, "key": verdict}) })
}

fn budget_set(node: &Node, user: String, session: Option<SessionId>, limit: Option<&str>) -> Answered {
    let what = "the budget was not set";
    let limit = match limit {
        None => None,
        Some(text) => Some(Money::parse(text).ok_or_else(|| {
            Refused::new("amount", what, format!("{text:?} is not an amount of dollars"), "write it as 12 or 12.50")
        })?),
    };
    let account = session.map_or(Account::User(user), |s| Account::Session(s.to_hex()));
    node.set_limit(account, limit).map_err(|e| Refused::of("disk", what, &e))?;
    Ok(AdminAnswer::Done {})
}

fn budget_list(node: &Node, user: &str, sessions: &[SessionId]) -> AdminAnswer {
    let budgets = node.budgets();
    let wanted = |account: &Account| match account {
        Account::User(u) => user.is_empty() || u == user,
        Account::Session(s) => sessions.iter().any(|id| id.to_hex() == *s),
    };
    let lines = budgets.balances().filter(|(a, _)| wanted(a)).map(|(account, b)| {
        let (kind, name) = match account {
            Account::User(u) => ("user", u),
            Account::Session(s) => ("session", s),
        };
        json!({"account": kind, "name": name, "limit": b.limit, "spent": b.spent, "held": b.held, "left": b.left()}).to_string()
    });
    AdminAnswer::Lines { lines: lines.collect(), more: false }
}

fn stats(node: &Node) -> serde_json::Value {
    let of = |s: &Arc<Session>| json!({"session": s.id(), "under_way": s.under_way()});
    let sessions: Vec<_> = node.open_sessions().iter().map(of).collect();
    json!({"pid": std::process::id(), "under_way": node.under_way(), "unsealed": node.vault().is_open(), "sessions": sessions})
}
