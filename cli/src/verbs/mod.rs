//! The verbs, one file per family. They decide nothing about bytes or terminals: that is below host/ and in the pure
//! modules beside it.

pub mod attach;
pub mod blob;
pub mod checkpoints;
pub mod completion;
pub mod cp;
pub mod doctor;
pub mod egress;
pub mod events;
pub mod exec;
pub mod fleet;
pub mod image;
pub mod keys;
pub mod kill;
pub mod ledger;
pub mod login;
pub mod logs;
pub mod node;
pub mod node_names;
pub mod nodes;
pub mod run;
pub mod sessions;
pub mod users;

use crate::args::Verb;
use crate::failure::{Failure, INTERRUPTED, Res};
use crate::output::Ctx;
use crate::{bench, demo};

/// The exit code of a process that a signal ends.
pub fn signal_exit(n: u8) -> u8 {
    128u8.saturating_add(n)
}

/// Unix milliseconds now.
pub fn now_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

/// Does what the command line asks.
pub async fn dispatch(ctx: &Ctx, verb: Verb) -> Res<u8> {
    match verb {
        // These handle Ctrl-C themselves.
        Verb::Run(a) => run::run(ctx, a).await,
        Verb::Attach(a) => attach::run(ctx, &crate::target::session(&a.session)?).await,
        Verb::Exec(a) => exec::run(ctx, a).await,
        Verb::Node(a @ crate::args::Node::Drain { .. }) => nodes::run(ctx, a).await,
        other => tokio::select! {
            done = plain(ctx, other) => done,
            _ = tokio::signal::ctrl_c() => Err(Failure {
                exit: INTERRUPTED,
                ..Failure::interrupted("stopped waiting", "what the node has begun, it finishes: look with `ks ls` and `ks events`")
            }),
        },
    }
}

async fn plain(ctx: &Ctx, verb: Verb) -> Res<u8> {
    match verb {
        Verb::Up(a) => node::up(ctx, a).await,
        Verb::Down(a) => node::down(ctx, a).await,
        Verb::Cp(a) => cp::run(ctx, &a).await,
        Verb::Logs(a) => logs::run(ctx, a).await,
        Verb::Ls => sessions::ls(ctx).await,
        Verb::Show(a) => sessions::show(ctx, &a.session).await,
        Verb::Checkpoint(a) => checkpoints::take(ctx, a).await,
        Verb::Checkpoints(a) => checkpoints::list(ctx, &a.session).await,
        Verb::Tree(a) => checkpoints::tree(ctx, &a.session).await,
        Verb::Diff(a) => checkpoints::diff(ctx, a).await,
        Verb::Restore(a) => checkpoints::restore(ctx, a).await,
        Verb::Fork(a) => checkpoints::fork(ctx, a).await,
        Verb::Park(a) => sessions::each(ctx, "park", &a.sessions).await,
        Verb::Wake(a) => sessions::each(ctx, "wake", &a.sessions).await,
        Verb::Stop(a) => sessions::each(ctx, "stop", &a.sessions).await,
        Verb::Kill(a) => kill::run(ctx, a).await,
        Verb::Rm(a) => sessions::rm(ctx, a).await,
        Verb::Doctor(a) => doctor::run(ctx, a).await,
        Verb::Events(a) => events::run(ctx, a).await,
        Verb::Key(a) => keys::key(ctx, a).await,
        Verb::Provider(a) => keys::provider(ctx, a).await,
        Verb::Ledger(a) => ledger::run(ctx, a).await,
        Verb::Cost(a) => ledger::cost(ctx, a).await,
        Verb::Budget(a) => egress::budget(ctx, a).await,
        Verb::Egress(a) => egress::run(ctx, a).await,
        Verb::Image(a) => image::run(ctx, a).await,
        Verb::Node(a) => nodes::run(ctx, a).await,
        Verb::Blob(a) => blob::run(ctx, a).await,
        Verb::Fleet(a) => fleet::run(ctx, a).await,
        Verb::User(a) => users::run(ctx, a).await,
        Verb::Login(a) => login::login(ctx, a).await,
        Verb::Context(a) => login::context(ctx, a),
        Verb::Completion(a) => completion::script(ctx, &a.shell),
        Verb::Demo(a) => demo::run(a, ctx).await,
        Verb::Bench(a) => bench::run(a, ctx).await,
        Verb::Help(a) => completion::help(ctx, a.topic.as_deref()),
        Verb::Version => completion::version(ctx),
        Verb::Man => completion::man(ctx),
        Verb::Run(_) | Verb::Attach(_) | Verb::Exec(_) => {
            unreachable!("these verbs are taken before this point")
        }
    }
}
