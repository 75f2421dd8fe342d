//! How nodes are named and listed.

use crate::failure::{Failure, Res};
use crate::human;
use crate::table::{Align, Table, clean};
use ks_proto::fleet::{FleetInfo, NodeRole, NodeState, NodeView};

/// Checks that `text` can be a node's name or number; it is then safe inside a URL path.
pub fn check(text: &str) -> Res<String> {
    let ok = (1..=63).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        && text != "."
        && text != "..";
    if ok {
        return Ok(text.to_owned());
    }
    Err(Failure::usage(
        format!("{text:?} is no node"),
        "a node's name has 1-63 letters, digits, '-', '_' and '.'",
        "list the nodes with `ks node ls`",
    ))
}

/// The node of this name or number.
pub fn find<'a>(info: &'a FleetInfo, text: &str) -> Res<&'a NodeView> {
    let by_number = || text.trim_start_matches('#').parse::<u64>().ok();
    let found = info.nodes.iter().find(|n| n.name == text).or_else(|| info.nodes.iter().find(|n| Some(n.number) == by_number()));
    found.ok_or_else(|| {
        let all: Vec<&str> = info.nodes.iter().map(|n| n.name.as_str()).collect();
        Failure::new("not-found", format!("no node {text}"), format!("there are {}", all.join(", ")), "see `ks node ls`")
    })
}

/// The nodes as a table.
pub fn table(info: &FleetInfo) -> Table {
    let mut t = Table::new(&[
        ("NODE", Align::Left),
        ("#", Align::Right),
        ("STATE", Align::Left),
        ("ROLE", Align::Left),
        ("SEEN", Align::Left),
        ("SESSIONS", Align::Right),
        ("FREE-MEM", Align::Right),
        ("FREE-DISK", Align::Right),
        ("LOAD", Align::Right),
        ("API", Align::Left),
    ]);
    for n in &info.nodes {
        t.row(vec![
            if n.number == info.me { format!("{}*", n.name) } else { n.name.clone() },
            n.number.to_string(),
            n.state.to_string(),
            role(n),
            seen(n, info.me),
            n.sessions.to_string(),
            some_mib(n.mem_free_mib),
            some_mib(n.disk_free_mib),
            if n.live { format!("{:.1}", n.load) } else { "-".into() },
            n.api.first().map(|u| u.trim_start_matches("https://").to_owned()).unwrap_or_default(),
        ]);
    }
    t
}

fn some_mib(mib: u64) -> String {
    if mib == 0 { "-".into() } else { human::mib(mib << 20) }
}

/// Its part in consensus.
pub fn role(n: &NodeView) -> String {
    match (n.leader, n.role, n.state) {
        (_, _, NodeState::Gone) => "-".into(),
        (true, _, _) => "leader".into(),
        (false, NodeRole::Voter, _) => "voter".into(),
        (false, NodeRole::Learner, _) => "learner".into(),
    }
}

/// When it was last heard of.
pub fn seen(n: &NodeView, me: u64) -> String {
    match n.seen_ms_ago {
        _ if n.number == me => "here".into(),
        _ if n.state == NodeState::Gone => "-".into(),
        Some(_) if n.live => "live".into(),
        Some(ms) => format!("{} ago", human::millis(ms)),
        None if n.live => "live".into(),
        None => "never".into(),
    }
}

/// One node in full.
pub fn facts(n: &NodeView, me: u64, now_ms: u64) -> String {
    let list = |l: &[String]| l.iter().map(|s| clean(s)).collect::<Vec<_>>().join(", ");
    let all: Vec<(&str, String)> = vec![
        ("name", clean(&n.name)),
        ("number", n.number.to_string()),
        ("peer id", clean(&n.peer_id)),
        ("state", n.state.to_string()),
        ("role", role(n)),
        ("seen", seen(n, me)),
        ("round trip", n.rtt_us.map_or("-".into(), human::micros)),
        ("api", list(&n.api)),
        ("addresses", list(&n.addrs)),
        ("domain", clean(&n.domain)),
        ("sessions", n.sessions.to_string()),
        ("memory", format!("{} free of {}", some_mib(n.mem_free_mib), some_mib(n.mem_total_mib))),
        ("disk", format!("{} free", some_mib(n.disk_free_mib))),
        ("cpus", format!("{}, load {:.1}", n.cpus, n.load)),
        ("profiles", list(&n.profiles)),
        ("version", clean(&n.version)),
        ("incarnation", clean(&n.incarnation)),
        (
            "joined",
            if n.joined_unix_ms == 0 {
                "-".into()
            } else {
                format!("{} UTC ({} ago)", human::utc(n.joined_unix_ms), human::age(now_ms, n.joined_unix_ms))
            },
        ),
    ];
    all.iter().map(|(k, v)| format!("{k:<12} {v}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_found_by_name_before_number() {
        let view = |number, name: &str| NodeView { number, name: name.into(), ..NodeView::default() };
        let info = FleetInfo { nodes: vec![view(1, "n1"), view(2, "1")], ..FleetInfo::default() };
        assert_eq!(
            (find(&info, "n1").unwrap().number, find(&info, "1").unwrap().number, find(&info, "#1").unwrap().number),
            (1, 2, 1)
        );
        assert!(find(&info, "n9").unwrap_err().error.why.contains("n1, 1"));
        for bad in ["", "..", "a/b", "a b", "é"] {
            assert_eq!(check(bad).unwrap_err().exit, 2, "{bad}");
        }
    }
}
