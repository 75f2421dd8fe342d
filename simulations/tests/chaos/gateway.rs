//! Model calls of a real guest, while its VM, its node and the gateway die.

use crate::harness::{node, show};

#[test]
fn bought_once_and_whole_while_vm_and_node_die() {
    let Some(n) = node() else { return };
    let o = n.ks(&["demo", "replay", "--tokens", "40", "--slow", "60"]);
    assert!(o.status.success(), "{}", show(&o));
    let text = String::from_utf8_lossy(&o.stdout);
    let figures: serde_json::Value = serde_json::from_str(text.lines().last().unwrap_or_default()).expect("figures");
    // What the demonstration checks itself is said again here, so that it cannot be weakened there alone.
    for (what, wanted) in
        [("calls", 10), ("whole", 10), ("equal_to_provider", 10), ("requests_bought", 10), ("bought_most_often", 1)]
    {
        assert_eq!(figures[what], wanted, "{what}: {figures}");
    }
    assert_eq!((&figures["ledger_verified"], &figures["key_in_guest"]), (&true.into(), &false.into()), "{figures}");
    assert!(figures["ledger"]["served"].as_u64().is_some_and(|n| n >= 1), "{figures}");
}
