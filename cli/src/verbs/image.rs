//! `ks image`: build, import, list, delete.

use crate::args::Image;
use crate::failure::{Failure, Res};
use crate::host::http::{Node, encode};
use crate::human;
use crate::output::{Ctx, with_schema};
use crate::table::{Align, Table, clean};
use ks_proto::api;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Runs `ks image …`.
pub async fn run(ctx: &Ctx, verb: Image) -> Res<u8> {
    let node = Node::find(ctx)?;
    match verb {
        Image::Build { name, profile, kernel } => {
            let name = name.unwrap_or_else(|| default_name(&profile).to_owned());
            let body = api::ImageBuild { name: checked(&name)?, kernel: path(kernel.as_deref())?, profile };
            made(ctx, node.call("/v1/images/build", &body, &mut ctx.bar()).await?, &name)
        }
        Image::Import { name, oci, root, kernel, profile } => {
            let body = api::ImageImport {
                name: checked(&name)?,
                oci: path(oci.as_deref())?,
                root_dir: path(root.as_deref())?,
                kernel: path(kernel.as_deref())?,
                profile,
            };
            made(ctx, node.call("/v1/images/import", &body, &mut ctx.bar()).await?, &name)
        }
        Image::Ls => ls(ctx, &node).await,
        Image::Rm { name } => {
            node.delete(&format!("/v1/images/{}", encode(&checked(&name)?))).await?;
            ctx.result(&json!({"schema": "ks.rm.v1", "image": name, "removed": true}), || format!("{name} removed\n"))?;
            Ok(0)
        }
    }
}

/// The image that sessions on engines of this profile get when they name none.
fn default_name(profile: &str) -> &'static str {
    if profile == "soft" { "soft" } else { "default" }
}

fn checked(name: &str) -> Res<String> {
    match name.parse::<ks_proto::SessionName>() {
        Ok(n) => Ok(n.to_string()),
        Err(_) => Err(Failure::usage(
            format!("{name:?} is no name for an image"),
            "names have 1-63 characters of a-z, 0-9, '-' and '.'",
            "choose another",
        )),
    }
}

/// The node runs elsewhere in the file tree: it gets absolute paths.
fn path(p: Option<&Path>) -> Res<Option<String>> {
    let Some(p) = p else { return Ok(None) };
    let bad =
        |why: String| Failure::usage(format!("cannot use {}", p.display()), why, "name a file or folder on the node's machine");
    let full: PathBuf = p.canonicalize().map_err(|e| bad(e.to_string()))?;
    full.to_str().map(|s| Some(s.to_owned())).ok_or_else(|| bad("its name is not UTF-8".into()))
}

fn made(ctx: &Ctx, got: Value, name: &str) -> Res<u8> {
    let id = got["id"].as_str().unwrap_or_default().chars().take(12).collect::<String>();
    ctx.result(&with_schema("ks.image.v1", got), || format!("image {name} {id}\n"))?;
    Ok(0)
}

async fn ls(ctx: &Ctx, node: &Node) -> Res<u8> {
    let all: Vec<api::Image> = node.get("/v1/images").await?;
    ctx.result(&json!({"schema": "ks.images.v1", "images": all}), || {
        let mut t = Table::new(&[
            ("NAME", Align::Left),
            ("ID", Align::Left),
            ("PROFILE", Align::Left),
            ("KERNEL", Align::Left),
            ("DISK", Align::Right),
            ("USED", Align::Right),
            ("GOLDEN", Align::Right),
        ]);
        for i in &all {
            let id = i.id.chars().take(12).collect();
            t.row(vec![
                i.name.clone(),
                id,
                clean(&i.profile),
                clean(&i.kernel),
                human::mib(i.disk_bytes),
                human::mib(i.disk_used_bytes),
                i.golden.to_string(),
            ]);
        }
        t.render()
    })?;
    if all.is_empty() {
        ctx.note("no images; build one: ks image build");
    }
    Ok(0)
}
