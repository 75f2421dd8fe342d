//! The real gateway as a process of its own: this test program again, started by a script named `ksgw` (see `harness`).

use ks_gwd::host::node::{Config, Node};
use ks_gwd::host::socket;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

/// How often it looks whether the test's folder is still there.
const LOOK: Duration = Duration::from_millis(200);

/// Not a test: does nothing unless the script started it with a gateway's arguments.
#[test]
fn main_when_started_as_the_real_ksgw() {
    let args: Vec<String> = std::env::args().collect();
    let Some(dir) = args.windows(2).find(|w| w[0] == "--dir").map(|w| PathBuf::from(&w[1])) else { return };
    let pids = PathBuf::from(std::env::var_os("KS_FAKE_FAULTS").unwrap()).join("gateway-pids");
    let mut pids = std::fs::OpenOptions::new().create(true).append(true).open(pids).unwrap();
    pids.write_all(format!("{}\n", std::process::id()).as_bytes()).unwrap();
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stderr).init();
    tokio::runtime::Runtime::new().unwrap().block_on(async move {
        let node = Node::start(Config { free_bytes: 1 << 20, ..Config::in_fleet(&dir) }).unwrap();
        let path = dir.join(ks_proto::gateway::SOCKET);
        let listener = socket::bind(&path).unwrap();
        tokio::spawn(node.clone().tick());
        tokio::spawn(socket::serve(node, listener));
        while path.exists() {
            tokio::time::sleep(LOOK).await;
        }
    });
}
