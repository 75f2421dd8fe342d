//! The gateway as a process that is killed: at each named point, and by hand while a provider works.

use crate::harness::*;
use ks_gwd::crash::POINTS;
use ks_proto::gateway::{AdminAsk, Provider as Settings, Secret};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A real `ksgw`, killed with this value.
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub async fn start(dir: &Path, crash_at: Option<&str>, log: &Path) -> Process {
    start_with(dir, crash_at, log, &[]).await
}

async fn start_with(dir: &Path, crash_at: Option<&str>, log: &Path, more: &[&str]) -> Process {
    let mut c = Command::new(env!("CARGO_BIN_EXE_ksgw"));
    c.arg("--dir").arg(dir).args(["--free-space", "1048576"]).args(more).env_remove("KS_GW_CRASH_AT");
    if let Some(point) = crash_at {
        c.env("KS_GW_CRASH_AT", point);
    }
    let log = std::fs::OpenOptions::new().append(true).create(true).open(log).unwrap();
    let socket = dir.join("gw.sock");
    let _ = std::fs::remove_file(&socket);
    let child = Process(c.env("KS_LOG", "debug").stderr(log).stdout(Stdio::null()).spawn().unwrap());
    soon("the gateway's socket", async {
        while tokio::net::UnixStream::connect(&socket).await.is_err() {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    })
    .await;
    child
}

pub async fn set_up(dir: &Path, base_url: String) {
    let mut admin = Admin::connect(&dir.join("gw.sock")).await;
    admin.done(AdminAsk::Unseal { key_hex: "07".repeat(32) }).await;
    let provider = Settings {
        name: "test".into(),
        dialect: "anthropic".into(),
        base_url,
        include_usage: false,
        ca_pem: None,
        builtin: false,
    };
    admin.done(AdminAsk::ProviderAdd { provider }).await;
    admin.ask(AdminAsk::KeyAdd { user: "alice".into(), provider: "test".into(), secret: Secret(MARKED.into()) }).await;
}

/// BOUGHT-ONCE at every step: the gateway dies at each named point of a call; after its restart the ledger is whole, every purchase
/// of the provider has an intent that was durable before, and an end that is complete or unknown, and the guest gets an answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_at_every_named_point_leaves_a_whole_ledger() {
    for point in POINTS {
        let provider = ks_test_provider::start("127.0.0.1:0".parse().unwrap(), None).await.unwrap();
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let base = format!("http://{}", provider.address);
        let mut process = start(dir.path(), Some(point), &log).await;
        set_up(dir.path(), base).await;
        let guest = Guest::new(&dir.path().join("gw.sock"), 1);
        let (path, body) = streamed("anthropic", "tokens=20");
        let first = guest.call(1, &path, &body).await.to_end().await;
        until("the crash", || process.0.try_wait().unwrap().is_some()).await;
        let bought = provider.purchases();
        let durable = ledger(dir.path(), guest.session()).iter().filter(|l| l["kind"] == "intent").count() as u64;
        assert!(bought <= durable && durable <= 1, "{point}: {bought} purchases, {durable} intents durable before");
        assert!(!first.body.ends_with(b"\"message_stop\"}\n\n") || point == "released", "{point}: the end was released early");
        let _second = start(dir.path(), None, &log).await;
        let mut admin = Admin::connect(&dir.path().join("gw.sock")).await;
        admin.done(AdminAsk::Unseal { key_hex: "07".repeat(32) }).await;
        let resumed = guest.resumed(2, 0);
        let again = resumed.call(1, &path, &body).await.to_end().await;
        assert!(again.end == Some(Ok(())) && again.body == reference(&path, &body).await, "{point}: {:?}", again.refused);
        let lines = ledger(dir.path(), guest.session());
        let of = |kind: &str| lines.iter().filter(|l| l["kind"] == kind).collect::<Vec<_>>();
        let (intents, ends) = (of("intent"), of("completed"));
        assert_eq!(intents.len(), ends.len(), "{point}: an intent without an end");
        let complete = ends.iter().filter(|l| l["outcome"] == "complete").count();
        let unknown = ends.iter().filter(|l| l["outcome"] == "unknown").count();
        assert!((complete, unknown) == (1, durable as usize - usize::from(intents.len() as u64 == durable)), "{point}: {ends:?}");
        assert!(provider.purchases() <= intents.len() as u64, "{point}: bought without an intent");
        if ["completed-durable", "released"].contains(&point) {
            assert_eq!(provider.purchases(), 1, "{point}: what was durable was bought again");
        }
        let text = std::fs::read_to_string(&log).unwrap();
        assert!(!text.contains(MARKED) && !text.contains(&MARKED[12..]), "the key is in the log");
    }
}

/// Killed by hand while the provider works on the request: the entry is unknown, shown, and counted as a possible purchase.
#[tokio::test(flavor = "multi_thread")]
async fn node_and_gateway_die_mid_call_is_unknown() {
    let provider = ks_test_provider::start("127.0.0.1:0".parse().unwrap(), None).await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let first = start(dir.path(), None, &log).await;
    set_up(dir.path(), format!("http://{}", provider.address)).await;
    let guest = Guest::new(&dir.path().join("gw.sock"), 1);
    let (path, body) = streamed("anthropic", "tokens=20,stall=3");
    let answer = guest.call(1, &path, &body).await;
    soon("the purchase", provider.until(|bought, _| bought == 1)).await;
    drop(first);
    drop(answer);
    let _second = start(dir.path(), None, &log).await;
    let mut admin = Admin::connect(&dir.path().join("gw.sock")).await;
    admin.done(AdminAsk::Unseal { key_hex: "07".repeat(32) }).await;
    // A torn last line is cut off.
    drop(admin.ask(AdminAsk::Ledger { session: guest.session(), from: 0 }).await);
    let ends: Vec<_> = ledger(dir.path(), guest.session()).into_iter().filter(|l| l["kind"] == "completed").collect();
    assert_eq!((ends.len(), &ends[0]["outcome"]), (1, &"unknown".into()));
}

/// Whom nobody needs any more ends by itself, in good order, but not while somebody is connected or a call is under way.
#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_nobody_uses_ends_by_itself() {
    let provider = ks_test_provider::start("127.0.0.1:0".parse().unwrap(), None).await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let mut process = start_with(dir.path(), None, &log, &["--idle-seconds", "1"]).await;
    set_up(dir.path(), format!("http://{}", provider.address)).await;
    let guest = Guest::new(&dir.path().join("gw.sock"), 1);
    let (path, body) = streamed("anthropic", "tokens=20,stall=3");
    let mut answer = guest.call(1, &path, &body).await;
    answer.at_least(100).await;
    // Its VM and its daemon die; the call goes on, and is in the journal when the process ends.
    drop(answer);
    let begun = std::time::Instant::now();
    while begun.elapsed() < std::time::Duration::from_secs(2) {
        assert!(process.0.try_wait().unwrap().is_none(), "it ended with a call under way");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    provider.go();
    until("its end", || process.0.try_wait().unwrap().is_some()).await;
    assert!(process.0.wait().unwrap().success() && !dir.path().join("gw.sock").exists());
    let ends: Vec<_> = ledger(dir.path(), guest.session()).into_iter().filter(|l| l["kind"] == "completed").collect();
    assert_eq!((ends.len(), &ends[0]["outcome"]), (1, &"complete".into()));
}
