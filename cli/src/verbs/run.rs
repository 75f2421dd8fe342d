//! `ks run`: makes a session, copies the named folders in, starts the command, opens its terminal.

use super::{attach, cp};
use crate::args;
use crate::failure::{FAILED, Failure, Res};
use crate::host::files::{self, Carry};
use crate::host::http::Node;
use crate::host::terminal;
use crate::human;
use crate::output::Ctx;
use crate::target;
use ks_proto::SessionName;
use ks_proto::api::{CreateSession, Session, StartMain};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Runs `ks run`.
pub async fn run(ctx: &Ctx, a: args::Run) -> Res<u8> {
    let carries: Vec<Carry> = a.sync.iter().map(|d| files::plan(d, &a.include)).collect::<Res<_>>()?;
    distinct(&carries)?;
    show(ctx, &carries, a.plan)?;
    if a.plan {
        return Ok(0);
    }
    let wants_terminal = !a.detach && !ctx.json && terminal::both();
    let main = start(&a, &carries)?;
    let create = creation(ctx, &a, if carries.is_empty() { Some(main.clone()) } else { None })?;
    let node = Node::find(ctx)?;
    // From before the first byte leaves: a session that the node begins to make is never forgotten.
    let mut interrupt = Interrupt::listen()?;
    let session = match create_interruptibly(ctx, &node, &create, &mut interrupt).await {
        Err(f) if f.error.code == "exists" && create.name.is_some() => {
            return taken(ctx, &node, &create, f, wants_terminal).await;
        }
        other => other?,
    };
    let name = session.name.to_string();
    if !carries.is_empty() {
        let filled = tokio::select! {
            done = fill(ctx, &node, &name, carries, &main) => done,
            n = interrupt.recv() => Err(told("nothing was started", "run it again when you like", n)),
        };
        if let Err(f) = filled {
            return Err(take_back(ctx, &node, &name, f).await);
        }
    }
    if wants_terminal {
        let every = session.cadence_s;
        let cadence = if every == 0 { "no checkpoints by themselves".to_owned() } else { format!("checkpoint every {every} s") };
        ctx.note(&format!("session {name} · {cadence} · detach: Enter ~ d"));
        return attach::run(ctx, &name).await;
    }
    let now: Session = node.session(&name).await.unwrap_or(session);
    ctx.result(&now, || format!("{name}\n"))?;
    Ok(0)
}

/// What ends a `ks run` that has not come to its command: Ctrl-C, SIGTERM, and SIGHUP of a window that is closed.
struct Interrupt {
    int: Signal,
    term: Signal,
    hup: Signal,
}

impl Interrupt {
    fn listen() -> Res<Self> {
        let on = |k| signal(k).map_err(|e| Failure::local("cannot listen for signals", e, "report this"));
        Ok(Self { int: on(SignalKind::interrupt())?, term: on(SignalKind::terminate())?, hup: on(SignalKind::hangup())? })
    }
    /// The number of the next one. Safe to cancel.
    async fn recv(&mut self) -> u8 {
        tokio::select! {
            _ = self.int.recv() => 2,
            _ = self.term.recv() => 15,
            _ = self.hup.recv() => 1,
        }
    }
}

/// The failure of having been told to end by this signal.
fn told(what: &str, next: &str, n: u8) -> Failure {
    let mut f = Failure::interrupted(what, next);
    if n != 2 {
        f.error.why = format!("ks was told to end by signal {n}");
        f.exit = super::signal_exit(n);
    }
    f
}

/// Two folders of one name would land in one place.
fn distinct(carries: &[Carry]) -> Res<()> {
    let mut seen = BTreeSet::new();
    match carries.iter().find(|c| !seen.insert(&c.plan.to)) {
        Some(c) => Err(Failure::usage(
            format!("two folders would become {}", c.plan.to),
            "they have the same name",
            "rename one, or sync their parent",
        )),
        None => Ok(()),
    }
}

fn show(ctx: &Ctx, carries: &[Carry], only_plan: bool) -> Res<()> {
    let plans: Vec<_> = carries.iter().map(|c| &c.plan).collect();
    if only_plan {
        return ctx.result(&json!({"schema": "ks.plan.v1", "folders": plans}), || {
            plans
                .iter()
                .map(|p| format!("{}\n{}", p.sentence(), p.notes.iter().map(|n| format!("  note: {n}\n")).collect::<String>()))
                .collect()
        });
    }
    for p in plans {
        ctx.note(&format!("plan: {}", p.sentence()));
        p.notes.iter().for_each(|n| ctx.note(&format!("  note: {}", crate::table::clean(n))));
    }
    Ok(())
}

