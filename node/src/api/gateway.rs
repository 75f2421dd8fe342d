//! `/gateway/…` and what belongs to a session's calls: keys, providers, ledger, costs, budgets, egress.
//!
//! Keys, providers and the user's budget are each node's: changes of the first two are told to the members that are up.
//! Everything about a session is on its owner's node, where the call is passed on to. What it may reach and spend is in the replicated
//! state too, and so goes where it goes.

use super::App;
use super::auth::Caller;
use super::reply::{Answered, Input, Needed, Refused};
use crate::fleet::call;
use axum::extract::{Path, Query, State};
use axum::http::{Method, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use ks_proto::SessionId;
use ks_proto::api::ApiError;
use ks_proto::gateway::{AdminAnswer, AdminAsk, KeyInfo, Provider, Secret};
use ks_raft::{Command, FleetState};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

/// Whose keys and budget: the node's own operator. Sessions have no other owner yet.
const USER: &str = "";

fn unexpected(answer: &AdminAnswer) -> Refused {
    let why = format!("unexpected {answer:?}");
    Refused(ApiError::new("internal", "the gateway's answer", why, "install programs of one version"))
}

async fn done(app: &App, ask: AdminAsk) -> Answered<Value> {
    match app.node.gateway.admin(ask).await? {
        AdminAnswer::Done {} => Ok(Json(json!({ "schema": "ks.done.v1" }))),
        AdminAnswer::Report { report } => Ok(Json(report)),
        other => Err(unexpected(&other)),
    }
}

/// JSON objects as lines.
fn lines(all: Vec<String>) -> Response {
    let mut text = all.join("\n");
    if !text.is_empty() {
        text.push('\n');
    }
    ([(header::CONTENT_TYPE, "application/x-ndjson")], text).into_response()
}

#[derive(Serialize, Deserialize)]
pub struct AddKey {
    provider: String,
    secret: Secret,
}

/// How long another member may take to note a key or a provider.
const NOTED: Duration = Duration::from_secs(10);

/// Tells the other members what a person told this one, so that a session finds it wherever it goes. Members that do not
/// answer are named in an event: they have to be told again.
async fn spread(app: &App, caller: Option<Extension<Caller>>, method: Method, path: &str, body: &impl Serialize) {
    if caller.is_none_or(|c| c.passed_on) {
        return;
    }
    let me = app.node.fleet.number();
    let members: Vec<u64> = app.node.state.read().active().map(|m| m.number).filter(|n| *n != me).collect();
    for to in members {
        let told = tokio::time::timeout(NOTED, call::tell(&app.node.fleet, to, method.clone(), path, body)).await;
        let why = match told {
            Ok(Ok(())) => continue,
            Ok(Err(e)) => e.why,
            Err(_) => format!("no answer in {} s", NOTED.as_secs()),
        };
        let name = app.node.fleet.name_of(to);
        let text = format!("{name} was not told of a change of keys or providers ({why}): repeat it when it is back");
        app.node.state.event("", "gateway-not-told", &text);
    }
}

type From = Option<Extension<Caller>>;

pub async fn keys(State(app): State<App>) -> Answered<Vec<KeyInfo>> {
    key_list(&app, AdminAsk::KeyList { user: USER.into() }).await
}

async fn key_list(app: &App, ask: AdminAsk) -> Answered<Vec<KeyInfo>> {
    match app.node.gateway.admin(ask).await? {
        AdminAnswer::Keys { keys } => Ok(Json(keys)),
        other => Err(unexpected(&other)),
    }
}

pub async fn add_key(State(app): State<App>, from: From, Needed(k): Needed<AddKey>) -> Answered<Vec<KeyInfo>> {
    let ask = AdminAsk::KeyAdd { user: USER.into(), provider: k.provider.clone(), secret: k.secret.clone() };
    let added = key_list(&app, ask).await?;
    spread(&app, from, Method::POST, "/v1/gateway/keys", &k).await;
    Ok(added)
}

pub async fn remove_key(State(app): State<App>, from: From, Path(provider): Path<String>) -> Answered<Value> {
    let removed = done(&app, AdminAsk::KeyRemove { user: USER.into(), provider: provider.clone() }).await?;
    spread(&app, from, Method::DELETE, &format!("/v1/gateway/keys/{}", segment(&provider)), &()).await;
    Ok(removed)
}

/// A name as one part of a path.
fn segment(name: &str) -> String {
    name.bytes()
        .map(|b| if b.is_ascii_alphanumeric() || b"-_.".contains(&b) { char::from(b).to_string() } else { format!("%{b:02X}") })
        .collect()
}

pub async fn test_key(State(app): State<App>, Path(provider): Path<String>) -> Answered<Value> {
    done(&app, AdminAsk::KeyTest { user: USER.into(), provider }).await
}

pub async fn providers(State(app): State<App>) -> Answered<Vec<Provider>> {
    match app.node.gateway.admin(AdminAsk::ProviderList {}).await? {
        AdminAnswer::Providers { providers } => Ok(Json(providers)),
        other => Err(unexpected(&other)),
    }
}

pub async fn add_provider(State(app): State<App>, from: From, Needed(provider): Needed<Provider>) -> Answered<Value> {
    let added = done(&app, AdminAsk::ProviderAdd { provider: provider.clone() }).await?;
    spread(&app, from, Method::POST, "/v1/gateway/providers", &provider).await;
    Ok(added)
}

pub async fn remove_provider(State(app): State<App>, from: From, Path(name): Path<String>) -> Answered<Value> {
    let removed = done(&app, AdminAsk::ProviderRemove { name: name.clone() }).await?;
    spread(&app, from, Method::DELETE, &format!("/v1/gateway/providers/{}", segment(&name)), &()).await;
    Ok(removed)
}

pub async fn stats(State(app): State<App>) -> Answered<Value> {
    done(&app, AdminAsk::Stats {}).await
}

/// The session with all its forks and their forks, parents first.
fn family(state: &FleetState, of: SessionId) -> Vec<SessionId> {
    let mut all = vec![of];
    let mut at = 0;
    while let Some(parent) = all.get(at).copied() {
        let children = state.sessions.values().filter(|r| r.forked_from.as_ref().is_some_and(|f| f.session == parent));
        for child in children {
            if !all.contains(&child.id) {
                all.push(child.id);
            }
        }
        at += 1;
    }
    all
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub struct LedgerQuery {
    from: u64,
}

pub async fn ledger(State(app): State<App>, Path(name): Path<String>, Query(q): Query<LedgerQuery>) -> Result<Response, Refused> {
    let session = app.node.record(&name)?.id;
    if !app.node.gateway.knows(&session) {
        return Ok(lines(vec![]));
    }
    Ok(lines(app.node.gateway.lines(AdminAsk::Ledger { session, from: q.from }).await?))
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub struct Verify {
    tree: bool,
}

pub async fn verify(State(app): State<App>, Path(name): Path<String>, Input(v): Input<Verify>) -> Answered<Value> {
    let id = app.node.record(&name)?.id;
    let sessions = if v.tree { family(&app.node.state.read(), id) } else { vec![id] };
    done(&app, AdminAsk::Verify { sessions }).await
}

#[derive(Deserialize)]
pub struct Reconcile {
    provider: String,
    export: String,
    #[serde(default)]
    apply: bool,
}

pub async fn reconcile(State(app): State<App>, Path(name): Path<String>, Needed(r): Needed<Reconcile>) -> Answered<Value> {
    let sessions = family(&app.node.state.read(), app.node.record(&name)?.id);
    done(&app, AdminAsk::Reconcile { sessions, provider: r.provider, export: r.export, apply: r.apply }).await
}

#[derive(Deserialize)]
pub struct Resolve {
    seq: u64,
    outcome: String,
    #[serde(default)]
    cost: Option<String>,
    #[serde(default)]
    note: String,
}

pub async fn resolve(State(app): State<App>, Path(name): Path<String>, Needed(r): Needed<Resolve>) -> Answered<Value> {
    let session = app.node.record(&name)?.id;
    done(&app, AdminAsk::Resolve { session, seq: r.seq, outcome: r.outcome, cost: r.cost, note: r.note }).await
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub struct CostQuery {
    session: String,
    tree: u8,
}

/// Costs of all sessions of this node, of one, or of one with its forks. Each line gets the session's name.
pub async fn cost(State(app): State<App>, Query(q): Query<CostQuery>) -> Result<Response, Refused> {
    let state = app.node.state.read();
    let me = app.node.fleet.number();
    let sessions = match q.session.as_str() {
        "" => state.sessions.values().filter(|r| r.owner == me).map(|r| r.id).collect(),
        name if q.tree != 0 => family(&state, app.node.record(name)?.id),
        name => vec![app.node.record(name)?.id],
    };
    let all = app.node.gateway.lines(AdminAsk::Cost { sessions }).await?;
    Ok(lines(all.into_iter().map(|line| named(&state, line)).collect()))
}

fn named(state: &FleetState, line: String) -> String {
    let Ok(Value::Object(mut object)) = serde_json::from_str(&line) else { return line };
    let id = object.get("session").and_then(Value::as_str).and_then(|s| s.parse::<SessionId>().ok());
    let Some(record) = id.and_then(|id| state.sessions.get(&id)) else { return line };
    object.insert("name".into(), json!(record.name.as_str()));
    Value::Object(object).to_string()
}

#[derive(Serialize, Deserialize)]
pub struct SetBudget {
    #[serde(default)]
    session: Option<String>,
    limit: Option<String>,
}

pub async fn budgets(State(app): State<App>) -> Result<Response, Refused> {
    let state = app.node.state.read();
    let sessions = state.sessions.values().filter(|r| !r.tombstone).map(|r| r.id).collect();
    let all = app.node.gateway.lines(AdminAsk::BudgetList { user: USER.into(), sessions }).await?;
    let all = with_recorded(&state, all);
    let of = |line: String| match serde_json::from_str::<Value>(&line) {
        Ok(v) if v["account"] == "session" => named_budget(&state, v),
        _ => line,
    };
    Ok(lines(all.into_iter().map(of).collect()))
}

/// A session that has not called yet where it is now has its limit in the state only.
fn with_recorded(state: &FleetState, mut all: Vec<String>) -> Vec<String> {
    let mut limits: BTreeMap<String, String> = state
        .sessions
        .values()
        .filter(|r| !r.tombstone)
        .filter_map(|r| Some((r.id.to_hex(), r.budget.clone().filter(|b| !b.is_empty())?)))
        .collect();
    for line in &mut all {
        let Ok(mut v) = serde_json::from_str::<Value>(line) else { continue };
        if let Some(limit) = v["name"].as_str().and_then(|id| limits.remove(id)).filter(|_| v["limit"].is_null()) {
            v["limit"] = json!(limit);
            *line = v.to_string();
        }
    }
    let unspent =
        |(id, limit)| json!({ "account": "session", "name": id, "limit": limit, "spent": "0.00", "held": "0.00", "left": limit });
    all.extend(limits.into_iter().map(|l| unspent(l).to_string()));
    all
}

fn named_budget(state: &FleetState, mut v: Value) -> String {
    let id = v["name"].as_str().and_then(|s| s.parse::<SessionId>().ok());
    if let Some(record) = id.and_then(|id| state.sessions.get(&id)) {
        v["session"] = v["name"].clone();
        v["name"] = json!(record.name.as_str());
    }
    v.to_string()
}

pub async fn set_budget(State(app): State<App>, from: From, Needed(b): Needed<SetBudget>) -> Answered<Value> {
    let record = b.session.as_deref().map(|s| app.node.record(s)).transpose()?;
    if let Some(r) = record.as_ref().filter(|r| r.owner != app.node.fleet.number() && from.is_some_and(|c| !c.passed_on)) {
        // Its owner's gateway must have it before the state does: it knows what an amount is.
        call::tell(&app.node.fleet, r.owner, Method::PUT, "/v1/gateway/budgets", &b).await?;
        return Ok(Json(json!({ "schema": "ks.done.v1" })));
    }
    let session = record.map(|r| r.id);
    let set = done(&app, AdminAsk::BudgetSet { user: USER.into(), session, limit: b.limit.clone() }).await?;
    if let Some(id) = session {
        let budget = Some(b.limit.unwrap_or_default());
        app.node.state.propose(Command::SetOutside { id, allow: None, budget }).await?;
    }
    Ok(set)
}

pub async fn egress(State(app): State<App>, Path(name): Path<String>) -> Answered<Value> {
    let record = app.node.record(&name)?;
    let listed = |allow: Vec<String>| Ok(Json(json!({ "schema": "ks.egress.v1", "allow": allow })));
    if let Some(allow) = record.allow {
        return listed(allow);
    }
    match app.node.gateway.admin(AdminAsk::EgressList { session: record.id }).await? {
        AdminAnswer::Egress { allow } => listed(allow),
        other => Err(unexpected(&other)),
    }
}

#[derive(Deserialize)]
pub struct SetEgress {
    allow: Vec<String>,
}

pub async fn set_egress(State(app): State<App>, Path(name): Path<String>, Needed(e): Needed<SetEgress>) -> Answered<Value> {
    let session = app.node.record(&name)?.id;
    let set = done(&app, AdminAsk::EgressSet { session, allow: e.allow.clone() }).await?;
    app.node.state.propose(Command::SetOutside { id: session, allow: Some(e.allow), budget: None }).await?;
    Ok(set)
}
