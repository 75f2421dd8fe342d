//! `ks-vmm`: runs one session's microVM under the orders of its node. See `keeper` for the processes that it becomes.

use anyhow::Context as _;
use clap::Parser;
use ks_proto::control::{Fault, VmmEvent};
use ks_vmm::channel::Pump;
use ks_vmm::control::{link::Link, server};
use ks_vmm::jail::own::{self, Place};
use ks_vmm::jail::{Jail, Visible, trap};
use ks_vmm::keeper::Keeper;
use ks_vmm::mailbox::Mailbox;
use ks_vmm::runner::{Command, Runner, exit_code};
use ks_vmm::shared::Shared;
use ks_vmm::start::{Context, Kvm};
use ks_vmm::starter::{self, Knowledge, Starter};
use ks_vmm::{cgroup, probe, qemu, sys, watchdog};
use rustix::event::{PollFd, PollFlags, poll};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

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
    /// Uid and gid of the jailed processes: ks-vmm itself, and QEMU
    #[arg(long)]
    jail_uid: Option<u32>,
    /// QEMU's program file, instead of the one in PATH
    #[arg(long)]
    qemu: Option<PathBuf>,
    /// Enter the jail, try ACTION in a thread of kind KIND, say what came of it, and end
    #[arg(long, hide = true, value_name = "KIND:ACTION")]
    jail_probe: Option<probe::Probe>,
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

/// All that is opened or found out while there are rights to do so; the jailed process has nothing else.
struct Inherited {
    control: UnixListener,
    channel: UnixListener,
    signals: OwnedFd,
    /// Readable when the keeper says stop or is gone.
    keeper: OwnedFd,
    /// The keeper's process, as the node knows it.
    pid: u32,
    log: RawFd,
    plan: own::Plan,
    jail: Jail,
    qemu: Option<PathBuf>,
    shim: Option<PathBuf>,
    kvm: Kvm,
    probe: Option<probe::Probe>,
}

fn open_device(path: &str) -> Result<OwnedFd, String> {
    File::options().read(true).write(true).open(path).map(OwnedFd::from).map_err(|e| e.to_string())
}

fn main() -> anyhow::Result<()> {
    // What the starter of this process left open is none of its business; nothing here owns a descriptor yet.
    sys::keep_only(&[]);
    let args = Args::parse();
    std::fs::create_dir_all(&args.run_dir).with_context(|| format!("make {}", args.run_dir.display()))?;
    let run_dir = args.run_dir.canonicalize()?;
    let log_file = std::fs::OpenOptions::new().create(true).append(true).open(run_dir.join("vmm.log"))?;
    let log = log_file.as_raw_fd();
    let filter = tracing_subscriber::EnvFilter::try_from_env("KS_LOG").unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(log_file).with_ansi(false).init();
    let signals = sys::stop_signals().context("block signals")?;
    raise_descriptor_limit();
    let control = listen(&args.control_socket)?;
    let channel = listen(&args.channel_socket)?;
    let pid = std::process::id();
    std::fs::write(run_dir.join("vmm.pid"), format!("{pid}\n"))?;

    let shim = find_shim();
    // An absolute path, for the jail; what is not there is reported when it is needed.
    let given = args.qemu.as_ref().map(|p| std::path::absolute(p).unwrap_or_else(|_| p.clone()));
    let qemu = given.or_else(|| qemu::find(None).ok());
    let mut visible = Visible::default();
    for file in shim.iter().chain(qemu.as_ref().filter(|p| p.is_file())) {
        visible.add(file);
    }
    let jail = Jail::probe(args.jail_uid, &run_dir, &visible);
    let plan = own::Plan::like(&jail, args.jail_uid, &run_dir);
    own::prepare(&plan).context("make the log files and the scratch folder")?;
    let mut kvm = Kvm { device: Some(open_device("/dev/kvm")), ..Kvm::default() };
    kvm.devices.userfaultfd = open_device("/dev/userfaultfd").ok();
    kvm.devices.profile = Some(ks_vmm_kvm::host::of_this_host());

    let (keeper, stop) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    if plan.rooted {
        sys::unshare(rustix::thread::UnshareFlags::NEWPID).context("make a pid namespace")?;
    }
    let files = vec![args.control_socket.clone(), args.channel_socket.clone(), run_dir.join("vmm.pid")];
    match sys::fork().context("fork the jailed process")? {
        Some(child) => {
            let keeper = Keeper { child, signals, stop, log, files, folders: cgroup::places(&pid.to_string()) };
            sys::leave(keeper.keep())
        }
        None => {
            drop(stop);
            let probe = args.jail_probe;
            run(Inherited { control, channel, signals, keeper, pid, log, plan, jail, qemu, shim, kvm, probe })
        }
    }
}

