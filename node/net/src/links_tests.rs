//! Inputs to expected effects of the link machine.

use super::*;

fn peers() -> (PeerId, PeerId) {
    let (a, b) = (PeerId::random(), PeerId::random());
    if a < b { (a, b) } else { (b, a) }
}

fn address(port: u16) -> Multiaddr {
    crate::control_addr(([127, 0, 0, 1], port).into())
}

fn id(n: usize) -> ConnectionId {
    ConnectionId::new_unchecked(n)
}

fn one(peer: PeerId) -> Input {
    Input::Members(BTreeMap::from([(peer, vec![address(7)])]))
}

fn dials(effects: &[Effect]) -> usize {
    effects.iter().filter(|effect| matches!(effect, Effect::Dial { .. })).count()
}

#[test]
fn the_smaller_id_dials_first() {
    let (small, great) = peers();
    let timing = LinkTiming::default();
    let mut links = Links::new(small, timing, 1);
    let dial = Effect::Dial { peer: great, addresses: vec![address(7)] };
    assert_eq!(links.step(0, one(great)), [Effect::Allow(great), dial]);

    let mut links = Links::new(great, timing, 1);
    assert_eq!(links.step(0, one(small)), [Effect::Allow(small)]);
    assert_eq!(links.wake_ms(), Some(timing.yield_ms));
    assert_eq!(dials(&links.step(timing.yield_ms, Input::Tick)), 1);
}

/// F9: however long the peer is away, the pause between two dials never exceeds its limit, and dialling never ends.
#[test]
fn a_peer_is_dialled_for_ever_with_a_bounded_pause() {
    let (small, great) = peers();
    let timing = LinkTiming::default();
    let mut links = Links::new(small, timing, 9);
    assert_eq!(dials(&links.step(0, one(great))), 1);
    let (mut now, mut last_pause) = (0, 0);
    for failed in 1..=20_000_u64 {
        assert_eq!(dials(&links.step(now, Input::DialFailed { peer: great, error: "no answer".into() })), 0);
        let wake = links.wake_ms().unwrap();
        last_pause = wake - now;
        assert!(last_pause >= timing.pause_min_ms / 2 && last_pause <= timing.pause_max_ms, "{last_pause}");
        now = wake;
        assert_eq!(dials(&links.step(now, Input::Tick)), 1);
        assert_eq!(links.states()[&great].failures, failed);
    }
    assert!(last_pause >= timing.pause_max_ms * 3 / 4);
    assert!(now > 15 * 3_600_000, "more than half a day has passed");
    links.step(now, Input::Opened { peer: great, id: id(1), dialled: true });
    assert!(links.states()[&great].connected);
    assert_eq!(dials(&links.step(now + timing.stable_ms, Input::Tick)), 0);
    assert_eq!((links.states()[&great].failures, links.wake_ms()), (0, None));
}

/// F5: a peer that dials again has restarted: the old connection goes, at once.
#[test]
fn the_newest_connection_wins_after_a_restart() {
    let (small, great) = peers();
    let timing = LinkTiming::default();
    for me in [small, great] {
        let peer = if me == small { great } else { small };
        for dialled in [true, false] {
            let mut links = Links::new(me, timing, 1);
            links.step(0, one(peer));
            links.step(300, Input::Opened { peer, id: id(1), dialled });
            let later = 300 + timing.crossing_ms;
            assert_eq!(links.step(later, Input::Opened { peer, id: id(2), dialled: false }), [Effect::Close(id(1))]);
            links.step(later, Input::Closed { peer, id: id(1), error: None });
            assert!(links.states()[&peer].connected);
            assert_eq!(links.wake_ms(), None);
        }
    }
}

/// Two nodes that dialled each other at once keep both connections, which may carry calls already; a third one ends both.
#[test]
fn crossing_dials_cut_no_call_off() {
    let (small, great) = peers();
    let timing = LinkTiming::default();
    for dialled_first in [true, false] {
        let mut links = Links::new(small, timing, 1);
        links.step(0, one(great));
        assert_eq!(links.step(1, Input::Opened { peer: great, id: id(1), dialled: dialled_first }), []);
        assert_eq!(links.step(2, Input::Opened { peer: great, id: id(2), dialled: !dialled_first }), []);
        let later = timing.crossing_ms + 2;
        let both = [Effect::Close(id(1)), Effect::Close(id(2))];
        assert_eq!(links.step(later, Input::Opened { peer: great, id: id(3), dialled: false }), both);
        for gone in [1, 2] {
            links.step(later, Input::Closed { peer: great, id: id(gone), error: None });
        }
        assert!(links.states()[&great].connected);
    }
}

/// A peer that closes right after the handshake (it does not know us yet) is dialled with pauses, not in a loop.
#[test]
fn a_short_lived_connection_counts_as_a_failure() {
    let (small, great) = peers();
    let timing = LinkTiming::default();
    let mut links = Links::new(small, timing, 1);
    links.step(0, one(great));
    let mut now = 0;
    for n in 0..12 {
        links.step(now, Input::Opened { peer: great, id: id(n), dialled: true });
        assert_eq!(dials(&links.step(now + 1, Input::Closed { peer: great, id: id(n), error: None })), 0);
        now = links.wake_ms().unwrap();
        assert_eq!(dials(&links.step(now, Input::Tick)), 1);
    }
    assert!(now > 20_000, "twelve attempts took {now} ms");
    // One that lived long is dialled again at once.
    links.step(now, Input::Opened { peer: great, id: id(99), dialled: true });
    now += 60_000;
    assert_eq!(dials(&links.step(now, Input::Closed { peer: great, id: id(99), error: None })), 1);
}

#[test]
fn members_that_leave_are_refused_and_forgotten() {
    let (small, great) = peers();
    let mut links = Links::new(small, LinkTiming::default(), 1);
    links.step(0, one(great));
    links.step(1, Input::Opened { peer: great, id: id(1), dialled: true });
    assert_eq!(links.step(2, Input::Members(BTreeMap::new())), [Effect::Refuse(great)]);
    assert_eq!(links.step(3, Input::Closed { peer: great, id: id(1), error: None }), []);
    assert!(links.states().is_empty());
    assert_eq!(links.step(4, Input::Opened { peer: great, id: id(2), dialled: false }), [Effect::Close(id(2))]);
    assert_eq!(links.wake_ms(), None);
}

#[test]
fn only_usable_addresses_are_dialled_and_new_ones_at_once() {
    let (small, great) = peers();
    let mut links = Links::new(small, LinkTiming::default(), 1);
    let unusable: Vec<Multiaddr> = ["/ip4/127.0.0.1/tcp/1", "/ip4/0.0.0.0/udp/1/quic-v1", "/ip4/127.0.0.1/udp/0/quic-v1"]
        .iter()
        .map(|text| text.parse().unwrap())
        .collect();
    assert_eq!(
        links.step(0, Input::Members(BTreeMap::from([(great, unusable), (small, vec![address(1)])]))),
        [Effect::Allow(great)]
    );
    assert_eq!(links.states().len(), 1, "a node is no peer of itself");
    let dial = Effect::Dial { peer: great, addresses: vec![address(7)] };
    assert_eq!(links.step(5, one(great)), [dial]);
    links.step(6, Input::DialFailed { peer: great, error: String::new() });
    let moved = Input::Members(BTreeMap::from([(great, vec![address(8)])]));
    assert_eq!(links.step(7, moved), [Effect::Dial { peer: great, addresses: vec![address(8)] }]);
}
