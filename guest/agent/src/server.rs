//! Requests of the node, one stream each: read, carry out, answer. Holds no state of its own.

use std::{io, path::PathBuf, sync::Arc};

use ks_proto::guest::{Check, GuestAnswer, GuestRequest, PROTOCOL, Tty};
use tokio::io::AsyncWriteExt as _;

use crate::{
    agent::Agent,
    doctor,
    exec::{self, Account, Command, Launch, known_term},
    files, hook, power,
    refusal::Refusal,
    tmux,
    wire::{self, Reader, Writer},
};

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const DEFAULT_CWD: &str = "/workspace";

/// What programs get for a key: the real one is never in here.
const DUMMY_KEY: &str = "keystate-held-outside";

/// Serves one stream of the connection `connection`.
pub async fn handle(agent: Arc<Agent>, stream: yamux::Stream, connection: u64) {
    let (mut reader, mut writer) = wire::split(stream);
    let request = match wire::read_request(&mut reader).await {
        Ok(request) => request,
        Err(e) if e.kind() == io::ErrorKind::InvalidData => {
            let refusal = Refusal::bad("read the request", e.to_string());
            let _ = finish(&mut writer, refusal.into()).await;
            return;
        }
        Err(_) => return,
    };
    // A lost stream is the node's affair; nothing here can be answered any more.
    let _ = dispatch(agent, request, reader, writer, connection).await;
}

async fn dispatch(
    agent: Arc<Agent>,
    request: GuestRequest,
    reader: Reader,
    mut writer: Writer,
    connection: u64,
) -> io::Result<()> {
    match request {
        GuestRequest::Hello { protocol } => finish(&mut writer, hello(protocol)).await,
        GuestRequest::Hook { kind, wall_unix_ns, entropy_hex, hostname, machine_id_hex } => {
            let wanted = hook::Wanted { kind, wall_unix_ns, entropy_hex, hostname, machine_id_hex };
            let done = hook::run(&agent, wanted).await;
            if done.is_ok() {
                agent.outlet.go(connection);
            }
            finish(&mut writer, answer(done)).await
        }
        GuestRequest::RelayGo {} => {
            agent.outlet.go(connection);
            finish(&mut writer, GuestAnswer::Ok {}).await
        }
        GuestRequest::Freeze {} => finish(&mut writer, answer(freeze(&agent).await)).await,
        GuestRequest::Thaw {} => finish(&mut writer, answer(thaw(&agent))).await,
        GuestRequest::StartMain { argv, env, cwd, cols, rows } => {
            let started = match working_directory(Some(&cwd), &account_home(&agent)) {
                Ok(cwd) => tmux::start(&agent, tmux::Start { argv, env, cwd, size: (cols, rows) }).await,
                Err(refusal) => Err(refusal),
            };
            finish(&mut writer, answer(started)).await
        }
        GuestRequest::Exec { argv, env, cwd, user, tty } => {
            let wanted = ExecRequest { argv, env, cwd, user, tty };
            run_program(&agent, prepare_exec(&agent, wanted), reader, writer).await
        }
        GuestRequest::Attach { tty } => {
            let launch = prepare_attach(&agent, tty).await;
            run_program(&agent, launch, reader, writer).await
        }
        GuestRequest::PutTar { path } => files::put(&agent, &path, reader, &mut writer).await,
        GuestRequest::GetTar { path } => files::get(&path, &mut writer).await,
        GuestRequest::ListFiles { path, hash, paths } => files::list(&path, hash, paths, &mut writer).await,
        GuestRequest::Logs { lines } => match tmux::logs(&agent, lines).await {
            Ok(text) => {
                wire::write_answer(&mut writer, &GuestAnswer::Ok {}).await?;
                writer.write_all(&text).await?;
                writer.shutdown().await
            }
            Err(refusal) => finish(&mut writer, refusal.into()).await,
        },
        GuestRequest::Doctor { wall_unix_ns } => {
            let checks: Vec<Check> = doctor::run(&agent, wall_unix_ns).await;
            finish(&mut writer, GuestAnswer::Doctor { checks }).await
        }
        GuestRequest::Sync {} => {
            let synced = tokio::task::spawn_blocking(rustix::fs::sync).await;
            finish(&mut writer, answer(synced.map_err(|e| Refusal::io("flush the file systems", e)))).await
        }
        GuestRequest::PowerOff {} => {
            if !agent.in_vm {
                let refusal = Refusal::bad("power off", "this agent is not PID 1 of a VM");
                return finish(&mut writer, refusal.into()).await;
            }
            power::quiesce(&agent).await;
            finish(&mut writer, GuestAnswer::Ok {}).await?;
            power::off_after_answer().await
        }
    }
}

