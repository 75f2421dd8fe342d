//! Pins: a checkpoint that came from a peer is kept until the fleet has decided about it, across restarts too.
//!
//! A pin is the name of an empty file in `pins/`: `<checkpoint>-<session>-<generation>-<epoch>-<run>-<upload>`. It is durable
//! before the manifest gets its name, so whoever was told "I hold it" can rely on it whatever happens to this process.

use crate::error::{At, StoreError};
use crate::store::Store;
use ks_proto::ids::{CheckpointId, RunToken, SessionId};
use std::fmt;
use std::path::PathBuf;

/// On whose behalf a checkpoint was fetched: one upload of one run of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PinKey {
    /// The session (zeros for an image).
    pub session: SessionId,
    /// The run that took the checkpoint.
    pub token: RunToken,
    /// Tells uploads of one run apart; the asker chooses it.
    pub upload: u64,
}

impl fmt::Display for PinKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let t = &self.token;
        write!(f, "{}-{}-{}-{}-{}", self.session, t.generation, t.epoch, t.run, self.upload)
    }
}

/// Reads the name of a pin's file.
pub(crate) fn parse(name: &str) -> Option<(CheckpointId, PinKey)> {
    let mut parts = name.split('-');
    let checkpoint = parts.next()?.parse().ok()?;
    let session = parts.next()?.parse().ok()?;
    let mut number = || {
        let text = parts.next()?;
        let n: u64 = text.parse().ok()?;
        (n.to_string() == text).then_some(n)
    };
    let token = RunToken { generation: number()?, epoch: number()?, run: number()? };
    let upload = number()?;
    parts.next().is_none().then_some((checkpoint, PinKey { session, token, upload }))
}

impl Store {
    fn pin_path(&self, id: &CheckpointId, pin: &PinKey) -> PathBuf {
        self.root.join("pins").join(format!("{id}-{pin}"))
    }

    /// Pins a checkpoint, durably. Doing it again does no harm.
    pub(crate) fn pin_checkpoint(&self, id: &CheckpointId, pin: &PinKey) -> Result<(), StoreError> {
        let path = self.pin_path(id, pin);
        let dir = self.root.join("pins");
        {
            let _names = self.naming();
            match self.disk.create(&path) {
                Ok(_) => self.names_changed(&dir),
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(StoreError::io("create", &path, e)),
            }
            self.state_mut().pins.insert((*id, *pin));
        }
        self.sync_dir(&self.root)?;
        self.sync_dir(&dir)
    }

    /// Removes a pin whose manifest did not come to be. One that stays does no harm: the next open removes it.
    pub(crate) fn unpin_absent(&self, id: &CheckpointId, pin: &PinKey) {
        let _names = self.naming();
        if !self.has_manifest(id) {
            let _ = self.disk.unlink(&self.pin_path(id, pin));
            self.names_changed(&self.root.join("pins"));
            self.state_mut().pins.remove(&(*id, *pin));
        }
    }

    /// The fleet has decided about a checkpoint that was pinned: from now on its own records keep it, or nothing does. Until the
    /// next collection has ended it stays in any case, so a list of roots made before the decision does no harm. True if
    /// it was pinned.
    ///
    /// # Errors
    /// If the disk refuses; the pin is then still there.
    pub fn decided(&self, id: &CheckpointId, pin: &PinKey) -> Result<bool, StoreError> {
        let path = self.pin_path(id, pin);
        let _names = self.naming();
        if !self.state().pins.contains(&(*id, *pin)) {
            return Ok(false);
        }
        match self.disk.unlink(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            other => other.at("remove", &path)?,
        }
        self.names_changed(&self.root.join("pins"));
        let mut s = self.state_mut();
        s.pins.remove(&(*id, *pin));
        s.decided.insert(*id);
        Ok(true)
    }

    /// All pins, for a node that starts again and asks the fleet's records which of them are decided.
    pub fn pins(&self) -> Vec<(CheckpointId, PinKey)> {
        self.state().pins.iter().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pins_name_reads_back_and_nothing_else_does() {
        let pin = PinKey { session: SessionId([7; 16]), token: RunToken { generation: 1, epoch: 22, run: 0 }, upload: u64::MAX };
        let id = CheckpointId([9; 32]);
        let name = format!("{id}-{pin}");
        assert_eq!(parse(&name), Some((id, pin)));
        for bad in [
            "",
            "x",
            &name[1..],
            &name[..name.len() - 21],
            &format!("{name}-1"),
            &format!("{name}0"),
            &name.replace("-22-", "-022-"),
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
