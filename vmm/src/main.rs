//! `ks-vmm`: runs one session's microVM under the orders of its node.

use anyhow::Context as _;
use clap::Parser;
use ks_proto::control::{Fault, VmmEvent};
use ks_vmm::channel::Pump;
use ks_vmm::control::{link::Link, server};
use ks_vmm::jail::{Jail, Visible};
use ks_vmm::mailbox::Mailbox;
use ks_vmm::runner::{Command, Runner, exit_code};
use ks_vmm::shared::Shared;
use ks_vmm::start::Context;
use ks_vmm::{qemu, sys, watchdog};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Runs one session's microVM; started by ksd.
#[derive(Parser)]
#[command(name = "ks-vmm", version)]
struct Args {
    /// Where the node gives orders; made here
    #[arg(long)]
    control_socket: PathBuf,
    /// Where the node reaches the guest; made here
    #[arg(long)]
    channel_socket: PathBuf,
    /// Folder for scratch files, logs and the pid file
    #[arg(long)]
    run_dir: PathBuf,
    /// Uid and gid of the jailed engine process
    #[arg(long)]
    jail_uid: Option<u32>,
    /// QEMU's program file, instead of the one in PATH
    #[arg(long)]
    qemu: Option<PathBuf>,
}

fn listen(path: &Path) -> anyhow::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e).context(format!("remove {}", path.display())),
        _ => {}
    }
    UnixListener::bind(path).with_context(|| format!("listen on {}", path.display()))
}

/// The preload shim: in KS_LIBEXEC, or beside this program. None as well when the hash scan is asked for.
fn find_shim() -> Option<PathBuf> {
    if std::env::var_os(qemu::HASH_SCAN).is_some_and(|v| v == "1") {
        return None;
    }
    let beside = std::env::current_exe().ok().and_then(|p| p.parent().map(Path::to_path_buf));
    let folders = [std::env::var_os("KS_LIBEXEC").map(PathBuf::from), beside];
    folders.into_iter().flatten().map(|d| d.join("libks_vmm_shim.so")).find(|p| p.is_file())
}

/// Many pack files are handed over: take as many descriptors as the host allows.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    std::fs::create_dir_all(&args.run_dir).with_context(|| format!("make {}", args.run_dir.display()))?;
    let run_dir = args.run_dir.canonicalize()?;
    let log = std::fs::OpenOptions::new().create(true).append(true).open(run_dir.join("vmm.log"))?;
    let filter = tracing_subscriber::EnvFilter::try_from_env("KS_LOG").unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(log).with_ansi(false).init();
    let signals = sys::stop_signals().context("block signals")?;
    raise_descriptor_limit();
    let control = listen(&args.control_socket)?;
    let channel = listen(&args.channel_socket)?;
    std::fs::write(run_dir.join("vmm.pid"), format!("{}\n", std::process::id()))?;

    let shared = Arc::new(Shared::new()?);
    let link = Arc::new(Link::default());
    let mail: Arc<Mailbox<Command>> = Arc::new(Mailbox::new()?);
    let ports = Arc::new(Mailbox::new()?);
    let runner = runner(&args, &run_dir, &shared, &link, &mail, &ports);

    start_signals(signals, mail.clone())?;
    start_watchdog(&shared, &link, &mail)?;
    let wishes = mail.clone();
    let wish = Box::new(move |n| drop(wishes.push(Command::Port(n))));
    let pump = Pump { listener: channel, shared: shared.clone(), answers: ports, wish };
    std::thread::Builder::new().name("ks-channel".into()).spawn(move || pump.run())?;
    server::serve(Arc::new(server::Server { link, shared, mail }), control)?;

    // QEMU dies with the thread that started it: this one, which lives as long as the process.
    let code = runner.run();
    for path in [&args.control_socket, &args.channel_socket, &run_dir.join("vmm.pid")] {
        let _ = std::fs::remove_file(path);
    }
    std::process::exit(code)
}

fn runner(
    args: &Args,
    run_dir: &Path,
    shared: &Arc<Shared>,
    link: &Arc<Link>,
    mail: &Arc<Mailbox<Command>>,
    ports: &Arc<Mailbox<ks_vmm::channel::PortAnswer>>,
) -> Runner {
    let shim = find_shim();
    // An absolute path, for the jail; what is not there is reported when it is needed.
    let given = args.qemu.as_ref().map(|p| std::path::absolute(p).unwrap_or_else(|_| p.clone()));
    let qemu = given.or_else(|| qemu::find(None).ok());
    let mut visible = Visible::default();
    for file in shim.iter().chain(qemu.as_ref().filter(|p| p.is_file())) {
        visible.add(file);
    }
    let jail = Jail::probe(args.jail_uid, run_dir, &visible);
    shared.set_jail(jail.words.clone());
    let (told, warned, ended) = (shared.clone(), link.clone(), mail.clone());
    let settings = qemu::Settings {
        program: qemu,
        shim,
        visible: Visible::default(),
        jail,
        on_jail: Arc::new(move |words| told.set_jail(words)),
    };
    let end = move |fault: Fault| drop(ended.push(Command::End { fault, code: exit_code::DIED }));
    let context = Context {
        shared: shared.clone(),
        link: link.clone(),
        run_dir: run_dir.to_path_buf(),
        qemu: settings,
        on_fatal: Arc::new(end),
        warn: Arc::new(move |text: String| {
            tracing::warn!("{text}");
            warned.event(VmmEvent::Warning { text });
        }),
    };
    Runner {
        mail: mail.clone(),
        shared: shared.clone(),
        link: link.clone(),
        context,
        ports: ports.clone(),
        vm: None,
        wish: None,
        run_pending: false,
    }
}

fn start_signals(signals: std::os::fd::OwnedFd, mail: Arc<Mailbox<Command>>) -> anyhow::Result<()> {
    std::thread::Builder::new().name("ks-signals".into()).spawn(move || {
        let mut info = [0u8; 128];
        while rustix::io::read(&signals, &mut info) == Err(rustix::io::Errno::INTR) {}
        tracing::info!("a stop signal came");
        server::stop(&mail, None);
    })?;
    Ok(())
}

fn start_watchdog(shared: &Arc<Shared>, link: &Arc<Link>, mail: &Arc<Mailbox<Command>>) -> anyhow::Result<()> {
    let (link, mail) = (link.clone(), mail.clone());
    watchdog::start(shared.clone(), move |event| {
        tracing::warn!("{event:?}");
        link.event(event);
        // A guest that goes on may have its port again.
        mail.ring();
    })?;
    Ok(())
}
