//! Members, join tokens, users and policy.
//!
//! ```text
//!            Found / AddMember          SetMemberState              RemoveMember
//!  (no one) ──────────────────► Active ◄──────────────► Draining ─────────────────► Gone
//!                                  │                         (owns no session)        ▲
//!                                  └──────────────────────────────────────────────────┘
//!                                            RemoveMember forced: it is dead
//! ```

use crate::command::{Command, MemberChange, Response};
use crate::error::Refusal;
use crate::fleet::{FleetPolicy, Member, MemberState, TokenRecord, UserRecord};
use crate::limits::{
    ADDRESSES_MAX, COPIES_MAX, GONE_MEMBERS_MAX, LEASE_MS, MEMBERS_MAX, PROFILES_MAX, TEXT_MAX, TOKEN_KEPT_MS, TOKENS_MAX,
    USER_TOKENS_MAX, USERS_MAX,
};
use crate::proposal::Applied;
use crate::state::FleetState;
use ks_proto::FleetId;

type Outcome = Result<Response, Refusal>;

/// The founder's number; entries that let others in have larger indexes.
const FOUNDER: u64 = 1;

fn too_many(what: &str, limit: usize) -> Refusal {
    Refusal::TooMany { what: what.into(), limit: limit as u64 }
}

fn check_texts<'a>(what: &str, texts: impl IntoIterator<Item = &'a String>, max: usize) -> Result<(), Refusal> {
    let mut count = 0;
    for text in texts {
        count += 1;
        if text.is_empty() || text.len() > TEXT_MAX {
            return Err(Refusal::BadValue { what: what.into(), why: format!("it has 1 to {TEXT_MAX} bytes") });
        }
    }
    if count > max { Err(too_many(what, max)) } else { Ok(()) }
}

fn check_member(m: &Member) -> Result<(), Refusal> {
    check_texts("a peer id", [&m.peer_id], 1)?;
    check_texts("a node name", [&m.name], 1)?;
    check_texts("a control address", &m.control, ADDRESSES_MAX)?;
    check_texts("an API address", &m.api, ADDRESSES_MAX)?;
    check_texts("a CPU profile", &m.profiles, PROFILES_MAX)?;
    if m.bulk.len() > ADDRESSES_MAX {
        return Err(too_many("bulk addresses", ADDRESSES_MAX));
    }
    if m.domain.len() > TEXT_MAX {
        return Err(Refusal::BadValue { what: "a failure domain".into(), why: format!("it has at most {TEXT_MAX} bytes") });
    }
    Ok(())
}

impl FleetState {
    pub(crate) fn fleet_command(&mut self, at: Applied, command: Command) -> Outcome {
        match command {
            Command::RaiseGeneration {} => self.raise_generation(),
            Command::Found { fleet_id, member, ca_cert_hex, now_unix_ms } => {
                self.found(fleet_id, member, ca_cert_hex, now_unix_ms)
            }
            Command::AddMember { token_hash, member, now_unix_ms } => self.add_member(at, &token_hash, member, now_unix_ms),
            Command::UpdateMember { number, change } => self.update_member(number, change),
            Command::SetMemberState { number, state } => self.set_member_state(number, state),
            Command::RemoveMember { number, forced } => self.remove_member(number, forced),
            Command::AddToken { token_hash, made_by, expires_unix_ms, now_unix_ms } => {
                self.add_token(token_hash, made_by, expires_unix_ms, now_unix_ms)
            }
            Command::DropToken { token_hash } => self.tokens.remove(&token_hash).map(|_| Response::Done).ok_or(Refusal::NoToken),
            Command::PutUser { name, role, token_hashes, now_unix_ms } => {
                let created_unix_ms = self.users.get(&name).map_or(now_unix_ms, |u| u.created_unix_ms);
                self.put_user(name, UserRecord { role, token_hashes, created_unix_ms })
            }
            Command::DropUser { name } => match self.users.remove(&name) {
                Some(_) => Ok(Response::Done),
                None => Err(Refusal::NoUser { name }),
            },
            Command::SetFleetPolicy { policy } => self.set_fleet_policy(policy),
            other => unreachable!("{other:?} is not about the fleet"),
        }
    }

    fn raise_generation(&mut self) -> Outcome {
        self.generation += 1;
        let generation = self.generation;
        self.sessions.edit_all(|_| true, |s| s.token.generation = generation);
        Ok(Response::Done)
    }

