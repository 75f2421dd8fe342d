//! `ks bench failover`: the host that runs a session is killed at a random moment, again and again, half the time the one
//! that leads; then hosts are cut off, half cut off, and stopped, and an outsider looks whether two runs ever overlap.

use super::figures::{Samples, wilson};
use super::observe::{Stream, gap, overlap};
use crate::demo::drive::{fresh_name, json, ks, ok, say, sh, wait};
use crate::demo::fleet::{WHOLE_AGAIN, assemble, durable};
use crate::demo::report;
use crate::lab::{Lab, Net, Part};
use anyhow::{Context, Result};
use clap::Args;
use serde_json::{Map, Value, json};
use std::time::{Duration, Instant};

/// What to run.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Cycles of killing everything of the owner
    #[arg(long, default_value_t = 20)]
    cycles: u32,
    /// Cycles of cutting off and stopping the owner
    #[arg(long, default_value_t = 20)]
    faults: u32,
    /// Guest memory, MiB
    #[arg(long, default_value_t = 512)]
    memory: u64,
    /// Of the random moments
    #[arg(long)]
    seed: Option<u64>,
    /// All nodes on loopback: no root, but no partitions either
    #[arg(long)]
    loopback: bool,
}

/// The longest that a session may be away before its cycle counts as not recovered.
const AWAY_MAX: Duration = Duration::from_secs(60);
/// One question to a session that may not answer.
const QUESTION_S: u64 = 3;
/// Seconds between the session's own checkpoints.
const CADENCE: &str = "5";

/// A small generator (SplitMix64): the moments of a run can be had again from its seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % n.max(1)
    }
}

#[derive(Default)]
struct Kills {
    done: u32,
    on_leader: u32,
    recovered: u32,
    lost_durable: u32,
    away: Samples,
    /// Kill to lapse, when the killed host did not lead and when it did: its lease, and the election with the new leader's wait.
    reassigned: [Samples; 2],
    /// Lapse to a guest whose restore hook has answered.
    restored: Samples,
    /// The rest: from there to the client's answer.
    reached: Samples,
    /// The same from inside, when the node tells them.
    parts: [Samples; 4],
    unrecovered: Vec<String>,
}

const PARTS: [&str; 4] = ["lease_ms", "election_ms", "restore_ms", "hook_ms"];

#[derive(Default)]
struct Faults {
    done: u32,
    moved: u32,
    double_run: u32,
    by_kind: Map<String, Value>,
    overlaps: Vec<String>,
    troubles: Vec<String>,
    /// From the last line of the older run to the first of the newer one, guest time.
    gap: Samples,
}

/// Runs the benchmark.
pub fn run(o: &Options) -> Result<()> {
    let netns = !o.loopback && Net::missing().is_none();
    if !netns && !o.loopback {
        say(&format!("no network namespaces ({}): loopback, without partitions", Net::missing().unwrap_or_default()));
    }
    let seed = o.seed.unwrap_or_else(crate::verbs::now_ms);
    let (_dir, lab) = assemble(netns)?;
    say(&format!("three nodes {}, seed {seed}", if netns { "in namespaces" } else { "on loopback" }));
    let mut dice = Dice(seed);
    let mut kills = Kills::default();
    warm_up(&lab, o)?;
    for i in 0..o.cycles {
        kill_once(&lab, o, &mut dice, i.is_multiple_of(2), &mut kills).with_context(|| format!("kill cycle {}", i + 1))?;
        say(&format!(
            "kill {} of {}: {} back, median {:.2} s",
            i + 1,
            o.cycles,
            kills.recovered,
            kills.away.percentile(50.0).unwrap_or(f64::NAN)
        ));
    }
    let mut faults = Faults::default();
    for i in 0..o.faults {
        let kind = Kind::all(netns)[i as usize % Kind::all(netns).len()];
        fault_once(&lab, o, &mut dice, kind, &mut faults).with_context(|| format!("fault cycle {} ({kind:?})", i + 1))?;
        say(&format!("fault {} of {} ({}): {} double runs", i + 1, o.faults, kind.name(), faults.double_run));
    }
    println!("{}", figures(o, netns, seed, &lab, &kills, &faults)?);
    Ok(())
}

