//! Plots of replays, as SVG text.
//!
//! One load: every policy is a point, recomputed work against goodput, and the
//! policies that no other beats in both are joined. Several loads: every policy is
//! a line, goodput over the rate. A hollow point marks reuse that was claimed by a
//! view and was gone: more than one block in a hundred.

use std::collections::BTreeMap;

use kvrouter_core::replay::lab::LabRun;
use kvrouter_core::replay::report::Summary;
use plotters::prelude::*;

/// Width and height in pixels.
const SIZE: (u32, u32) = (860, 520);
/// Share of claimed blocks that may be gone before a point is hollow.
const STALE_SHARE: f64 = 0.01;

/// One policy at one load.
struct Point {
    name: String,
    at: (f64, f64),
    is_stale: bool,
}

/// The plot of a timed replay.
pub fn rows(rows: &[Summary]) -> Result<String, String> {
    let mut rates: Vec<f64> = rows.iter().map(|row| row.rate).collect();
    rates.sort_by(f64::total_cmp);
    rates.dedup();
    if rates.len() > 1 {
        return lines(rows);
    }
    let points: Vec<Point> = rows
        .iter()
        .map(|row| Point {
            name: short(&row.policy),
            at: ((1.0 - row.hit_share) * 100.0, row.goodput * 100.0),
            is_stale: row.false_hit_share > STALE_SHARE,
        })
        .collect();
    let better = |a: (f64, f64), b: (f64, f64)| a.0 <= b.0 && a.1 >= b.1 && a != b;
    scatter(
        "Reuse against goodput (modelled)",
        "prompt tokens recomputed, %",
        "goodput, % of requests",
        &points,
        better,
    )
}

/// The plot of a lab replay: less work and less waiting are better.
pub fn lab(runs: &[LabRun]) -> Result<String, String> {
    let points: Vec<Point> = runs
        .iter()
        .map(|run| Point {
            name: short(&run.policy),
            at: (run.summary.recomputed_tokens as f64, run.summary.latency_proxy_ticks),
            is_stale: run.summary.stale_claims > 0,
        })
        .collect();
    let better = |a: (f64, f64), b: (f64, f64)| a.0 <= b.0 && a.1 <= b.1 && a != b;
    scatter(
        "Reuse against latency (modelled)",
        "prompt tokens recomputed",
        "ticks to the first byte, mean",
        &points,
        better,
    )
}

/// The name, with its settings where they are few.
fn short(policy: &str) -> String {
    let parts: Vec<&str> = policy.split(':').collect();
    if parts.len() <= 2 { policy.to_owned() } else { parts[0].to_owned() }
}

/// Room around the values, so that no point lies on the frame.
fn range(values: impl Iterator<Item = f64> + Clone) -> std::ops::Range<f64> {
    let low = values.clone().fold(f64::INFINITY, f64::min);
    let high = values.fold(f64::NEG_INFINITY, f64::max);
    let room = ((high - low) * 0.12).max(0.5);
    low - room..high + room
}

fn scatter(
    title: &str,
    x: &str,
    y: &str,
    points: &[Point],
    better: impl Fn((f64, f64), (f64, f64)) -> bool,
) -> Result<String, String> {
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        area.fill(&WHITE).map_err(said)?;
        let (xs, ys) = (points.iter().map(|point| point.at.0), points.iter().map(|point| point.at.1));
        let mut chart = ChartBuilder::on(&area)
            .caption(title, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(56)
            .build_cartesian_2d(range(xs), range(ys))
            .map_err(said)?;
        chart.configure_mesh().light_line_style(WHITE).x_desc(x).y_desc(y).draw().map_err(said)?;
        let beaten = |point: &Point| points.iter().any(|other| better(other.at, point.at));
        let mut front: Vec<(f64, f64)> =
            points.iter().filter(|point| !beaten(point)).map(|point| point.at).collect();
        front.sort_by(|a, b| a.0.total_cmp(&b.0));
        chart.draw_series([PathElement::new(front, BLACK.mix(0.4))]).map_err(said)?;
        for (number, point) in points.iter().enumerate() {
            let colour = Palette99::pick(number);
            let style = if point.is_stale { colour.stroke_width(2) } else { colour.filled() };
            chart.draw_series([Circle::new(point.at, 5, style)]).map_err(said)?;
            let label = Text::new(point.name.clone(), (8, -5), ("sans-serif", 13));
            chart.draw_series([EmptyElement::at(point.at) + label]).map_err(said)?;
        }
        area.present().map_err(said)?;
    }
    Ok(text)
}

fn lines(rows: &[Summary]) -> Result<String, String> {
    let mut series: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
    for row in rows {
        series.entry(&row.policy).or_default().push((row.rate, row.goodput * 100.0));
    }
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        area.fill(&WHITE).map_err(said)?;
        let rates = range(rows.iter().map(|row| row.rate));
        let mut chart = ChartBuilder::on(&area)
            .caption("Goodput over load (modelled)", ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(56)
            .build_cartesian_2d(rates, 0.0..100.0)
            .map_err(said)?;
        chart
            .configure_mesh()
            .light_line_style(WHITE)
            .x_desc("rate of arrivals, times the recorded one")
            .y_desc("goodput, % of requests")
            .draw()
            .map_err(said)?;
        for (number, (policy, mut points)) in series.into_iter().enumerate() {
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            let colour = Palette99::pick(number).to_rgba();
            let dots = points.iter().map(|at| Circle::new(*at, 3, colour.filled()));
            chart.draw_series(dots).map_err(said)?;
            chart
                .draw_series([PathElement::new(points, colour.stroke_width(2))])
                .map_err(said)?
                .label(short(policy))
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerLeft)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3))
            .draw()
            .map_err(said)?;
        area.present().map_err(said)?;
    }
    Ok(text)
}

fn said(error: impl std::fmt::Display) -> String {
    error.to_string()
}
