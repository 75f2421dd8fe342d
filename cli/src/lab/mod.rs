//! A fleet for demonstrations, benchmarks and tests: several real nodes on one machine, each with a folder of its own, on
//! loopback or each in a network namespace, with the faults that hosts and networks have.
//!
//! Everything that a person could do goes through the `ks` program; faults go around it. Shared with the tests in
//! simulations/ by its path, so it uses nothing of this crate.

mod net;
mod process;

pub use net::Net;
pub use process::Part;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// First port of every node in a namespace of its own.
const PORT: u16 = 7700;
/// Longest single call that changes something; the first session builds the golden checkpoint.
const CALL_S: u64 = 420;

/// Where the nodes live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// All on 127.0.0.1, with ports that they choose.
    Loopback,
    /// Each in a network namespace with an address of its own; needs root.
    Namespaces,
}

/// One node.
#[derive(Debug, Clone)]
pub struct Machine {
    /// `n1`, `n2`, ...
    pub name: String,
    /// Its KS_HOME.
    pub home: PathBuf,
    /// What `ks up --fleet-address` gets.
    fleet_address: String,
}

/// How to speak to the fleet from outside.
#[derive(Debug, Clone, Default)]
pub struct Client {
    /// `HOST:PORT` of each node's HTTPS API, in the order of the machines.
    pub addresses: Vec<String>,
    /// Bearer token.
    pub token: String,
    /// Fingerprint of the fleet.
    pub fingerprint: String,
}

/// The nodes, and what holds them. All is taken down when it is dropped.
#[derive(Debug)]
pub struct Lab {
    dir: PathBuf,
    libexec: PathBuf,
    net: Option<Net>,
    /// The machines.
    pub machines: Vec<Machine>,
    /// How many of them, from the first on, are to be members; the others are spares.
    pub members: usize,
    /// Filled in by [`Lab::assemble`].
    pub client: Client,
}

impl Lab {
    /// Folders and networks of `n` nodes below `dir`; nothing runs yet. `libexec` holds the programs.
    pub fn new(dir: &Path, libexec: &Path, place: Place, n: usize) -> Result<Self> {
        ensure!((1..=9).contains(&n), "a lab has one to nine nodes");
        let net = match place {
            Place::Loopback => None,
            Place::Namespaces => Some(Net::new(n)?),
        };
        let machines = (1..=n)
            .map(|i| {
                let home = dir.join(format!("n{i}"));
                std::fs::create_dir_all(&home).with_context(|| format!("making {}", home.display()))?;
                let fleet_address = match &net {
                    None => "127.0.0.1".to_owned(),
                    Some(_) => format!("{}:{PORT}", Net::address(i - 1)),
                };
                Ok(Machine { name: format!("n{i}"), home, fleet_address })
            })
            .collect::<Result<_>>()?;
        std::fs::create_dir_all(dir.join("client")).context("a folder for the client")?;
        Ok(Self { dir: dir.to_owned(), libexec: libexec.to_owned(), net, members: n, machines, client: Client::default() })
    }
    /// The network, when the nodes have namespaces.
    pub fn net(&self) -> Option<&Net> {
        self.net.as_ref()
    }