fn figures(o: &Options, netns: bool, seed: u64, lab: &Lab, k: &Kills, f: &Faults) -> Result<Value> {
    let mut m = Map::new();
    k.away.report("interruption", "_s", &mut m);
    let mut parts = Map::new();
    for (name, samples) in PARTS.iter().zip(&k.parts).filter(|p| p.1.percentile(50.0).is_some()) {
        samples.report(&format!("node_{}", name.trim_end_matches("_ms")), "_ms", &mut parts);
    }
    k.reassigned[0].report("lease", "_s", &mut parts);
    k.reassigned[1].report("lease_and_election", "_s", &mut parts);
    k.restored.report("restore_and_hook", "_s", &mut parts);
    k.reached.report("first_answer", "_s", &mut parts);
    f.gap.report("gap", "_s", &mut m);
    m.insert("gap_min_s".into(), json!(f.gap.percentile(0.0)));
    let (low, high) = wilson(k.recovered, k.done);
    m.extend([
        ("bench".to_owned(), json!("failover")),
        ("cycles".to_owned(), json!(k.done)),
        ("on_leader".to_owned(), json!(k.on_leader)),
        ("recovered".to_owned(), json!(k.recovered)),
        ("recovered_wilson95".to_owned(), json!([low, high])),
        ("unrecovered".to_owned(), json!(k.unrecovered)),
        ("lost_durable".to_owned(), json!(k.lost_durable)),
        ("parts".to_owned(), Value::Object(parts)),
        ("double_run".to_owned(), json!(f.double_run)),
        ("fault_cycles".to_owned(), json!(f.done)),
        ("fault_moved".to_owned(), json!(f.moved)),
        ("faults".to_owned(), Value::Object(f.by_kind.clone())),
        ("overlaps".to_owned(), json!(f.overlaps)),
        ("troubles".to_owned(), json!(f.troubles)),
        ("lease_ms".to_owned(), lab.fleet().map_or(Value::Null, |v| v["policy"]["lease_ms"].clone())),
        ("memory_mib".to_owned(), json!(o.memory)),
        ("seed".to_owned(), json!(seed)),
        ("place".to_owned(), json!(if netns { "namespaces" } else { "loopback" })),
        (
            "measured".to_owned(),
            json!("interruption: SIGKILL of every process of the owner to the end of the first `ks exec true` that a client with all three addresses got through, process starts included; double_run: a line of the older run's guest counter with a later guest time than the newer run's first line"),
        ),
        ("conditions".to_owned(), report::conditions()?),
    ]);
    Ok(Value::Object(m))
}

/// The first session of a fleet makes the golden checkpoint, the first on each other node fetches it: not counted.
fn warm_up(lab: &Lab, o: &Options) -> Result<()> {
    for i in 0..lab.machines.len() {
        let name = begin(lab, o, i)?;
        ok(&["rm", &name, "--force"])?;
    }
    Ok(())
}

/// A session that counts into a file, on machine `i` if the fleet lets us choose.
fn begin(lab: &Lab, o: &Options, i: usize) -> Result<String> {
    let name = fresh_name("failover");
    let (memory, node) = (o.memory.to_string(), lab.machines[i].name.as_str());
    let count = "i=0; while :; do i=$((i+1)); echo $i > /workspace/n; sleep 0.1; done";
    ok(&[
        "run",
        "--name",
        &name,
        "--memory",
        &memory,
        "--cadence",
        CADENCE,
        "--node",
        node,
        "--detach",
        "--",
        "sh",
        "-c",
        count,
    ])?;
    Ok(name)
}

fn counted(name: &str) -> Result<u64> {
    wait("the counter", 30, || Ok(sh(name, "cat /workspace/n")?.parse::<u64>().ok()))
}

/// One question with a short deadline, through some machines.
fn answers(lab: &Lab, machines: &[usize], name: &str) -> bool {
    let mut c = lab.through_within(machines, QUESTION_S);
    c.args(["exec", name, "--", "true"]).output().is_ok_and(|o| o.status.success())
}

