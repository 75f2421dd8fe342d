//! Line plots as SVG: one panel for each figure, nodes from left to right.

use super::Figures;
use std::fmt::Write;

const WIDTH: f64 = 340.0;
const HEIGHT: f64 = 220.0;
const LEFT: f64 = 70.0;
const TOP: f64 = 36.0;
const PANELS_ACROSS: usize = 3;

/// Name of a panel, and its figure.
type Panel = (&'static str, fn(&Figures) -> f64);

const PANELS: [Panel; 8] = [
    ("lease renewals granted, per second", |f| f.renewals_s),
    ("renewal to grant, p99, ms", |f| f.renewal_p99_ms),
    ("quorum rounds, per second", |f| f.rounds_s),
    ("consensus, KiB per second, whole fleet", |f| f.raft_bytes_s / 1024.0),
    ("gossip, KiB per second and node", |f| f.gossip_bytes_node_s / 1024.0),
    ("500 sessions of a dead node: decided, s", |f| f.place_decided_s),
    ("the same: every new owner knows, s", |f| f.place_500_s),
    ("the same: processor time of all nodes, s", |f| f.place_cpu_s),
];

/// All panels.
pub fn svg(all: &[Figures]) -> String {
    let rows = PANELS.len().div_ceil(PANELS_ACROSS);
    let (w, h) = (WIDTH * PANELS_ACROSS as f64, HEIGHT * rows as f64);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {w} {h}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"{w}\" height=\"{h}\" fill=\"white\"/>\n"
    );
    for (at, panel) in PANELS.iter().enumerate() {
        let (x, y) = ((at % PANELS_ACROSS) as f64 * WIDTH, (at / PANELS_ACROSS) as f64 * HEIGHT);
        draw(&mut out, all, panel, x, y);
    }
    out.push_str("</svg>\n");
    out
}

fn draw(out: &mut String, all: &[Figures], (name, figure): &Panel, x: f64, y: f64) {
    let nodes_max = all.iter().map(|f| f.nodes).max().unwrap_or(1) as f64;
    let value_max = all.iter().map(figure).fold(0.0, f64::max).max(1e-9) * 1.1;
    let (inner_w, inner_h) = (WIDTH - LEFT - 20.0, HEIGHT - TOP - 40.0);
    let px = |n: f64| x + LEFT + n / nodes_max * inner_w;
    let py = |v: f64| y + TOP + inner_h - v / value_max * inner_h;
    let (x0, y0) = (px(0.0), py(0.0));
    let points: Vec<(f64, f64)> = all.iter().map(|f| (px(f.nodes as f64), py(figure(f)))).collect();
    let line: String = points.iter().map(|(a, b)| format!("{a:.1},{b:.1} ")).collect();
    // Writing to a String cannot fail.
    let _ = writeln!(out, "<text x=\"{:.0}\" y=\"{:.0}\" font-weight=\"bold\">{name}</text>", x + 12.0, y + 18.0);
    let _ = writeln!(out, "<path d=\"M{x0:.1} {:.1}V{y0:.1}H{:.1}\" fill=\"none\" stroke=\"#888\"/>", y + TOP, x0 + inner_w);
    let _ = writeln!(out, "<polyline points=\"{}\" fill=\"none\" stroke=\"#1f6feb\" stroke-width=\"2\"/>", line.trim());
    for (f, (a, b)) in all.iter().zip(&points) {
        let v = figure(f);
        let label = if v >= 100.0 {
            format!("{v:.0}")
        } else if v >= 1.0 {
            format!("{v:.1}")
        } else {
            format!("{v:.3}")
        };
        let _ = writeln!(out, "<circle cx=\"{a:.1}\" cy=\"{b:.1}\" r=\"3\" fill=\"#1f6feb\"/>");
        let _ = writeln!(out, "<text x=\"{a:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>", b - 7.0);
        let _ = writeln!(out, "<text x=\"{a:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>", y0 + 14.0, f.nodes);
    }
    let _ = writeln!(
        out,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#555\">nodes</text>",
        x0 + inner_w / 2.0,
        y0 + 30.0
    );
}
