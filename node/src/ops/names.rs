//! Names for sessions that nobody named.

const FIRST: [&str; 32] = [
    "quiet", "amber", "brisk", "calm", "clear", "deft", "early", "fair", "gentle", "glad", "keen", "kind", "late", "light",
    "lucid", "mellow", "mild", "neat", "noble", "plain", "polar", "proud", "quick", "rapid", "ready", "sharp", "silver",
    "steady", "still", "sunny", "vivid", "warm",
];
const SECOND: [&str; 32] = [
    "otter", "badger", "beaver", "bison", "crane", "dolphin", "eagle", "falcon", "ferret", "finch", "gecko", "heron", "ibis",
    "jackal", "koala", "lemur", "lynx", "marten", "newt", "ocelot", "osprey", "panda", "pelican", "petrel", "puffin", "raven",
    "robin", "seal", "stork", "swift", "tapir", "wren",
];

/// The name that these random bytes give; `taken` says which cannot be. A number is added when all else is taken.
pub fn pick(seed: [u8; 8], taken: impl Fn(&str) -> bool) -> String {
    let n = u64::from_le_bytes(seed);
    let at = |k: u64| {
        let k = n.wrapping_add(k);
        format!("{}-{}", FIRST[(k % 32) as usize], SECOND[(k / 32 % 32) as usize])
    };
    let plain = (0..1024).map(at).find(|name| !taken(name));
    plain.unwrap_or_else(|| (2u64..).map(|k| format!("{}-{k}", at(0))).find(|name| !taken(name)).expect("numbers do not end"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_allowed_and_avoid_the_taken_ones() {
        let first = pick([7; 8], |_| false);
        assert!(first.parse::<ks_proto::SessionName>().is_ok());
        assert_ne!(pick([7; 8], |n| n == first), first);
        let none_plain = pick([7; 8], |n| !n.ends_with("-3"));
        assert!(none_plain.ends_with("-3"));
    }
}
