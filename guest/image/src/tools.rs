//! Runs the host's own programs (mmdebstrap, mkfs.ext4, ...) and reports their failures readably.
//!
//! They are told to end when this process dies, however it dies; nothing they write is kept unless they succeed.

use std::{
    ffi::OsStr,
    path::PathBuf,
    process::{Command, Stdio},
};

use crate::error::ImageError;

/// A host program and the Debian package that has it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tool {
    pub(crate) program: &'static str,
    pub(crate) package: &'static str,
}

const fn tool(program: &'static str, package: &'static str) -> Tool {
    Tool { program, package }
}

/// For a root disk from packages.
pub(crate) const FOR_DEBIAN: &[Tool] =
    &[tool("mmdebstrap", "mmdebstrap"), tool("dpkg-deb", "dpkg"), tool("mkfs.ext4", "e2fsprogs")];
/// For any root disk.
pub(crate) const FOR_DISK: &[Tool] = &[tool("mkfs.ext4", "e2fsprogs"), tool("cp", "coreutils")];
/// For the distribution's kernel.
pub(crate) const FOR_KERNEL_PACKAGE: &[Tool] = &[tool("mmdebstrap", "mmdebstrap"), tool("dpkg-deb", "dpkg")];
/// For compiling the soft kernel.
pub(crate) const FOR_COMPILING: &[Tool] = &[
    tool("mmdebstrap", "mmdebstrap"),
    tool("dpkg-deb", "dpkg"),
    tool("tar", "tar"),
    tool("xz", "xz-utils"),
    tool("make", "make"),
    tool("gcc", "gcc"),
    tool("flex", "flex"),
    tool("bison", "bison"),
    tool("bc", "bc"),
];

/// For working without root.
const FOR_NAMESPACE: &[Tool] = &[tool("unshare", "util-linux"), tool("newuidmap", "uidmap"), tool("newgidmap", "uidmap")];

const TAIL_LINES: usize = 15;

/// Fails with the list of packages to install when any of `tools` is missing.
pub(crate) fn require(tools: &[Tool]) -> Result<(), ImageError> {
    let missing: Vec<Tool> = tools.iter().copied().filter(|t| find(t.program).is_none()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let mut packages: Vec<&str> = missing.iter().map(|t| t.package).collect();
    packages.sort_unstable();
    packages.dedup();
    let programs: Vec<&str> = missing.iter().map(|t| t.program).collect();
    Err(ImageError::MissingTools { programs: programs.join(", "), packages: packages.join(" ") })
}

/// Fails when this host lacks the programs that map a user's subordinate ids into a namespace, or the user has no such ids.
pub fn require_user_namespaces() -> Result<(), ImageError> {
    require(FOR_NAMESPACE)?;
    let uid = rustix::process::geteuid().as_raw();
    let name = user_name(&std::fs::read_to_string("/etc/passwd").unwrap_or_default(), uid);
    for file in ["/etc/subuid", "/etc/subgid"] {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        if !has_ids(&text, uid, name.as_deref()) {
            let who = name.clone().unwrap_or_else(|| uid.to_string());
            let why = format!("{file} has no line for {who} (for example: {who}:100000:65536)");
            return Err(ImageError::NeedsRoot { why });
        }
    }
    Ok(())
}

/// The name of `uid` in a passwd file.
fn user_name(passwd: &str, uid: u32) -> Option<String> {
    let mut rows = passwd.lines().map(|l| l.split(':').collect::<Vec<_>>());
    rows.find(|r| r.get(2).and_then(|u| u.parse().ok()) == Some(uid)).map(|r| r[0].to_owned())
}

/// Does a subuid or subgid file give ids to this user, by name or by number?
fn has_ids(text: &str, uid: u32, name: Option<&str>) -> bool {
    let number = uid.to_string();
    text.lines().filter_map(|l| l.split_once(':')).any(|(who, _)| who == number || Some(who) == name)
}

/// Where `program` is, in PATH or the system directories that users often lack.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from))
        .map(|dir| dir.join(program))
        .find(|file| file.is_file())
}

/// A command for [`run`], with a plain locale.
pub(crate) fn command(program: &str) -> Command {
    let mut command = match find(program) {
        Some(path) => Command::new(path),
        None => Command::new(program),
    };
    command.env("LC_ALL", "C.UTF-8");
    command
}

/// Runs to the end, without input; standard output. On failure the error holds the last lines of both streams.
pub(crate) fn run(command: &Command, doing: &str) -> Result<String, ImageError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let failed =
        |status: String, tail: String| ImageError::ToolFailed { program: program.clone(), doing: doing.to_owned(), status, tail };
    let output = tied_to_us(command).output().map_err(|e| failed(e.to_string(), String::new()))?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(stdout);
    }
    let all = stdout + &String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = all.lines().collect();
    let tail = lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n");
    Err(failed(output.status.to_string(), tail))
}

/// The same command with SIGTERM for the time of our death, where the host has setpriv (util-linux).
fn tied_to_us(command: &Command) -> Command {
    let mut tied = match find("setpriv") {
        Some(setpriv) => {
            let mut tied = Command::new(setpriv);
            tied.args(["--pdeathsig", "TERM", "--"]).arg(command.get_program());
            tied
        }
        None => Command::new(command.get_program()),
    };
    tied.args(command.get_args()).stdin(Stdio::null());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => tied.env(name, value),
            None => tied.env_remove(name),
        };
    }
    tied
}

/// `text` quoted for a POSIX shell.
pub(crate) fn shell_quote(text: &OsStr) -> String {
    format!("'{}'", text.to_string_lossy().replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subordinate_ids_are_found_by_name_or_number() {
        let passwd = "root:x:0:0::/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\n";
        assert_eq!(user_name(passwd, 1000).as_deref(), Some("ann"));
        assert_eq!(user_name(passwd, 7), None);
        assert!(has_ids("ann:100000:65536\n", 1000, Some("ann")) && has_ids("1000:1:1", 1000, None));
        assert!(!has_ids("annette:100000:65536\n", 1000, Some("ann")) && !has_ids("", 1000, Some("ann")));
    }

    #[test]
    fn missing_tools_name_their_packages() {
        let error = require(&[tool("ks-no-such-a", "pkg-a"), tool("ks-no-such-b", "pkg-a"), tool("sh", "dash")]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "missing host programs: ks-no-such-a, ks-no-such-b; install them with: apt-get install pkg-a"
        );
    }

    #[test]
    fn a_failing_tool_shows_its_last_output() {
        let error = run(command("sh").arg("-c").arg("echo why >&2; exit 3"), "testing").unwrap_err();
        assert!(error.to_string().contains("while testing") && error.to_string().contains("why"), "{error}");
    }

    #[test]
    fn quoting() {
        assert_eq!(shell_quote(OsStr::new("a'b c")), "'a'\\''b c'");
    }
}
