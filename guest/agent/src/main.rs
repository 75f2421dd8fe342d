//! `ks-guest`: PID 1 inside the session's VM, and the same server outside a VM for tests and for the node.
//!
//! As PID 1 it boots the guest (`boot`), finds the guest channel (`channel`) and answers requests (`server`).
//! With `--serve-socket PATH` it answers the same requests on a Unix socket, as the user who started it, without
//! cgroups or a change of user. Refuses any other way of being started.

mod agent;
mod boot;
mod cgroup;
mod channel;
mod doctor;
mod exec;
mod files;
mod helper;
mod hook;
mod log;
mod outlet;
mod power;
mod refusal;
mod server;
mod sys;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_relay;
mod tmux;
mod wire;

use std::{path::PathBuf, process::ExitCode};

const HELP: &str = "ks-guest: the agent inside a KeepState VM (PID 1)

  ks-guest --serve-socket PATH [--framed] [--state DIR]

  --serve-socket PATH   listen on a Unix socket and serve the guest protocol (yamux), for use outside a VM
  --framed              expect generation markers and escapes, as on the virtio-serial port
  --state DIR           where sockets and notes are kept (default: PATH with .state appended)
  --version             print the version
";

/// What the command line asks for.
#[derive(Debug, PartialEq, Eq)]
enum Mode {
    Init,
    Serve { socket: PathBuf, framed: bool, state: PathBuf },
    Help,
    Version,
}

fn parse(is_init: bool, args: &[String]) -> Result<Mode, String> {
    if is_init {
        // The kernel hands words of its command line that it does not know to init.
        return Ok(Mode::Init);
    }
    let (mut socket, mut framed, mut state) = (None, false, None);
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        match arg.as_str() {
            "--serve-socket" => socket = Some(PathBuf::from(rest.next().ok_or("--serve-socket needs a path")?)),
            "--state" => state = Some(PathBuf::from(rest.next().ok_or("--state needs a directory")?)),
            "--framed" => framed = true,
            "--help" | "-h" => return Ok(Mode::Help),
            "--version" => return Ok(Mode::Version),
            other => return Err(format!("unknown argument {other}; see ks-guest --help")),
        }
    }
    let socket = socket.ok_or("this program is PID 1 of a KeepState VM; outside one it needs --serve-socket PATH")?;
    let state = state.unwrap_or_else(|| {
        let mut name = socket.clone().into_os_string();
        name.push(".state");
        PathBuf::from(name)
    });
    Ok(Mode::Serve { socket, framed, state })
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let mode = match parse(rustix::process::getpid().is_init(), &args) {
        Ok(mode) => mode,
        Err(why) => {
            log::line(&why);
            return ExitCode::from(2);
        }
    };
    match mode {
        Mode::Init => boot::run(),
        Mode::Serve { socket, framed, state } => match channel::serve_socket(&socket, framed, &state) {
            Ok(()) => ExitCode::SUCCESS,
            Err(why) => {
                log::line(&format!("cannot serve on {}: {why}", socket.display()));
                ExitCode::FAILURE
            }
        },
        Mode::Help => {
            log::plain(HELP);
            ExitCode::SUCCESS
        }
        Mode::Version => {
            log::plain(concat!("ks-guest ", env!("CARGO_PKG_VERSION"), "\n"));
            ExitCode::SUCCESS
        }
    }
}

#[cfg(test)]
mod command_line_tests {
    use super::*;

    fn words(s: &str) -> Vec<String> {
        s.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn init_ignores_what_the_kernel_passes() {
        assert_eq!(parse(true, &words("ks_soft --nonsense")), Ok(Mode::Init));
    }

    #[test]
    fn outside_a_vm_a_socket_is_needed() {
        assert!(parse(false, &[]).unwrap_err().contains("--serve-socket"));
        assert!(parse(false, &words("--serve-socket")).is_err());
        assert!(parse(false, &words("--bogus")).unwrap_err().contains("--bogus"));
        let want = Mode::Serve { socket: "/a".into(), framed: true, state: "/a.state".into() };
        assert_eq!(parse(false, &words("--serve-socket /a --framed")), Ok(want));
    }
}
