//! `ks doctor`: this machine, or a session from inside.

use crate::args;
use crate::failure::{Res, VERDICT_NO};
use crate::host::checks;
use crate::host::http::Node;
use crate::output::Ctx;
use crate::table::clean;
use crate::target;
use ks_proto::api::DoctorReport;
use ks_proto::guest::Check;

/// Runs the checks; exit 1 if one fails.
pub async fn run(ctx: &Ctx, a: args::Doctor) -> Res<u8> {
    let report = match &a.session {
        Some(s) => Node::find(ctx)?.get(&format!("/v1/sessions/{}/doctor", target::session(s)?)).await?,
        None => machine(ctx).await,
    };
    ctx.result(&report, || text(ctx, &report))?;
    Ok(if report.ok { 0 } else { VERDICT_NO })
}

/// The node knows best; without one, what can be seen from here.
async fn machine(ctx: &Ctx) -> DoctorReport {
    let asked = match Node::find(ctx) {
        Ok(n) => n.get::<DoctorReport>("/v1/doctor").await.map(|r| (n, r)),
        Err(e) => Err(e),
    };
    let checks = match asked {
        Ok((n, r)) => {
            let up = Check { name: "node".into(), ok: true, detail: format!("answers at {}", n.base()), fix: String::new() };
            r.checks.into_iter().filter(|c| c.name != "node").chain([up]).collect()
        }
        Err(f) => {
            let down =
                Check { name: "node".into(), ok: false, detail: format!("{}: {}", f.error.what, f.error.why), fix: f.error.next };
            checks::all(&ctx.data_dir).into_iter().chain([down]).collect::<Vec<_>>()
        }
    };
    DoctorReport { schema: "ks.doctor.v1".into(), ok: checks.iter().all(|c| c.ok), checks }
}

fn text(ctx: &Ctx, r: &DoctorReport) -> String {
    let width = r.checks.iter().map(|c| c.name.chars().count()).max().unwrap_or(0);
    let mut out = String::new();
    for c in &r.checks {
        let verdict = if c.ok { ctx.paint(32, "ok  ") } else { ctx.paint(31, "FAIL") };
        out.push_str(&format!("{verdict}  {:<width$}  {}\n", clean(&c.name), clean(&c.detail)));
        if !c.ok && !c.fix.is_empty() {
            out.push_str(&format!("      {:<width$}  fix: {}\n", "", clean(&c.fix)));
        }
    }
    out
}
