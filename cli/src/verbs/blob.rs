//! `ks blob`: the store of a node.

use super::node_names;
use crate::args::Blob;
use crate::failure::{Res, VERDICT_NO};
use crate::host::http::Node;
use crate::human;
use crate::output::Ctx;
use crate::table::clean;
use ks_proto::blobs::{BlobReport, VerifyBlobs};

/// Does what `ks blob ...` asks.
pub async fn run(ctx: &Ctx, verb: Blob) -> Res<u8> {
    match verb {
        Blob::Verify { node } => verify(ctx, node).await,
    }
}

async fn verify(ctx: &Ctx, which: Option<String>) -> Res<u8> {
    let which = which.map(|n| node_names::check(n.trim_start_matches('#')).map(|_| n)).transpose()?;
    let report: BlobReport = Node::find(ctx)?.call("/v1/blobs/verify", &VerifyBlobs { node: which }, &mut ctx.bar()).await?;
    ctx.result(&report, || text(&report))?;
    let lost = report.damaged_objects.saturating_sub(report.mended_objects);
    if lost == 0 {
        return Ok(0);
    }
    ctx.note(&format!(
        "{} could not be had from a peer: see which checkpoints need them with `ks restore NAME@cN --verify`; a running session's next checkpoint stores again what it still has",
        human::count(lost, "object")
    ));
    Ok(VERDICT_NO)
}

fn text(r: &BlobReport) -> String {
    let mut out = format!(
        "{}: {} of {} read in {}, {}\n",
        clean(&r.node),
        human::mib(r.bytes),
        human::count(r.packs, "pack"),
        human::millis(r.took_ms),
        match (r.damaged_objects, r.mended_objects) {
            (0, _) => "all intact".to_owned(),
            (n, m) => format!("{} damaged, {m} of them mended from peers", human::count(n, "object")),
        }
    );
    for d in &r.damaged {
        let file = d.file.as_deref().map_or_else(String::new, |f| format!(" in {}", clean(f)));
        let end = if d.mended { "mended" } else { "not mended" };
        out.push_str(&format!("  {}{file}: {}: {end}\n", clean(&d.object), clean(&d.why)));
    }
    let more = r.damaged_objects.saturating_sub(r.damaged.len() as u64);
    if more > 0 {
        out.push_str(&format!("  and {more} more\n"));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use ks_proto::blobs::DamagedObject;

    #[test]
    fn a_report_names_what_is_damaged_and_what_became_of_it() {
        let clean = BlobReport { node: "n1".into(), packs: 3, bytes: 5 << 20, ..BlobReport::default() };
        assert!(text(&clean).contains("5.0 MiB of 3 packs") && text(&clean).contains("all intact"), "{}", text(&clean));
        let one = |object: &str, mended| DamagedObject {
            object: object.into(),
            file: Some("/d/x.pack".into()),
            why: "other bytes".into(),
            mended,
            ..DamagedObject::default()
        };
        let r = BlobReport {
            damaged_objects: 4,
            mended_objects: 1,
            damaged: vec![one("aa", true), one("bb\x1b[2J", false)],
            ..clean
        };
        let t = text(&r);
        assert!(t.contains("4 objects damaged, 1 of them mended"), "{t}");
        assert!(
            t.contains("aa in /d/x.pack: other bytes: mended") && t.contains("not mended") && t.contains("and 2 more"),
            "{t}"
        );
        assert!(!t.contains('\x1b'));
    }
}
