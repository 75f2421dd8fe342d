//! `ks key` and `ks provider`: what sessions call models with. A key is never an argument and never printed.

use super::login::{Hidden, hidden};
use super::now_ms;
use crate::args;
use crate::failure::{Failure, Res};
use crate::host::http::{Node, encode};
use crate::human;
use crate::output::Ctx;
use crate::table::{Align, Table, clean};
use ks_proto::gateway::{KeyInfo, Provider, Secret};
use serde_json::{Value, json};

/// Does what `ks key ...` asks.
pub async fn key(ctx: &Ctx, verb: args::Key) -> Res<u8> {
    let node = Node::find(ctx)?;
    match verb {
        args::Key::Add { provider } => {
            let secret = secret(ctx, &provider).await?;
            let body = json!({ "provider": provider, "secret": secret });
            let added: Vec<KeyInfo> = node.call("/v1/gateway/keys", &body, &mut ctx.bar()).await?;
            let print = added.first().map(|k| k.fingerprint.clone()).unwrap_or_default();
            ctx.result(&json!({"schema": "ks.keys.v1", "keys": added}), || {
                format!("{provider}: key {} is stored\n", clean(&print))
            })?;
            ctx.note(&format!("sessions call http://127.0.0.1:4180/{provider}; check it with `ks key test {provider}`"));
        }
        args::Key::Ls => {
            let all: Vec<KeyInfo> = node.get("/v1/gateway/keys").await?;
            let now = now_ms();
            ctx.result(&json!({"schema": "ks.keys.v1", "keys": all}), || {
                let mut t = Table::new(&[("PROVIDER", Align::Left), ("FINGERPRINT", Align::Left), ("AGE", Align::Right)]);
                for k in &all {
                    t.row(vec![k.provider.clone(), k.fingerprint.clone(), human::age(now, k.added_unix_ms)]);
                }
                t.render()
            })?;
        }
        args::Key::Rm { provider } => {
            node.delete(&format!("/v1/gateway/keys/{}", encode(&provider))).await?;
            let done = json!({"schema": "ks.key-rm.v1", "provider": provider, "removed": true});
            ctx.result(&done, || format!("{provider}: key removed\n"))?;
        }
        args::Key::Test { provider } => {
            let path = format!("/v1/gateway/keys/{}/test", encode(&provider));
            let report: Value = node.call(&path, &json!({}), &mut ctx.bar()).await?;
            let verdict = report["key"].as_str().unwrap_or("unclear").to_owned();
            let status = report["status"].as_u64().unwrap_or(0);
            ctx.result(&crate::output::with_schema("ks.key-test.v1", report), || {
                format!("{provider}: key {} (the provider answered {status})\n", clean(&verdict))
            })?;
            return Ok(u8::from(verdict != "accepted"));
        }
    }
    Ok(0)
}

async fn secret(ctx: &Ctx, provider: &str) -> Res<Secret> {
    let (prompt, pipe) = (format!("key for {provider}"), format!("pipe it in: `ks key add {provider} < FILE`"));
    let wanted = Hidden { noun: "key", prompt: &prompt, pipe: &pipe, source: "copy it from the provider's console" };
    hidden(ctx, wanted).await.map(Secret)
}

/// Does what `ks provider ...` asks.
pub async fn provider(ctx: &Ctx, verb: args::Provider) -> Res<u8> {
    let node = Node::find(ctx)?;
    match verb {
        args::Provider::Add { name, dialect, base_url, include_usage, ca } => {
            let ca_pem = ca
                .map(|file| {
                    let failed = |e| Failure::usage(format!("cannot read {}", file.display()), format!("{e}"), "give a PEM file");
                    std::fs::read_to_string(&file).map_err(failed)
                })
                .transpose()?;
            let body = Provider { name: name.clone(), dialect, base_url, include_usage, ca_pem, builtin: false };
            let _: Value = node.call("/v1/gateway/providers", &body, &mut ctx.bar()).await?;
            let done = json!({"schema": "ks.provider-add.v1", "name": name});
            ctx.result(&done, || format!("{name}: http://127.0.0.1:4180/{name} in every session; `ks key add {name}` next\n"))?;
        }
        args::Provider::Ls => {
            let all: Vec<Provider> = node.get("/v1/gateway/providers").await?;
            ctx.result(&json!({"schema": "ks.providers.v1", "providers": all}), || {
                let mut t = Table::new(&[("NAME", Align::Left), ("DIALECT", Align::Left), ("BASE URL", Align::Left)]);
                for p in &all {
                    t.row(vec![p.name.clone(), p.dialect.clone(), p.base_url.clone()]);
                }
                t.render()
            })?;
        }
        args::Provider::Rm { name } => {
            node.delete(&format!("/v1/gateway/providers/{}", encode(&name))).await?;
            let done = json!({"schema": "ks.provider-rm.v1", "name": name, "removed": true});
            ctx.result(&done, || format!("{name} removed\n"))?;
        }
    }
    Ok(0)
}
