//! The sample repository and the stand-in agent, written into a scratch folder to be synced into a session.

use anyhow::{Context, Result};
use std::fs;
use std::path::Path;

/// (path below the scratch folder, contents).
const FILES: &[(&str, &str)] = &[
    ("agent.py", include_str!("assets/agent.py")),
    ("repo/README.md", include_str!("assets/repo/README.md")),
    ("repo/newsletter/__init__.py", include_str!("assets/repo/newsletter/__init__.py")),
    ("repo/newsletter/archive.py", include_str!("assets/repo/newsletter/archive.py")),
    ("repo/newsletter/authors.py", include_str!("assets/repo/newsletter/authors.py")),
    ("repo/newsletter/digest.py", include_str!("assets/repo/newsletter/digest.py")),
    ("repo/newsletter/feed.py", include_str!("assets/repo/newsletter/feed.py")),
    ("repo/newsletter/headline.py", include_str!("assets/repo/newsletter/headline.py")),
    ("repo/newsletter/index.py", include_str!("assets/repo/newsletter/index.py")),
    ("repo/newsletter/limits.py", include_str!("assets/repo/newsletter/limits.py")),
    ("repo/newsletter/links.py", include_str!("assets/repo/newsletter/links.py")),
    ("repo/newsletter/mail.py", include_str!("assets/repo/newsletter/mail.py")),
    ("repo/newsletter/reading.py", include_str!("assets/repo/newsletter/reading.py")),
    ("repo/newsletter/tags.py", include_str!("assets/repo/newsletter/tags.py")),
    ("repo/newsletter/teaser.py", include_str!("assets/repo/newsletter/teaser.py")),
    ("repo/requirements.txt", include_str!("assets/repo/requirements.txt")),
    ("repo/tests/__init__.py", include_str!("assets/repo/tests/__init__.py")),
    ("repo/tests/test_archive.py", include_str!("assets/repo/tests/test_archive.py")),
    ("repo/tests/test_authors.py", include_str!("assets/repo/tests/test_authors.py")),
    ("repo/tests/test_digest.py", include_str!("assets/repo/tests/test_digest.py")),
    ("repo/tests/test_feed.py", include_str!("assets/repo/tests/test_feed.py")),
    ("repo/tests/test_headline.py", include_str!("assets/repo/tests/test_headline.py")),
    ("repo/tests/test_index.py", include_str!("assets/repo/tests/test_index.py")),
    ("repo/tests/test_limits.py", include_str!("assets/repo/tests/test_limits.py")),
    ("repo/tests/test_links.py", include_str!("assets/repo/tests/test_links.py")),
    ("repo/tests/test_mail.py", include_str!("assets/repo/tests/test_mail.py")),
    ("repo/tests/test_reading.py", include_str!("assets/repo/tests/test_reading.py")),
    ("repo/tests/test_tags.py", include_str!("assets/repo/tests/test_tags.py")),
    ("repo/tests/test_teaser.py", include_str!("assets/repo/tests/test_teaser.py")),
    ("repo/tests/test_version.py", include_str!("assets/repo/tests/test_version.py")),
    ("repo/vendor/textkit-1.4/textkit.py", include_str!("assets/repo/vendor/textkit-1.4/textkit.py")),
    ("repo/vendor/textkit-2.0/textkit.py", include_str!("assets/repo/vendor/textkit-2.0/textkit.py")),
];

/// Writes everything below `dir`: `agent.py` and `repo/`.
pub fn write(dir: &Path) -> Result<()> {
    for (path, text) in FILES {
        let to = dir.join(path);
        let parent = to.parent().context("an asset has a folder")?;
        fs::create_dir_all(parent).with_context(|| format!("making {}", parent.display()))?;
        fs::write(&to, text).with_context(|| format!("writing {}", to.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_asset_is_listed() {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/demo/assets");
        let mut todo = vec![dir.clone()];
        let mut found = 0;
        while let Some(d) = todo.pop() {
            for e in std::fs::read_dir(d).unwrap().flatten() {
                if e.path().is_dir() {
                    todo.push(e.path());
                } else {
                    let rel = e.path().strip_prefix(&dir).unwrap().display().to_string();
                    assert!(super::FILES.iter().any(|(p, _)| *p == rel), "{rel} is not in FILES");
                    found += 1;
                }
            }
        }
        assert_eq!(found, super::FILES.len());
    }
}
