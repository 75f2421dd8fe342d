//! `/images`.

use super::App;
use super::reply::{Answered, Input, Needed, Refused, long};
use crate::host::image;
use crate::ops::create::apply;
use axum::Json;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use ks_proto::api::{ApiError, Image, ImageBuild, ImageImport};
use ks_raft::Command;

pub async fn list(State(app): State<App>) -> Json<Vec<Image>> {
    let records: Vec<_> = app.node.state.read().images.values().cloned().collect();
    Json(records.iter().map(|i| image::listed(&app.node, i)).collect())
}

pub async fn remove(State(app): State<App>, Path(name): Path<String>) -> Answered<Image> {
    let record = image::find(&app.node, &name)?;
    let shown = image::listed(&app.node, &record);
    apply(&app.node, Command::RemoveImage { name: name.clone() }).await?;
    if app.node.state.read().image_by_id(&record.id).is_none() {
        let _ = tokio::fs::remove_dir_all(image::image_dir(&app.node, &record.id)).await;
    }
    app.node.state.event("", "image", &format!("image {name} is removed"));
    Ok(Json(shown))
}

pub async fn build(State(app): State<App>, Input(b): Input<ImageBuild>) -> Response {
    let mut args = vec!["build".to_owned()];
    args.extend(b.kernel.iter().flat_map(|k| ["--kernel".to_owned(), k.clone()]));
    let profile = match image::profile(&b.profile) {
        Ok(p) => p,
        Err(e) => return Refused(e).into_response(),
    };
    args.extend(["--profile".to_owned(), profile.to_owned()]);
    let name = if b.name.is_empty() { image::default_for(profile).to_owned() } else { b.name };
    long(move |steps| async move { image::make(&app.node, &name, args, &steps).await })
}

pub async fn import(State(app): State<App>, Needed(i): Needed<ImageImport>) -> Response {
    let source = match (&i.oci, &i.root_dir) {
        (Some(f), None) => ["--oci".to_owned(), f.clone()],
        (None, Some(d)) => ["--root-dir".to_owned(), d.clone()],
        _ => {
            let why = "exactly one of an OCI archive and a root directory is needed";
            return Refused(ApiError::new("usage", "the import", why, "ks image import --oci FILE | --root-dir DIR"))
                .into_response();
        }
    };
    let mut args = vec!["import".to_owned()];
    args.extend(source);
    args.extend(i.kernel.iter().flat_map(|k| ["--kernel".to_owned(), k.clone()]));
    match image::profile(&i.profile) {
        Ok(p) => args.extend(["--profile".to_owned(), p.to_owned()]),
        Err(e) => return Refused(e).into_response(),
    }
    long(move |steps| async move { image::make(&app.node, &i.name, args, &steps).await })
}
