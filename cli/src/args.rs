//! The command line, as types. Says nothing about what a verb does.

pub use crate::args_fleet::{Blob, Context, Fleet, Join, Login, Node, User};
pub use crate::args_gateway::{Budget, Cost, Egress, Key, Ledger, LedgerAct, Provider};
use crate::{bench, demo, host::names};
use clap::{Args, Parser, Subcommand};
use clap_complete::engine::ArgValueCompleter;
use std::path::PathBuf;

/// Durable machines for coding agents: a session survives the death of its VM, its daemon and its host.
#[derive(Debug, Parser)]
#[command(
    name = "ks",
    version,
    disable_help_subcommand = true,
    max_term_width = 100,
    after_help = "Topics: ks help <topic>   First steps: ks"
)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub verb: Option<Verb>,
}

/// Options of every verb.
#[derive(Debug, Clone, Default, Args)]
pub struct Global {
    /// Machine-readable output on stdout: one object, or one per line for streams; each has a `schema`
    #[arg(long, global = true, help_heading = "Everywhere")]
    pub json: bool,
    /// Nothing on stderr but errors
    #[arg(long, short, global = true, help_heading = "Everywhere")]
    pub quiet: bool,
    /// Never ask; take the answer that changes nothing
    #[arg(long, global = true, help_heading = "Everywhere")]
    pub no_input: bool,
    /// The node's address (else KS_ADDR, the user configuration, the context in use, or the node on this machine)
    #[arg(long, global = true, value_name = "HOST:PORT", help_heading = "Everywhere", conflicts_with = "context")]
    pub address: Option<String>,
    /// A fleet that `ks login` noted; local is the node on this machine
    #[arg(long, global = true, value_name = "NAME", help_heading = "Everywhere")]
    pub context: Option<String>,
}

fn sessions() -> ArgValueCompleter {
    ArgValueCompleter::new(names::complete)
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Start the node on this machine
    Up(Up),
    /// Stop the node on this machine; running sessions keep running (--all stops them first)
    Down(Down),
    /// Make a session and run a command in it
    Run(Run),
    /// Open a session's terminal
    Attach(One),
    /// Run a program in a session, byte for byte
    Exec(Exec),
    /// Copy files into or out of a session
    Cp(Cp),
    /// Show what the main window has printed
    Logs(Logs),
    /// List sessions
    #[command(alias = "list")]
    Ls,
    /// Show one session in full
    Show(One),
    /// Take a checkpoint now
    Checkpoint(Checkpoint),
    /// List a session's checkpoints
    Checkpoints(One),
    /// Show the family of a session: parents, children, checkpoints
    Tree(One),
    /// List the files that differ between two checkpoints
    Diff(Diff),
    /// Put a session back to one of its checkpoints
    Restore(Restore),
    /// Make sessions that go on from a checkpoint of another
    Fork(Fork),
    /// Checkpoint, then give memory and CPU back
    Park(Many),
    /// Bring parked or stopped sessions back
    Wake(Many),
    /// Crash a session's VM on purpose and measure how long it is away
    Kill(Kill),
    /// Checkpoint and end; the checkpoints stay
    Stop(Many),
    /// Delete sessions and their checkpoints
    Rm(Rm),
    /// Check this machine, or a session from inside
    Doctor(Doctor),
    /// Show what has happened
    Events(Events),
    /// Join machines into a fleet; list, drain and remove them
    #[command(subcommand)]
    Node(Node),
    /// Look after a node's store
    #[command(subcommand)]
    Blob(Blob),
    /// The fleet as a whole: status, policy, recovery
    #[command(subcommand)]
    Fleet(Fleet),
    /// Make, list and delete users
    #[command(subcommand)]
    User(User),
    /// Note a fleet, its certificate and your token as a context
    Login(Login),
    /// List, choose and forget contexts
    #[command(subcommand)]
    Context(Context),
    /// Keep providers' keys outside the sessions
    #[command(subcommand)]
    Key(Key),
    /// Providers of models that sessions may call
    #[command(subcommand)]
    Provider(Provider),
    /// A session's model calls: bought, served again, open
    Ledger(Ledger),
    /// What model calls cost, by session, day or model
    Cost(Cost),
    /// Limits on what model calls may cost
    #[command(subcommand)]
    Budget(Budget),
    /// What else a session may reach
    #[command(subcommand)]
    Egress(Egress),
    /// Build, import, list and delete guest images
    #[command(subcommand)]
    Image(Image),
    /// Print the shell's completion script
    Completion(Completion),
    /// Show one of the demonstrations and write a report
    Demo(demo::DemoArgs),
    /// Measure, with JSON on the last line
    Bench(bench::BenchArgs),
    /// Explain a verb or a topic
    Help(Help),
    /// Print the version
    Version,
    /// Print the man page
    #[command(hide = true)]
    Man,
}

