//! What an imported tree needs to carry sessions: mount points, the user `agent`, no stranger's identity.
//!
//! Nothing that is there is changed, except the machine id and ssh host keys, which must not be shared.

use crate::{
    error::{ImageError, IoContext},
    staging::{self, Attributes, Staging},
};

use std::{os::fd::AsFd, path::Path};

const AGENT_ID: u32 = 1000;
/// Programs whose absence a person should know of.
const EXPECTED: &[(&str, &str)] = &[
    ("tmux", "sessions have no shared terminal window"),
    ("git", "`ks diff` and sync of repositories do without git in the guest"),
    ("bash", "the shell is /bin/sh"),
    ("sudo", "the user agent cannot become root"),
];
const BIN_DIRS: &[&str] = &["usr/bin", "bin", "usr/local/bin", "usr/sbin", "sbin"];

/// Prepares the tree; warnings for people.
pub(crate) fn finish(staging: &Staging, env: &[String]) -> Result<Vec<String>, ImageError> {
    if !has_program(staging, "sh") {
        return Err(ImageError::NotARoot { why: "there is no /bin/sh; is it a distroless image?".into() });
    }
    apply(staging, env).doing("prepare the tree at", staging.path())?;
    let warning = |(program, why): &(&str, &str)| format!("no {program}: {why}");
    Ok(EXPECTED.iter().filter(|(p, _)| !has_program(staging, p)).map(warning).collect())
}

fn has_program(staging: &Staging, name: &str) -> bool {
    BIN_DIRS.iter().any(|dir| staging.exists(&format!("{dir}/{name}")))
}

fn apply(staging: &Staging, env: &[String]) -> std::io::Result<()> {
    for (name, mode) in [
        ("dev", 0o755),
        ("proc", 0o555),
        ("sys", 0o555),
        ("run", 0o755),
        ("tmp", 0o1777),
        ("etc", 0o755),
        ("home", 0o755),
        ("var", 0o755),
        ("root", 0o700),
    ] {
        if !staging.exists(name) {
            make_dir(staging, name, root_owned(mode))?;
        }
    }
    add_agent(staging)?;
    staging.write("etc/machine-id", "", root_owned(0o444))?;
    remove_host_keys(staging)?;
    if staging.read("etc/resolv.conf")?.is_none_or(|text| text.trim().is_empty()) {
        staging.write("etc/resolv.conf", "nameserver 127.0.0.1\noptions attempts:1 timeout:1\n", root_owned(0o644))?;
    }
    if staging.read("etc/hosts")?.is_none_or(|text| text.trim().is_empty()) {
        staging.write("etc/hosts", "127.0.0.1 localhost\n127.0.1.1 keepstate\n::1 localhost\n", root_owned(0o644))?;
    }
    if !env.is_empty() {
        staging.write("etc/profile.d/ks-image-env.sh", &profile(env), root_owned(0o644))?;
    }
    Ok(())
}

/// The image's environment as a shell profile.
fn profile(env: &[String]) -> String {
    let mut text = String::from("# The environment that the imported image asks for.\n");
    for (name, value) in env.iter().filter_map(|pair| pair.split_once('=')) {
        let plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') && !name.is_empty();
        if plain && !name.as_bytes()[0].is_ascii_digit() && name != "HOME" && name != "HOSTNAME" {
            let quoted = value.replace('\'', "'\\''");
            text.push_str(&format!("export {name}='{quoted}'\n"));
        }
    }
    text
}

