//! Applies `recipes/soft-kernel.edits` to a kernel source tree.
//!
//! An edit names a file and one whole line of it, which must occur exactly once, and puts our own lines
//! before it. All edits are checked before the first file is written.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// Why the edits do not fit a source tree.
#[derive(Debug, thiserror::Error)]
pub enum EditError {
    /// The recipe itself is malformed.
    #[error("line {line} of the recipe is outside of a @file and @before")]
    Recipe { line: usize },
    /// A file is missing or cannot be written.
    #[error("cannot edit {}", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The anchor was not found exactly once.
    #[error("{} has the line `{anchor}` {count} times instead of once; the kernel release has changed there, review the recipe", path.display())]
    Anchor { path: PathBuf, anchor: String, count: usize },
}

struct Edit<'a> {
    file: &'a str,
    anchor: &'a str,
    lines: Vec<&'a str>,
}

/// Applies `recipe` to the tree at `source`.
pub(crate) fn apply(source: &Path, recipe: &str) -> Result<(), EditError> {
    let mut changed: BTreeMap<PathBuf, Vec<String>> = BTreeMap::new();
    for edit in parse(recipe)? {
        let path = source.join(edit.file);
        if !changed.contains_key(&path) {
            let text = std::fs::read_to_string(&path).map_err(|source| EditError::File { path: path.clone(), source })?;
            changed.insert(path.clone(), text.split('\n').map(str::to_owned).collect());
        }
        let Some(lines) = changed.get_mut(&path) else { continue };
        let at: Vec<usize> = lines.iter().enumerate().filter(|(_, l)| l.trim() == edit.anchor).map(|(i, _)| i).collect();
        let [at] = at[..] else {
            return Err(EditError::Anchor { path, anchor: edit.anchor.to_owned(), count: at.len() });
        };
        lines.splice(at..at, edit.lines.iter().map(|l| (*l).to_owned()));
    }
    for (path, lines) in changed {
        std::fs::write(&path, lines.join("\n")).map_err(|source| EditError::File { path, source })?;
    }
    Ok(())
}

fn parse(recipe: &str) -> Result<Vec<Edit<'_>>, EditError> {
    let mut edits: Vec<Edit<'_>> = Vec::new();
    let mut file = None;
    let mut in_edit = false;
    for (i, line) in recipe.lines().enumerate() {
        if let Some(name) = line.strip_prefix("@file ") {
            (file, in_edit) = (Some(name.trim()), false);
        } else if let Some(anchor) = line.strip_prefix("@before ") {
            let file = file.ok_or(EditError::Recipe { line: i + 1 })?;
            edits.push(Edit { file, anchor: anchor.trim(), lines: Vec::new() });
            in_edit = true;
        } else if let Some(edit) = edits.last_mut().filter(|_| in_edit) {
            edit.lines.push(line);
        } else if !line.is_empty() && !line.starts_with('#') {
            return Err(EditError::Recipe { line: i + 1 });
        }
    }
    for edit in &mut edits {
        while edit.lines.last().is_some_and(|l| l.is_empty()) {
            edit.lines.pop();
        }
    }
    Ok(edits)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECIPE: &str = "# c\n\n@file a.c\n@before call();\n\tif (x)\n\n@before end();\none\n\ntwo\n";

    fn tree(text: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.c"), text).unwrap();
        dir
    }

    #[test]
    fn lines_go_before_their_anchors() {
        let dir = tree("{\n\tcall();\n\tend();\n}\n");
        apply(dir.path(), RECIPE).unwrap();
        let text = std::fs::read_to_string(dir.path().join("a.c")).unwrap();
        assert_eq!(text, "{\n\tif (x)\n\tcall();\none\n\ntwo\n\tend();\n}\n");
    }

    #[test]
    fn a_missing_or_double_anchor_changes_nothing() {
        for text in ["call();\n", "call();\nend();\nend();\n"] {
            let dir = tree(text);
            assert!(matches!(apply(dir.path(), RECIPE), Err(EditError::Anchor { .. })));
            assert_eq!(std::fs::read_to_string(dir.path().join("a.c")).unwrap(), text);
        }
    }

    #[test]
    fn our_recipe_parses() {
        let edits = parse(crate::recipe::SOFT_EDITS).unwrap();
        assert_eq!(edits.len(), 4);
        assert!(edits.iter().all(|e| !e.lines.is_empty()));
    }
}
