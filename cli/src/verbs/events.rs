//! `ks events`: what has happened, and what happens.

use crate::args;
use crate::failure::{Failure, Res};
use crate::host::http::Node;
use crate::human;
use crate::output::{Ctx, with_schema};
use crate::table::clean;
use crate::target;
use ks_proto::api::Event;

/// Prints events; with --follow until Ctrl-C.
pub async fn run(ctx: &Ctx, a: args::Events) -> Res<u8> {
    let only = a.session.as_deref().map(target::session).transpose()?;
    let node = Node::find(ctx)?;
    let path = if a.follow { "/v1/events?follow=1" } else { "/v1/events" };
    node.lines(path, &mut |value| {
        let events: Vec<Event> = match value {
            list @ serde_json::Value::Array(_) => serde_json::from_value(list),
            one => serde_json::from_value(one).map(|e| vec![e]),
        }
        .map_err(|e| {
            Failure::new("internal", "an event is not understood", e.to_string(), "compare `ks version` and `ks doctor`")
        })?;
        for e in events.iter().filter(|e| only.as_ref().is_none_or(|s| *s == e.session)) {
            let value = with_schema("ks.event.v1", serde_json::to_value(e).unwrap_or_default());
            ctx.result(&value, || {
                let session = if e.session.is_empty() { "-" } else { &e.session };
                format!("{}  {:<20} {:<18} {}\n", human::utc(e.unix_ms), clean(session), clean(&e.kind), clean(&e.text))
            })?;
        }
        Ok(())
    })
    .await?;
    Ok(0)
}