#[derive(Debug, Args)]
pub struct Up {
    /// Stay in the terminal and log to it
    #[arg(long)]
    pub foreground: bool,
    /// Seconds to wait for the node to answer
    #[arg(long, default_value_t = 60, value_name = "S")]
    pub timeout: u64,
    /// Where peers and clients reach this node: UDP PORT and PORT+1, TCP PORT; kept, and without a port one is picked
    #[arg(long, value_name = "IP[:PORT]", value_parser = fleet_address)]
    pub fleet_address: Option<String>,
    /// MiB per second that checkpoints may take between this node and its peers, each way; else no limit
    #[arg(long, value_name = "N", env = "KS_BULK_MIB_S", value_parser = clap::value_parser!(u32).range(1..))]
    pub bulk_mib_s: Option<u32>,
}

/// `IP`, `IP:PORT`, `[IP6]:PORT`; kept as it was typed.
fn fleet_address(text: &str) -> Result<String, String> {
    let alone = text.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok();
    if alone || text.parse::<std::net::SocketAddr>().is_ok() {
        return Ok(text.to_owned());
    }
    Err("write an IP address, or IP:PORT; names are not resolved here".into())
}

#[derive(Debug, Args)]
pub struct Down {
    /// Kill the node if it does not end by itself
    #[arg(long)]
    pub force: bool,
    /// Checkpoint and stop every session of this node first; if one cannot be, the node stays up
    #[arg(long)]
    pub all: bool,
}

#[derive(Debug, Args)]
pub struct One {
    /// Session name or id
    #[arg(add = sessions())]
    pub session: String,
}

#[derive(Debug, Args)]
pub struct Many {
    /// Session names or ids
    #[arg(required = true, add = sessions())]
    pub sessions: Vec<String>,
}

#[derive(Debug, Args)]
pub struct Run {
    /// Name of the session; else the node chooses one
    #[arg(long)]
    pub name: Option<String>,
    /// Image to start from
    #[arg(long)]
    pub image: Option<String>,
    /// Memory in MiB
    #[arg(long, value_name = "MIB")]
    pub memory: Option<u64>,
    /// Virtual CPUs
    #[arg(long, value_name = "N")]
    pub vcpus: Option<u16>,
    /// auto, kvm or qemu
    #[arg(long)]
    pub engine: Option<String>,
    /// Copy this folder to /workspace/<its name> first; may be given again
    #[arg(long, value_name = "DIR")]
    pub sync: Vec<PathBuf>,
    /// With --sync: carry this file or folder although .gitignore skips it
    #[arg(long, value_name = "PATH", requires = "sync")]
    pub include: Vec<PathBuf>,
    /// Only show what --sync would carry
    #[arg(long, requires = "sync")]
    pub plan: bool,
    /// Seconds between checkpoints; 0 is never
    #[arg(long, value_name = "S")]
    pub cadence: Option<u64>,
    /// Park after so many idle seconds; 0 is never
    #[arg(long, value_name = "S")]
    pub idle_park: Option<u64>,
    /// Nodes that must have a checkpoint before it counts as durable; else the fleet's policy
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=7))]
    pub copies: Option<u16>,
    /// Node to begin on, by name or number; else the node that is asked, unless it drains or has no room
    #[arg(long, value_name = "NODE")]
    pub node: Option<String>,
    /// Do not open the terminal
    #[arg(long, short)]
    pub detach: bool,
    /// Environment of the command; NAME alone takes the value from here
    #[arg(long, short, value_name = "NAME=VALUE")]
    pub env: Vec<String>,
    /// The command; a login shell if there is none
    #[arg(last = true, value_name = "CMD")]
    pub command: Vec<String>,
}

#[derive(Debug, Args)]
pub struct Exec {
    /// Session name or id
    #[arg(add = sessions())]
    pub session: String,
    /// Give it a terminal (default when stdin and stdout are terminals)
    #[arg(long, short, overrides_with = "no_tty")]
    pub tty: bool,
    /// Give it no terminal
    #[arg(long, short = 'T', overrides_with = "tty")]
    pub no_tty: bool,
    /// Accepted for habit's sake: stdin is always connected
    #[arg(long, short)]
    pub interactive: bool,
    /// User in the guest
    #[arg(long, short, value_name = "NAME")]
    pub user: Option<String>,
    /// Folder in the guest
    #[arg(long, short = 'w', value_name = "DIR")]
    pub cwd: Option<String>,
    /// Environment; NAME alone takes the value from here
    #[arg(long, short, value_name = "NAME=VALUE")]
    pub env: Vec<String>,
    /// Program and arguments
    #[arg(trailing_var_arg = true, required = true, value_name = "CMD")]
    pub command: Vec<String>,
}