fn start(a: &args::Run, carries: &[Carry]) -> Res<StartMain> {
    let env = a.env.iter().map(|e| target::env(e, |k| std::env::var(k).ok())).collect::<Res<_>>()?;
    let (cols, rows) = if terminal::both() { terminal::size() } else { (0, 0) };
    let cwd = carries.first().map(|c| c.plan.to.clone()).unwrap_or_default();
    Ok(StartMain { command: a.command.clone(), env, cwd, cols, rows })
}

fn creation(ctx: &Ctx, a: &args::Run, main: Option<StartMain>) -> Res<CreateSession> {
    let s = &ctx.settings;
    let parse = |n: &String| {
        n.parse::<SessionName>()
            .map_err(|e| Failure::usage(format!("{n:?} is no name for a session"), e.to_string(), "choose another with --name"))
    };
    let engine = a.engine.clone().or_else(|| s.engine.clone());
    if let Some(e) = engine.as_deref().filter(|e| !["auto", "kvm", "qemu"].contains(e)) {
        return Err(Failure::usage(
            format!("no engine {e:?}"),
            "engines are auto, kvm and qemu",
            "leave --engine away to let the node choose",
        ));
    }
    Ok(CreateSession {
        name: a.name.as_ref().map(parse).transpose()?,
        image: a.image.clone().or_else(|| s.image.clone()),
        memory_mib: a.memory.or(s.memory_mib),
        vcpus: a.vcpus.or(s.vcpus),
        engine,
        cadence_s: a.cadence.or(s.cadence_s),
        idle_park_s: a.idle_park.or(s.idle_park_s),
        copies: a.copies,
        node: a.node.as_deref().map(super::node_names::check).transpose()?,
        main,
    })
}

/// Creates. Ctrl-C, SIGTERM and SIGHUP let the node finish, then the session is taken back: nothing is left behind.
async fn create_interruptibly(ctx: &Ctx, node: &Node, create: &CreateSession, interrupt: &mut Interrupt) -> Res<Session> {
    let mut bar = ctx.bar();
    let call = node.call::<Session>("/v1/sessions", create, &mut bar);
    tokio::pin!(call);
    let n = tokio::select! {
        biased;
        n = interrupt.recv() => n,
        made = &mut call => return made,
    };
    ctx.note("stopping; Ctrl-C again leaves it to the node");
    let made = tokio::select! {
        made = &mut call => made?,
        // A window that closes sends more than one signal: only a person at the keyboard is in a hurry.
        _ = interrupt.int.recv() => {
            return Err(Failure::interrupted("stopped while the session was being made", "it may exist: look with `ks ls`, delete with `ks rm --force`"));
        }
    };
    let f = told("nothing was started", "run it again when you like", n);
    Err(take_back(ctx, node, made.name.as_str(), f).await)
}

/// Deletes a session that never got to its command, and returns the reason with what became of it.
async fn take_back(ctx: &Ctx, node: &Node, name: &str, mut f: Failure) -> Failure {
    match node.delete(&format!("/v1/sessions/{name}?force=1")).await {
        Ok(_) => {
            ctx.note(&format!("{name} was taken back"));
            if f.error.code == "link-lost" {
                // Whatever had become of it: nothing is left.
                f.error.next = "nothing is left of it; run it again".into();
                f.exit = FAILED;
            }
        }
        Err(e) => {
            f.error.next = format!("{name} could not be taken back ({}): delete it with `ks rm --force {name}`", e.error.why)
        }
    }
    f
}

async fn fill(ctx: &Ctx, node: &Node, name: &str, carries: Vec<Carry>, main: &StartMain) -> Res<()> {
    for c in carries {
        let begun = std::time::Instant::now();
        let (files, bytes, to) = (c.plan.files, c.plan.bytes, c.plan.to.clone());
        cp::send(ctx, node, name, &to, c.items).await?;
        let took = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
        ctx.note(&format!("copied {} {} to {to} in {}", human::count(files, "file"), human::mib(bytes), human::micros(took)));
    }
    let _: Value = node.call(&format!("/v1/sessions/{name}/start"), main, &mut ctx.bar()).await?;
    Ok(())
}

/// The wanted name is taken: offers what the person probably wants.
async fn taken(ctx: &Ctx, node: &Node, create: &CreateSession, mut f: Failure, wants_terminal: bool) -> Res<u8> {
    let name = create.name.as_ref().map(ToString::to_string).unwrap_or_default();
    let state = node.session(&name).await.map(|s| format!(" ({})", s.state)).unwrap_or_default();
    if wants_terminal && ctx.ask(&format!("{name} exists already{state}. Attach to it instead?")) {
        return attach::run(ctx, &name).await;
    }
    f.error.next = format!("go into it with `ks attach {name}`, or choose another --name");
    Err(f)
}