async fn finish(writer: &mut Writer, answer: GuestAnswer) -> io::Result<()> {
    wire::write_answer(writer, &answer).await?;
    writer.shutdown().await
}

fn answer(result: Result<(), Refusal>) -> GuestAnswer {
    match result {
        Ok(()) => GuestAnswer::Ok {},
        Err(refusal) => refusal.into(),
    }
}

fn hello(protocol: u32) -> GuestAnswer {
    if protocol != PROTOCOL {
        let why = format!("the node speaks protocol {protocol}, this guest {PROTOCOL}");
        return Refusal::new("bad-request", "greet", why, "make the image anew with this version").into();
    }
    let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    GuestAnswer::Hello {
        protocol: PROTOCOL,
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        boot_id: text("/proc/sys/kernel/random/boot_id"),
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        clocksource: text("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
    }
}

async fn freeze(agent: &Agent) -> Result<(), Refusal> {
    match &agent.cgroup {
        Some(group) => group.freeze().await.map_err(|e| Refusal::io("freeze the user's processes", e)),
        None => Err(Refusal::bad("freeze the user's processes", "outside a VM there is no cgroup of theirs")),
    }
}

fn thaw(agent: &Agent) -> Result<(), Refusal> {
    match &agent.cgroup {
        Some(group) => group.thaw().map_err(|e| Refusal::io("thaw the user's processes", e)),
        None => Err(Refusal::bad("thaw the user's processes", "outside a VM there is no cgroup of theirs")),
    }
}

struct ExecRequest {
    argv: Vec<String>,
    env: Vec<(String, String)>,
    cwd: Option<String>,
    user: Option<String>,
    tty: Option<Tty>,
}

/// The user's environment; `term` for programs on a terminal.
pub fn environment(agent: &Agent, account: &Account, term: Option<&str>) -> Vec<(String, String)> {
    let home = account.home.to_string_lossy().into_owned();
    let mut env: Vec<(String, String)> = [
        ("HOME", home.as_str()),
        ("USER", &account.name),
        ("LOGNAME", &account.name),
        ("SHELL", &account.shell),
        ("PATH", PATH),
        ("LANG", "C.UTF-8"),
        ("TMUX_TMPDIR", &tmux::socket_dir(agent).to_string_lossy()),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .to_vec();
    if let Some(term) = term {
        env.push(("TERM".into(), known_term(term, &account.home)));
    }
    if agent.in_vm {
        env.extend(gateway_environment());
    }
    env
}

/// Where models and the rest of the world are, for programs that go by their usual variables.
fn gateway_environment() -> impl Iterator<Item = (String, String)> {
    let gateway = format!("http://127.0.0.1:{}", ks_relay::PORT);
    let proxy = format!("http://127.0.0.1:{}", ks_relay::EGRESS_PORT);
    let own = "127.0.0.1,localhost,::1";
    [
        ("OPENAI_BASE_URL", format!("{gateway}/openai/v1")),
        ("OPENAI_API_BASE", format!("{gateway}/openai/v1")),
        ("ANTHROPIC_BASE_URL", format!("{gateway}/anthropic")),
        ("GOOGLE_GEMINI_BASE_URL", format!("{gateway}/gemini")),
        ("OPENAI_API_KEY", DUMMY_KEY.into()),
        ("ANTHROPIC_API_KEY", DUMMY_KEY.into()),
        ("GEMINI_API_KEY", DUMMY_KEY.into()),
        ("http_proxy", proxy.clone()),
        ("https_proxy", proxy.clone()),
        ("HTTP_PROXY", proxy.clone()),
        ("HTTPS_PROXY", proxy.clone()),
        // Not socks5h://, although the port speaks it: some HTTP libraries refuse to start without a further package then.
        ("ALL_PROXY", proxy.clone()),
        ("all_proxy", proxy),
        ("NO_PROXY", own.into()),
        ("no_proxy", own.into()),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value))
}

fn account_home(agent: &Agent) -> PathBuf {
    let account = if agent.in_vm { Account::resolve(None).ok() } else { Some(Account::own()) };
    account.map_or_else(|| PathBuf::from("/"), |a| a.home)
}

/// The directory asked for, which must exist; else /workspace, the home directory or `/`.
fn working_directory(wanted: Option<&str>, home: &std::path::Path) -> Result<PathBuf, Refusal> {
    match wanted.filter(|w| !w.is_empty()) {
        Some(dir) if std::path::Path::new(dir).is_dir() => Ok(dir.into()),
        Some(dir) => {
            let next = "make it first, or name another with --cwd";
            Err(Refusal::new("bad-request", format!("start in {dir}"), "there is no such directory", next))
        }
        None => {
            let fallbacks = [PathBuf::from(DEFAULT_CWD), home.to_owned()];
            Ok(fallbacks.into_iter().find(|d| d.is_dir()).unwrap_or_else(|| "/".into()))
        }
    }
}

fn prepare_exec(agent: &Agent, wanted: ExecRequest) -> Result<Launch, Refusal> {
    agent.not_frozen("run a program")?;
    if wanted.argv.first().is_none_or(String::is_empty) {
        return Err(Refusal::bad("run a program", "no program was named"));
    }
    let nul = |s: &String| s.contains('\0');
    let bad_env = |(name, value): &(String, String)| name.is_empty() || name.contains(['\0', '=']) || nul(value);
    if wanted.argv.iter().any(nul) || wanted.env.iter().any(bad_env) {
        return Err(Refusal::bad("run a program", "an argument or variable has a NUL byte, or a variable no valid name"));
    }
    let account = account_for(agent, wanted.user.as_deref())?;
    let home = account.home.clone();
    let cwd = working_directory(wanted.cwd.as_deref(), &home)?;
    let mut env = environment(agent, &account, wanted.tty.as_ref().map(|t| t.term.as_str()));
    for (name, value) in wanted.env {
        env.retain(|(have, _)| *have != name);
        env.push((name, value));
    }
    let size = wanted.tty.map(|t| (t.cols, t.rows));
    Ok(Launch { argv: wanted.argv, env, cwd, account: agent.in_vm.then_some(account), size })
}

fn account_for(agent: &Agent, user: Option<&str>) -> Result<Account, Refusal> {
    if agent.in_vm {
        return Account::resolve(user);
    }
    let own = Account::own();
    match user {
        Some(u) if u != own.name && u != own.uid.to_string() => {
            let next = format!("leave the user out; programs run as {}", own.name);
            Err(Refusal::new("bad-request", format!("run as {u}"), "outside a VM users are not changed", next))
        }
        Some(_) | None => Ok(own),
    }
}

async fn prepare_attach(agent: &Agent, tty: Tty) -> Result<Launch, Refusal> {
    agent.not_frozen("attach")?;
    if !tmux::exists(agent).await? {
        return Err(tmux::no_main());
    }
    let account = account_for(agent, None)?;
    let env = environment(agent, &account, Some(&tty.term));
    let account = agent.in_vm.then_some(account);
    Ok(Launch { argv: tmux::attach_argv(), env, cwd: "/".into(), account, size: Some((tty.cols, tty.rows)) })
}

async fn run_program(agent: &Agent, launch: Result<Launch, Refusal>, reader: Reader, mut writer: Writer) -> io::Result<()> {
    match launch.and_then(|launch| start(agent, &launch)) {
        Ok((pid, ended, streams)) => {
            if let Err(lost) = wire::write_answer(&mut writer, &GuestAnswer::Ok {}).await {
                agent.reaper.signal_group(pid, 1);
                return Err(lost);
            }
            exec::run(&agent.reaper, pid, ended, streams, reader, writer).await;
            Ok(())
        }
        Err(refusal) => finish(&mut writer, refusal.into()).await,
    }
}

type Started = (rustix::process::Pid, tokio::sync::oneshot::Receiver<exec::Ended>, exec::Streams);

fn start(agent: &Agent, launch: &Launch) -> Result<Started, Refusal> {
    let what = || format!("run {}", launch.argv.first().map_or("", String::as_str));
    let cgroup = match &agent.cgroup {
        Some(group) => Some(group.procs().map_err(|e| Refusal::io(what(), e))?),
        None => None,
    };
    let (command, streams) = Command::prepare(launch, cgroup).map_err(|e| Refusal::io(what(), e))?;
    let (pid, ended) = agent.reaper.spawn(command).map_err(|e| not_started(what(), &e))?;
    Ok((pid, ended, streams))
}

fn not_started(what: String, error: &io::Error) -> Refusal {
    match error.kind() {
        io::ErrorKind::NotFound => Refusal::new("not-found", what, "no such program", "check its name and PATH"),
        io::ErrorKind::PermissionDenied | io::ErrorKind::IsADirectory => {
            Refusal::new("not-executable", what, error.to_string(), "make it executable, or name another program")
        }
        _ if error.raw_os_error() == Some(libc::ENOEXEC) => {
            let next = "name its interpreter, as in `sh FILE`";
            Refusal::new("not-executable", what, "it is not a program for this machine", next)
        }
        _ => Refusal::io(what, error),
    }
}
