//! `ks`: the command line of KeepState. Links nothing of ours but the formats; speaks to the node over its API.

mod args;
mod args_fleet;
mod args_gateway;
mod bench;
mod config;
mod context;
mod demo;
mod escape;
mod failure;
mod help;
mod host;
mod human;
mod lab;
mod ledger;
mod modes;
mod output;
mod plan;
mod replies;
mod sequences;
mod table;
mod target;
mod verbs;

use args::Cli;
use clap::{CommandFactory, Parser};
use clap_complete::CompleteEnv;
use failure::{FAILED, Failure, Res, USAGE};
use output::Ctx;
use std::process::ExitCode;

/// Restores the terminal when `ks` has died (host/guard.rs).
pub const TTY_GUARD: &str = "__tty-guard";
/// Runs a program in a session of its own (host/daemon.rs).
pub const DETACH: &str = "__detach";

fn main() -> ExitCode {
    // Own children come first: their arguments are another program's, `--` included, and no parser may touch them.
    let mut words = std::env::args_os().skip(1);
    match words.next() {
        Some(w) if w == TTY_GUARD => return ExitCode::from(host::guard::run()),
        Some(w) if w == DETACH => {
            let f = host::daemon::detach(&words.collect::<Vec<_>>());
            output::report(&f, false);
            return ExitCode::from(f.exit);
        }
        Some(_) | None => {}
    }
    CompleteEnv::with_factory(Cli::command).complete();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => return ExitCode::from(not_parsed(&hinted(e))),
    };
    let json = cli.global.json;
    let code = match run(cli) {
        Ok(code) => code,
        Err(f) => {
            output::report(&f, json);
            f.exit
        }
    };
    // Threads that wait for a keyboard or a pipe do not keep the process.
    std::process::exit(i32::from(code))
}

fn run(cli: Cli) -> Res<u8> {
    let Some(verb) = cli.verb else {
        print!("{}", help::OVERVIEW);
        return Ok(0);
    };
    let flags =
        config::Layer { address: cli.global.address.clone(), context: cli.global.context.clone(), ..config::Layer::default() };
    let ctx = Ctx::new(&cli.global, host::settings::load(flags)?, host::settings::data_dir());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.map_err(|e| Failure::local("cannot start", e, "free some memory"))?;
    let done = runtime.block_on(verbs::dispatch(&ctx, verb));
    runtime.shutdown_background();
    done
}

/// Adds the hints that clap has not: a verb whose letters are swapped, and the `--` before a command.
fn hinted(mut e: clap::Error) -> clap::Error {
    use clap::error::{ContextKind, ContextValue, ErrorKind};
    let first = std::env::args().skip(1).find(|a| !a.starts_with('-'));
    let given = |e: &clap::Error, kind| match e.get(kind) {
        Some(ContextValue::String(s)) => Some(s.clone()),
        _ => None,
    };
    match e.kind() {
        ErrorKind::InvalidSubcommand if e.get(ContextKind::SuggestedSubcommand).is_none() => {
            let root = Cli::command();
            let verbs: Vec<&str> = root.get_subcommands().filter(|c| !c.is_hide_set()).map(clap::Command::get_name).collect();
            let wrong = given(&e, ContextKind::InvalidSubcommand).filter(|w| first.as_ref() == Some(w));
            if let Some(near) = wrong.and_then(|w| help::nearest(&w, verbs.iter().copied())) {
                e.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(vec![near.to_owned()]));
            }
        }
        ErrorKind::UnknownArgument if first.as_deref() == Some("run") => {
            if let Some(word) = given(&e, ContextKind::InvalidArg).filter(|w| !w.starts_with('-')) {
                let tip = format!("the command comes after `--`: ks run -- {word}");
                e.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
            }
        }
        _ => {}
    }
    e
}

/// Help and versions go to stdout with 0; mistakes to stderr with 2, or as JSON when that was asked for.
fn not_parsed(e: &clap::Error) -> u8 {
    use clap::error::ErrorKind;
    let wanted = matches!(e.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    let mine = std::env::args_os().take_while(|a| a != "--").any(|a| a == "--json");
    if mine && !wanted {
        let text = e.to_string();
        let mut lines = text.lines().map(str::trim).filter(|l| !l.is_empty());
        let what = lines.next().unwrap_or_default().trim_start_matches("error: ").to_owned();
        let why = lines.collect::<Vec<_>>().join("; ");
        output::report(&Failure::usage(what, why, "see `ks help`"), true);
        return USAGE;
    }
    match e.print() {
        Ok(()) if wanted => 0,
        Ok(()) => USAGE,
        Err(_) => FAILED,
    }
}