    /// Words that put a command into a namespace. Not `ip netns exec`: that hides the control groups below /sys.
    fn inside(namespace: Option<&str>) -> Vec<String> {
        namespace.map(|ns| vec!["nsenter".to_owned(), format!("--net=/run/netns/{ns}")]).unwrap_or_default()
    }
    fn bare(&self, namespace: Option<&str>, seconds: u64) -> Command {
        let words = [Self::inside(namespace), ["timeout", "-k", "2", &seconds.to_string()].map(str::to_owned).to_vec()].concat();
        let mut c = Command::new(&words[0]);
        c.args(&words[1..]).arg(self.libexec.join("ks"));
        for k in ["KS_ADDR", "KS_TOKEN", "KS_FINGERPRINT", "KS_CONTEXT", "KS_API_FILE", "KS_HOME"] {
            c.env_remove(k);
        }
        c.env("KS_LIBEXEC", &self.libexec).env("NO_COLOR", "1").stdin(Stdio::null());
        c
    }
    /// `ks` on machine `i`, speaking to its own node.
    pub fn on(&self, i: usize) -> Command {
        let ns = self.net.as_ref().map(|n| n.namespace(i));
        let mut c = self.bare(ns.as_deref(), CALL_S);
        c.env("KS_HOME", &self.machines[i].home);
        c
    }
    /// `ks` on a laptop that knows the addresses of these machines.
    pub fn through(&self, machines: &[usize]) -> Command {
        self.through_within(machines, CALL_S)
    }
    /// As [`Lab::through`], ended after so many seconds.
    pub fn through_within(&self, machines: &[usize], seconds: u64) -> Command {
        let mut c = self.bare(self.net.as_ref().map(Net::hub), seconds);
        c.envs(self.client_env(machines));
        c
    }
    /// `ks` on a laptop that knows all addresses.
    pub fn anywhere(&self) -> Command {
        self.through(&self.others(&[]))
    }
    /// Words in front of a call that comes from where the client lives.
    pub fn client_before(&self) -> Vec<String> {
        Self::inside(self.net.as_ref().map(Net::hub))
    }
    /// What makes a `ks` speak to these machines.
    pub fn client_env(&self, machines: &[usize]) -> Vec<(String, String)> {
        let some: Vec<&str> = machines.iter().filter_map(|i| self.client.addresses.get(*i)).map(String::as_str).collect();
        let home = self.dir.join("client");
        [
            ("KS_ADDR", some.join(",")),
            ("KS_TOKEN", self.client.token.clone()),
            ("KS_FINGERPRINT", self.client.fingerprint.clone()),
            ("HOME", home.display().to_string()),
            ("XDG_STATE_HOME", home.join("state").display().to_string()),
            ("XDG_CONFIG_HOME", home.join("config").display().to_string()),
        ]
        .map(|(k, v)| (k.to_owned(), v))
        .to_vec()
    }