/// Adds `agent` (uid 1000) unless some user has that id already, and its directories.
fn add_agent(staging: &Staging) -> std::io::Result<()> {
    let passwd = staging.read("etc/passwd")?.unwrap_or_else(|| "root:x:0:0:root:/root:/bin/sh\n".into());
    let taken = passwd.lines().any(|l| l.starts_with("agent:"));
    let id_taken = passwd.lines().any(|l| l.split(':').nth(2) == Some("1000"));
    let home = passwd
        .lines()
        .find(|l| l.split(':').nth(2) == Some("1000"))
        .and_then(|l| l.split(':').nth(5))
        .unwrap_or("/home/agent")
        .trim_start_matches('/')
        .to_owned();
    if !taken && !id_taken {
        let shell = if staging.exists("bin/bash") { "/bin/bash" } else { "/bin/sh" };
        append(staging, "etc/passwd", &passwd, &format!("agent:x:1000:1000::/home/agent:{shell}\n"), 0o644)?;
        let group = staging.read("etc/group")?.unwrap_or_else(|| "root:x:0:\n".into());
        if !group.lines().any(|l| l.split(':').nth(2) == Some("1000")) {
            append(staging, "etc/group", &group, "agent:x:1000:\n", 0o644)?;
        }
        if let Some(shadow) = staging.read("etc/shadow")? {
            append(staging, "etc/shadow", &shadow, "agent:!:19676:0:99999:7:::\n", 0o640)?;
        }
        if staging.exists("etc/sudoers.d") {
            staging.write("etc/sudoers.d/agent", "agent ALL=(ALL:ALL) NOPASSWD: ALL\n", root_owned(0o440))?;
        }
    }
    let own = Attributes { uid: AGENT_ID, gid: AGENT_ID, ..root_owned(0o755) };
    for dir in [home.as_str(), "workspace"] {
        if !staging.exists(dir) && !dir.split('/').any(|part| part == ".." || part.is_empty()) {
            make_dir(staging, dir, own)?;
        }
    }
    Ok(())
}

fn append(staging: &Staging, path: &str, old: &str, line: &str, mode: u32) -> std::io::Result<()> {
    let gap = if old.is_empty() || old.ends_with('\n') { "" } else { "\n" };
    staging.write(path, &format!("{old}{gap}{line}"), root_owned(mode))
}

fn remove_host_keys(staging: &Staging) -> std::io::Result<()> {
    let Ok(dir) = staging.dir(Path::new("etc/ssh"), false) else { return Ok(()) };
    for name in staging::names(dir.as_fd())? {
        if name.to_string_lossy().starts_with("ssh_host_") {
            staging::remove(dir.as_fd(), &name)?;
        }
    }
    Ok(())
}

fn make_dir(staging: &Staging, path: &str, attributes: Attributes) -> std::io::Result<()> {
    let path = Path::new(path);
    let parent = staging.dir(path.parent().unwrap_or(Path::new("")), true)?;
    let name = path.file_name().ok_or(std::io::ErrorKind::InvalidInput)?;
    staging.make_dir(parent.as_fd(), name, attributes)
}

fn root_owned(mode: u32) -> Attributes {
    Attributes { uid: 0, gid: 0, mode, mtime_s: 1_700_000_000 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, Staging) {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let staging = Staging::open(dir.path()).unwrap();
        (dir, staging)
    }

    #[test]
    fn a_bare_tree_gets_what_sessions_need() {
        let (dir, staging) = tree(&[
            ("bin/sh", ""),
            ("etc/passwd", "root:x:0:0::/root:/bin/sh"),
            ("etc/machine-id", "abc"),
            ("etc/ssh/ssh_host_rsa_key", "k"),
        ]);
        let warnings = finish(&staging, &["PATH=/go/bin:/bin".into(), "X Y=1".into()]).unwrap();
        assert!(warnings.iter().any(|w| w.starts_with("no tmux")));
        let read = |p: &str| std::fs::read_to_string(dir.path().join(p)).unwrap();
        assert!(read("etc/passwd").ends_with("/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\n"));
        assert_eq!(read("etc/machine-id"), "");
        assert!(!dir.path().join("etc/ssh/ssh_host_rsa_key").exists());
        assert!(dir.path().join("workspace").is_dir() && dir.path().join("home/agent").is_dir());
        assert!(read("etc/profile.d/ks-image-env.sh").ends_with("export PATH='/go/bin:/bin'\n"));
    }

    #[test]
    fn a_link_to_the_hosts_files_is_not_followed() {
        let (dir, staging) = tree(&[("bin/sh", "")]);
        let outside = tempfile::tempdir().unwrap();
        let victim = outside.path().join("passwd");
        std::fs::write(&victim, "host\n").unwrap();
        std::fs::create_dir(dir.path().join("etc")).unwrap();
        std::os::unix::fs::symlink(&victim, dir.path().join("etc/passwd")).unwrap();
        finish(&staging, &[]).unwrap();
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "host\n");
    }

    #[test]
    fn a_tree_without_a_shell_is_refused() {
        let (_dir, staging) = tree(&[("etc/passwd", "")]);
        assert!(matches!(finish(&staging, &[]), Err(ImageError::NotARoot { .. })));
    }
}
