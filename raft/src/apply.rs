//! The one entrance: a command changes the state, or is refused and changes nothing.

use crate::command::{Command, Response};
use crate::error::Refusal;
use crate::proposal::Applied;
use crate::record::{CheckpointRecord, SessionRecord};
use crate::state::FleetState;
use ks_proto::api::Checkpoint;
use ks_proto::{CheckpointId, RunToken, SessionId};
use std::collections::BTreeMap;

type Outcome = Result<Response, Refusal>;

impl FleetState {
    /// Applies one command at the next index. The same commands in the same order give the same state everywhere.
    pub fn apply(&mut self, command: Command) -> Response {
        self.apply_at(Applied { index: self.applied + 1 }, command)
    }

    /// Applies one command that stands at `at` in the log.
    pub fn apply_at(&mut self, at: Applied, command: Command) -> Response {
        self.applied += 1;
        self.dispatch(at, command).unwrap_or_else(|refusal| Response::Refused { refusal })
    }

    fn dispatch(&mut self, at: Applied, command: Command) -> Outcome {
        match command {
            Command::CreateSession { .. }
            | Command::BeginRun { .. }
            | Command::Assign(_)
            | Command::AssignMany { .. }
            | Command::AssignLapsed { .. }
            | Command::SetWanted { .. }
            | Command::SetCommand { .. }
            | Command::SetPolicy { .. }
            | Command::SetOutside { .. }
            | Command::NoteLost { .. }
            | Command::NoteBack { .. }
            | Command::RemoveSession { .. }
            | Command::SetReplicas { .. }
            | Command::SetCopies { .. } => self.session_command(command),
            Command::CommitCheckpoint { .. }
            | Command::Pin { .. }
            | Command::DropCheckpoints { .. }
            | Command::AddHolder { .. }
            | Command::DropHolder { .. }
            | Command::PutImage { .. }
            | Command::RemoveImage { .. }
            | Command::PutGolden { .. }
            | Command::DropGolden { .. }
            | Command::AddRootHolder { .. }
            | Command::DropRootHolder { .. } => self.data_command(command),
            Command::RaiseGeneration {}
            | Command::Found { .. }
            | Command::AddMember { .. }
            | Command::UpdateMember { .. }
            | Command::SetMemberState { .. }
            | Command::RemoveMember { .. }
            | Command::AddToken { .. }
            | Command::DropToken { .. }
            | Command::PutUser { .. }
            | Command::DropUser { .. }
            | Command::SetFleetPolicy { .. } => self.fleet_command(at, command),
        }
    }

    fn session_command(&mut self, command: Command) -> Outcome {
        match command {
            Command::CreateSession { .. } => self.create(command),
            Command::BeginRun { id, from, expected_epoch, node } => self.begin_run(id, from, expected_epoch, node),
            Command::Assign(assignment) => self.assign(assignment, None),
            Command::AssignMany { moves } => self.assign_many(moves, None),
            Command::AssignLapsed { moves, lapse } => self.assign_many(moves, Some(lapse)),
            Command::SetReplicas { session, expected_epoch, replicas } => self.set_replicas(session, expected_epoch, replicas),
            Command::SetCopies { session, copies } => self.set_copies(session, copies),
            Command::SetWanted { id, wanted, reason } => self.edit(id, |s| (s.wanted, s.reason) = (wanted, reason)),
            Command::SetCommand { id, command } => self.edit(id, |s| s.command = Some(command)),
            Command::SetPolicy { id, cadence_s, idle_park_s } => {
                self.edit(id, |s| (s.cadence_s, s.idle_park_s) = (cadence_s, idle_park_s))
            }
            Command::SetOutside { id, allow, budget } => self.set_outside(id, allow, budget),
            Command::NoteLost { id, lost } => self.edit(id, |s| {
                s.lost.get_or_insert(lost);
            }),
            Command::NoteBack { id, interruption } => self.edit(id, |s| {
                s.lost = None;
                s.last_interruption = Some(interruption);
            }),
            Command::RemoveSession { id } => self.remove_session(id),
            other => unreachable!("{other:?} is not about a session"),
        }
    }

    fn data_command(&mut self, command: Command) -> Outcome {
        match command {
            Command::CommitCheckpoint { id, token, info, holders } => self.commit(id, token, info, holders),
            Command::AddHolder { session, checkpoint, token, node } => self.add_holder(session, checkpoint, token, node),
            Command::DropHolder { session, checkpoint, node } => self.drop_holder(session, checkpoint, node),
            Command::AddRootHolder { manifest, node } => self.root_holder(manifest, node, true),
            Command::DropRootHolder { manifest, node } => self.root_holder(manifest, node, false),
            Command::Pin { id, number, pinned } => {
                let s = self.live(id)?;
                let name = s.name.to_string();
                let missing = Refusal::NoCheckpoint { name, wanted: format!("c{number}") };
                s.checkpoints.get_mut(&number).ok_or(missing)?.info.pinned = pinned;
                Ok(Response::Done)
            }
            Command::DropCheckpoints { id, numbers } => self.drop_checkpoints(id, &numbers),
            Command::PutImage { image } => self.put_image(image),
            Command::RemoveImage { name } => self.remove_image(&name),
            Command::PutGolden { golden } => {
                self.golden.retain(|g| !g.same_key(&golden));
                self.golden.push(golden);
                Ok(Response::Done)
            }
            Command::DropGolden { checkpoint } => {
                self.golden.retain(|g| g.checkpoint != checkpoint);
                Ok(Response::Done)
            }
            other => unreachable!("{other:?} is not about stored data"),
        }
    }

