//! Tables, JSON and a plot of what was measured.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::Result;
use candle_specprefill::specprefill::Keep;
use plotters::prelude::*;
use serde::Serialize;

use crate::decode::Decode;
use crate::divergence::Divergence;
use crate::gate;
use crate::tasks::Kind;

/// One answer.
#[derive(Clone, Debug, Serialize)]
pub struct Case {
    /// Which prompt.
    pub task: usize,
    pub kind: Kind,
    pub length: usize,
    pub depth: f64,
    pub scorer: String,
    /// `None` for full prefill.
    pub keep: Option<Keep>,
    pub score: f64,
    pub text: String,
    pub answer: String,
    /// Whether tokens were dropped.
    pub sparse: bool,
    pub prompt_tokens: usize,
    pub kept_tokens: usize,
    pub ttft_s: f64,
    /// The draft's reading, a part of `scoring_s`.
    pub draft_prefill_s: f64,
    pub scoring_s: f64,
    pub prefill_s: f64,
    /// The target's probability of the draft's first token.
    pub agreement: Option<f64>,
    /// Whether the gate doubted the selection.
    pub reread: bool,
}

/// Everything.
#[derive(Clone, Debug, Serialize)]
pub struct Results {
    pub cases: Vec<Case>,
    pub divergences: Vec<Divergence>,
    pub decode: Option<Decode>,
    pub seconds: f64,
}

/// Which cases belong to a column of a table.
type Filter = Box<dyn Fn(&Case) -> bool>;