/// The starter, forked while there are rights to fork it with.
fn fork_starter(i: &Inherited) -> anyhow::Result<Starter> {
    let (ours, theirs) = starter::pair()?;
    match sys::fork().context("fork the starter")? {
        Some(process) => Ok(Starter::new(ours, process)),
        None => {
            sys::keep_only(&[theirs.as_raw_fd(), i.log]);
            let die = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
            if let Err(e) = die {
                tracing::warn!("the starter: {e}");
            }
            let (qemu, shim, jail) = (i.qemu.clone(), i.shim.clone(), i.jail.clone());
            starter::serve(&theirs, &Knowledge { qemu, shim, jail, cgroup: i.pid.to_string() });
            sys::leave(0)
        }
    }
}

/// The jailed process: takes its own rights away, then serves.
fn run(mut i: Inherited) -> anyhow::Result<()> {
    let starter = fork_starter(&i)?;
    // Later this process may not open its own.
    i.kvm.devices.pagemap = File::open("/proc/self/pagemap").ok();
    let entered = own::enter(&i.plan, i.log);
    let (place, words) = match entered {
        Ok(e) => e,
        Err(e) => {
            tracing::error!("{e}; nothing is run without it");
            std::process::exit(trap::EXIT_CODE);
        }
    };
    // Without a backtrace, which would open files.
    std::panic::set_hook(Box::new(|panic| tracing::error!("{panic}")));
    if let Some(probe) = &i.probe {
        std::process::exit(probe.run(&words));
    }
    let shared = Arc::new(Shared::new()?);
    shared.set_jail(words.clone());
    let link = Arc::new(Link::default());
    let mail: Arc<Mailbox<Command>> = Arc::new(Mailbox::new()?);
    let ports = Arc::new(Mailbox::new()?);
    let context = context((i.kvm, i.shim.is_some(), starter), place, words, &shared, &link, &mail);
    let runner = Runner {
        mail: mail.clone(),
        shared: shared.clone(),
        link: link.clone(),
        context,
        ports: ports.clone(),
        vm: None,
        wish: None,
        run_pending: false,
    };
    start_signals(i.signals, i.keeper, mail.clone())?;
    start_watchdog(&shared, &link, &mail)?;
    let wishes = mail.clone();
    let wish = Box::new(move |n| drop(wishes.push(Command::Port(n))));
    let pump = Pump { listener: i.channel, shared: shared.clone(), answers: ports, wish };
    std::thread::Builder::new().name("ks-channel".into()).spawn(move || pump.run())?;
    server::serve(Arc::new(server::Server { link, shared, mail, pid: i.pid }), i.control)?;

    // QEMU dies with the thread that forked its starter: this one, which lives as long as the process.
    std::process::exit(runner.run())
}

fn context(
    (mut kvm, shim, starter): (Kvm, bool, Starter),
    place: Place,
    words: Vec<String>,
    shared: &Arc<Shared>,
    link: &Arc<Link>,
    mail: &Arc<Mailbox<Command>>,
) -> Context {
    let (told, warned, ended) = (shared.clone(), link.clone(), mail.clone());
    let settings = qemu::Settings {
        starter: Mutex::new(starter),
        shim,
        userfaultfd: kvm.devices.userfaultfd.as_ref().and_then(|d| d.try_clone().ok()),
        on_jail: Arc::new(move |engine, cgroup| told.set_jail(own::all_words(&words, engine, cgroup))),
    };
    if kvm.device.as_ref().is_some_and(Result::is_err) {
        // Without it no guest runs in this process.
        kvm.devices.pagemap = None;
    }
    let end = move |fault: Fault| drop(ended.push(Command::End { fault, code: exit_code::DIED }));
    Context {
        shared: shared.clone(),
        link: link.clone(),
        place,
        qemu: settings,
        kvm: Mutex::new(kvm),
        on_fatal: Arc::new(end),
        warn: Arc::new(move |text: String| {
            tracing::warn!("{text}");
            warned.event(VmmEvent::Warning { text });
        }),
    }
}

/// Stops on a signal, and on the keeper's word or death.
fn start_signals(signals: OwnedFd, keeper: OwnedFd, mail: Arc<Mailbox<Command>>) -> anyhow::Result<()> {
    std::thread::Builder::new().name("ks-signals".into()).spawn(move || {
        let mut fds = [PollFd::new(&signals, PollFlags::IN), PollFd::new(&keeper, PollFlags::IN)];
        while poll(&mut fds, None) == Err(rustix::io::Errno::INTR) {}
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
