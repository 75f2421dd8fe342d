//! Session names for the shell's completion.

use super::http::Node;
use super::settings;
use crate::config::Layer;
use crate::output::Ctx;
use clap_complete::engine::CompletionCandidate;
use ks_proto::api::Session;
use std::ffi::OsStr;
use std::time::Duration;

/// A person waits for it at every press of Tab.
const PATIENCE: Duration = Duration::from_millis(500);

/// The sessions whose names begin with what is typed; none when the node does not answer at once.
pub fn complete(current: &OsStr) -> Vec<CompletionCandidate> {
    let Some(typed) = current.to_str() else { return vec![] };
    let all = sessions().unwrap_or_default();
    let wanted = all.into_iter().filter(|s| s.name.as_str().starts_with(typed));
    wanted.map(|s| CompletionCandidate::new(s.name.as_str()).help(Some(s.state.to_string().into()))).collect()
}

fn sessions() -> Option<Vec<Session>> {
    let settings = settings::load(Layer::default()).ok()?;
    let ctx = Ctx::new(&crate::args::Global::default(), settings, settings::data_dir());
    let node = Node::find(&ctx).ok()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    runtime.block_on(async { tokio::time::timeout(PATIENCE, node.get("/v1/sessions")).await.ok()?.ok() })
}
