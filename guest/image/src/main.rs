//! `ks-image`: builds and imports guest images. Parses arguments and prints; the library does the work.
//!
//! Standard output carries JSON lines with `--json` (progress, then the image), otherwise only the result;
//! people's lines go to standard error. Not as root, it starts itself again in a user namespace with mapped
//! ids, because a root disk has many owners.

use std::{os::unix::process::CommandExt, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use ks_image::{BuildRequest, Cache, ImageInfo, ImportRequest, Profile, Progress, RootSource, SoftKernelRequest};

const STEPS_BUILD: u32 = 4;
const STEPS_IMPORT: u32 = 6;
const STEPS_SOFT_KERNEL: u32 = 2;
/// Set for the copy of this program inside the user namespace.
const INSIDE: &str = "KS_IMAGE_IN_NAMESPACE";

/// Builds and imports KeepState guest images.
#[derive(Parser)]
#[command(name = "ks-image", version)]
struct Cli {
    /// Where results are kept between builds (default: keepstate in the user's cache directory).
    #[arg(long, global = true, value_name = "DIR")]
    cache: Option<PathBuf>,
    /// Progress and the result as JSON lines on standard output.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Builds the default image from Debian packages.
    Build {
        #[command(flatten)]
        common: Common,
        /// Name for people.
        #[arg(long, default_value = "default")]
        name: String,
        /// Fetch the distribution's packages again.
        #[arg(long)]
        refresh: bool,
    },
    /// Imports a root disk from an OCI archive or a directory.
    Import {
        #[command(flatten)]
        common: Common,
        /// Name for people.
        #[arg(long, default_value = "imported")]
        name: String,
        #[command(flatten)]
        source: Source,
        /// Where the initramfs comes from (only the default build's is known).
        #[arg(long, value_parser = ["default"], default_value = "default")]
        initrd_from: String,
    },
    /// Compiles the small kernel for KVM without hardware virtualization.
    SoftKernel {
        /// The file to write.
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
        /// For more than one vCPU.
        #[arg(long)]
        smp: bool,
        /// Fetch the newest source and compile again.
        #[arg(long)]
        refresh: bool,
    },
}

#[derive(Args)]
struct Common {
    /// The image directory to make or replace.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Which engines it is for.
    #[arg(long, value_enum, default_value = "general")]
    profile: Profile,
    /// The static ks-guest program (default: the file ks-guest beside this program).
    #[arg(long, value_name = "PATH")]
    guest_agent: Option<PathBuf>,
    /// Size of the root disk as the guest sees it.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    size_gib: u32,
    /// A vmlinux or bzImage in place of the profile's own kernel, with all that the guest needs built in.
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct Source {
    /// An oci-layout or `docker save` archive.
    #[arg(long, value_name = "ARCHIVE.tar")]
    oci: Option<PathBuf>,
    /// A directory that holds a root tree.
    #[arg(long, value_name = "PATH")]
    root_dir: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ks-image: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<()> {
    become_root()?;
    let cache = Cache::open(cli.cache)?;
    match cli.command {
        Command::Build { common, name, refresh } => {
            let guest_agent = guest_agent(common.guest_agent)?;
            let request = BuildRequest {
                out: common.out,
                name,
                profile: common.profile,
                guest_agent,
                size_gib: common.size_gib,
                kernel: common.kernel,
                refresh,
            };
            let info = ks_image::build(&cache, &request, &mut Progress::new(cli.json, STEPS_BUILD))?;
            print_image(&info, &request.out, cli.json)
        }
        Command::Import { common, name, source, initrd_from: _ } => {
            let guest_agent = guest_agent(common.guest_agent)?;
            let source = match (source.oci, source.root_dir) {
                (Some(archive), None) => RootSource::Oci(archive),
                (None, Some(dir)) => RootSource::Dir(dir),
                _ => bail!("give one of --oci and --root-dir"),
            };
            let request = ImportRequest {
                out: common.out,
                name,
                source,
                profile: common.profile,
                guest_agent,
                size_gib: common.size_gib,
                kernel: common.kernel,
            };
            let info = ks_image::import(&cache, &request, &mut Progress::new(cli.json, STEPS_IMPORT))?;
            print_image(&info, &request.out, cli.json)
        }
        Command::SoftKernel { out, smp, refresh } => {
            let request = SoftKernelRequest { out: Some(out), smp, refresh };
            let progress = &mut Progress::new(cli.json, STEPS_SOFT_KERNEL);
            let file = ks_image::soft_kernel(&cache, &request, progress)?;
            let (_, release) = ks_image::inspect_kernel(&file)?;
            if cli.json {
                let line = serde_json::json!({
                    "schema": "ks.image.kernel.v1", "file": file, "kernel_release": release,
                });
                println!("{line}");
            } else {
                println!("{}", file.display());
            }
            Ok(())
        }
    }
}

fn guest_agent(given: Option<PathBuf>) -> Result<PathBuf> {
    if let Some(path) = given {
        return Ok(path);
    }
    let beside = std::env::current_exe().context("cannot find this program's own file")?.with_file_name("ks-guest");
    if beside.is_file() {
        return Ok(beside);
    }
    bail!("no guest agent: {} does not exist; give the static ks-guest with --guest-agent PATH", beside.display())
}

fn print_image(info: &ImageInfo, out: &std::path::Path, json: bool) -> Result<()> {
    for warning in &info.root.warnings {
        eprintln!("ks-image: warning: {warning}");
    }
    if json {
        println!("{}", serde_json::to_string(info)?);
    } else {
        println!("{}", out.display());
        eprintln!(
            "image {} {}: kernel {}, root disk {} MiB used of {} GiB",
            info.name,
            &info.id[..16],
            info.kernel_release,
            info.root.used_bytes >> 20,
            info.root.bytes >> 30
        );
    }
    Ok(())
}

/// Not root: goes on as root of a user namespace, with the user's subordinate ids mapped.
fn become_root() -> Result<()> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let refuse = |why: &str| ks_image::ImageError::NeedsRoot { why: why.to_owned() };
    if std::env::var_os(INSIDE).is_some() {
        return Err(refuse("the user namespace did not make this process root").into());
    }
    ks_image::require_user_namespaces().context("working without root needs a user namespace")?;
    let this = std::env::current_exe().context("cannot find this program's own file")?;
    let error = std::process::Command::new("unshare")
        .args(["--user", "--map-root-user", "--map-auto", "--mount", "--"])
        .arg(this)
        .args(std::env::args_os().skip(1))
        .env(INSIDE, "1")
        .exec();
    Err(refuse(&format!("cannot start unshare ({error})")).into())
}
