//! The map of sessions against a plain one.

use super::*;

fn record(n: u8, name: &str, parent: Option<u8>) -> SessionRecord {
    let mut s = FleetState::default();
    s.apply(image("default", IMAGE));
    s.apply(create(n, name, None));
    let mut r = s.sessions[&sid(n)].clone();
    r.forked_from = parent.map(|p| ForkPoint { session: sid(p), name: "p".into(), number: 1, checkpoint: cid(p) });
    r
}

#[test]
fn a_change_after_a_clone_copies_one_record_only() {
    let mut map: SessionMap = (0..200).map(|n| record(n, &format!("s{n}"), None)).collect();
    let held = map.clone();
    map.get_mut(&sid(7)).unwrap().reason = "changed".into();
    assert_eq!((held[&sid(7)].reason.as_str(), map[&sid(7)].reason.as_str()), ("", "changed"));
    for n in (0..200).filter(|n| *n != 7) {
        assert!(std::ptr::eq(&held[&sid(n)], &map[&sid(n)]), "record {n} was copied");
    }
}

proptest! {
    #[test]
    fn it_is_a_map_that_also_finds_names_and_children(
        steps in prop::collection::vec((0u8..12, 0u8..6, prop::option::of(0u8..12), 0u8..4), 0..80),
    ) {
        let (mut map, mut model) = (SessionMap::default(), BTreeMap::new());
        for (n, name, parent, what) in steps {
            let r = record(n, &format!("n{name}"), parent);
            match what {
                0 => prop_assert_eq!(map.remove(&r.id).is_some(), model.remove(&r.id).is_some()),
                1 => if let Some(r) = map.get_mut(&r.id) {
                    r.tombstone = true;
                    model.insert(r.id, r.clone());
                },
                // Names of live sessions are unique, which the state sees to.
                _ => if !model.values().any(|x: &SessionRecord| !x.tombstone && x.name == r.name && x.id != r.id) {
                    model.insert(r.id, r.clone());
                    map.insert(r);
                },
            }
            prop_assert_eq!(map.len(), model.len());
            prop_assert!(map.keys().eq(model.keys()));
            for n in 0..6 {
                let name = format!("n{n}").parse().unwrap();
                let want = model.values().find(|x| !x.tombstone && x.name == name).map(|x| x.id);
                prop_assert_eq!(map.by_name(&name).map(|x| x.id), want);
            }
            for p in 0..12 {
                let want = model.values().filter(|x| x.forked_from.as_ref().is_some_and(|f| f.session == sid(p)));
                prop_assert!(map.children(&sid(p)).map(|x| x.id).eq(want.map(|x| x.id)));
            }
        }
        let json = serde_json::to_value(&map).unwrap();
        prop_assert_eq!(&json, &serde_json::to_value(&model).unwrap());
        let again: SessionMap = serde_json::from_value(json.clone()).unwrap();
        prop_assert_eq!(serde_json::to_value(&again).unwrap(), json);
    }
}
