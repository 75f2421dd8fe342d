//! `ks fleet`: the fleet as a whole, and what it says when it has no quorum.

use super::node_names;
use crate::args;
use crate::failure::{Failure, Res, VERDICT_NO};
use crate::host::contexts;
use crate::host::http::Node;
use crate::human;
use crate::output::{Ctx, with_schema};
use crate::table::clean;
use ks_proto::fleet::{FleetInfo, FleetPolicy, NodeState, PolicyChange, Recover};
use std::time::{Duration, Instant};

/// Does what `ks fleet ...` asks.
pub async fn run(ctx: &Ctx, verb: args::Fleet) -> Res<u8> {
    match verb {
        args::Fleet::Status => status(ctx).await,
        args::Fleet::Recover { yes } => recover(ctx, yes).await,
        args::Fleet::Policy { copies, voters, lease_ms } => policy(ctx, PolicyChange { copies, voters, lease_ms }).await,
    }
}

/// The fleet as the node sees it. New addresses are noted in the context.
pub async fn info(node: &Node) -> Res<FleetInfo> {
    let info: FleetInfo = node.get("/v1/fleet").await?;
    if let Some(name) = node.context() {
        learn(name, &info)?;
    }
    Ok(info)
}

/// Longest wait for the node of this machine to be back after it changed its place in a fleet.
const BACK_MAX: Duration = Duration::from_secs(60);

