//! The one entrance: a command changes the state, or is refused and changes nothing.

use crate::command::{Command, Response};
use crate::error::Refusal;
use crate::record::{CheckpointRecord, SessionRecord};
use crate::state::FleetState;
use ks_proto::api::Checkpoint;
use ks_proto::{RunToken, SessionId};
use std::collections::BTreeMap;

type Outcome = Result<Response, Refusal>;

impl FleetState {
    /// Applies one command. The same commands in the same order give the same state everywhere.
    pub fn apply(&mut self, command: Command) -> Response {
        self.applied += 1;
        self.dispatch(command).unwrap_or_else(|refusal| Response::Refused { refusal })
    }

    fn dispatch(&mut self, command: Command) -> Outcome {
        match command {
            Command::CreateSession { .. } => self.create(command),
            Command::BeginRun { id, from } => {
                let s = self.live(id)?;
                s.token.run += 1;
                s.head = from;
                Ok(Response::Token { token: s.token })
            }
            Command::Assign { id, owner } => {
                let generation = self.generation;
                let s = self.live(id)?;
                s.owner = owner;
                s.token = RunToken { generation, epoch: s.token.epoch + 1, run: s.token.run };
                Ok(Response::Token { token: s.token })
            }
            Command::RaiseGeneration {} => {
                self.generation += 1;
                for s in self.sessions.values_mut() {
                    s.token.generation = self.generation;
                }
                Ok(Response::Done)
            }
            Command::SetWanted { id, wanted, reason } => self.edit(id, |s| (s.wanted, s.reason) = (wanted, reason)),
            Command::SetCommand { id, command } => self.edit(id, |s| s.command = Some(command)),
            Command::SetPolicy { id, cadence_s, idle_park_s } => {
                self.edit(id, |s| (s.cadence_s, s.idle_park_s) = (cadence_s, idle_park_s))
            }
            Command::CommitCheckpoint { id, token, info } => self.commit(id, token, info),
            Command::Pin { id, number, pinned } => {
                let s = self.live(id)?;
                let name = s.name.to_string();
                let missing = Refusal::NoCheckpoint { name, wanted: format!("c{number}") };
                s.checkpoints.get_mut(&number).ok_or(missing)?.info.pinned = pinned;
                Ok(Response::Done)
            }
            Command::DropCheckpoints { id, numbers } => self.drop_checkpoints(id, &numbers),
            Command::NoteLost { id, lost } => self.edit(id, |s| {
                s.lost.get_or_insert(lost);
            }),
            Command::NoteBack { id, interruption } => self.edit(id, |s| {
                s.lost = None;
                s.last_interruption = Some(interruption);
            }),
            Command::RemoveSession { id } => self.remove_session(id),
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
        if self.sessions.values().any(|s| !s.tombstone && s.name == name) {
            return Err(Refusal::NameTaken { name: name.to_string() });
        }
        if self.image_by_id(&params.image_id).is_none() {
            return Err(Refusal::NoImage { name: params.image });
        }
        if let Some(f) = &forked_from {
            // The fork point must still be there: from this command on it is kept.
            let parent = self.sessions.get(&f.session).ok_or(Refusal::NoSession { id: f.session })?;
            if parent.by_id(&f.checkpoint).is_none() {
                return Err(Refusal::NoCheckpoint { name: parent.name.to_string(), wanted: f.checkpoint.to_hex() });
            }
        }
        let token = RunToken { generation: self.generation, epoch: 1, run: 0 };
        let record = SessionRecord {
            id,
            name,
            owner,
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
        };
        self.sessions.insert(id, record);
        Ok(Response::Token { token })
    }

    fn commit(&mut self, id: SessionId, token: RunToken, mut info: Checkpoint) -> Outcome {
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
        s.checkpoints.insert(number, CheckpointRecord { info, token });
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
