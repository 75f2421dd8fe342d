//! Reads the layers of the settings from where they are.

use crate::config::{self, Layer};
use crate::failure::{Failure, Res};
use std::path::{Path, PathBuf};

fn env(key: &str) -> Option<String> {
    std::env::var(key).ok()
}

/// The folder of the node on this machine.
pub fn data_dir() -> PathBuf {
    config::data_dir(env)
}

/// All layers, `flags` on top.
pub fn load(flags: Layer) -> Res<Layer> {
    let user_file = config::user_file(env);
    let user = match read(&user_file)? {
        Some(text) => Layer::user(&user_file, &text)?,
        None => Layer::default(),
    };
    let project = match std::env::current_dir().ok().and_then(|d| project_file(&d)) {
        Some(path) => read(&path)?.map(|text| Layer::project(&path, &text)).transpose()?.unwrap_or_default(),
        None => Layer::default(),
    };
    Ok(flags.over(Layer::env(env)?).over(project).over(user))
}

/// The nearest .ks.toml at or above a folder.
fn project_file(from: &Path) -> Option<PathBuf> {
    from.ancestors().map(|d| d.join(".ks.toml")).find(|p| p.is_file())
}

fn read(path: &Path) -> Res<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) => Ok(None),
        Err(e) => Err(Failure::local(format!("cannot read {}", path.display()), e, "mend or move the file")),
    }
}