/// The node of this machine starts again when its place in a fleet changes: waits until it answers and `done` holds. None
/// when it takes too long.
pub async fn back(ctx: &Ctx, what: &str, done: impl Fn(&FleetInfo) -> bool) -> Option<FleetInfo> {
    let until = Instant::now() + BACK_MAX;
    let mut bar = ctx.bar();
    while Instant::now() < until {
        bar.step(what, 0, 0);
        if let Ok(node) = Node::here(ctx)
            && let Ok(Ok(info)) = tokio::time::timeout(Duration::from_secs(3), info(&node)).await
            && done(&info)
        {
            return Some(info);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    None
}

/// `HOST:PORT` of every live member's API.
pub fn addresses(info: &FleetInfo) -> impl Iterator<Item = String> + '_ {
    let members = info.nodes.iter().filter(|n| n.state != NodeState::Gone);
    members.flat_map(|n| n.api.iter()).filter_map(|url| Some(crate::config::Address::read(url).ok()?.host))
}

fn learn(name: &str, info: &FleetInfo) -> Res<()> {
    let path = contexts::file();
    let mut all = contexts::load(&path)?;
    let Some(c) = all.contexts.get_mut(name) else { return Ok(()) };
    let told: Vec<String> = addresses(info).collect();
    if told.is_empty() {
        return Ok(());
    }
    // Nodes that are gone are forgotten; the order of the others stays.
    let kept: Vec<String> = c.addresses.iter().filter(|a| told.contains(a)).cloned().collect();
    let now = crate::context::merge(&kept, told);
    if now != c.addresses {
        c.addresses = now;
        contexts::save(&path, &all)?;
    }
    Ok(())
}

async fn status(ctx: &Ctx) -> Res<u8> {
    let info = info(&Node::find(ctx)?).await?;
    ctx.result(&info, || facts(ctx, &info))?;
    if !info.fleet_id.is_empty() && !info.quorum {
        ctx.note(&no_quorum(&info));
        return Ok(VERDICT_NO);
    }
    Ok(0)
}

/// What no quorum means, and what to do.
pub fn no_quorum(info: &FleetInfo) -> String {
    let silent: Vec<String> =
        info.nodes.iter().filter(|n| info.voters.contains(&n.number) && !n.live).map(|n| clean(&n.name)).collect();
    let who = if silent.is_empty() { "voters do not answer".to_owned() } else { format!("not heard of: {}", silent.join(", ")) };
    let need = info.voters.len() / 2 + 1;
    format!(
        "NO QUORUM: {need} of the {} must agree, and {who}.\n  \
         Nothing can be decided: sessions stand still when their node's lease ends, none is started or moved, and none is lost.\n  \
         They go on by themselves as soon as enough voters are back. If those are gone for ever: `ks fleet recover` on the\n  \
         node with the newest state; what only the others had is lost then.",
        human::count(info.voters.len() as u64, "voter")
    )
}

fn facts(ctx: &Ctx, i: &FleetInfo) -> String {
    if i.fleet_id.is_empty() {
        let mut text = "this node is alone: no fleet\n".to_owned();
        if !i.warning.is_empty() {
            text.push_str(&format!("note         {}\n", clean(&i.warning)));
        }
        return text;
    }
    let name = |n: u64| {
        let known = i.nodes.iter().find(|v| v.number == n);
        known.map_or_else(|| format!("#{n}"), |v| format!("{} (#{n})", clean(&v.name)))
    };
    let quorum = if i.quorum { ctx.paint(32, "yes") } else { ctx.paint(31, "NO") };
    let lease = match (i.lease.state.as_str(), i.lease.remaining_ms) {
        ("held", Some(ms)) => format!("held, {} left", human::millis(ms)),
        ("lapsed", _) => ctx.paint(31, "lapsed: its sessions stand still"),
        (other, _) => clean(other),
    };
    let live = i.nodes.iter().filter(|n| n.live).count();
    let known = i.nodes.iter().filter(|n| n.state != NodeState::Gone).count();
    let p = &i.policy;
    let all: Vec<(&str, String)> = vec![
        ("fleet", clean(&i.fleet_id)),
        ("fingerprint", clean(&i.fingerprint)),
        ("generation", i.generation.to_string()),
        ("quorum", quorum),
        ("leader", i.leader.map_or("none".into(), |l| format!("{}, term {}", name(l), i.term))),
        ("voters", i.voters.iter().map(|v| name(*v)).collect::<Vec<_>>().join(", ")),
        ("nodes", format!("{known}, {live} live; this is {}", name(i.me))),
        ("lease", lease),
        ("policy", policy_text(p)),
    ];
    let mut text: String = all.iter().map(|(k, v)| format!("{k:<12} {v}\n")).collect();
    if !i.warning.is_empty() {
        text.push_str(&format!("{:<12} {}\n", "note", clean(&i.warning)));
    }
    text.push('\n');
    text.push_str(&node_names::table(i).render());
    text
}

fn policy_text(p: &FleetPolicy) -> String {
    let copies = if p.copies == 1 { "1 copy".to_owned() } else { format!("{} copies", p.copies) };
    format!("{copies} make a checkpoint durable, {}, lease {}", human::count(p.voters.into(), "voter"), human::millis(p.lease_ms))
}

async fn policy(ctx: &Ctx, change: PolicyChange) -> Res<u8> {
    let node = Node::find(ctx)?;
    let p =
        if change == PolicyChange::default() { info(&node).await?.policy } else { node.put("/v1/fleet/policy", &change).await? };
    let value = with_schema("ks.policy.v1", serde_json::to_value(&p).unwrap_or_default());
    ctx.result(&value, || format!("{}\n", policy_text(&p)))?;
    Ok(0)
}

async fn recover(ctx: &Ctx, yes: bool) -> Res<u8> {
    // Never a remote node by accident: this is said of the machine that one sits at.
    let node = Node::here(ctx)?;
    let now = info(&node).await?;
    if now.quorum && !now.fleet_id.is_empty() {
        return Err(Failure::new(
            "usage",
            "the fleet has a quorum",
            "recovering now would make two fleets of one",
            "remove dead nodes with `ks node rm --force NAME`",
        ));
    }
    ctx.note(&format!(
        "{} becomes the only voter of a new generation. What only the other nodes had is lost: sessions go on from\n\
         the newest checkpoint that this node or a later joiner holds. Nodes that come back follow it, and give up what they decided meanwhile.",
        now.nodes.iter().find(|n| n.number == now.me).map_or("this node".into(), |n| clean(&n.name))
    ));
    if !yes && !ctx.ask_no("Recover?") {
        return Err(Failure::new("usage", "nothing was done", "recovering was not confirmed", "`ks fleet recover --yes`"));
    }
    let _: FleetInfo = node.call("/v1/fleet/recover", &Recover { confirmed: true }, &mut ctx.bar()).await?;
    let before = now.generation;
    let came = back(ctx, "starting a new generation", |i| i.quorum && i.generation > before).await;
    let Some(info) = came else {
        let why = format!("no new generation after {} s", BACK_MAX.as_secs());
        return Err(Failure::new("timeout", "the recovery has begun and is not done", why, "look with `ks fleet status`"));
    };
    ctx.result(&info, || format!("generation {}: this node leads\n\n{}", info.generation, facts(ctx, &info)))?;
    Ok(0)
}
