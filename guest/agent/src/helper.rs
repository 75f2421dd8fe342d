//! Small programs that the agent itself needs (tmux commands, ssh-keygen): run to their end, with output and a deadline.

use std::{io, path::PathBuf, time::Duration};

use crate::{
    agent::Agent,
    exec::{Account, Command, Ended, Launch, Streams},
};

/// Output kept of one helper.
const OUTPUT_BYTES_MAX: usize = 64 * 1024 * 1024;

/// How a helper ended and what it wrote.
#[derive(Debug)]
pub struct Output {
    /// Its end.
    pub ended: Ended,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error, as text.
    pub stderr: String,
}

/// A helper to run.
#[derive(Debug)]
pub struct Helper {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// The whole environment.
    pub env: Vec<(String, String)>,
    /// Who it runs as.
    pub account: Option<Account>,
    /// Joins the user's cgroup (what it starts stays there).
    pub in_user_cgroup: bool,
}

impl Helper {
    /// Runs it; on the deadline its process group is killed.
    pub async fn run(self, agent: &Agent, limit: Duration) -> io::Result<Output> {
        let cgroup = match &agent.cgroup {
            Some(group) if self.in_user_cgroup => Some(group.procs()?),
            Some(_) | None => None,
        };
        let launch = Launch { argv: self.argv, env: self.env, cwd: PathBuf::from("/"), account: self.account, size: None };
        let (command, streams) = Command::prepare(&launch, cgroup)?;
        let (pid, ended) = agent.reaper.spawn(command)?;
        let Streams::Pipes { stdin, stdout, stderr } = streams else { return Err(io::ErrorKind::Unsupported.into()) };
        drop(stdin);
        let read = |fd: crate::exec::Fd| async move {
            let mut all = Vec::new();
            let mut buf = vec![0; 16 * 1024];
            loop {
                let n = fd.read(&mut buf).await?;
                if n == 0 {
                    return Ok::<_, io::Error>(all);
                }
                if all.len() + n > OUTPUT_BYTES_MAX {
                    return Err(io::Error::other("it wrote too much"));
                }
                all.extend_from_slice(&buf[..n]);
            }
        };
        let finish = async {
            let (stdout, stderr, ended) = tokio::join!(read(stdout), read(stderr), ended);
            let ended = ended.map_err(io::Error::other)?;
            Ok(Output { ended, stdout: stdout?, stderr: String::from_utf8_lossy(&stderr?).trim().to_owned() })
        };
        match tokio::time::timeout(limit, finish).await {
            Ok(result) => result,
            Err(_) => {
                agent.reaper.signal_group(pid, 9);
                let why = format!("{} did not end within {} s", launch.argv.join(" "), limit.as_secs());
                Err(io::Error::new(io::ErrorKind::TimedOut, why))
            }
        }
    }
}
