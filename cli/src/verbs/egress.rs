//! `ks egress` and `ks budget`: what a session may reach, and what it may spend.

use crate::args;
use crate::failure::Res;
use crate::host::http::Node;
use crate::output::Ctx;
use crate::table::{Align, Table, clean};
use crate::target;
use serde_json::{Value, json};

/// Does what `ks egress ...` asks.
pub async fn run(ctx: &Ctx, verb: args::Egress) -> Res<u8> {
    let node = Node::find(ctx)?;
    match verb {
        args::Egress::Ls { session } => {
            let name = target::session(&session)?;
            show(ctx, &name, &list(&node, &name).await?)
        }
        args::Egress::Allow { session, hosts } => {
            let name = target::session(&session)?;
            let mut all = list(&node, &name).await?;
            all.extend(hosts.into_iter().filter(|h| !all.contains(h)).collect::<Vec<_>>());
            set(ctx, &node, &name, all).await
        }
        args::Egress::Deny { session, hosts } => {
            let name = target::session(&session)?;
            let all = list(&node, &name).await?.into_iter().filter(|h| !hosts.contains(h)).collect();
            set(ctx, &node, &name, all).await
        }
    }
}

async fn list(node: &Node, name: &str) -> Res<Vec<String>> {
    let got: Value = node.get(&format!("/v1/sessions/{name}/egress")).await?;
    let all = got["allow"].as_array().into_iter().flatten();
    Ok(all.filter_map(|v| v.as_str().map(str::to_owned)).collect())
}

async fn set(ctx: &Ctx, node: &Node, name: &str, allow: Vec<String>) -> Res<u8> {
    let _: Value = node.put(&format!("/v1/sessions/{name}/egress"), &json!({ "allow": allow })).await?;
    show(ctx, name, &allow)
}

fn show(ctx: &Ctx, name: &str, allow: &[String]) -> Res<u8> {
    ctx.result(&json!({"schema": "ks.egress.v1", "session": name, "allow": allow}), || {
        allow.iter().map(|h| format!("{}\n", clean(h))).collect()
    })?;
    if allow.is_empty() {
        ctx.note(&format!("{name} reaches nothing but the models' gateway; `ks egress allow {name} HOST` changes that"));
    }
    Ok(0)
}

/// Does what `ks budget ...` asks.
pub async fn budget(ctx: &Ctx, verb: args::Budget) -> Res<u8> {
    let node = Node::find(ctx)?;
    let (session, limit) = match verb {
        args::Budget::Ls => return budgets(ctx, &node).await,
        args::Budget::Set { dollars, session } => (session, Some(dollars)),
        args::Budget::Rm { session } => (session, None),
    };
    let session = session.map(|s| target::session(&s)).transpose()?;
    let _: Value = node.put("/v1/gateway/budgets", &json!({ "session": session, "limit": limit })).await?;
    let whose = session.clone().unwrap_or_else(|| "all sessions together".into());
    ctx.result(&json!({"schema": "ks.budget.v1", "session": session, "limit": limit}), || match &limit {
        Some(limit) => format!("{whose}: at most ${limit}\n"),
        None => format!("{whose}: no limit\n"),
    })?;
    Ok(0)
}

async fn budgets(ctx: &Ctx, node: &Node) -> Res<u8> {
    let mut all: Vec<Value> = Vec::new();
    node.lines("/v1/gateway/budgets", &mut |v| {
        all.push(v);
        Ok(())
    })
    .await?;
    ctx.result(&json!({"schema": "ks.budgets.v1", "budgets": all}), || {
        let right = Align::Right;
        let mut t =
            Table::new(&[("WHOSE", Align::Left), ("LIMIT", right), ("SPENT", right), ("RESERVED", right), ("LEFT", right)]);
        for b in &all {
            let money = |k: &str| b[k].as_str().map_or("-".to_owned(), |m| format!("${m}"));
            let whose = match (b["account"].as_str(), b["name"].as_str()) {
                (Some("session"), Some(name)) => name.to_owned(),
                _ => "all sessions".into(),
            };
            t.row(vec![whose, money("limit"), money("spent"), money("held"), money("left")]);
        }
        t.render()
    })?;
    Ok(0)
}
