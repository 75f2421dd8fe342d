//! Nodes in one process, and the wire between them.

use crate::host::frame::{self, Ask, Question};
use crate::host::{Consensus, ConsensusConfig, Guard, Timing, TokioRuntime, Wire, WireError};
use crate::*;
use futures::FutureExt;
use futures::future::BoxFuture;
use ks_proto::manifest::EngineKind;
use ks_proto::{CheckpointId, FleetId, ImageId, SessionId};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// No wait of a test is longer.
pub const DEADLINE: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Cables {
    nodes: BTreeMap<u64, Consensus>,
    /// From, to: what is sent so is lost.
    cut: BTreeSet<(u64, u64)>,
    /// Answers to proposals that are to be lost.
    lose_answers: u32,
    lost_answers: u32,
}

/// The wire that all nodes share.
#[derive(Clone, Default)]
pub struct Net(Arc<Mutex<Cables>>);

struct Plug {
    from: u64,
    net: Net,
}

impl Wire for Plug {
    fn call(&self, to: u64, request: Vec<u8>, deadline: Duration) -> BoxFuture<'static, Result<Vec<u8>, WireError>> {
        let (from, net) = (self.from, self.net.clone());
        let lost = WireError::Timeout { to, ms: deadline.as_millis() as u64 };
        async move {
            let delivered = async {
                if net.is_cut(from, to) {
                    return std::future::pending().await;
                }
                let peer = net.0.lock().unwrap().nodes.get(&to).cloned();
                let peer = peer.ok_or_else(|| WireError::Unreachable { to, why: "it is down".into() })?;
                let answer = peer.serve(from, &request).await;
                if net.is_cut(to, from) || net.loses_answer(&request) {
                    return std::future::pending().await;
                }
                Ok(answer)
            };
            tokio::time::timeout(deadline, delivered).await.unwrap_or(Err(lost))
        }
        .boxed()
    }
}

impl Net {
    fn is_cut(&self, from: u64, to: u64) -> bool {
        self.0.lock().unwrap().cut.contains(&(from, to))
    }
    fn loses_answer(&self, request: &[u8]) -> bool {
        let mut cables = self.0.lock().unwrap();
        let proposal = frame::decode::<Question<TokioRuntime>>(request).is_ok_and(|(q, _)| matches!(q.ask, Ask::Propose(_)));
        let lose = proposal && cables.lose_answers > 0;
        if lose {
            cables.lose_answers -= 1;
            cables.lost_answers += 1;
        }
        lose
    }
    pub fn lose_answers(&self, count: u32) {
        self.0.lock().unwrap().lose_answers = count;
    }
    pub fn lost_answers(&self) -> u32 {
        self.0.lock().unwrap().lost_answers
    }
    /// Cuts `node` off from the others, both ways.
    pub fn isolate(&self, node: u64) {
        let mut cables = self.0.lock().unwrap();
        for other in 0..16 {
            cables.cut.extend([(node, other), (other, node)]);
        }
    }
    pub fn heal(&self) {
        self.0.lock().unwrap().cut.clear();
    }
}

pub fn timing() -> Timing {
    Timing { heartbeat_ms: 100, election_min_ms: 400, election_max_ms: 800, ..Timing::default() }
}

/// A group of nodes over one wire, each with its folder.
pub struct Group {
    pub net: Net,
    dir: tempfile::TempDir,
    timing: Timing,
    starts: u64,
}

impl Group {
    pub fn new(timing: Timing) -> Self {
        Self { net: Net::default(), dir: tempfile::tempdir().unwrap(), timing, starts: 0 }
    }

    pub fn dir(&self, number: u64) -> PathBuf {
        self.dir.path().join(number.to_string())
    }

    pub fn config(&mut self, number: u64) -> ConsensusConfig {
        self.starts += 1;
        ConsensusConfig { number, incarnation: 1000 + self.starts, dir: self.dir(number), timing: self.timing }
    }

    pub fn wire(&self, from: u64) -> Arc<dyn Wire> {
        Arc::new(Plug { from, net: self.net.clone() })
    }

    pub async fn start(&mut self, number: u64) -> Consensus {
        let config = self.config(number);
        let node = Consensus::open(config, self.wire(number)).await.unwrap();
        self.plug(&node);
        node
    }

    pub fn plug(&self, node: &Consensus) {
        self.net.0.lock().unwrap().nodes.insert(node.number(), node.clone());
    }

