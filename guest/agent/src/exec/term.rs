//! TERM: what the client has, if the guest's terminfo knows it.

use std::path::Path;

/// What an unknown TERM becomes.
pub const FALLBACK_TERM: &str = "xterm-256color";
const TERMINFO_DIRS: [&str; 3] = ["/etc/terminfo", "/lib/terminfo", "/usr/share/terminfo"];

/// `term` if terminfo has it (for the home directory `home` too), else [`FALLBACK_TERM`].
pub fn known_term(term: &str, home: &Path) -> String {
    let own = home.join(".terminfo");
    let mut dirs = TERMINFO_DIRS.iter().map(Path::new).chain([own.as_path()]);
    if dirs.any(|dir| has(dir, term)) { term.to_owned() } else { FALLBACK_TERM.to_owned() }
}

fn has(dir: &Path, term: &str) -> bool {
    let Some(first) = term.chars().next() else { return false };
    let plain = |c: char| c.is_ascii_alphanumeric() || "+-._".contains(c);
    first != '.' && term.chars().all(plain) && dir.join(first.to_string()).join(term).is_file()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_and_odd_names_fall_back() {
        let home = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(home.path().join(".terminfo/k")).unwrap();
        std::fs::write(home.path().join(".terminfo/k/ks-own"), "x").unwrap();
        assert_eq!(known_term("ks-own", home.path()), "ks-own");
        for odd in ["xterm-ghostty-of-tomorrow", "", "../../etc/passwd", "k/ks-own", "k\0"] {
            assert_eq!(known_term(odd, home.path()), FALLBACK_TERM, "{odd:?}");
        }
    }
}
