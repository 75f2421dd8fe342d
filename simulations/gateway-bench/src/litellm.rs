//! LiteLLM's proxy from PyPI, in a virtual environment in the cache folder, before the same provider.

use crate::rig::Process;
use anyhow::{Context, Result, ensure};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The version that is compared with.
pub const VERSION: &str = "1.108.7";

/// It has so long to come up.
const START: Duration = Duration::from_secs(300);

fn cache() -> Result<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = set("KS_CACHE").or_else(|| set("XDG_CACHE_HOME").map(|d| d.join("keepstate")));
    base.or_else(|| set("HOME").map(|h| h.join(".cache/keepstate"))).context("neither KS_CACHE, XDG_CACHE_HOME nor HOME is set")
}

fn shown(command: &mut Command) -> Result<()> {
    let status = command.stdout(Stdio::null()).status().with_context(|| format!("running {command:?}"))?;
    ensure!(status.success(), "{command:?} failed");
    Ok(())
}

/// Installs it if it is not there; its program.
///
/// # Errors
/// If pip cannot.
pub fn install() -> Result<PathBuf> {
    let dir = cache()?.join(format!("litellm-{VERSION}"));
    let program = dir.join("bin/litellm");
    if !program.exists() {
        eprintln!("==> installing LiteLLM {VERSION} into {}", dir.display());
        shown(Command::new("python3").args(["-m", "venv"]).arg(&dir))?;
        let package = format!("litellm[proxy]=={VERSION}");
        shown(Command::new(dir.join("bin/pip")).args(["install", "-q", "--disable-pip-version-check", &package]))?;
    }
    Ok(program)
}

/// Starts it with one worker (its supervisor of several ends workers that take more than five seconds to load, which here they do) and
/// waits until it serves.
///
/// # Errors
/// If it does not come up.
pub async fn start(program: &Path, scratch: &Path, provider: SocketAddr, model: &str) -> Result<(Process, SocketAddr)> {
    let config = scratch.join("litellm.yaml");
    let text = format!(
        "model_list:\n  - model_name: \"{model}\"\n    litellm_params:\n      model: \"openai/{model}\"\n      api_base: http://{provider}/v1\n      api_key: sk-bench\nlitellm_settings:\n  telemetry: false\n  num_retries: 0\ngeneral_settings:\n  dangerously_permit_weak_or_unset_master_key: true\n"
    );
    std::fs::write(&config, text)?;
    let free = tokio::net::TcpListener::bind("127.0.0.1:0").await?.local_addr()?;
    let log = std::fs::File::create(scratch.join("litellm.log"))?;
    let mut command = Command::new(program);
    command.arg("--config").arg(&config).args(["--host", "127.0.0.1", "--port", &free.port().to_string(), "--num_workers", "1"]);
    command.env("LITELLM_LOG", "ERROR").env("LITELLM_MODE", "PRODUCTION").env("LITELLM_LOCAL_MODEL_COST_MAP", "True");
    let process = Process::start("litellm", command.stdout(log.try_clone()?).stderr(log))?;
    let end = Instant::now() + START;
    while tokio::net::TcpStream::connect(free).await.is_err() {
        let log = || std::fs::read_to_string(scratch.join("litellm.log")).unwrap_or_default();
        ensure!(Instant::now() < end, "LiteLLM did not come up within {START:?}; its log:\n{}", log());
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    // The workers load for a while after the socket is there.
    tokio::time::sleep(Duration::from_secs(5)).await;
    Ok((process, free))
}
