//! Removal of sessions and images: what something else still needs stays.

use crate::command::Response;
use crate::error::Refusal;
use crate::record::ImageRecord;
use crate::state::FleetState;
use ks_proto::{ImageId, SessionId};

impl FleetState {
    /// Removes a live session. Fork points stay under a tombstone for as long as a descendant is there.
    pub(crate) fn remove_session(&mut self, id: SessionId) -> Result<Response, Refusal> {
        let s = self.live(id)?;
        s.tombstone = true;
        s.reason = "removed".into();
        s.lost = None;
        self.bury(id);
        self.collect_images();
        Ok(Response::Done)
    }

    /// Thins the tombstone to its fork points, or forgets it when nobody descends from it, and then its parent, upwards.
    fn bury(&mut self, mut id: SessionId) {
        loop {
            let forks = self.fork_points(&id);
            let parent = match self.sessions.get_mut(&id) {
                Some(s) if s.tombstone => {
                    s.checkpoints.retain(|_, c| forks.contains(&c.info.id));
                    s.forked_from.as_ref().map(|f| f.session)
                }
                _ => return,
            };
            if !forks.is_empty() {
                return;
            }
            self.sessions.remove(&id);
            match parent {
                Some(parent) => id = parent,
                None => return,
            }
        }
    }

    pub(crate) fn put_image(&mut self, image: ImageRecord) -> Result<Response, Refusal> {
        self.old_images.remove(&image.id);
        if let Some(old) = self.images.insert(image.name.clone(), image) {
            self.old_images.insert(old.id, old);
        }
        self.collect_images();
        Ok(Response::Done)
    }

    pub(crate) fn remove_image(&mut self, name: &str) -> Result<Response, Refusal> {
        let image = self.images.get(name).ok_or_else(|| Refusal::NoImage { name: name.to_owned() })?;
        let id = image.id;
        let named_otherwise = self.images.values().any(|i| i.id == id && i.name != name);
        let users: Vec<&str> = self
            .sessions
            .values()
            .filter(|s| !s.tombstone && s.params.image_id == id && !named_otherwise)
            .map(|s| s.name.as_str())
            .collect();
        if !users.is_empty() {
            return Err(Refusal::ImageUsed { name: name.to_owned(), by: users.join(", ") });
        }
        self.images.remove(name);
        self.collect_images();
        Ok(Response::Done)
    }

    /// Images without a name and without a session are forgotten, with their golden checkpoints.
    fn collect_images(&mut self) {
        let named = |s: &Self, id: &ImageId| s.images.values().any(|i| i.id == *id);
        let used = |s: &Self, id: &ImageId| s.sessions.values().any(|x| x.params.image_id == *id);
        let old: Vec<ImageId> = self.old_images.keys().copied().collect();
        for id in old {
            if named(self, &id) || !used(self, &id) {
                self.old_images.remove(&id);
            }
        }
        let ids: Vec<ImageId> = self.golden.iter().map(|g| g.image_id).collect();
        for id in ids {
            if self.image_by_id(&id).is_none() {
                self.golden.retain(|g| g.image_id != id);
            }
        }
    }
}