    pub async fn stop(&self, node: Consensus) {
        self.net.0.lock().unwrap().nodes.remove(&node.number());
        node.shutdown().await;
    }

    /// A founded fleet in which nodes 1 to `count` vote.
    pub async fn voters(&mut self, count: u64) -> Vec<Consensus> {
        let first = self.start(1).await;
        first.found().await.unwrap();
        first.propose(found()).await.unwrap().ok().unwrap();
        let mut nodes = vec![first];
        for number in 2..=count {
            nodes.push(self.start(number).await);
            nodes[0].ensure_learner(number).await.unwrap();
        }
        set_voters(&nodes[0], 1..=count).await;
        for node in &nodes {
            let mut leadership = node.leadership();
            within("a leader is known", leadership.wait_for(|l| l.leader.is_some())).await.unwrap();
        }
        nodes
    }
}

pub async fn set_voters(leader: &Consensus, voters: impl IntoIterator<Item = u64>) {
    let guard: Guard = leader.membership().guard;
    leader.set_voters(&voters.into_iter().collect(), guard).await.unwrap();
}

pub async fn within<T>(what: &str, wait: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, wait).await.unwrap_or_else(|_| panic!("not in time: {what}"))
}

/// Waits until the state of `node` is as asked.
pub async fn until(what: &str, node: &Consensus, mut as_asked: impl FnMut(&FleetState) -> bool) {
    let mut changes = node.changes();
    within(what, changes.wait_for(|s| as_asked(s))).await.unwrap();
}

/// Waits until one of `nodes` leads, and can show it.
pub async fn leader(nodes: &[Consensus]) -> Consensus {
    let found = async {
        loop {
            for node in nodes {
                if node.quorum_round().await.is_ok() {
                    return node.clone();
                }
            }
            let waits = nodes.iter().map(|n| {
                let mut leadership = n.leadership();
                async move { drop(leadership.changed().await) }.boxed()
            });
            // A leader that was cut off learns of it by the next round only, so look again in any case.
            let again = tokio::time::timeout(Duration::from_millis(50), futures::future::select_all(waits));
            drop(again.await);
        }
    };
    within("a leader", found).await
}

pub fn json(node: &Consensus) -> serde_json::Value {
    serde_json::to_value(&*node.state()).unwrap()
}

pub fn sid(n: u8) -> SessionId {
    SessionId([n; 16])
}

pub fn member(peer: &str) -> Member {
    serde_json::from_value(serde_json::json!({"peer_id": peer, "name": peer})).unwrap()
}

pub fn found() -> Command {
    Command::Found { fleet_id: FleetId([1; 16]), member: member("one"), ca_cert_hex: String::new(), now_unix_ms: 1 }
}

pub fn image() -> Command {
    let (kernel, cmdline, profile) = (String::new(), String::new(), String::new());
    let (id, disk) = (ImageId([9; 32]), CheckpointId([9; 32]));
    let (name, holders) = ("default".into(), vec![]);
    let (disk_bytes, disk_used_bytes, created_unix_ms) = (1, 1, 1);
    Command::PutImage {
        image: ImageRecord { name, id, kernel, cmdline, profile, disk_bytes, disk_used_bytes, disk, created_unix_ms, holders },
    }
}

pub fn create(n: u8) -> Command {
    Command::CreateSession {
        id: sid(n),
        name: format!("s{n}").parse().unwrap(),
        owner: 1,
        params: SessionParams {
            image: "default".into(),
            image_id: ImageId([9; 32]),
            memory_mib: 512,
            vcpus: 1,
            engine: EngineKind::Qemu,
            profile: "tcg".into(),
            engine_why: String::new(),
        },
        cadence_s: 60,
        idle_park_s: 0,
        command: None,
        forked_from: None,
        head: CheckpointId([255; 32]),
        now_unix_ms: 5,
    }
}

/// Counts how often it was applied: each time raises the session's run counter by one.
pub fn begin(n: u8) -> Command {
    Command::BeginRun { id: sid(n), from: CheckpointId([255; 32]), expected_epoch: None, node: None }
}

pub fn run(response: Response) -> u64 {
    match response {
        Response::Token { token } => token.run,
        other => panic!("{other:?}"),
    }
}

pub async fn with_session(node: &Consensus) {
    node.propose(image()).await.unwrap().ok().unwrap();
    node.propose(create(1)).await.unwrap().ok().unwrap();
}
