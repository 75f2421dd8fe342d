//! The recipes, embedded, and the keys under which their results are cached.
//!
//! A key is the BLAKE3 hash of everything that decides the result on our side. The distribution's own
//! updates are not part of it: `--refresh` asks for them.

pub(crate) const PACKAGES: &str = include_str!("../recipes/packages.txt");
pub(crate) const EXCLUDES: &str = include_str!("../recipes/excludes.txt");
pub(crate) const CUSTOMIZE: &str = include_str!("../recipes/customize.sh");
pub(crate) const FETCH_KERNEL: &str = include_str!("../recipes/fetch-kernel.sh");
pub(crate) const FETCH_SOURCE: &str = include_str!("../recipes/fetch-source.sh");
pub(crate) const MODULES: &str = include_str!("../recipes/modules.txt");
pub(crate) const GENERAL_CMDLINE: &str = include_str!("../recipes/general-cmdline.txt");
pub(crate) const SOFT_CMDLINE: &str = include_str!("../recipes/soft-cmdline.txt");
pub(crate) const SOFT_CONFIG: &str = include_str!("../recipes/soft-kernel.config");
pub(crate) const SOFT_EDITS: &str = include_str!("../recipes/soft-kernel.edits");

/// Debian release of the default root disk and kernels.
pub(crate) const SUITE: &str = "bookworm";
/// Times of the tree's files and of the file system, so that they say nothing about the builder: 2023-11-14.
pub(crate) const EPOCH_S: &str = "1700000000";
/// Options of mkfs.ext4. A small journal keeps checkpoints small; checksums are left to the chunks above
/// (BLAKE3), as the guest would compute them in kernel code; nothing is initialised lazily, since that
/// would dirty the disk in every session.
pub(crate) const MKFS_OPTIONS: &[&str] = &[
    "-q",
    "-F",
    "-b",
    "4096",
    "-m",
    "0",
    "-L",
    "ks-root",
    "-J",
    "size=16",
    "-U",
    "6b656570-7374-4174-8564-69736b303031",
    "-O",
    "^metadata_csum,^metadata_csum_seed,^orphan_file",
    "-E",
    "lazy_itable_init=0,lazy_journal_init=0,nodiscard,hash_seed=6b656570-7374-4174-8564-69736b303031,root_owner=0:0",
];

/// Which hosts and engines an image is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    /// Hardware KVM and QEMU: the distribution's kernel.
    General,
    /// KVM on a host without hardware virtualization: the small kernel.
    Soft,
}

impl Profile {
    /// The recommended command line; `{tsc_khz}` stands for the host's TSC rate in kHz.
    pub(crate) fn cmdline(self) -> &'static str {
        match self {
            Profile::General => GENERAL_CMDLINE.trim_ascii(),
            Profile::Soft => SOFT_CMDLINE.trim_ascii(),
        }
    }
}

/// The lines of a recipe list, without comments.
pub(crate) fn lines(text: &str) -> Vec<&str> {
    text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#')).collect()
}

/// Hex key of `parts`, each with its length, so that no two lists give the same bytes.
pub(crate) fn key(parts: &[&str]) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    hasher.finalize().to_hex()[..16].to_owned()
}

/// Key of the distribution's kernel and modules.
pub(crate) fn kernel_key() -> String {
    key(&["kernel", SUITE, FETCH_KERNEL, MODULES])
}

/// Key of the default root disk of `size_gib`.
pub(crate) fn root_key(size_gib: u32) -> String {
    let mkfs = MKFS_OPTIONS.join(" ");
    key(&["root", SUITE, EPOCH_S, PACKAGES, EXCLUDES, CUSTOMIZE, &mkfs, &size_gib.to_string()])
}

/// Key of the soft kernel.
pub(crate) fn soft_kernel_key(smp: bool) -> String {
    key(&["soft", SUITE, FETCH_SOURCE, SOFT_CONFIG, SOFT_EDITS, if smp { "smp" } else { "up" }])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_differ_where_inputs_do() {
        assert_ne!(root_key(8), root_key(16));
        assert_ne!(soft_kernel_key(true), soft_kernel_key(false));
        assert_ne!(key(&["ab", "c"]), key(&["a", "bc"]));
        assert_eq!(kernel_key(), kernel_key());
    }

    #[test]
    fn lists_and_command_lines_are_clean() {
        assert!(lines(PACKAGES).iter().all(|p| !p.contains([' ', ','])));
        assert!(lines(MODULES).contains(&"virtio_blk"));
        for profile in [Profile::General, Profile::Soft] {
            assert!(profile.cmdline().contains("tsc_early_khz={tsc_khz} tsc=reliable"));
            assert!(!profile.cmdline().contains('\n'));
        }
        assert!(Profile::Soft.cmdline().ends_with(" ks_soft"));
    }
}