    fn found(&mut self, fleet_id: FleetId, member: Member, ca_cert_hex: String, now_unix_ms: u64) -> Outcome {
        check_member(&member)?;
        if let Some(fleet_id_now) = self.fleet_id {
            let same = fleet_id_now == fleet_id && self.members.get(&FOUNDER).is_some_and(|m| m.peer_id == member.peer_id);
            let refusal = Refusal::AlreadyFounded { fleet_id: fleet_id_now };
            return if same { Ok(Response::Member { number: FOUNDER }) } else { Err(refusal) };
        }
        self.fleet_id = Some(fleet_id);
        self.ca_cert_hex = ca_cert_hex;
        let member = Member { number: FOUNDER, joined_unix_ms: now_unix_ms, state: MemberState::Active, ..member };
        self.members.insert(FOUNDER, member);
        // What the lone node had was written before numbers meant anything: it is all on this one node.
        self.sessions.edit_all(
            |_| true,
            |s| {
                s.owner = FOUNDER;
                s.replicas = vec![FOUNDER];
                s.checkpoints.values_mut().for_each(|c| c.holders = vec![FOUNDER]);
            },
        );
        self.golden.iter_mut().for_each(|g| g.holders = vec![FOUNDER]);
        self.images.values_mut().chain(self.old_images.values_mut()).for_each(|i| i.holders = vec![FOUNDER]);
        Ok(Response::Member { number: FOUNDER })
    }

    fn add_member(&mut self, at: Applied, token_hash: &str, mut member: Member, now_unix_ms: u64) -> Outcome {
        if !self.is_founded() {
            return Err(Refusal::NotFounded);
        }
        check_member(&member)?;
        let token = self.tokens.get(token_hash).ok_or(Refusal::NoToken)?;
        if let Some(by) = token.used_by {
            // The joiner did not hear the answer: it gets it again.
            let same = self.members.get(&by).is_some_and(|m| m.is_member() && m.peer_id == member.peer_id);
            return if same { Ok(Response::Member { number: by }) } else { Err(Refusal::TokenUsed { by }) };
        }
        if now_unix_ms >= token.expires_unix_ms {
            return Err(Refusal::TokenExpired { ago_ms: now_unix_ms - token.expires_unix_ms });
        }
        if let Some(m) = self.member_by_peer(&member.peer_id) {
            return Err(Refusal::PeerTaken { peer_id: member.peer_id, number: m.number });
        }
        if self.members.values().filter(|m| m.is_member()).count() >= MEMBERS_MAX {
            return Err(too_many("members", MEMBERS_MAX));
        }
        let number = at.index;
        assert!(self.members.keys().next_back().is_none_or(|last| *last < number), "log indexes rise, so numbers are new");
        member.name = self.free_name(number, &member.name);
        self.members.insert(number, Member { number, joined_unix_ms: now_unix_ms, state: MemberState::Active, ..member });
        if let Some(token) = self.tokens.get_mut(token_hash) {
            token.used_by = Some(number);
        }
        Ok(Response::Member { number })
    }

    /// The name, or the name with the number behind it when another member has it.
    fn free_name(&self, number: u64, name: &str) -> String {
        let taken = self.members.values().any(|m| m.is_member() && m.number != number && m.name == name);
        if taken { format!("{name}-{number}") } else { name.to_owned() }
    }

    fn member(&self, number: u64) -> Result<&Member, Refusal> {
        let m = self.members.get(&number).ok_or(Refusal::NoMember { number })?;
        if m.is_member() {
            return Ok(m);
        }
        Err(Refusal::MemberNotFit { number, state: m.state, what: "it is not changed any more".into() })
    }

    fn update_member(&mut self, number: u64, change: MemberChange) -> Outcome {
        let mut m = self.member(number)?.clone();
        let MemberChange { name, control, bulk, api, profiles, domain, incarnation } = change;
        if let Some(name) = name {
            m.name = self.free_name(number, &name);
        }
        m.control = control.unwrap_or(m.control);
        m.bulk = bulk.unwrap_or(m.bulk);
        m.api = api.unwrap_or(m.api);
        m.profiles = profiles.unwrap_or(m.profiles);
        m.domain = domain.unwrap_or(m.domain);
        m.incarnation = incarnation.unwrap_or(m.incarnation);
        check_member(&m)?;
        self.members.insert(number, m);
        Ok(Response::Done)
    }

    fn not_the_last(&self, number: u64) -> Result<(), Refusal> {
        if self.active().any(|m| m.number != number) { Ok(()) } else { Err(Refusal::LastMember { number }) }
    }

