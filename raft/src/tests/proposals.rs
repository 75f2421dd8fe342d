//! A proposal is applied at most once, however often and in whatever order its copies arrive.

use super::*;

fn proposal(node: u64, boot: u64, seq: u64, done_below: u64) -> Proposal {
    Proposal { id: ProposalId { node, boot, nonce: 7 * boot, seq }, done_below, command: begin(1, 255) }
}

fn apply(s: &mut FleetState, p: Proposal) -> String {
    let index = s.applied + 1;
    word(&s.apply_proposal(Applied { index }, p))
}

fn one_session() -> FleetState {
    check(vec![(create(1, "a", None), "0.1.0")])
}

#[test]
fn a_repeated_proposal_gets_its_first_answer() {
    let mut s = one_session();
    assert_eq!(apply(&mut s, proposal(1, 1, 0, 0)), "0.1.1");
    assert_eq!(apply(&mut s, proposal(1, 1, 1, 0)), "0.1.2");
    assert_eq!(apply(&mut s, proposal(1, 1, 0, 0)), "0.1.1");
    assert_eq!(apply(&mut s, proposal(2, 1, 0, 0)), "0.1.3", "numbers are each node's own");
    assert_eq!(s.answers_kept(), 3);
    assert_eq!(apply(&mut s, proposal(1, 1, 2, 2)), "0.1.4");
    assert_eq!(s.answers_kept(), 2, "what the proposer knows is forgotten");
    assert!(apply(&mut s, proposal(1, 1, 0, 0)).contains("its answer was received"));
    assert_eq!(apply(&mut s, proposal(1, 2, 0, 0)), "0.1.5", "it was started again");
    assert!(apply(&mut s, proposal(1, 1, 3, 2)).contains("started again since"));
    let copied = Proposal { id: ProposalId { nonce: 1, ..proposal(1, 2, 0, 0).id }, ..proposal(1, 2, 0, 0) };
    assert!(apply(&mut s, copied).contains("data folder was copied"));
    assert!(apply(&mut s, proposal(1, 2, limits::WINDOW, 0)).contains("too many"));
    assert!(apply(&mut s, proposal(1, 2, 3, 4)).contains("over"), "done with itself");
    assert_eq!(s.sessions[&sid(1)].token.run, 5);
    assert_eq!((s.boot_of(1), s.boot_of(2), s.boot_of(3)), (2, 1, 0));
}

#[test]
fn a_refusal_is_an_answer_like_any_other() {
    let mut s = one_session();
    let refused = Proposal { command: begin(2, 1), ..proposal(1, 1, 0, 0) };
    assert!(apply(&mut s, refused.clone()).contains("no session"));
    s.apply(create(2, "b", None));
    assert!(apply(&mut s, refused).contains("no session"), "the first answer, though it would be another one now");
}

proptest! {
    /// Copies of twenty proposals of two nodes arrive in any order and number; proposers advance as answers come.
    #[test]
    fn copies_in_any_order_are_applied_at_most_once(arrivals in prop::collection::vec((1u64..3, 0u64..20, 0u64..6), 0..200)) {
        let mut s = one_session();
        let mut first: BTreeMap<(u64, u64), String> = BTreeMap::new();
        for (node, seq, lag) in arrivals {
            let known = (0..).take_while(|n| first.contains_key(&(node, *n))).count() as u64;
            let p = proposal(node, 1, seq, known.saturating_sub(lag).min(seq));
            let got = apply(&mut s, p);
            match first.get(&(node, seq)) {
                Some(answer) => prop_assert!(got == *answer || got.contains("its answer was received"), "{}", got),
                None => prop_assert!(first.insert((node, seq), got).is_none()),
            }
            let done: BTreeSet<&String> = first.values().collect();
            prop_assert_eq!(done.len(), first.len(), "every proposal has an answer of its own");
            prop_assert_eq!(s.sessions[&sid(1)].token.run, first.len() as u64, "applied once each");
        }
        let again: FleetState = serde_json::from_str(&serde_json::to_string(&s).unwrap()).unwrap();
        prop_assert_eq!(again.answers_kept(), s.answers_kept(), "answers are part of a snapshot");
    }
}