fn kill_once(lab: &Lab, o: &Options, dice: &mut Dice, leads: bool, k: &mut Kills) -> Result<()> {
    let leader = lab.leader()?;
    let others = lab.others(&[leader]);
    let on = if leads { leader } else { others[dice.below(others.len() as u64) as usize] };
    let name = begin(lab, o, on)?;
    let before = counted(&name)?;
    let number = json(&["checkpoint", &name])?["number"].as_u64().context("a number")?;
    durable(&name, number, 60)?;
    let owner = lab.owner(&name)?;
    let led = lab.leader()? == owner;
    k.on_leader += u32::from(led);
    std::thread::park_timeout(Duration::from_millis(dice.below(6000)));
    let (killed, killed_unix_ms) = (Instant::now(), crate::verbs::now_ms());
    lab.kill(owner, Part::All);
    k.done += 1;
    let all: Vec<usize> = (0..lab.machines.len()).collect();
    let mut back = false;
    while !back && killed.elapsed() < AWAY_MAX {
        back = answers(lab, &all, &name);
    }
    let away = killed.elapsed().as_secs_f64();
    if back {
        k.recovered += 1;
        k.away.push(away);
        let s = json(&["show", &name])?;
        let i = &s["last_interruption"];
        if let (Some(at), Some(ready)) = (i["at_unix_ms"].as_u64(), i["ready_ms"].as_u64()) {
            // The interruption counts from the last grant of the owner's lease, which was before the kill.
            let lease = i["parts"]["lease_ms"].as_u64().unwrap_or(0).min(ready);
            let lapsed = (at + lease).saturating_sub(killed_unix_ms) as f64 / 1000.0;
            let restored = (ready - lease) as f64 / 1000.0;
            k.reassigned[usize::from(led)].push(lapsed);
            k.restored.push(restored);
            k.reached.push((away - lapsed - restored).max(0.0));
        }
        for (part, samples) in PARTS.iter().zip(&mut k.parts) {
            if let Some(ms) = s["last_interruption"]["parts"][*part].as_f64() {
                samples.push(ms);
            }
        }
        let after = counted(&name)?;
        k.lost_durable += u32::from(after < before || !still_listed(&name, number)?);
    } else {
        let seen = ks(&["--json", "show", &name])?;
        k.unrecovered.push(format!("{name}: {}", String::from_utf8_lossy(&seen.stdout).trim()));
    }
    lab.up(owner)?;
    lab.settled(WHOLE_AGAIN)?;
    // One that did not come back may refuse to go as well.
    ks(&["rm", &name, "--force"])?;
    Ok(())
}

fn still_listed(name: &str, number: u64) -> Result<bool> {
    let all = json(&["checkpoints", name])?;
    Ok(all["checkpoints"].as_array().into_iter().flatten().any(|c| c["number"].as_u64() == Some(number)))
}

/// What happens to the owner's host.
#[derive(Debug, Clone, Copy)]
enum Kind {
    /// Its cable is pulled.
    Cut,
    /// What it sends to its peers is lost.
    Mute,
    /// What its peers send to it is lost.
    Deaf,
    /// ksd is stopped, then thawed.
    StopDaemon,
    /// ks-vmm and qemu are.
    StopMachines,
    /// Everything is.
    StopAll,
}