fn keep_name(keep: &Keep) -> String {
    match keep {
        Keep::Fraction(k) => format!("{k}"),
        Keep::Tokens(n) => format!("{n}t"),
        Keep::Mass(k) => format!("mass:{k}"),
        Keep::Budget { ttft_s } => format!("{ttft_s}s"),
    }
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let values: Vec<f64> = values.collect();
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

impl Results {
    /// Columns of the tables: full prefill, then every scorer and share, in the order they ran.
    fn columns(&self) -> Vec<(String, Option<String>)> {
        let mut columns = vec![];
        for case in &self.cases {
            let column = (case.scorer.clone(), case.keep.as_ref().map(keep_name));
            if !columns.contains(&column) {
                columns.push(column);
            }
        }
        columns
    }

    fn of<'a>(
        &'a self,
        column: &'a (String, Option<String>),
        row: &'a dyn Fn(&Case) -> bool,
    ) -> impl Iterator<Item = &'a Case> {
        let fits = |c: &&Case| c.scorer == column.0 && c.keep.as_ref().map(keep_name) == column.1;
        self.cases.iter().filter(fits).filter(move |c| row(c))
    }

    /// Quality, time and divergence as Markdown.
    pub fn markdown(&self) -> String {
        let mut rows: Vec<(String, Filter)> = vec![];
        let lengths: BTreeMap<usize, ()> = self
            .cases
            .iter()
            .filter(|c| c.kind == Kind::Needle)
            .map(|c| (c.length, ()))
            .collect();
        for length in lengths.into_keys() {
            let row = move |c: &Case| c.kind == Kind::Needle && c.length == length;
            rows.push((format!("needle {length}"), Box::new(row)));
        }
        for kind in [
            Kind::Multi,
            Kind::ToolResult,
            Kind::SystemSecret,
            Kind::Quote,
        ] {
            let name = format!("{kind:?}").to_lowercase();
            rows.push((name, Box::new(move |c: &Case| c.kind == kind)));
        }
        let mut out = String::from("Right answers, % (quote: words in order, %), and time to first token, s (scoring's share of it)\n\n| scorer | keep |");
        for (name, row) in &rows {
            let n = self.of(&("full".into(), None), row).count();
            let _ = write!(out, " {name} (n={n}) |");
        }
        out.push_str("\n|---|---|");
        out.push_str(&"---|".repeat(rows.len()));
        for column in self.columns() {
            let keep = column.1.clone().unwrap_or_else(|| "all".into());
            let _ = write!(out, "\n| {} | {keep} |", column.0);
            for (_, row) in &rows {
                let cases: Vec<&Case> = self.of(&column, row).collect();
                if cases.is_empty() {
                    out.push_str(" |");
                    continue;
                }
                let ttft = mean(cases.iter().map(|c| c.ttft_s));
                let share = mean(cases.iter().map(|c| c.scoring_s)) / ttft.max(1e-9);
                let score = mean(cases.iter().map(|c| c.score));
                let _ = write!(
                    out,
                    " {:.0} · {ttft:.2} ({:.0} %) |",
                    100.0 * score,
                    100.0 * share
                );
            }
        }
        out.push_str("\n\nSpeed-up of the first token, measured and by the model 1 / (kept + d), d the draft's cost by the target's\n\n| length | scorer | keep | kept | d | measured | model | look-ahead and scoring by the draft's reading |\n|---|---|---|---|---|---|---|---|");
        for (name, row) in rows.iter().filter(|(name, _)| name.starts_with("needle")) {
            let column = ("full".into(), None);
            let full: Vec<&Case> = self.of(&column, row).collect();
            let per_token = |s: &dyn Fn(&Case) -> f64, cases: &[&Case]| {
                mean(cases.iter().map(|c| s(c) / c.prompt_tokens as f64))
            };
            for column in self.columns().iter().filter(|c| c.1.is_some()) {
                let cases: Vec<&Case> = self.of(column, row).filter(|c| c.sparse).collect();
                if cases.is_empty()
                    || !["look-ahead-wide", "tail-window"].contains(&column.0.as_str())
                {
                    continue;
                }
                let kept = mean(
                    cases
                        .iter()
                        .map(|c| c.kept_tokens as f64 / c.prompt_tokens as f64),
                );
                let d = per_token(&|c| c.scoring_s, &cases) / per_token(&|c| c.prefill_s, &full);
                let measured =
                    mean(full.iter().map(|c| c.ttft_s)) / mean(cases.iter().map(|c| c.ttft_s));
                let _ = write!(
                    out,
                    "\n| {} | {} | {} | {kept:.3} | {d:.3} | {measured:.2} | {:.2} | {:.1} % |",
                    name.trim_start_matches("needle "),
                    column.0,
                    column.1.as_deref().unwrap_or_default(),
                    1.0 / (kept + d),
                    100.0 * (mean(cases.iter().map(|c| c.scoring_s / c.draft_prefill_s)) - 1.0)
                );
            }
        }
        out.push_str("\n\nDivergence from full prefill over the last rows of plain text\n\n| scorer | keep | kept | KL, nats | same top token |\n|---|---|---|---|---|");
        for d in &self.divergences {
            let _ = write!(
                out,
                "\n| {} | {} | {:.3} | {:.4} | {:.0} % |",
                d.scorer,
                keep_name(&d.keep),
                d.share,
                d.kl,
                100.0 * d.same_top
            );
        }
        out.push_str("\n\nProbability that the target gives to the draft's first token, by whether the answer was right\n\n| answer | n | least | tenth | median | nine tenths | most |\n|---|---|---|---|---|---|---|");
        for (name, right) in [("right", true), ("wrong", false)] {
            let cases = self.cases.iter().filter(|c| c.kind != Kind::Quote);
            let cases = cases.filter(|c| (c.score == 1.0) == right);
            let mut found: Vec<f64> = cases.filter_map(|c| c.agreement).collect();
            found.sort_by(f64::total_cmp);
            let last = found.len().saturating_sub(1) as f64;
            let at = |q: f64| found.get((last * q) as usize).copied().unwrap_or(f64::NAN);
            let _ = write!(out, "\n| {name} | {} |", found.len());
            for q in [0.0, 0.1, 0.5, 0.9, 1.0] {
                let _ = write!(out, " {:.3} |", at(q));
            }
        }
        out.push_str(&gate::summary(&self.cases));
        if let Some(d) = &self.decode {
            let routes = if d.same_routes { "the same" } else { "OTHER" };
            let _ = write!(
                out,
                "\n\nA token after a sparse prefill of {} of {} rows took {:.3} ms, after a dense one of as many {:.3} ms (ratio {:.2}, {routes} kernels)",
                d.rows,
                d.prompt_tokens,
                1e3 * d.sparse_s,
                1e3 * d.dense_s,
                d.sparse_s / d.dense_s
            );
        }
        let _ = write!(
            out,
            "\n\n{} answers in {:.0} s\n",
            self.cases.len(),
            self.seconds
        );
        out
    }

    /// Right answers of the needle grid by the share kept, a line per scorer.
    pub fn plot(&self) -> Result<String> {
        let mut svg = String::new();
        {
            let root = SVGBackend::with_string(&mut svg, (760, 440)).into_drawing_area();
            root.fill(&WHITE)?;
            let mut chart = ChartBuilder::on(&root)
                .caption(
                    "Needles found by the share of the prompt kept",
                    ("sans-serif", 18),
                )
                .margin(16)
                .x_label_area_size(44)
                .y_label_area_size(52)
                .build_cartesian_2d(0.0..1.0, 0.0..105.0)?;
            chart
                .configure_mesh()
                .x_desc("kept share of the prompt")
                .y_desc("right answers, %")
                .light_line_style(WHITE)
                .draw()?;
            // Longer ones have one share only.
            let needle = |c: &Case| c.kind == Kind::Needle && c.length < crate::LONG;
            let full = 100.0 * mean(self.of(&("full".into(), None), &needle).map(|c| c.score));
            let grey = RGBColor(120, 120, 120);
            chart
                .draw_series(LineSeries::new([(0.0, full), (1.0, full)], grey))?
                .label("full prefill")
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], grey));
            let columns = self.columns();
            let mut names: Vec<&str> = columns
                .iter()
                .filter(|c| c.1.is_some())
                .map(|c| c.0.as_str())
                .collect();
            names.dedup();
            for (i, name) in names.into_iter().enumerate() {
                let mut points: Vec<(f64, f64)> = columns
                    .iter()
                    .filter(|c| c.0 == name && c.1.is_some())
                    .map(|column| {
                        let cases: Vec<&Case> = self.of(column, &needle).collect();
                        let kept = cases
                            .iter()
                            .map(|c| c.kept_tokens as f64 / c.prompt_tokens as f64);
                        (mean(kept), 100.0 * mean(cases.iter().map(|c| c.score)))
                    })
                    .collect();
                points.sort_by(|a, b| a.0.total_cmp(&b.0));
                let colour = Palette99::pick(i).stroke_width(2);
                chart
                    .draw_series(LineSeries::new(points.clone(), colour))?
                    .label(name)
                    .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour));
                chart.draw_series(
                    points
                        .iter()
                        .map(|p| Circle::new(*p, 4, Palette99::pick(i).filled())),
                )?;
            }
            chart
                .configure_series_labels()
                .position(SeriesLabelPosition::LowerRight)
                .background_style(WHITE)
                .border_style(grey)
                .draw()?;
            root.present()?;
        }
        Ok(svg)
    }
}
