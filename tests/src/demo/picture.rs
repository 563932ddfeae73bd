//! The picture of a run: hit share and time to first token, side by side, as SVG.

use std::path::Path;

use anyhow::{Context, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::results::PolicyResult;

const SIZE: (u32, u32) = (1080, 460);
const INK: RGBColor = RGBColor(0x24, 0x29, 0x2f);
const GRID: RGBColor = RGBColor(0xe3, 0xe6, 0xea);
const BLUE: RGBColor = RGBColor(0x2f, 0x6d, 0xb5);
const GREEN: RGBColor = RGBColor(0x2e, 0x8b, 0x57);
const AMBER: RGBColor = RGBColor(0xd9, 0x8e, 0x2b);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A row of bars for each policy.
struct Panel<'a> {
    caption: &'a str,
    /// The axis' text.
    unit: &'a str,
    top: f64,
    /// Name, colour and one value per policy.
    series: Vec<(&'a str, RGBColor, Vec<f64>)>,
}

/// Draws `all` into the file `path`.
pub fn draw(path: &Path, seed: u64, all: &[PolicyResult]) -> anyhow::Result<()> {
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    draw_on(&root, seed, all).map_err(|error| anyhow!("{error}"))?;
    root.present()
        .map_err(|error| anyhow!("{error}"))
        .with_context(|| format!("failed to write {}", path.display()))
}

fn draw_on(root: &Area<'_>, seed: u64, all: &[PolicyResult]) -> Result<(), Box<dyn std::error::Error>> {
    root.fill(&WHITE)?;
    let title = format!(
        "{} requests of multi-turn conversations on 4 simulated engines, seed {seed}",
        all.first().map_or(0, |row| row.requests)
    );
    root.draw(&Text::new(title, (24, 18), font(20)))?;
    let (_, body) = root.split_vertically(48);
    let (left, right) = body.split_horizontally(SIZE.0 * 2 / 5);
    let names: Vec<&str> = all.iter().map(|row| row.policy).collect();
    let column = |value: fn(&PolicyResult) -> f64| all.iter().map(value).collect::<Vec<f64>>();
    let hits = Panel {
        caption: "Prompt tokens found in the cache",
        unit: "share of prompt tokens, %",
        top: 100.0,
        series: vec![("", BLUE, column(|row| row.hit_share * 100.0))],
    };
    let slow = column(|row| row.first_token_p99_ms);
    let times = Panel {
        caption: "Time to first token (lower is better)",
        unit: "milliseconds",
        top: slow.iter().copied().fold(1.0, f64::max) * 1.15,
        series: vec![
            ("median", GREEN, column(|row| row.first_token_p50_ms)),
            ("99th percentile", AMBER, slow),
        ],
    };
    draw_panel(&left, &names, &hits)?;
    draw_panel(&right, &names, &times)
}

fn draw_panel(area: &Area<'_>, names: &[&str], panel: &Panel<'_>) -> Result<(), Box<dyn std::error::Error>> {
    let mut chart = ChartBuilder::on(area)
        .caption(panel.caption, font(17))
        .margin(14)
        .x_label_area_size(34)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..names.len() as f64, 0.0..panel.top)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .disable_x_axis()
        .light_line_style(WHITE)
        .bold_line_style(GRID)
        .axis_style(GRID)
        .y_labels(6)
        .y_label_style(font(13))
        .y_label_formatter(&|value| format!("{value:.0}"))
        .y_desc(panel.unit)
        .axis_desc_style(font(14))
        .draw()?;
    let width = 0.76 / panel.series.len() as f64;
    for (at, (name, colour, values)) in panel.series.iter().enumerate() {
        let bar = |(policy, value): (usize, &f64)| {
            let from = policy as f64 + 0.12 + width * at as f64;
            Rectangle::new([(from, 0.0), (from + width * 0.94, *value)], colour.filled())
        };
        let drawn = chart.draw_series(values.iter().enumerate().map(bar))?;
        if !name.is_empty() {
            let colour = *colour;
            drawn
                .label(*name)
                .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
        }
        for (policy, value) in values.iter().enumerate() {
            let middle = policy as f64 + 0.12 + width * (at as f64 + 0.47);
            let place = chart.backend_coord(&(middle, *value));
            let style = font(14).pos(Pos::new(HPos::Center, VPos::Bottom));
            area.draw(&Text::new(format!("{value:.0}"), relative(area, place, -4), style))?;
        }
    }
    for (at, name) in names.iter().enumerate() {
        let place = chart.backend_coord(&(at as f64 + 0.5, 0.0));
        let style = font(14).pos(Pos::new(HPos::Center, VPos::Top));
        area.draw(&Text::new(*name, relative(area, place, 9), style))?;
    }
    if panel.series.len() > 1 {
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.9))
            .border_style(GRID)
            .label_font(font(14))
            .draw()?;
    }
    Ok(())
}

/// A point of the whole picture as one of `area`, moved down by `below`.
fn relative(area: &Area<'_>, (x, y): (i32, i32), below: i32) -> (i32, i32) {
    let (left, top) = area.get_base_pixel();
    (x - left, y - top + below)
}

fn font(size: i32) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&INK)
}