impl Kind {
    fn all(netns: bool) -> &'static [Kind] {
        const ALL: [Kind; 6] = [Kind::Cut, Kind::StopDaemon, Kind::Mute, Kind::StopAll, Kind::Deaf, Kind::StopMachines];
        const STOPS: [Kind; 3] = [Kind::StopDaemon, Kind::StopAll, Kind::StopMachines];
        if netns { &ALL } else { &STOPS }
    }
    fn name(self) -> &'static str {
        match self {
            Self::Cut => "cut",
            Self::Mute => "mute",
            Self::Deaf => "deaf",
            Self::StopDaemon => "stop-ksd",
            Self::StopMachines => "stop-ks-vmm",
            Self::StopAll => "stop-all",
        }
    }
    fn begin(self, lab: &Lab, owner: usize) -> Result<()> {
        let net = || lab.net().context("partitions need namespaces");
        let peers = lab.others(&[owner]);
        match self {
            Self::Cut => net()?.cut(owner),
            Self::Mute => peers.iter().try_for_each(|p| net()?.lose(owner, Some(*p))),
            Self::Deaf => peers.iter().try_for_each(|p| net()?.lose(*p, Some(owner))),
            Self::StopDaemon => stop(lab, owner, Part::Daemon),
            Self::StopMachines => stop(lab, owner, Part::Machines),
            Self::StopAll => stop(lab, owner, Part::All),
        }
    }
    /// Must a peer take over? A stopped ks-vmm alone leaves its node's lease alone.
    fn moves(self) -> bool {
        !matches!(self, Self::StopMachines)
    }
}

fn stop(lab: &Lab, owner: usize, part: Part) -> Result<()> {
    anyhow::ensure!(lab.stop(owner, part) > 0, "nothing to stop: {part:?}");
    Ok(())
}

fn fault_once(lab: &Lab, o: &Options, dice: &mut Dice, kind: Kind, f: &mut Faults) -> Result<()> {
    let name = begin(lab, o, dice.below(lab.machines.len() as u64) as usize)?;
    let number = json(&["checkpoint", &name])?["number"].as_u64().context("a number")?;
    durable(&name, number, 60)?;
    let owner = lab.owner(&name)?;
    let others = lab.others(&[owner]);
    let older = Stream::open(lab.through(&[owner]), &name)?;
    anyhow::ensure!(older.reach(20, Duration::from_secs(30)), "the counter does not count");
    std::thread::park_timeout(Duration::from_millis(dice.below(1500)));
    kind.begin(lab, owner)?;
    f.done += 1;
    let begun = Instant::now();
    let patience = if kind.moves() { AWAY_MAX } else { Duration::from_secs(15) };
    let mut moved = false;
    while !moved && begun.elapsed() < patience {
        moved = answers(lab, &others, &name);
    }
    let newer = moved.then(|| Stream::open(lab.through(&others), &name)).transpose()?;
    if let Some(n) = &newer {
        n.reach(50, Duration::from_secs(20));
    }
    if let Some(net) = lab.net() {
        net.heal()?;
    }
    lab.thaw(owner);
    // Long enough for whatever was held back to come out.
    std::thread::park_timeout(Duration::from_secs(5));
    let (old, new) = (older.lines(), newer.as_ref().map(Stream::lines).unwrap_or_default());
    drop((older, newer));
    f.moved += u32::from(moved);
    if moved && new.len() < 50 {
        f.troubles.push(format!("{}: {name}: only {} lines of the newer run were seen", kind.name(), new.len()));
    }
    if let Some(s) = gap(&old, &new) {
        f.gap.push(s);
    }
    if let Some(s) = overlap(&old, &new) {
        f.double_run += 1;
        f.overlaps.push(format!("{}: {name}: {s:.3} s", kind.name()));
    }
    if kind.moves() && !moved {
        f.troubles.push(format!("{}: {name} was not taken over in {} s", kind.name(), AWAY_MAX.as_secs()));
    }
    let entry = f.by_kind.entry(kind.name()).or_insert_with(|| json!({"cycles": 0, "moved": 0}));
    entry["cycles"] = json!(entry["cycles"].as_u64().unwrap_or(0) + 1);
    entry["moved"] = json!(entry["moved"].as_u64().unwrap_or(0) + u64::from(moved));
    lab.up(owner)?;
    lab.settled(WHOLE_AGAIN)?;
    ks(&["rm", &name, "--force"])?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_moments() {
        let roll = |seed| (0..5).scan(Dice(seed), |d, _| Some(d.below(6000))).collect::<Vec<_>>();
        assert_eq!(roll(7), roll(7));
        assert_ne!(roll(7), roll(8));
        assert!(roll(7).iter().all(|n| *n < 6000));
    }
}
