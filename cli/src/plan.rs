//! What `--sync` is going to carry, in numbers and as a sentence. Pure.

use crate::human;
use serde::Serialize;

/// Something that .gitignore keeps at home.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Skipped {
    /// Path below the folder, without a final slash.
    pub path: String,
    /// Its size.
    pub bytes: u64,
    /// False when counting was given up: it is larger.
    pub counted: bool,
}

/// The plan for one folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// The folder as it was named.
    pub from: String,
    /// Where it lands in the session.
    pub to: String,
    /// Files and links carried.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// What stays here by .gitignore.
    pub skipped: Vec<Skipped>,
    /// Anything else worth saying.
    pub notes: Vec<String>,
}

/// Skipped things named in the sentence; the rest is summed.
const NAMED_MAX: usize = 3;

impl Plan {
    /// `./ -> /workspace/repo  1,204 files 18 MiB (skipped node_modules 812 MiB by .gitignore)`.
    pub fn sentence(&self) -> String {
        let from = if self.from.ends_with('/') { self.from.clone() } else { format!("{}/", self.from) };
        let mut out = format!(
            "{} -> {}  {} {}",
            crate::table::clean(&from),
            self.to,
            human::count(self.files, "file"),
            human::mib(self.bytes)
        );
        let mut by_size = self.skipped.clone();
        by_size.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.path.cmp(&b.path)));
        if by_size.is_empty() {
            return out;
        }
        let size = |b: u64, counted: bool| format!("{}{}", if counted { "" } else { "over " }, human::mib(b));
        let mut parts: Vec<String> = by_size
            .iter()
            .take(NAMED_MAX)
            .map(|s| format!("{} {}", crate::table::clean(&s.path), size(s.bytes, s.counted)))
            .collect();
        let rest = by_size.get(NAMED_MAX..).unwrap_or_default();
        if !rest.is_empty() {
            let bytes = rest.iter().map(|s| s.bytes).sum();
            parts.push(format!("{} more {}", rest.len(), size(bytes, rest.iter().all(|s| s.counted))));
        }
        out.push_str(&format!(" (skipped {} by .gitignore)", parts.join(", ")));
        out
    }
}

/// The name under /workspace for a folder's last path component: what would be awkward in a path becomes `_`.
pub fn workspace_name(last: Option<&str>) -> String {
    let name: String = last.unwrap_or_default().chars().map(|c| if c == '/' || c.is_control() { '_' } else { c }).collect();
    if name.is_empty() || name == "." || name == ".." { "root".into() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn plan(skipped: Vec<(&str, u64, bool)>) -> Plan {
        Plan {
            from: ".".into(),
            to: "/workspace/repo".into(),
            files: 1204,
            bytes: 18 * MIB,
            skipped: skipped.into_iter().map(|(p, bytes, counted)| Skipped { path: p.into(), bytes, counted }).collect(),
            notes: vec![],
        }
    }

    #[test]
    fn the_sentence_names_the_largest_and_sums_the_rest() {
        assert_eq!(plan(vec![]).sentence(), "./ -> /workspace/repo  1,204 files 18 MiB");
        assert_eq!(
            plan(vec![("node_modules", 812 * MIB, true)]).sentence(),
            "./ -> /workspace/repo  1,204 files 18 MiB (skipped node_modules 812 MiB by .gitignore)"
        );
        let many = vec![("a", MIB, true), ("b", 40 * MIB, false), ("c", 20 * MIB, true), ("d", 30 * MIB, true), ("e", MIB, true)];
        assert_eq!(
            plan(many).sentence(),
            "./ -> /workspace/repo  1,204 files 18 MiB (skipped b over 40 MiB, d 30 MiB, c 20 MiB, 2 more 2.0 MiB by .gitignore)"
        );
    }

    #[test]
    fn names_in_the_workspace() {
        assert_eq!(workspace_name(Some("repo")), "repo");
        assert_eq!(workspace_name(Some("a\nb")), "a_b");
        assert_eq!(workspace_name(None), "root");
    }
}
