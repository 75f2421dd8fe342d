//! Asks git which files of a folder belong to it: tracked and untracked ones, without the ignored. git itself is the
//! judge of .gitignore; nothing here reads such a file.

use crate::failure::{Failure, Res};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What git says of a folder.
#[derive(Debug, Default)]
pub struct Listing {
    /// Files to carry, relative to the folder. A nested repository is one entry that is a folder.
    pub files: Vec<PathBuf>,
    /// Ignored files and folders.
    pub ignored: Vec<PathBuf>,
}

/// How the folder relates to git.
#[derive(Debug, PartialEq, Eq)]
pub enum Kind {
    /// git is not installed.
    NoGit,
    /// In no repository.
    Plain,
    /// In a repository with this git folder; `top` is its working tree.
    Repository { git_dir: PathBuf, top: PathBuf },
}

/// git, deaf to the caller's repository variables and silent about locale.
fn git(dir: &Path) -> Command {
    let mut c = Command::new("git");
    for k in [
        "GIT_DIR",
        "GIT_WORK_TREE",
        "GIT_INDEX_FILE",
        "GIT_PREFIX",
        "GIT_COMMON_DIR",
        "GIT_OBJECT_DIRECTORY",
        "GIT_CEILING_DIRECTORIES",
    ] {
        c.env_remove(k);
    }
    // No optional locks: a `git status` of the person's own must not meet ours.
    c.env("LC_ALL", "C").env("GIT_OPTIONAL_LOCKS", "0").arg("-C").arg(dir);
    c
}

fn failed(what: String, why: &str) -> Failure {
    Failure::local(what, why.trim(), "mend it with git, or sync a folder that is in no repository")
}

/// Runs git and returns its stdout; any failure or warning is one of ours.
fn ask(dir: &Path, extra: &[&OsStr], args: &[&str]) -> Res<Vec<u8>> {
    let what = || format!("git cannot list {}", dir.display());
    let out = git(dir).args(extra).args(args).output().map_err(|e| failed(what(), &e.to_string()))?;
    let err = String::from_utf8_lossy(&out.stderr);
    // git goes on after "unable to access '.gitignore'" as if there were none, which would carry what must not be.
    let blind = err.lines().find(|l| l.contains("unable to access") || l.contains("could not open directory"));
    if let Some(line) = blind {
        return Err(failed(what(), line));
    }
    if !out.status.success() {
        return Err(failed(what(), &err));
    }
    Ok(out.stdout)
}

/// Finds out how the folder relates to git.
pub fn kind(dir: &Path) -> Res<Kind> {
    let out = match git(dir).args(["rev-parse", "--absolute-git-dir", "--show-toplevel"]).output() {
        Ok(out) => out,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Kind::NoGit),
        Err(e) => return Err(failed(format!("cannot run git for {}", dir.display()), &e.to_string())),
    };
    let err = String::from_utf8_lossy(&out.stderr);
    if !out.status.success() {
        if err.contains("not a git repository") || err.contains("must be run in a work tree") {
            return Ok(Kind::Plain);
        }
        // "dubious ownership" and a broken repository: guessing would carry ignored files.
        return Err(failed(format!("git refuses {}", dir.display()), &err));
    }
    let mut lines = out.stdout.split(|b| *b == b'\n').map(|l| PathBuf::from(OsString::from_vec(l.to_vec())));
    match (lines.next(), lines.next()) {
        (Some(git_dir), Some(top)) => Ok(Kind::Repository { git_dir, top }),
        _ => Ok(Kind::Plain),
    }
}

/// Lists a folder that is in a repository.
pub fn list(dir: &Path) -> Res<Listing> {
    listing(dir, &[])
}

/// Lists a folder that is in none, with the same rules, through an empty repository elsewhere.
pub fn list_plain(dir: &Path) -> Res<Listing> {
    let bad = |e: &dyn std::fmt::Display| Failure::local("cannot make a temporary folder", e, "free some disk in TMPDIR");
    let temp = tempfile::tempdir().map_err(|e| bad(&e))?;
    ask(temp.path(), &[], &["init", "-q", "--template="])?;
    let git_dir = temp.path().join(".git");
    let mut d = OsString::from("--git-dir=");
    d.push(&git_dir);
    let mut w = OsString::from("--work-tree=");
    w.push(dir);
    listing(dir, &[&d, &w])
}

fn listing(dir: &Path, extra: &[&OsStr]) -> Res<Listing> {
    let files = ask(dir, extra, &["ls-files", "-z", "-c", "-o", "--exclude-standard", "--deduplicate"])?;
    let ignored = ask(dir, extra, &["ls-files", "-z", "-o", "-i", "--exclude-standard", "--directory"])?;
    Ok(Listing { files: paths(&files), ignored: paths(&ignored) })
}

/// NUL-separated paths; git marks folders with a final slash.
fn paths(out: &[u8]) -> Vec<PathBuf> {
    out.split(|b| *b == 0)
        .map(|p| p.strip_suffix(b"/").unwrap_or(p))
        .filter(|p| !p.is_empty())
        .map(|p| PathBuf::from(OsString::from_vec(p.to_vec())))
        .collect()
}

/// The history and branch of a linked working tree as a git folder of its own, in a temporary place: its `.git` file
/// points outside the folder and would be broken in the session.
pub fn detached_copy(dir: &Path) -> Res<tempfile::TempDir> {
    let temp =
        tempfile::tempdir().map_err(|e| Failure::local("cannot make a temporary folder", e, "free some disk in TMPDIR"))?;
    let to = temp.path().join("copy");
    let words: [&OsStr; 7] = [
        "clone".as_ref(),
        "-q".as_ref(),
        "--no-checkout".as_ref(),
        "--no-hardlinks".as_ref(),
        "--".as_ref(),
        dir.as_os_str(),
        to.as_os_str(),
    ];
    ask(temp.path(), &words, &[])?;
    let head = ask(dir, &[], &["rev-parse", "--verify", "-q", "HEAD"]);
    if head.is_ok() {
        ask(&to, &[], &["read-tree", "HEAD"])?;
    }
    // The clone's remote is a path of this machine; the person's own remote takes its place, if there is one.
    let url = git(dir).args(["config", "--get", "remote.origin.url"]).output();
    match url {
        Ok(o) if o.status.success() => {
            let url = String::from_utf8_lossy(&o.stdout).trim().to_owned();
            ask(&to, &[], &["remote", "set-url", "origin", &url])?;
        }
        _ => {
            ask(&to, &[], &["remote", "remove", "origin"])?;
        }
    }
    Ok(temp)
}
