//! Machine: whom to dial and when, and which of several connections to one peer stay.
//!
//! ```text
//!            Members(+peer)            Opened
//!   unknown ---------------> down(at) --------> up ---------------.
//!      ^                      |   ^   DialFailed |                | Closed (last one)
//!      | Members(-peer)       |   '--------------'                v
//!      '----------------------+------------------------------- down(at)
//! ```
//!
//! A member that is down is dialled for ever: at once or after `yield_ms` first, then with a growing, jittered pause of at most
//! `pause_max_ms`. The peer with the smaller id dials first and the other one waits `yield_ms`, so that two nodes seldom dial each
//! other at the same time. When they do, both connections stay: each may already carry a call. Otherwise a new connection ends
//! the older ones: a peer that dials again has restarted or lost them, and they would swallow calls until they time out. New
//! streams take the newest connection, so there are at most two: one dialled from each side.
//!
//! A connection that lived less than `stable_ms` counts as a failed dial: a peer that does not know us (yet) accepts the handshake
//! and closes, and must not be dialled in a loop.

use std::collections::BTreeMap;

use libp2p::{Multiaddr, PeerId, swarm::ConnectionId};

use crate::address::socket_addr;

/// Most addresses of one peer that are used.
const ADDRESSES_MAX: usize = 16;

/// How the machine paces itself. Milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkTiming {
    /// Pause after the first failed dial; doubles with each further one.
    pub pause_min_ms: u64,
    /// Longest pause between two dials of one peer.
    pub pause_max_ms: u64,
    /// How long the greater peer id waits for the smaller one to dial first.
    pub yield_ms: u64,
    /// A connection younger than this counts as a failed dial when it closes.
    pub stable_ms: u64,
    /// Two connections dialled from both sides within this time are one meeting: both stay.
    pub crossing_ms: u64,
}

impl Default for LinkTiming {
    fn default() -> Self {
        Self { pause_min_ms: 100, pause_max_ms: 5_000, yield_ms: 250, stable_ms: 2_000, crossing_ms: 3_000 }
    }
}

/// What is known of the way to one member.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerState {
    /// There is a connection.
    pub connected: bool,
    /// Time of the last echo, there and back, in microseconds.
    pub rtt_us: Option<u64>,
    /// Dials in a row that failed.
    pub failures: u64,
    /// Why the last dial failed or the last connection ended; cleared when a connection has proved stable.
    pub error: Option<String>,
    /// Where the member is dialled.
    pub addresses: Vec<Multiaddr>,
}

pub(crate) enum Input {
    /// The whole allow-list, replacing the former one.
    Members(BTreeMap<PeerId, Vec<Multiaddr>>),
    /// A connection stands; `dialled`: by this node.
    Opened { peer: PeerId, id: ConnectionId, dialled: bool },
    /// A connection is gone.
    Closed { peer: PeerId, id: ConnectionId, error: Option<String> },
    /// A dial of this node's failed.
    DialFailed { peer: PeerId, error: String },
    /// An echo came back.
    Echoed { peer: PeerId, rtt_us: u64 },
    /// Time has passed.
    Tick,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Let this peer in and out.
    Allow(PeerId),
    /// Cut this peer off.
    Refuse(PeerId),
    /// Connect.
    Dial { peer: PeerId, addresses: Vec<Multiaddr> },
    /// End one connection.
    Close(ConnectionId),
}

#[derive(Clone, Copy)]
struct Connection {
    id: ConnectionId,
    dialled: bool,
    since_ms: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Dial {
    None,
    At(u64),
    Running,
}

struct Link {
    connections: Vec<Connection>,
    dial: Dial,
    state: PeerState,
}

pub(crate) struct Links {
    me: PeerId,
    timing: LinkTiming,
    seed: u64,
    peers: BTreeMap<PeerId, Link>,
}

impl Links {
    /// `seed` feeds the jitter only.
    pub(crate) fn new(me: PeerId, timing: LinkTiming, seed: u64) -> Self {
        Self { me, timing, seed, peers: BTreeMap::new() }
    }

    pub(crate) fn step(&mut self, now_ms: u64, input: Input) -> Vec<Effect> {
        let mut effects = Vec::new();
        match input {
            Input::Members(members) => self.members(now_ms, members, &mut effects),
            Input::Opened { peer, id, dialled } => {
                self.opened(now_ms, peer, Connection { id, dialled, since_ms: now_ms }, &mut effects)
            }
            Input::Closed { peer, id, error } => self.closed(now_ms, peer, id, error),
            Input::DialFailed { peer, error } => self.dial_failed(now_ms, peer, error),
            Input::Echoed { peer, rtt_us } => {
                if let Some(link) = self.peers.get_mut(&peer) {
                    link.state.rtt_us = Some(rtt_us);
                }
            }
            Input::Tick => {}
        }
        self.due(now_ms, &mut effects);
        effects
    }