    fn set_member_state(&mut self, number: u64, state: MemberState) -> Outcome {
        self.member(number)?;
        match state {
            MemberState::Active => {}
            MemberState::Draining => self.not_the_last(number)?,
            MemberState::Gone => {
                let why = "a member leaves by RemoveMember".into();
                return Err(Refusal::BadValue { what: "the state gone".into(), why });
            }
        }
        if let Some(m) = self.members.get_mut(&number) {
            m.state = state;
        }
        Ok(Response::Done)
    }

    fn remove_member(&mut self, number: u64, forced: bool) -> Outcome {
        let state = self.member(number)?.state;
        self.not_the_last(number)?;
        if !forced {
            if state != MemberState::Draining {
                return Err(Refusal::MemberNotFit { number, state, what: "it must be drained first".into() });
            }
            let sessions = self.sessions.values().filter(|s| !s.tombstone && s.owner == number).count();
            if sessions > 0 {
                return Err(Refusal::OwnsSessions { number, sessions });
            }
        }
        if let Some(m) = self.members.get_mut(&number) {
            m.state = MemberState::Gone;
        }
        // Its copies are gone for good, so that no later count includes them.
        let named = |s: &crate::SessionRecord| {
            s.replicas.contains(&number) || s.checkpoints.values().any(|c| c.holders.contains(&number))
        };
        self.sessions.edit_all(named, |s| {
            let owner = s.owner;
            s.replicas.retain(|n| *n != number || *n == owner);
            s.checkpoints.values_mut().for_each(|c| c.holders.retain(|n| *n != number));
        });
        self.golden.iter_mut().for_each(|g| g.holders.retain(|n| *n != number));
        let images = self.images.values_mut().chain(self.old_images.values_mut());
        images.for_each(|i| i.holders.retain(|n| *n != number));
        self.forget_gone();
        Ok(Response::Done)
    }

    fn forget_gone(&mut self) {
        let gone: Vec<u64> = self.members.values().filter(|m| !m.is_member()).map(|m| m.number).collect();
        for number in gone.iter().take(gone.len().saturating_sub(GONE_MEMBERS_MAX)) {
            self.members.remove(number);
        }
    }

    fn add_token(&mut self, token_hash: String, made_by: String, expires_unix_ms: u64, now_unix_ms: u64) -> Outcome {
        if !self.is_founded() {
            return Err(Refusal::NotFounded);
        }
        let hex = token_hash.len() == 64 && token_hash.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if !hex {
            return Err(Refusal::BadValue { what: "the token's hash".into(), why: "it is a BLAKE3 in 64 hex digits".into() });
        }
        check_texts("a user name", [&made_by], 1)?;
        if expires_unix_ms <= now_unix_ms {
            return Err(Refusal::TokenExpired { ago_ms: now_unix_ms - expires_unix_ms });
        }
        if self.tokens.contains_key(&token_hash) {
            return Err(Refusal::BadValue { what: "the token".into(), why: "it was added before".into() });
        }
        let kept = |t: &TokenRecord| t.expires_unix_ms.saturating_add(TOKEN_KEPT_MS) > now_unix_ms;
        if self.tokens.values().filter(|t| kept(t)).count() >= TOKENS_MAX {
            return Err(too_many("join tokens", TOKENS_MAX));
        }
        self.tokens.retain(|_, t| kept(t));
        self.tokens.insert(token_hash, TokenRecord { expires_unix_ms, made_by, used_by: None });
        Ok(Response::Done)
    }

    fn put_user(&mut self, name: String, user: UserRecord) -> Outcome {
        check_texts("a user name", [&name], 1)?;
        check_texts("an access token's hash", &user.token_hashes, USER_TOKENS_MAX)?;
        if !self.users.contains_key(&name) && self.users.len() >= USERS_MAX {
            return Err(too_many("users", USERS_MAX));
        }
        self.users.insert(name, user);
        Ok(Response::Done)
    }

    fn set_fleet_policy(&mut self, policy: FleetPolicy) -> Outcome {
        let bad = |what: String, why: String| Err(Refusal::BadValue { what, why });
        if !(1..=COPIES_MAX).contains(&policy.copies) {
            return bad(format!("{} copies", policy.copies), format!("1 to {COPIES_MAX}"));
        }
        if ![1, 3, 5].contains(&policy.voters) {
            return bad(format!("{} voters", policy.voters), "1, 3 or 5".into());
        }
        if !LEASE_MS.contains(&policy.lease_ms) {
            return bad(format!("a lease of {} ms", policy.lease_ms), format!("{} to {}", LEASE_MS.start(), LEASE_MS.end()));
        }
        self.policy = policy;
        Ok(Response::Done)
    }
}
