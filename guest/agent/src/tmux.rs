//! The tmux session `main`: its configuration, its start, its clients and its scrollback.
//!
//! Its socket lives below the agent's state directory (TMUX_TMPDIR), so that cleaning /tmp does not cut the session.

use std::{
    io,
    os::unix::fs::{DirBuilderExt as _, chown},
    path::PathBuf,
    sync::atomic::Ordering,
    time::Duration,
};

use crate::{agent::Agent, exec::Account, helper::Helper, refusal::Refusal, server::environment};

const LIMIT: Duration = Duration::from_secs(60);
const SESSION: &str = "=main";
/// A pane of the session (a bare `=main` names no pane).
const PANE: &str = "=main:";

/// Written when the session starts. When the command ends, its window stays and shows the exit status.
const CONFIG: &str = "\
# Written by ks-guest at each start of the session `main`; changes are lost.
set -g default-terminal tmux-256color
set -as terminal-features ',xterm*:RGB'
set -g window-size latest
set -g history-limit 50000
set -s escape-time 10
set -g focus-events on
set -g status off
set -g remain-on-exit on
bind R respawn-pane
";

/// What StartMain asks for.
#[derive(Debug)]
pub struct Start {
    /// The command; empty for a login shell.
    pub argv: Vec<String>,
    /// Added to the environment.
    pub env: Vec<(String, String)>,
    /// Where it starts.
    pub cwd: PathBuf,
    /// The size before any client attaches.
    pub size: (u16, u16),
}

/// Where tmux puts its sockets.
pub fn socket_dir(agent: &Agent) -> PathBuf {
    agent.state.join("tmux")
}

/// Starts the session unless it exists.
pub async fn start(agent: &Agent, wanted: Start) -> Result<(), Refusal> {
    agent.not_frozen("start the main session")?;
    let _one = agent.starting.lock().await;
    let fail = |why: io::Error| Refusal::io("start the main session", why);
    prepare(agent).map_err(fail)?;
    if exists(agent).await? {
        agent.main_started.store(true, Ordering::Relaxed);
        return Ok(());
    }
    let output = helper(agent, start_args(agent, &wanted), true)?.run(agent, LIMIT).await.map_err(fail)?;
    if output.ended.code != 0 {
        return Err(Refusal::io("start the main session", format!("tmux: {}", output.stderr)));
    }
    agent.main_started.store(true, Ordering::Relaxed);
    Ok(())
}

/// Whether the session is there and answers. Without a server's socket there is nobody to ask, which spares the start of
/// a program (0.15 s in an emulated guest).
pub async fn exists(agent: &Agent) -> Result<bool, Refusal> {
    let uid = if agent.in_vm { Account::resolve(None)?.uid } else { Account::own().uid };
    if !socket_dir(agent).join(format!("tmux-{uid}")).join("default").exists() {
        return Ok(false);
    }
    let args = ["has-session", "-t", SESSION].map(str::to_owned).to_vec();
    let output = helper(agent, args, false)?.run(agent, LIMIT).await.map_err(not_there)?;
    Ok(output.ended.code == 0)
}

/// The arguments of a client of the session.
pub fn attach_argv() -> Vec<String> {
    ["tmux", "-u", "attach-session", "-t", SESSION].map(str::to_owned).to_vec()
}

/// The last `lines` lines of the scrollback and the screen.
pub async fn logs(agent: &Agent, lines: u32) -> Result<Vec<u8>, Refusal> {
    agent.not_frozen("read the main window")?;
    if !exists(agent).await? {
        return Err(no_main());
    }
    let from = format!("-{lines}");
    let args = ["capture-pane", "-p", "-t", PANE, "-S", &from].map(str::to_owned).to_vec();
    let output = helper(agent, args, false)?.run(agent, LIMIT).await.map_err(not_there)?;
    if output.ended.code != 0 {
        return Err(Refusal::io("read the main window", format!("tmux: {}", output.stderr)));
    }
    Ok(last_lines(output.stdout, lines as usize))
}

/// One line about the main window: its command, or how it ended.
pub async fn describe(agent: &Agent) -> Result<String, Refusal> {
    let format = "#{pane_current_command} pid #{pane_pid}#{?pane_dead, ended with status #{pane_dead_status},}";
    let args = ["display-message", "-p", "-t", PANE, format].map(str::to_owned).to_vec();
    let output = helper(agent, args, false)?.run(agent, LIMIT).await.map_err(not_there)?;
    if output.ended.code == 0 {
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    } else {
        Err(Refusal::io("ask tmux", output.stderr))
    }
}

