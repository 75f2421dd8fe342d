//! What makes a fork another machine: machine id, host name, ssh host keys, boot id.

use std::{
    io::{self, Write as _},
    path::Path,
    sync::Arc,
    time::Duration,
};

use crate::{agent::Agent, helper::Helper, refusal::Refusal};

const KEYGEN: &str = "/usr/bin/ssh-keygen";
const KEYGEN_LIMIT: Duration = Duration::from_secs(300);
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const HOSTNAME_MAX: usize = 63;

/// A checked identity.
#[derive(Debug)]
pub struct Identity {
    hostname: String,
    machine_id: String,
}

impl Identity {
    /// Refuses names and ids that the files could not hold.
    pub fn new(hostname: &str, machine_id_hex: &str) -> Result<Self, Refusal> {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
        let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
        let fits = hostname.len() <= HOSTNAME_MAX && hostname.chars().all(plain);
        if !fits || !edge(hostname.chars().next()) || !edge(hostname.chars().last()) {
            let why = format!("{hostname:?} is not a host name (letters, digits, - and ., at most {HOSTNAME_MAX})");
            return Err(Refusal::bad("take on the new identity", why));
        }
        let id = machine_id_hex.to_ascii_lowercase();
        let hex = id.len() == 32 && id.chars().all(|c| c.is_ascii_hexdigit());
        if !hex || id.chars().all(|c| c == '0') {
            return Err(Refusal::bad("take on the new identity", "a machine id is 32 hex digits, not all zero"));
        }
        Ok(Self { hostname: hostname.to_owned(), machine_id: id })
    }

    /// Writes it everywhere. Host keys are removed at once and made anew in the background.
    pub fn apply(&self, agent: &Arc<Agent>) -> io::Result<()> {
        replace(Path::new("/etc/machine-id"), format!("{}\n", self.machine_id).as_bytes(), 0o444)?;
        let dbus = Path::new("/var/lib/dbus/machine-id");
        if dbus.symlink_metadata().is_ok_and(|m| m.is_file()) {
            replace(dbus, format!("{}\n", self.machine_id).as_bytes(), 0o444)?;
        }
        rustix::system::sethostname(self.hostname.as_bytes())?;
        replace(Path::new("/etc/hostname"), format!("{}\n", self.hostname).as_bytes(), 0o644)?;
        let hosts = std::fs::read_to_string("/etc/hosts").unwrap_or_default();
        replace(Path::new("/etc/hosts"), hosts_with(&hosts, &self.hostname).as_bytes(), 0o644)?;
        new_boot_id(&agent.state)?;
        if remove_host_keys(Path::new("/etc/ssh"))? > 0 && Path::new(KEYGEN).exists() {
            let agent = agent.clone();
            tokio::spawn(async move { make_host_keys(&agent).await });
        }
        Ok(())
    }
}

async fn make_host_keys(agent: &Agent) {
    let argv = vec![KEYGEN.to_owned(), "-A".into()];
    let helper = Helper { argv, env: vec![], account: None, in_user_cgroup: false };
    match helper.run(agent, KEYGEN_LIMIT).await {
        Ok(output) if output.ended.code == 0 => {}
        Ok(output) => crate::log::line(&format!("no new ssh host keys: {}", output.stderr)),
        Err(why) => crate::log::line(&format!("no new ssh host keys: {why}")),
    }
}

/// `hosts` with one 127.0.1.1 line, which names `hostname`.
fn hosts_with(hosts: &str, hostname: &str) -> String {
    let line = format!("127.0.1.1 {hostname}");
    let mut out = String::new();
    let mut done = false;
    for old in hosts.lines() {
        let own = old.split_whitespace().next() == Some("127.0.1.1");
        if !own || !done {
            out.push_str(if own { &line } else { old });
            out.push('\n');
        }
        done |= own;
    }
    if !done {
        out.push_str(&line);
        out.push('\n');
    }
    out
}

/// Removes private and public host keys; returns how many private ones there were.
fn remove_host_keys(dir: &Path) -> io::Result<usize> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(e) => return Err(e),
    };
    let mut private = 0;
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("ssh_host_") && (name.ends_with("_key") || name.ends_with("_key.pub")) {
            std::fs::remove_file(entry.path())?;
            private += usize::from(name.ends_with("_key"));
        }
    }
    Ok(private)
}

/// Notes a fresh boot id and lays it over the kernel's, which cannot be set.
fn new_boot_id(state: &Path) -> io::Result<()> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|e| io::Error::other(e.to_string()))?;
    let note = state.join("boot-id");
    let mounted = std::fs::read(BOOT_ID).is_ok_and(|now| std::fs::read(&note).is_ok_and(|old| old == now));
    // In place: a mount of an earlier fork shows the same file.
    std::fs::write(&note, format!("{}\n", uuid(bytes)))?;
    if !mounted && let Err(why) = rustix::mount::mount_bind(&note, BOOT_ID) {
        crate::log::line(&format!("the kernel's boot id stays as it was: {why}"));
    }
    Ok(())
}

/// Random bytes as a version 4 UUID.
fn uuid(mut b: [u8; 16]) -> String {
    b[6] = (b[6] & 0x0f) | 0x40;
    b[8] = (b[8] & 0x3f) | 0x80;
    let h = hex::encode(b);
    format!("{}-{}-{}-{}-{}", &h[..8], &h[8..12], &h[12..16], &h[16..20], &h[20..])
}

/// Writes a file whole or not at all.
fn replace(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let mut temp = path.as_os_str().to_owned();
    temp.push(".ks-new");
    let temp = Path::new(&temp);
    let mut file = std::fs::File::create(temp)?;
    file.write_all(bytes)?;
    rustix::fs::fchmod(&file, rustix::fs::Mode::from_raw_mode(mode))?;
    std::fs::rename(temp, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_of_hosts_changes() {
        let old = "127.0.0.1 localhost\n127.0.1.1 keepstate\n::1 localhost\n127.0.1.1 again\n";
        assert_eq!(hosts_with(old, "b"), "127.0.0.1 localhost\n127.0.1.1 b\n::1 localhost\n");
        assert_eq!(hosts_with("", "b"), "127.0.1.1 b\n");
    }

    #[test]
    fn only_host_keys_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["ssh_host_rsa_key", "ssh_host_rsa_key.pub", "ssh_config", "my_key"] {
            std::fs::write(dir.path().join(name), "x").unwrap();
        }
        assert_eq!(remove_host_keys(dir.path()).unwrap(), 1);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
        assert_eq!(remove_host_keys(&dir.path().join("none")).unwrap(), 0);
    }

    #[test]
    fn a_boot_id_is_a_random_uuid() {
        assert_eq!(uuid([0xff; 16]), "ffffffff-ffff-4fff-bfff-ffffffffffff");
    }

    #[test]
    fn a_file_is_replaced_with_its_mode() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("machine-id");
        std::fs::write(&path, "old").unwrap();
        replace(&path, b"new", 0o444).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o444);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
