//! Walks the folders of `--sync` and decides nothing: git's list, plus `.git`, plus what was included by name.

use super::git::{self, Kind};
use crate::failure::{Failure, Res};
use crate::plan::{Plan, Skipped, workspace_name};
use std::collections::BTreeMap;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

/// Counting what is skipped takes no longer than this.
const COUNT_FOR: Duration = Duration::from_secs(2);
/// Repositories inside repositories, at most so deep.
const NESTED_MAX: u32 = 16;

/// One thing to carry.
#[derive(Debug, Clone)]
pub struct Item {
    /// Where its bytes are here.
    pub source: PathBuf,
    /// Bytes, for files.
    pub bytes: u64,
}

/// A folder, ready to be carried.
#[derive(Debug)]
pub struct Carry {
    /// For the person.
    pub plan: Plan,
    /// Path below the target, to what is there. Ordered, so parents come first.
    pub items: BTreeMap<PathBuf, Item>,
    /// Kept until the upload is over.
    pub _temp: Vec<tempfile::TempDir>,
}

/// Plans one folder.
pub fn plan(named: &Path, include: &[PathBuf]) -> Res<Carry> {
    let bad =
        |e: io::Error| Failure::usage(format!("cannot sync {}", named.display()), e.to_string(), "name a folder that exists");
    let dir = named.canonicalize().map_err(bad)?;
    if !dir.is_dir() {
        return Err(Failure::usage(
            format!("cannot sync {}", named.display()),
            "it is no folder",
            "name a folder; single files go with `ks cp`",
        ));
    }
    let name = workspace_name(dir.file_name().and_then(|n| n.to_str()));
    let mut w = Walk::default();
    w.folder(&dir, Path::new(""), 0)?;
    for inc in include {
        w.included(&dir, inc)?;
    }
    let plan = Plan {
        from: named.display().to_string(),
        to: format!("/workspace/{name}"),
        files: w.items.len() as u64,
        bytes: w.items.values().map(|i| i.bytes).sum(),
        skipped: w.count_skipped(),
        notes: w.notes,
    };
    Ok(Carry { plan, items: w.items, _temp: w.temp })
}

/// Adds a whole folder under `to`, ignored files too: it was named.
pub fn whole(dir: &Path, to: &Path, items: &mut BTreeMap<PathBuf, Item>) -> Res<()> {
    let dir = dir.canonicalize().map_err(|e| unreadable(dir, &e))?;
    let mut w = Walk::default();
    w.tree(&dir, to, &|_| false)?;
    items.append(&mut w.items);
    Ok(())
}

#[derive(Default)]
struct Walk {
    items: BTreeMap<PathBuf, Item>,
    ignored: Vec<(PathBuf, PathBuf)>,
    notes: Vec<String>,
    temp: Vec<tempfile::TempDir>,
}

impl Walk {
    /// Adds a folder and the repositories inside it. `to` is its place below the target.
    fn folder(&mut self, dir: &Path, to: &Path, depth: u32) -> Res<()> {
        if depth > NESTED_MAX {
            return Err(Failure::local(
                format!("cannot sync {}", dir.display()),
                "repositories are nested too deeply",
                "sync a folder further down",
            ));
        }
        let listing = match git::kind(dir)? {
            Kind::NoGit => {
                self.notes.push("git is not installed here: .gitignore was not applied".into());
                return self.everything(dir, to);
            }
            Kind::Plain => git::list_plain(dir)?,
            Kind::Repository { git_dir, top } => {
                if top == dir {
                    self.git_folder(dir, &git_dir, to)?;
                } else {
                    self.notes.push(format!(
                        "{} is inside a repository ({}), whose history stays here",
                        dir.display(),
                        top.display()
                    ));
                }
                git::list(dir)?
            }
        };
        for file in &listing.files {
            let source = dir.join(file);
            match source.symlink_metadata() {
                Ok(m) if m.is_dir() => self.folder(&source, &to.join(file), depth + 1)?,
                Ok(m) => self.one(source, to.join(file), &m),
                // Deleted but still tracked.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(unreadable(&source, &e)),
            }
        }
        self.ignored.extend(listing.ignored.into_iter().map(|p| (dir.join(&p), to.join(p))));
        Ok(())
    }

    /// The repository itself: its folder as it is (without locks), or a copy of a linked working tree's history.
    fn git_folder(&mut self, dir: &Path, git_dir: &Path, to: &Path) -> Res<()> {
        let dot = dir.join(".git");
        let meta = dot.symlink_metadata().map_err(|e| unreadable(&dot, &e))?;
        if meta.is_dir() {
            return self.tree(&dot, &to.join(".git"), &|p| p.extension().is_some_and(|x| x == "lock"));
        }
        let inside = self.items.keys().any(|k| k.starts_with(".git")) && !to.as_os_str().is_empty();
        if inside && meta.is_file() {
            // A submodule: its git folder is in the outer one, which is carried.
            self.one(dot, to.join(".git"), &meta);
            return Ok(());
        }
        self.notes
            .push(format!("{} is a linked working tree: its commits are carried as a repository of their own", dir.display()));
        let copy = git::detached_copy(dir).map_err(|mut f| {
            f.error.what = format!("cannot carry {}, a linked working tree of {}", dir.display(), git_dir.display());
            f
        })?;
        self.tree(&copy.path().join("copy/.git"), &to.join(".git"), &|_| false)?;
        self.temp.push(copy);
        Ok(())
    }