/// The refusal when nobody started the session.
pub fn no_main() -> Refusal {
    Refusal::new("not-found", "use the main window", "it was not started, or its tmux ended", "start it with `ks run`")
}

fn not_there(why: io::Error) -> Refusal {
    if why.kind() == io::ErrorKind::NotFound {
        let next = "install tmux in the session's image";
        return Refusal::new("not-found", "run tmux", "the session has no tmux program", next);
    }
    Refusal::io("run tmux", why)
}

fn helper(agent: &Agent, args: Vec<String>, in_user_cgroup: bool) -> Result<Helper, Refusal> {
    let account = if agent.in_vm { Some(Account::resolve(None)?) } else { None };
    let env = environment(agent, &account.clone().unwrap_or_else(Account::own), None);
    let mut argv = vec!["tmux".to_owned(), "-u".into()];
    argv.extend(args);
    Ok(Helper { argv, env, account, in_user_cgroup })
}

/// Writes the configuration and makes the directory of the socket.
fn prepare(agent: &Agent) -> io::Result<()> {
    std::fs::create_dir_all(&agent.conf)?;
    std::fs::write(agent.conf.join("tmux.conf"), CONFIG)?;
    let dir = socket_dir(agent);
    if let Err(e) = std::fs::DirBuilder::new().mode(0o700).create(&dir)
        && e.kind() != io::ErrorKind::AlreadyExists
    {
        return Err(e);
    }
    if agent.in_vm {
        let user = Account::resolve(None).map_err(io::Error::other)?;
        chown(&dir, Some(user.uid), Some(user.gid))?;
    }
    Ok(())
}

fn start_args(agent: &Agent, wanted: &Start) -> Vec<String> {
    let (cols, rows) = wanted.size;
    let (cols, rows) = if cols == 0 || rows == 0 { (80, 24) } else { (cols, rows) };
    let conf = agent.conf.join("tmux.conf").to_string_lossy().into_owned();
    let cwd = wanted.cwd.to_string_lossy().replace('#', "##");
    let mut args: Vec<String> = ["-f", &conf, "new-session", "-d", "-s", "main", "-c", &cwd].map(str::to_owned).to_vec();
    args.extend(["-x".into(), cols.to_string(), "-y".into(), rows.to_string()]);
    for (name, value) in &wanted.env {
        args.extend(["-e".into(), format!("{name}={value}")]);
    }
    if !wanted.argv.is_empty() {
        args.extend(["--".into(), shell_line(&wanted.argv)]);
    }
    args
}

/// A shell command that becomes exactly this program with these arguments.
fn shell_line(argv: &[String]) -> String {
    let quoted: Vec<String> = argv.iter().map(|a| format!("'{}'", a.replace('\'', r"'\''"))).collect();
    format!("exec {}", quoted.join(" "))
}

/// How tmux begins the line at the bottom of a window whose command ended.
const DEAD: &[u8] = b"Pane is dead";

/// The last lines. The empty ones with which tmux pads the screen, also above the line that tells of the command's
/// end, are not part of the log.
fn last_lines(text: Vec<u8>, lines: usize) -> Vec<u8> {
    let mut all: Vec<&[u8]> = text.split_inclusive(|b| *b == b'\n').collect();
    let drop_padding = |all: &mut Vec<&[u8]>| {
        while all.last().is_some_and(|line| *line == b"\n") {
            all.pop();
        }
    };
    drop_padding(&mut all);
    if let Some(dead) = all.pop_if(|line| line.starts_with(DEAD)) {
        drop_padding(&mut all);
        all.push(dead);
    }
    all[all.len().saturating_sub(lines)..].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_survive_the_shell() {
        let argv = ["printf", "%s|", "a b", "it's", "$HOME", "", "\u{e9}\n*"].map(str::to_owned);
        let output = std::process::Command::new("/bin/sh").arg("-c").arg(shell_line(&argv)).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "a b|it's|$HOME||\u{e9}\n*|");
    }

    #[test]
    fn the_last_lines_without_padding() {
        assert_eq!(last_lines(b"a\nb\nc\n\n\n\n".to_vec(), 2), b"b\nc\n");
        assert_eq!(last_lines(b"a\nb\n".to_vec(), 5), b"a\nb\n");
        assert_eq!(last_lines(b"\n\n\n".to_vec(), 5), b"");
        let ended = b"a\n\nhi\n\n\nPane is dead (status 3)\n".to_vec();
        assert_eq!(last_lines(ended, 2), b"hi\nPane is dead (status 3)\n");
        assert_eq!(last_lines(b"a\nb".to_vec(), 1), b"b");
    }
}
