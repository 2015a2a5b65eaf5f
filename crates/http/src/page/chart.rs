//! Lines over time, as SVG made here. Colours are those of the style sheet's legend; text takes the page's own.

use maud::{Markup, PreEscaped, html};
use plotters::prelude::*;

use super::{layout::short, ring::STEP};

/// Colours of the lines, as `--s0` and so on in the style sheet: to be told apart on white and on black.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0x1f, 0x77, 0xb4),
    RGBColor(0xd9, 0x5f, 0x02),
    RGBColor(0x2c, 0xa0, 0x2c),
    RGBColor(0x94, 0x67, 0xbd),
    RGBColor(0xc2, 0x18, 0x5b),
    RGBColor(0x7f, 0x7f, 0x00),
];
const SIZE: (u32, u32) = (480, 170);
/// Bounds of drawn values: beyond these sizes arithmetic has no room for axes, and devices send any number.
const LARGEST: f64 = 1e60;
const LEAST: f64 = 1e-60;
/// Seconds for which a value is the present one: two samples.
const FRESH: f64 = STEP as f64 * 2.0 / 1e3;

/// A line: its name and its points, seconds before now (below zero) and value.
pub(super) struct ChartLine {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
}

impl ChartLine {
    /// Returns the present value; `None` if the last point is an old one, as of a figure that has not changed since.
    fn last(&self) -> Option<f64> {
        self.points.last().filter(|(at, _)| *at >= -FRESH).map(|(_, value)| *value)
    }
}

/// The lines with a caption that says the last value of each in words, for those who do not see them. At most six lines.
pub(super) fn chart(title: &str, unit: &str, lines: &[ChartLine]) -> Markup {
    let lines = &lines[..lines.len().min(COLOURS.len())];
    let drawn = draw(lines);
    html! {
        figure {
            h2 { (title) }
            @match drawn {
                Some(svg) => div aria-hidden="true" { (PreEscaped(svg)) },
                None => p.muted { "Nothing to draw yet." },
            }
            figcaption {
                @for (number, line) in lines.iter().enumerate() {
                    span.legend {
                        span class={ "dot s" (number) } {}
                        (line.name) ": "
                        b {
                            @match line.last() {
                                Some(value) => { (short(value)) @if !unit.is_empty() { " " (unit) } },
                                None => "–",
                            }
                        }
                    }
                }
            }
        }
    }
}

/// `None` if there are less than two points, or they cannot be drawn.
fn draw(lines: &[ChartLine]) -> Option<String> {
    let points = || lines.iter().flat_map(|line| line.points.iter().copied()).filter(is_drawn);
    if points().count() < 2 {
        return None;
    }
    let begin = points().map(|(x, _)| x).fold(f64::INFINITY, f64::min).min(-60.0);
    let low = points().map(|(_, y)| y).fold(0.0, f64::min);
    let high = points().map(|(_, y)| y).fold(0.0, f64::max);
    let high = if high - low < LEAST { low + 1.0 } else { high + (high - low) * 0.05 };
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        let mut chart = ChartBuilder::on(&root)
            .margin(4)
            .margin_right(24)
            .x_label_area_size(20)
            .y_label_area_size(52)
            .build_cartesian_2d(begin..0.0, low..high)
            .ok()?;
        let grid = RGBColor(128, 128, 128).mix(0.3);
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(grid)
            .axis_style(grid)
            .x_labels(5)
            .y_labels(4)
            .x_label_formatter(&|x| ago(*x))
            .y_label_formatter(&|y| short(*y))
            .label_style(("sans-serif", 14))
            .draw()
            .ok()?;
        for (line, colour) in lines.iter().zip(COLOURS) {
            let points = line.points.iter().copied().filter(is_drawn);
            chart.draw_series(LineSeries::new(points, colour.stroke_width(2))).ok()?;
        }
        root.present().ok()?;
    }
    Some(svg)
}

fn is_drawn((x, y): &(f64, f64)) -> bool {
    // A point that lies ahead, by a clock that was set back, has no place on the axis.
    (-LARGEST..=0.0).contains(x) && y.abs() <= LARGEST
}

fn ago(seconds: f64) -> String {
    let seconds = seconds.abs().round();
    match seconds {
        0.0 => "now".to_owned(),
        s if s < 120.0 => format!("{s} s"),
        s if s < 7_200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.0} h", s / 3_600.0),
        s => format!("{:.0} d", s / 86_400.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The viewer soon gets a chart, whatever numbers a device sends.
    #[test]
    fn numbers_of_any_size_neither_panic_nor_take_for_ever() {
        let extremes = [
            f64::MAX,
            f64::MIN,
            f64::MIN_POSITIVE,
            5e-324,
            -0.0,
            1e60,
            -1e60,
            1e-60,
            f64::INFINITY,
            f64::NAN,
        ];
        for first in extremes {
            for second in extremes {
                let points = vec![(-60.0, first), (-1.0, second), (0.0, 1.0), (0.0, first)];
                let line = ChartLine { name: "x".to_owned(), points };
                assert!(chart("extreme", "", &[line]).0.len() < 64 << 10, "{first} {second}");
            }
            let points = vec![(first, 1.0), (0.0, 2.0), (0.0, 2.0)];
            assert!(chart("long ago", "", &[ChartLine { name: "x".to_owned(), points }]).0.len() < 64 << 10);
        }
    }

    /// The failure: minutes after the last write its latency was still said to be that of now.
    #[test]
    fn a_value_of_earlier_is_drawn_and_not_said_to_be_the_present_one() {
        let said = |last: f64| {
            let line = ChartLine { name: "x".to_owned(), points: vec![(-40.0, 7.5), (last, 7.5)] };
            let drawn = chart("", "ms", &[line]).into_string();
            assert!(drawn.contains("<polyline"), "{drawn}");
            drawn.contains("<b>7.50 ms</b>")
        };
        assert_eq!([said(0.0), said(-2.1), said(-4.1), said(-30.0)], [true, true, false, false]);
    }

    #[test]
    fn a_chart_has_no_style_or_script_that_a_strict_policy_refuses() {
        let points = vec![(-4.0, 1.0), (-2.0, f64::NAN), (0.0, 3.0)];
        let drawn = chart("<b>", "", &[ChartLine { name: "<i>".to_owned(), points }]).into_string();
        assert!(drawn.contains("<svg") && drawn.contains("polyline"), "{drawn}");
        assert!(!drawn.contains("style=") && !drawn.contains("<script") && !drawn.contains("<style"));
        assert!(drawn.contains("&lt;b&gt;") && !drawn.contains("<i>"));
        let one =
            chart("one", "", &[ChartLine { name: "x".to_owned(), points: vec![(0.0, 1.0)] }]).into_string();
        assert!(!one.contains("<svg") && one.contains("Nothing to draw"));
    }
}