    fn everything(&mut self, dir: &Path, to: &Path) -> Res<()> {
        self.tree(dir, to, &|_| false)
    }

    fn included(&mut self, dir: &Path, inc: &Path) -> Res<()> {
        let plain = inc.components().all(|c| matches!(c, Component::Normal(_) | Component::CurDir));
        let source = dir.join(inc);
        let meta = source.symlink_metadata();
        let (true, Ok(meta)) = (plain, meta) else {
            return Err(Failure::usage(
                format!("cannot include {}", inc.display()),
                format!("it is not below {}", dir.display()),
                "write --include with a path below the synced folder",
            ));
        };
        if meta.is_dir() {
            self.tree(&source, inc, &|_| false)?
        } else {
            self.one(source.clone(), inc.into(), &meta)
        }
        self.ignored.retain(|(s, _)| !s.starts_with(&source));
        Ok(())
    }

    fn tree(&mut self, dir: &Path, to: &Path, leave: &dyn Fn(&Path) -> bool) -> Res<()> {
        let mut todo = vec![(dir.to_path_buf(), to.to_path_buf())];
        while let Some((d, t)) = todo.pop() {
            let meta = d.symlink_metadata().map_err(|e| unreadable(&d, &e))?;
            // Empty folders matter (git's refs/), so folders are entries here.
            if !t.as_os_str().is_empty() {
                self.items.insert(t.clone(), Item { source: d.clone(), bytes: 0 });
            }
            debug_assert!(meta.is_dir(), "only folders are walked");
            for e in std::fs::read_dir(&d).map_err(|e| unreadable(&d, &e))? {
                let e = e.map_err(|e| unreadable(&d, &e))?;
                let (source, at) = (e.path(), t.join(e.file_name()));
                if leave(&source) {
                    continue;
                }
                match source.symlink_metadata() {
                    Ok(m) if m.is_dir() => todo.push((source, at)),
                    Ok(m) => self.one(source, at, &m),
                    Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                    Err(e) => return Err(unreadable(&source, &e)),
                }
            }
        }
        Ok(())
    }

    fn one(&mut self, source: PathBuf, to: PathBuf, meta: &Metadata) {
        let t = meta.file_type();
        if t.is_socket() || t.is_fifo() || t.is_block_device() || t.is_char_device() {
            self.notes.push(format!("{} is no file, folder or link: left out", source.display()));
            return;
        }
        let bytes = if t.is_file() { meta.len().min(meta.blocks().saturating_mul(512).max(1)) } else { 0 };
        let bytes = if meta.len() == 0 { 0 } else { bytes };
        self.items.insert(to, Item { source, bytes });
    }

    fn count_skipped(&self) -> Vec<Skipped> {
        let until = Instant::now() + COUNT_FOR;
        let one = |(source, to): &(PathBuf, PathBuf)| {
            let (bytes, counted) = size_of(source, until);
            Skipped { path: to.display().to_string(), bytes, counted }
        };
        self.ignored.iter().map(one).collect()
    }
}

fn unreadable(path: &Path, e: &io::Error) -> Failure {
    Failure::local(format!("cannot read {}", path.display()), e, "make it readable, or have .gitignore skip it")
}