    /// Starts machine `i`'s node, or finds it running.
    pub fn up(&self, i: usize) -> Result<()> {
        self.up_with(i, &[])
    }
    /// As [`Lab::up`], with more in its environment.
    pub fn up_with(&self, i: usize, env: &[(&str, &str)]) -> Result<()> {
        let address = self.machines[i].fleet_address.as_str();
        let mut c = self.on(i);
        c.envs(env.iter().copied());
        ok(c, &["up", "--fleet-address", address]).map(|_| ())
    }
    /// A join token, made on the first machine.
    pub fn token(&self, ttl: &str) -> Result<String> {
        let token = json(self.on(0), &["node", "token", "--ttl", ttl])?;
        token["token"].as_str().map(str::to_owned).context("a token")
    }
    /// Starts all members, makes the first one's image, joins the others to it, makes an admin, and waits until all is well.
    pub fn assemble(&mut self) -> Result<()> {
        (0..self.members).try_for_each(|i| self.up(i))?;
        ok(self.on(0), &["image", "build"])?;
        for i in 1..self.members {
            let (token, name) = (self.token("10m")?, self.machines[i].name.clone());
            ok(self.on(i), &["node", "join", &token, "--name", &name])?;
        }
        let user = json(self.on(0), &["user", "add", "lab", "--role", "admin"])?;
        let fleet = self.settled(Duration::from_secs(60))?;
        let nodes = fleet["nodes"].as_array().cloned().unwrap_or_default();
        let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
        // The machines are listed in the order of joining; the founder's name is its own choice.
        for (m, v) in self.machines.iter_mut().zip(&nodes) {
            m.name = text(&v["name"]);
        }
        let addresses = nodes.iter().map(|v| text(&v["api"][0]).trim_start_matches("https://").to_owned()).collect();
        self.client = Client { addresses, token: text(&user["token"]), fingerprint: text(&fleet["fingerprint"]) };
        ok(self.anywhere(), &["ls"]).context("the fleet answers from outside")?;
        Ok(())
    }
    /// The fleet as some node sees it, asked locally on the first machine that answers.
    pub fn fleet(&self) -> Result<Value> {
        let mut last = anyhow::anyhow!("no machines");
        for i in 0..self.machines.len() {
            if self.process_ids(i, Part::Daemon).is_empty() {
                continue;
            }
            match self.seen_by(i) {
                Ok(v) if v["quorum"] == true => return Ok(v),
                Ok(v) => last = anyhow::anyhow!("{} sees no quorum: {v}", self.machines[i].name),
                Err(e) => last = e,
            }
        }
        Err(last)
    }
    /// The fleet as machine `i` sees it, with or without a quorum.
    pub fn seen_by(&self, i: usize) -> Result<Value> {
        let o = self.on(i).args(["--json", "fleet", "status"]).output().context("starting ks")?;
        serde_json::from_slice(&o.stdout).with_context(|| format!("ks fleet status: {}", shown(&o)))
    }
    /// Waits until every machine is a live member and enough of them vote.
    pub fn settled(&self, patience: Duration) -> Result<Value> {
        let wanted = match self.members {
            1 | 2 => 1,
            3 | 4 => 3,
            _ => 5,
        };
        self.wait("the fleet settles", patience, || {
            let f = self.fleet()?;
            let nodes = f["nodes"].as_array().cloned().unwrap_or_default();
            let live = nodes.iter().filter(|n| n["live"] == true && n["state"] == "active").count();
            let voters = f["voters"].as_array().map_or(0, Vec::len);
            let policy = f["policy"]["voters"].as_u64().unwrap_or(3) as usize;
            if live >= self.members && voters >= wanted.min(policy) {
                return Ok(Some(f));
            }
            bail!("{live} live, {voters} voters")
        })
    }
    /// Asks again until `f` gives something. The last error is told when time is up.
    pub fn wait<T>(&self, what: &str, patience: Duration, mut f: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        let until = Instant::now() + patience;
        let mut last = String::from("no error");
        loop {
            match f() {
                Ok(Some(v)) => return Ok(v),
                Ok(None) => {}
                Err(e) => last = format!("{e:#}"),
            }
            if Instant::now() > until {
                bail!("{what}: not after {} s ({last})", patience.as_secs());
            }
            std::thread::park_timeout(Duration::from_millis(50));
        }
    }
    /// Which machine has this name.
    pub fn machine(&self, name: &str) -> Result<usize> {
        self.machines.iter().position(|m| m.name == name).with_context(|| format!("no machine {name:?}"))
    }
    /// The machine that owns a session, asked through the others' addresses too.
    pub fn owner(&self, session: &str) -> Result<usize> {
        let s = json(self.anywhere(), &["show", session])?;
        self.machine(s["node"].as_str().unwrap_or_default())
    }
    /// The machine that leads, if anybody knows.
    pub fn leader(&self) -> Result<usize> {
        let f = self.fleet()?;
        let leader = f["leader"].as_u64().context("no leader is known")?;
        let name = f["nodes"].as_array().into_iter().flatten().find(|n| n["number"].as_u64() == Some(leader));
        self.machine(name.and_then(|n| n["name"].as_str()).unwrap_or_default())
    }
    /// All members but these.
    pub fn others(&self, than: &[usize]) -> Vec<usize> {
        (0..self.members).filter(|i| !than.contains(i)).collect()
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for i in 0..self.machines.len() {
            self.kill(i, Part::All);
        }
        for m in &self.machines {
            let _ = Command::new("umount").args(["-q", "-l"]).arg(&m.home).stderr(Stdio::null()).status();
        }
    }
}

/// What a call printed.
pub fn shown(o: &Output) -> String {
    let text = |b: &[u8]| String::from_utf8_lossy(b).trim().to_owned();
    format!("{}; stdout: {}; stderr: {}", o.status, text(&o.stdout), text(&o.stderr))
}

/// A call that must succeed; its standard output, trimmed.
pub fn ok(mut c: Command, args: &[&str]) -> Result<String> {
    let o = c.args(args).output().context("starting ks")?;
    ensure!(o.status.success(), "ks {}: {}", args.join(" "), shown(&o));
    Ok(String::from_utf8_lossy(&o.stdout).trim().to_owned())
}

/// A call with --json that must succeed; the last JSON value that it printed.
pub fn json(mut c: Command, args: &[&str]) -> Result<Value> {
    c.arg("--json");
    let text = ok(c, args)?;
    let last = text.lines().last().unwrap_or_default();
    serde_json::from_str(&text)
        .or_else(|_| serde_json::from_str(last))
        .with_context(|| format!("ks {}: not JSON: {text}", args.join(" ")))
}
