//! What the gate would have caught: its threshold chosen on every other prompt, judged on the rest.

use std::fmt::Write;

use crate::output::Case;
use crate::tasks::Kind;

/// A threshold on some answers.
struct Judged {
    wrong: usize,
    caught: usize,
    right: usize,
    alarms: usize,
}

/// Probability that the target gave to the draft's first token, and whether the value was right.
type Answer = (f64, bool);

fn judge(answers: &[Answer], threshold: f64) -> Judged {
    let count = |right: bool, below: bool| {
        let fits = |a: &&Answer| a.1 == right && (!below || a.0 < threshold);
        answers.iter().filter(fits).count()
    };
    Judged {
        wrong: count(false, false),
        caught: count(false, true),
        right: count(true, false),
        alarms: count(true, true),
    }
}

/// The threshold with the largest catch rate less false-alarm rate, halfway between the least and the largest of equals.
fn calibrate(answers: &[Answer]) -> f64 {
    let mut seen: Vec<f64> = answers.iter().map(|a| a.0).collect();
    seen.extend([0.0, 1.0]);
    seen.sort_by(f64::total_cmp);
    let worth = |threshold: f64| {
        let j = judge(answers, threshold);
        j.caught as f64 / j.wrong.max(1) as f64 - j.alarms as f64 / j.right.max(1) as f64
    };
    let halves: Vec<f64> = seen.windows(2).map(|w| (w[0] + w[1]) / 2.0).collect();
    let best = halves.iter().map(|t| worth(*t)).fold(f64::MIN, f64::max);
    let mut equal = halves.into_iter().filter(|t| worth(*t) == best);
    let first = equal.next().unwrap_or_default();
    (first + equal.next_back().unwrap_or(first)) / 2.0
}

/// Markdown.
pub fn summary(cases: &[Case]) -> String {
    let of = |odd: usize| -> Vec<Answer> {
        let cases = cases
            .iter()
            .filter(|c| c.kind != Kind::Quote && c.task % 2 == odd);
        cases
            .filter_map(|c| Some((c.agreement?, c.score == 1.0)))
            .collect()
    };
    let (chosen_on, held_out) = (of(0), of(1));
    if chosen_on.is_empty() || held_out.is_empty() {
        return String::new();
    }
    let threshold = calibrate(&chosen_on);
    let mut out = format!("\n\nGate with min_probability {threshold:.3}, chosen on every other prompt\n\n| prompts | wrong answers caught | right answers doubted |\n|---|---|---|");
    for (name, answers) in [("chosen on", chosen_on), ("held out", held_out)] {
        let j = judge(&answers, threshold);
        let _ = write!(
            out,
            "\n| {name} | {} of {} | {} of {} |",
            j.caught, j.wrong, j.alarms, j.right
        );
    }
    out
}