/// Bytes below a path, and whether there was time to count them all.
fn size_of(path: &Path, until: Instant) -> (u64, bool) {
    let mut todo = vec![path.to_path_buf()];
    let mut bytes = 0;
    while let Some(p) = todo.pop() {
        if Instant::now() > until {
            return (bytes, false);
        }
        // What cannot be read is not carried either; its size is not worth an error.
        let Ok(m) = p.symlink_metadata() else { continue };
        if m.is_dir() {
            todo.extend(std::fs::read_dir(&p).into_iter().flatten().flatten().map(|e| e.path()));
        } else {
            bytes += m.len().min(m.blocks().saturating_mul(512));
        }
    }
    (bytes, true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn sh(dir: &Path, script: &str) {
        let out = Command::new("sh")
            .args(["-euc", script])
            .current_dir(dir)
            .envs([
                ("GIT_AUTHOR_NAME", "a"),
                ("GIT_AUTHOR_EMAIL", "a@b"),
                ("GIT_COMMITTER_NAME", "a"),
                ("GIT_COMMITTER_EMAIL", "a@b"),
            ])
            .output()
            .unwrap();
        assert!(out.status.success(), "{script}: {}", String::from_utf8_lossy(&out.stderr));
    }
    fn names(c: &Carry) -> Vec<String> {
        c.items.keys().map(|k| k.display().to_string()).filter(|k| !k.starts_with(".git/") && k != ".git").collect()
    }

    #[test]
    fn git_decides_with_nested_negated_ignores_and_git_itself_comes_along() {
        let t = tempfile::tempdir().unwrap();
        sh(
            t.path(),
            "git init -q . ; mkdir -p node_modules/x src/gen; echo 1 > node_modules/x/a; head -c 3000000 /dev/zero | tr '\\0' x > node_modules/big
             printf 'node_modules\\n*.log\\n' > .gitignore; printf '!keep.log\\ngen\\n' > src/.gitignore
             echo a > src/keep.log; echo b > src/drop.log; echo c > src/gen/o; echo d > tracked; echo e > gone
             git add . ; git commit -qm x; rm gone; echo u > untracked; ln -s /etc/passwd link; touch .git/index.lock",
        );
        let c = plan(t.path(), &[]).unwrap();
        assert_eq!(names(&c), [".gitignore", "link", "src/.gitignore", "src/keep.log", "tracked", "untracked"]);
        let has = |p: &str| c.items.contains_key(Path::new(p));
        assert!(has(".git/HEAD") && has(".git/refs/tags"), "the repository is carried, empty folders too");
        assert!(!has(".git/index.lock"), "locks are not");
        let skipped: Vec<_> = c.plan.skipped.iter().map(|s| s.path.as_str()).collect();
        assert_eq!(skipped, ["node_modules", "src/drop.log", "src/gen"]);
        assert!(c.plan.skipped[0].bytes > 2_900_000, "{:?}", c.plan.skipped);

        let c = plan(t.path(), &[PathBuf::from("node_modules/x")]).unwrap();
        assert!(names(&c).contains(&"node_modules/x/a".to_owned()));
        assert!(plan(t.path(), &[PathBuf::from("../x")]).is_err());
    }

    #[test]
    fn the_list_agrees_with_check_ignore() {
        let t = tempfile::tempdir().unwrap();
        sh(
            t.path(),
            "git init -q .; printf '/a/*\\n!/a/b\\n**/tmp\\n\\\\#x\\n*.o\\n!important.o\\n' > .gitignore
             mkdir -p a/b/c a/d q/tmp w/tmp; for f in a/1 a/b/2 a/b/c/3 a/d/4 q/tmp/5 w/tmp/6 '#x' 7.o important.o w/8.o; do echo z > \"$f\"; done",
        );
        let c = plan(t.path(), &[]).unwrap();
        let all = ["a/1", "a/b/2", "a/b/c/3", "a/d/4", "q/tmp/5", "w/tmp/6", "#x", "7.o", "important.o", "w/8.o"];
        for f in all {
            let ignored = Command::new("git").args(["check-ignore", "-q", f]).current_dir(t.path()).status().unwrap().success();
            assert_eq!(!ignored, c.items.contains_key(Path::new(f)), "{f}");
        }
    }

    #[test]
    fn a_folder_in_no_repository_obeys_its_gitignore_too() {
        let t = tempfile::tempdir().unwrap();
        sh(t.path(), "echo skip > .gitignore; mkdir skip sub; echo 1 > skip/a; echo 2 > sub/b; mkfifo pipe");
        let c = plan(t.path(), &[]).unwrap();
        assert_eq!(names(&c), [".gitignore", "sub/b"]);
        assert_eq!(c.plan.skipped.len(), 1);
    }

    #[test]
    fn an_ignore_file_that_cannot_be_read_is_an_error() {
        let t = tempfile::tempdir().unwrap();
        // A folder in its place is unreadable even for root.
        sh(t.path(), "git init -q .; mkdir .gitignore sub; echo 1 > sub/a");
        let e = plan(t.path(), &[]);
        match e {
            Err(f) => assert!(f.error.why.contains(".gitignore"), "{f:?}"),
            // git versions that do not warn treat it as absent and list everything; then nothing was left out wrongly.
            Ok(c) => assert!(names(&c).contains(&"sub/a".to_owned())),
        }
    }

    #[test]
    fn linked_working_trees_and_nested_repositories_are_whole() {
        let t = tempfile::tempdir().unwrap();
        sh(
            t.path(),
            "git init -q main; cd main; echo 1 > f; git add f; git commit -qm one; git worktree add -q ../side -b side
             cd ../side; echo 2 > f; echo n > new; git init -q inner; echo i > inner/file",
        );
        let c = plan(&t.path().join("side"), &[]).unwrap();
        assert_eq!(
            names(&c),
            ["f", "inner/.git", "inner/file", "new"]
                .iter()
                .map(|s| (*s).to_owned())
                .chain(names(&c).into_iter().filter(|n| n.starts_with("inner/.git/")))
                .collect::<std::collections::BTreeSet<_>>()
                .into_iter()
                .collect::<Vec<_>>()
        );
        let out = t.path().join("out");
        for (to, item) in &c.items {
            let at = out.join(to);
            if item.source.is_dir() {
                std::fs::create_dir_all(&at).unwrap();
            } else {
                std::fs::create_dir_all(at.parent().unwrap()).unwrap();
                std::fs::copy(&item.source, &at).unwrap();
            }
        }
        sh(
            &out,
            "git fsck --no-progress; test \"$(git branch --show-current)\" = side; test \"$(git status --porcelain f)\" = ' M f'; git log -1 --format=%s | grep -qx one",
        );
    }
}
