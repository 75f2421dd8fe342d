//! `ks completion`, `ks help`, `ks version`, `ks man`: what needs no node.

use crate::args::Cli;
use crate::failure::{Failure, Res};
use crate::help;
use crate::output::Ctx;
use clap::CommandFactory;
use clap_complete::env::Shells;
use serde_json::json;

fn unwritten(e: impl std::fmt::Display) -> Failure {
    Failure::local("cannot write the text", e, "report this")
}

/// Prints a shell's completion script.
pub fn script(ctx: &Ctx, shell: &str) -> Res<u8> {
    let shells = Shells::builtins();
    let Some(found) = shells.completer(shell) else {
        let all: Vec<&str> = shells.names().collect();
        let what = format!("no completion for {shell:?}");
        return Err(Failure::usage(what, "this shell is not known here", format!("use one of {}", all.join(", "))));
    };
    let mut out = Vec::new();
    found.write_registration("COMPLETE", "ks", "ks", "ks", &mut out).map_err(unwritten)?;
    let text = String::from_utf8_lossy(&out).into_owned();
    ctx.result(&json!({"schema": "ks.completion.v1", "shell": shell, "script": text}), || text.clone())?;
    Ok(0)
}

/// Explains a verb or a topic.
pub fn help(ctx: &Ctx, topic: Option<&str>) -> Res<u8> {
    let text = match topic {
        None => help::OVERVIEW.to_owned(),
        Some(t) => match help::topic(t) {
            Some(text) => text.to_owned(),
            None => verb(t)?,
        },
    };
    ctx.result(&json!({"schema": "ks.help.v1", "topic": topic, "text": text}), || text.clone())?;
    Ok(0)
}

fn verb(name: &str) -> Res<String> {
    let mut root = Cli::command();
    root.build();
    if let Some(c) = root.find_subcommand_mut(name) {
        return Ok(c.render_long_help().to_string());
    }
    let verbs: Vec<String> = root.get_subcommands().filter(|c| !c.is_hide_set()).map(|c| c.get_name().to_owned()).collect();
    let all = verbs.iter().map(String::as_str).chain(help::TOPICS.iter().map(|t| t.0));
    let topics: Vec<&str> = help::TOPICS.iter().map(|t| t.0).collect();
    let next = match help::nearest(name, all) {
        Some(near) => format!("did you mean `ks help {near}`?"),
        None => format!("topics are {}; verbs are listed by `ks --help`", topics.join(", ")),
    };
    Err(Failure::usage(format!("no help on {name:?}"), "it is neither a verb nor a topic", next))
}

/// Prints the version.
pub fn version(ctx: &Ctx) -> Res<u8> {
    let v = env!("CARGO_PKG_VERSION");
    ctx.result(&json!({"schema": "ks.version.v1", "version": v}), || format!("ks {v}\n"))?;
    Ok(0)
}

/// Prints the man page.
pub fn man(ctx: &Ctx) -> Res<u8> {
    let mut out = Vec::new();
    clap_mangen::Man::new(Cli::command()).render(&mut out).map_err(unwritten)?;
    let text = String::from_utf8_lossy(&out).into_owned();
    ctx.result(&json!({"schema": "ks.man.v1", "roff": text}), || text.clone())?;
    Ok(0)
}