#[derive(Debug, Args)]
pub struct Cp {
    /// A path here, or SESSION:PATH
    pub from: String,
    /// A path here, or SESSION:PATH
    pub to: String,
}

#[derive(Debug, Args)]
pub struct Logs {
    /// Session name or id
    #[arg(add = sessions())]
    pub session: String,
    /// The last N lines
    #[arg(long, short = 'n', default_value_t = 1000, value_name = "N")]
    pub lines: u32,
    /// Go on with what is printed, until Ctrl-C or until the session no longer runs
    #[arg(long, short = 'f')]
    pub follow: bool,
}

#[derive(Debug, Args)]
pub struct Checkpoint {
    /// Session name or id
    #[arg(add = sessions())]
    pub session: String,
    /// A note
    #[arg(long, short, default_value = "")]
    pub message: String,
    /// Keep it for ever
    #[arg(long)]
    pub pin: bool,
}

#[derive(Debug, Args)]
pub struct Diff {
    /// SESSION@cN, the older one
    #[arg(add = sessions())]
    pub from: String,
    /// cN or SESSION@cN, the newer one
    pub to: String,
    /// Only below this folder
    #[arg(long, default_value = "")]
    pub path: String,
}

#[derive(Debug, Args)]
pub struct Restore {
    /// SESSION@cN
    #[arg(add = sessions())]
    pub point: String,
    /// Verify everything before the first instruction
    #[arg(long)]
    pub verify: bool,
}

#[derive(Debug, Args)]
pub struct Fork {
    /// SESSION or SESSION@cN; without cN a checkpoint is taken now
    #[arg(add = sessions())]
    pub point: String,
    /// Children
    #[arg(short, long = "number", default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub n: u32,
    /// Names of the children, in order
    #[arg(long)]
    pub name: Vec<String>,
    /// Put this file into each child before it goes on
    #[arg(long, value_name = "FILE[:/GUEST/PATH]")]
    pub steer: Vec<String>,
    /// Serve the children what their parent bought after the checkpoint, instead of asking anew
    #[arg(long, value_parser = ["parent"], value_name = "parent")]
    pub replay: Option<String>,
}

#[derive(Debug, Args)]
pub struct Kill {
    /// Session name or id
    #[arg(add = sessions())]
    pub session: String,
    /// Kill the node's daemon as well
    #[arg(long)]
    pub with_daemon: bool,
    /// Seconds to wait until it is back
    #[arg(long, default_value_t = 120, value_name = "S")]
    pub timeout: u64,
}

#[derive(Debug, Args)]
pub struct Rm {
    /// Session names or ids
    #[arg(required = true, add = sessions())]
    pub sessions: Vec<String>,
    /// Also running and never-checkpointed ones
    #[arg(long, short)]
    pub force: bool,
}

#[derive(Debug, Args)]
pub struct Doctor {
    /// Session name or id; without it this machine is checked
    #[arg(add = sessions())]
    pub session: Option<String>,
}

#[derive(Debug, Args)]
pub struct Events {
    /// Go on as things happen
    #[arg(long, short)]
    pub follow: bool,
    /// Only of this session
    #[arg(add = sessions())]
    pub session: Option<String>,
}

#[derive(Debug, Subcommand)]
pub enum Image {
    /// Build an image from the distribution's packages
    Build {
        /// Name of the image; else that of the profile's default image: default or soft
        #[arg(long)]
        name: Option<String>,
        /// general, or soft for software KVM
        #[arg(long, value_parser = ["general", "soft"], default_value = "general")]
        profile: String,
        /// A kernel (vmlinux or bzImage) instead of the distribution's
        #[arg(long, value_name = "FILE")]
        kernel: Option<PathBuf>,
    },
    /// Import an image from an OCI archive or a root folder on the node's disk
    Import {
        /// Name of the image
        name: String,
        /// OCI archive
        #[arg(long, value_name = "FILE", conflicts_with = "root")]
        oci: Option<PathBuf>,
        /// Root folder
        #[arg(long, alias = "root-dir", value_name = "DIR", required_unless_present = "oci")]
        root: Option<PathBuf>,
        /// A kernel (vmlinux or bzImage)
        #[arg(long, value_name = "FILE")]
        kernel: Option<PathBuf>,
        /// general, or soft for software KVM
        #[arg(long, value_parser = ["general", "soft"], default_value = "general")]
        profile: String,
    },
    /// List images
    Ls,
    /// Delete an image
    Rm {
        /// Name of the image
        name: String,
    },
}

#[derive(Debug, Args)]
pub struct Completion {
    /// bash, zsh, fish, elvish or powershell
    pub shell: String,
}

#[derive(Debug, Args)]
pub struct Help {
    /// A verb or a topic
    pub topic: Option<String>,
}