    /// When the machine wants its next `Tick`.
    pub(crate) fn wake_ms(&self) -> Option<u64> {
        let dials = self.peers.values().filter_map(|link| match link.dial {
            Dial::At(at) => Some(at),
            Dial::None | Dial::Running => None,
        });
        let proofs = self.peers.values().filter(|link| link.state.failures != 0).flat_map(|link| &link.connections);
        dials.chain(proofs.map(|connection| connection.since_ms + self.timing.stable_ms)).min()
    }

    pub(crate) fn states(&self) -> BTreeMap<PeerId, PeerState> {
        self.peers.iter().map(|(peer, link)| (*peer, link.state.clone())).collect()
    }

    fn members(&mut self, now_ms: u64, members: BTreeMap<PeerId, Vec<Multiaddr>>, effects: &mut Vec<Effect>) {
        let gone: Vec<_> = self.peers.keys().filter(|peer| !members.contains_key(peer)).copied().collect();
        for peer in gone {
            self.peers.remove(&peer);
            effects.push(Effect::Refuse(peer));
        }
        for (peer, mut addresses) in members {
            if peer == self.me {
                continue;
            }
            addresses.retain(|address| socket_addr(address).is_some_and(|a| a.port() != 0 && !a.ip().is_unspecified()));
            addresses.truncate(ADDRESSES_MAX);
            let first_ms = now_ms + self.first_pause_ms(peer);
            let link = self.peers.entry(peer).or_insert_with(|| {
                effects.push(Effect::Allow(peer));
                Link { connections: Vec::new(), dial: Dial::At(first_ms), state: PeerState::default() }
            });
            if link.state.addresses != addresses {
                link.state.addresses = addresses;
                if link.connections.is_empty() && link.dial != Dial::Running {
                    link.dial = Dial::At(first_ms);
                }
            }
        }
    }

    fn first_pause_ms(&self, peer: PeerId) -> u64 {
        if self.me < peer { 0 } else { self.timing.yield_ms }
    }

    fn opened(&mut self, now_ms: u64, peer: PeerId, new: Connection, effects: &mut Vec<Effect>) {
        let crossing_ms = self.timing.crossing_ms;
        let Some(link) = self.peers.get_mut(&peer) else {
            effects.push(Effect::Close(new.id));
            return;
        };
        link.state.connected = true;
        if new.dialled || link.dial != Dial::Running {
            link.dial = Dial::None;
        }
        for old in &link.connections {
            let crossing = old.dialled != new.dialled && now_ms < old.since_ms + crossing_ms;
            if !crossing {
                effects.push(Effect::Close(old.id));
            }
        }
        link.connections.push(new);
    }

    fn closed(&mut self, now_ms: u64, peer: PeerId, id: ConnectionId, error: Option<String>) {
        let first_pause_ms = self.first_pause_ms(peer);
        let stable_ms = self.timing.stable_ms;
        let Some(link) = self.peers.get_mut(&peer) else { return };
        let Some(at) = link.connections.iter().position(|connection| connection.id == id) else { return };
        let closed = link.connections.remove(at);
        if !link.connections.is_empty() {
            return;
        }
        link.state.connected = false;
        link.state.rtt_us = None;
        link.state.error = Some(error.unwrap_or_else(|| "the connection was closed".into()));
        if link.dial == Dial::Running {
            return;
        }
        if now_ms < closed.since_ms + stable_ms {
            self.pause(now_ms, peer);
        } else {
            link.state.failures = 0;
            link.dial = Dial::At(now_ms + first_pause_ms);
        }
    }

    fn dial_failed(&mut self, now_ms: u64, peer: PeerId, error: String) {
        let Some(link) = self.peers.get_mut(&peer) else { return };
        if link.dial != Dial::Running {
            return;
        }
        link.dial = Dial::None;
        if link.connections.is_empty() {
            link.state.error = Some(error);
            self.pause(now_ms, peer);
        }
    }

    /// Counts a failure and sets the time of the next dial.
    fn pause(&mut self, now_ms: u64, peer: PeerId) {
        let jitter = self.jitter_percent();
        let timing = self.timing;
        let Some(link) = self.peers.get_mut(&peer) else { return };
        let doublings = link.state.failures.min(20);
        link.state.failures += 1;
        let pause = timing.pause_min_ms.saturating_mul(1 << doublings).min(timing.pause_max_ms);
        link.dial = Dial::At(now_ms + pause * jitter / 100);
    }

    /// 75 to 100: never longer than the named pause.
    fn jitter_percent(&mut self) -> u64 {
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.seed;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        75 + (z ^ (z >> 31)) % 26
    }

    fn due(&mut self, now_ms: u64, effects: &mut Vec<Effect>) {
        for (peer, link) in &mut self.peers {
            let stable = link.connections.iter().any(|connection| now_ms >= connection.since_ms + self.timing.stable_ms);
            if stable && link.state.failures != 0 {
                link.state.failures = 0;
                link.state.error = None;
            }
            if matches!(link.dial, Dial::At(at) if at <= now_ms) {
                if link.connections.is_empty() && !link.state.addresses.is_empty() {
                    link.dial = Dial::Running;
                    effects.push(Effect::Dial { peer: *peer, addresses: link.state.addresses.clone() });
                } else {
                    link.dial = Dial::None;
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "links_tests.rs"]
mod tests;
