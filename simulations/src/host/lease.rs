//! Leases: effects of holder and granter.

use super::{Done, Host, Mail};
use crate::mutants::Mutant;
use crate::net::ask;
use ks_fleet::lease::{Answer, GranterEffect, GranterInput, HolderEffect, HolderInput};
use ks_raft::{Command, MemberChange};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Longest wait for the answer to a renewal. One that is late is useless, and must be harmless.
const RENEW_WAIT: Duration = Duration::from_secs(15);

impl Host {
    pub(super) fn hold(&mut self, input: HolderInput) {
        let now = self.now();
        for effect in self.holder.step(now, input) {
            match effect {
                HolderEffect::SendRenewal { seq, incarnation } => self.renew(now, seq, incarnation),
                HolderEffect::SetDeadline { boottime_ms } => self.raise(boottime_ms),
                HolderEffect::Limit { boottime_ms } => {
                    self.world.with(|w| {
                        w.count("lone to fleet");
                        w.node(self.me).vms.values().for_each(|vm| vm.limit(boottime_ms));
                    });
                    self.hold(HolderInput::Limited);
                }
                HolderEffect::Lapsed => self.world.with(|w| w.count("leases lapsed")),
                HolderEffect::Regained { .. } => self.world.with(|w| w.count("leases regained")),
                HolderEffect::Refused { .. } => self.world.with(|w| w.count("renewals refused")),
            }
        }
    }

    /// Only VMs of sessions that are this node's, at their epoch, get the deadline; the others are ended first.
    fn raise(&mut self, boottime_ms: u64) {
        self.end_strangers();
        self.world.with(|w| w.node(self.me).vms.values().for_each(|vm| vm.extend(boottime_ms)));
    }

    /// The deadline that a VM of this node starts with.
    pub(super) fn deadline(&self) -> u64 {
        self.holder.deadline_ms()
    }

    fn renew(&mut self, now: u64, seq: u64, incarnation: u64) {
        self.sent_ms.insert(seq, now);
        while self.sent_ms.len() > 64 {
            self.sent_ms.pop_first();
        }
        let Some(leader) = self.peer.leadership().borrow().leader else { return };
        let (world, me, tell) = (self.world.clone(), self.me, self.tell.clone());
        self.spawn(async move {
            let letter = |reply| Mail::Renew { node: me, incarnation, reply };
            if let Some(answer) = ask(&world, me, leader, RENEW_WAIT, letter).await {
                drop(tell.send(Done::Renewed { seq, answer }));
            }
        });
    }

    pub(super) fn renewed(&mut self, seq: u64, mut answer: Answer) {
        if self.world.is(Mutant::RenewalFromReply)
            && let (Answer::Granted { lease_ms, .. }, Some(sent)) = (&mut answer, self.sent_ms.get(&seq))
        {
            *lease_ms += self.now().saturating_sub(*sent);
        }
        self.hold(HolderInput::Answer { seq, answer });
    }

    pub(super) fn grant(&mut self, input: GranterInput) {
        let effects = self.granter.step(self.now(), input);
        self.granted(effects);
    }

    pub(super) fn granted(&mut self, effects: Vec<GranterEffect>) {
        for effect in effects {
            match effect {
                GranterEffect::StartRound { round } => self.round(round),
                GranterEffect::Answer { request, answer } => {
                    if let Some(reply) = self.requests.remove(&request) {
                        let _ = reply.send(answer);
                    }
                }
                GranterEffect::Regrant { node, incarnation, regrant, term } => {
                    self.regrants.push_back((node, incarnation, regrant, term));
                    self.pump_regrants();
                }
                GranterEffect::Returning { node } => self.place(ks_fleet::placement::Input::Returning { node }),
                GranterEffect::Lapse { node, term } => {
                    self.world.with(|w| w.count("lapses declared"));
                    self.place(ks_fleet::placement::Input::Lapsed { node, term });
                }
            }
        }
    }

    fn round(&mut self, round: u64) {
        if self.world.is(Mutant::NoQuorumRound) {
            let term = self.peer.leadership().borrow().term;
            drop(self.tell.send(Done::Round { round, result: Some((term, self.peer.applied())) }));
            return;
        }
        let peer = self.peer.clone();
        self.spawn_done(async move {
            let result = peer.covering_round().await.ok();
            Done::Round { round, result }
        });
    }

    /// Re-grants wait until the assignments of the same lapse have ended, or one could come behind them.
    pub(super) fn pump_regrants(&mut self) {
        for (node, incarnation, regrant, term) in std::mem::take(&mut self.regrants) {
            if self.assigning.get(&node).is_some_and(|n| *n > 0) {
                self.regrants.push_back((node, incarnation, regrant, term));
                continue;
            }
            let peer = self.peer.clone();
            let change = MemberChange { incarnation: Some(incarnation), ..MemberChange::default() };
            self.spawn_done(async move {
                let answer = peer.propose_in_term(term, Command::UpdateMember { number: node, change }).await;
                let index = answer.ok().filter(|(_, a)| !super::refused(a)).map(|(index, _)| index);
                Done::Regranted { node, regrant, index }
            });
        }
    }

    /// VMs of sessions that are not this node's, or at an older epoch, end.
    pub(super) fn end_strangers(&mut self) {
        let (state, me) = (self.state.clone(), self.me);
        self.world.with(|w| {
            w.node_mut(me).vms.retain(|id, vm| {
                let s = state.sessions.get(id).filter(|s| !s.tombstone && s.owner == me);
                let same = s.is_some_and(|s| (s.token.generation, s.token.epoch) == (vm.token.generation, vm.token.epoch));
                if !same {
                    vm.end();
                }
                same && !vm.ended.load(Ordering::SeqCst)
            });
        });
    }
}