    /// A session that was not removed.
    pub(crate) fn live(&mut self, id: SessionId) -> Result<&mut SessionRecord, Refusal> {
        self.sessions.get_mut(&id).filter(|s| !s.tombstone).ok_or(Refusal::NoSession { id })
    }

    fn edit(&mut self, id: SessionId, change: impl FnOnce(&mut SessionRecord)) -> Outcome {
        change(self.live(id)?);
        Ok(Response::Done)
    }

    fn create(&mut self, command: Command) -> Outcome {
        let Command::CreateSession {
            id,
            name,
            owner,
            params,
            cadence_s,
            idle_park_s,
            command,
            forked_from,
            head,
            now_unix_ms: created_unix_ms,
        } = command
        else {
            unreachable!("create is called for CreateSession only")
        };
        if self.sessions.contains_key(&id) {
            return Err(Refusal::IdTaken { id });
        }
        if self.sessions.by_name(&name).is_some() {
            return Err(Refusal::NameTaken { name: name.to_string() });
        }
        self.check_target(owner)?;
        if self.image_by_id(&params.image_id).is_none() {
            return Err(Refusal::NoImage { name: params.image });
        }
        let mut allow = None;
        if let Some(f) = &forked_from {
            // The fork point must still be there: from this command on it is kept.
            let parent = self.sessions.get(&f.session).ok_or(Refusal::NoSession { id: f.session })?;
            if parent.by_id(&f.checkpoint).is_none() {
                return Err(Refusal::NoCheckpoint { name: parent.name.to_string(), wanted: f.checkpoint.to_hex() });
            }
            // A child may reach what its parent may. Its budget is its own.
            allow = parent.allow.clone();
        }
        let token = RunToken { generation: self.generation, epoch: 1, run: 0 };
        let record = SessionRecord {
            id,
            name,
            owner,
            copies: 0,
            replicas: if self.is_founded() { vec![owner] } else { Vec::new() },
            token,
            params,
            cadence_s,
            idle_park_s,
            command,
            wanted: crate::Wanted::Running,
            reason: String::new(),
            created_unix_ms,
            forked_from,
            head,
            next_number: 1,
            checkpoints: BTreeMap::new(),
            lost: None,
            last_interruption: None,
            tombstone: false,
            allow,
            budget: None,
        };
        self.sessions.insert(record);
        Ok(Response::Token { token })
    }

    fn begin_run(&mut self, id: SessionId, from: CheckpointId, epoch: Option<u64>, node: Option<u64>) -> Outcome {
        let s = self.live(id)?;
        s.expect_epoch(epoch)?;
        if let Some(node) = node.filter(|n| *n != s.owner) {
            return Err(Refusal::NotOwner { name: s.name.to_string(), node, owner: s.owner });
        }
        s.token.run += 1;
        s.go_on_from(from);
        Ok(Response::Token { token: s.token })
    }

    fn commit(&mut self, id: SessionId, token: RunToken, mut info: Checkpoint, holders: Vec<u64>) -> Outcome {
        self.check_holders(&holders)?;
        let s = self.live(id)?;
        if token != s.token {
            return Err(Refusal::Fenced { name: s.name.to_string(), stale: token, current: s.token });
        }
        if let Some(same) = s.by_id(&info.id) {
            return Ok(Response::Checkpoint { number: same.info.number });
        }
        let number = s.next_number;
        info.number = number;
        s.next_number += 1;
        s.head = info.id;
        let holders = if holders.is_empty() { vec![s.owner] } else { holders };
        s.checkpoints.insert(number, CheckpointRecord { info, token, holders, branch: false });
        Ok(Response::Checkpoint { number })
    }

    fn drop_checkpoints(&mut self, id: SessionId, numbers: &[u64]) -> Outcome {
        let s = self.sessions.get(&id).ok_or(Refusal::NoSession { id })?;
        let kept = self.kept(s);
        if let Some((number, why)) = numbers.iter().find_map(|n| kept.get(n).map(|w| (*n, *w))) {
            return Err(Refusal::Kept { name: s.name.to_string(), number, why: why.to_owned() });
        }
        if let Some(s) = self.sessions.get_mut(&id) {
            s.checkpoints.retain(|n, _| !numbers.contains(n));
        }
        Ok(Response::Done)
    }
}
