//! `ks user`: who may do what.

use super::now_ms;
use crate::args;
use crate::failure::{Failure, Res};
use crate::host::http::Node;
use crate::human;
use crate::output::Ctx;
use crate::table::{Align, Table, clean};
use ks_proto::SessionName;
use ks_proto::fleet::{NewUser, PutUser, UserView};
use serde_json::json;

/// Does what `ks user ...` asks.
pub async fn run(ctx: &Ctx, verb: args::User) -> Res<u8> {
    match verb {
        args::User::Add { name, role } => add(ctx, PutUser { name: checked(&name)?, role }).await,
        args::User::Ls => ls(ctx).await,
        args::User::Rm { names } => {
            let names: Vec<String> = names.iter().map(|n| checked(n)).collect::<Res<_>>()?;
            let node = Node::find(ctx)?;
            for name in names {
                node.delete(&format!("/v1/users/{name}")).await?;
                ctx.result(&json!({"schema": "ks.user-rm.v1", "name": name, "removed": true}), || format!("{name} removed\n"))?;
            }
            Ok(0)
        }
    }
}

/// A user's name has the alphabet of a session's; it is then safe inside a URL path.
fn checked(name: &str) -> Res<String> {
    match name.parse::<SessionName>() {
        Ok(n) => Ok(n.to_string()),
        Err(_) => Err(Failure::usage(
            format!("{name:?} is no name for a user"),
            "it has 1-63 characters of a-z, 0-9, '-' and '.', starting with a letter or digit",
            "choose another",
        )),
    }
}

async fn add(ctx: &Ctx, body: PutUser) -> Res<u8> {
    let node = Node::find(ctx)?;
    let u: NewUser = node.call("/v1/users", &body, &mut ctx.bar()).await?;
    ctx.result(&u, || format!("{}\n", clean(&u.token)))?;
    ctx.note(&format!(
        "{} ({}): this token is shown once. They run `ks login HOST:PORT --fingerprint F` and paste it.",
        clean(&u.name),
        u.role
    ));
    Ok(0)
}

async fn ls(ctx: &Ctx) -> Res<u8> {
    let all: Vec<UserView> = Node::find(ctx)?.get("/v1/users").await?;
    let now = now_ms();
    ctx.result(&json!({"schema": "ks.users.v1", "users": all}), || {
        let mut t = Table::new(&[("NAME", Align::Left), ("ROLE", Align::Left), ("TOKENS", Align::Right), ("AGE", Align::Right)]);
        for u in &all {
            t.row(vec![u.name.clone(), u.role.to_string(), u.tokens.to_string(), human::age(now, u.created_unix_ms)]);
        }
        t.render()
    })?;
    Ok(0)
}
