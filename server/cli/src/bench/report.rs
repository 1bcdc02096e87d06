//! Output of the benchmark, as a table and as JSON.

use std::fmt::Write as _;
use std::time::Duration;

use expertd_kernels::ceilings::Ceilings;
use serde_json::json;

use super::floor::Floor;
use expertd_types::Phase;

/// Figures of one step size.
pub(super) struct Figures {
    pub(super) tokens_per_rank: usize,
    pub(super) tokens: usize,
    /// Durations of the steps, ascending.
    pub(super) steps: Vec<Duration>,
    /// Time over which `requests` answers were measured.
    pub(super) wall: Duration,
    pub(super) requests: usize,
    /// Median duration of each phase on the slowest rank.
    pub(super) phases: [Duration; Phase::ALL.len()],
    /// Median of the sum of all phases except the copies between host and device, on the slowest rank.
    pub(super) inner: Duration,
    /// Mean floor of the steps, if ceilings are known.
    pub(super) floor: Option<Floor>,
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Columns of a phase's duration.
fn width(phase: Phase) -> usize {
    phase.name().len().max(6)
}

/// Formats the figures as a table.
pub(super) fn table(figures: &[Figures]) -> String {
    let mut text = String::new();
    let _ = write!(text, "{:>6} {:>7} {:>13} {:>8}", "T/rank", "step µs", "min..p90", "tokens/s");
    for phase in Phase::ALL {
        let _ = write!(text, " {:>1$}", phase.name(), width(phase));
    }
    let _ = writeln!(text, " {:>6}", "rest");
    let measured = |text: &mut String, f: &Figures| {
        let median = f.steps[f.steps.len() / 2];
        let p90 = f.steps[(f.steps.len() * 9 / 10).min(f.steps.len() - 1)];
        let spread = format!("{:.0}..{:.0}", micros(f.steps[0]), micros(p90));
        let rate = (f.tokens * f.requests) as f64 / f.wall.as_secs_f64();
        let _ = write!(text, "{:>6} {:>7.0} {spread:>13} {rate:>8.0}", f.tokens_per_rank, micros(median));
        for (phase, time) in Phase::ALL.into_iter().zip(f.phases) {
            let _ = write!(text, " {:>1$.0}", micros(time), width(phase));
        }
        let rest = median.saturating_sub(f.phases.iter().sum());
        let _ = writeln!(text, " {:>6.0}", micros(rest));
    };
    for f in figures {
        measured(&mut text, f);
        if let Some(floor) = &f.floor {
            floor_line(&mut text, f, floor);
        }
    }
    text.push_str(
        "medians; each phase is that of its slowest rank, so phases may add up to more than the step\n",
    );
    text
}

/// Appends the floors in the columns of the line above, and the ratio of the step without copies to its floor.
fn floor_line(text: &mut String, f: &Figures, floor: &Floor) {
    let _ = write!(text, "{:>6} {:>7.0} {:>13} {:>8}", "floor", micros(floor.step()), "", "");
    for phase in Phase::ALL {
        let part = match phase {
            Phase::Dispatch => format!("{:.0}", micros(floor.dispatch)),
            Phase::Experts => format!("{:.0}", micros(floor.experts)),
            Phase::Combine => format!("{:.0}", micros(floor.combine)),
            _ => String::new(),
        };
        let width = width(phase);
        let _ = write!(text, " {part:>width$}");
    }
    let (inner, ratio) = (micros(f.inner), f.inner.as_secs_f64() / floor.step().as_secs_f64());
    let _ = writeln!(text, "  without copies {inner:.0} µs, {ratio:.2} x the floor");
}

/// Formats the figures as JSON, with all times in seconds, and the ceilings if they are known.
pub(super) fn json(ceilings: Option<&Ceilings>, figures: &[Figures]) -> serde_json::Value {
    let one = |f: &Figures| {
        let phases: serde_json::Map<_, _> = Phase::ALL
            .iter()
            .zip(f.phases)
            .map(|(p, t)| (format!("{}_seconds", p.name()), json!(t.as_secs_f64())))
            .collect();
        json!({
            "tokens_per_rank": f.tokens_per_rank,
            "tokens": f.tokens,
            "tokens_per_second": (f.tokens * f.requests) as f64 / f.wall.as_secs_f64(),
            "step_seconds": f.steps.iter().map(Duration::as_secs_f64).collect::<Vec<_>>(),
            "phases": phases,
            "without_copies_seconds": f.inner.as_secs_f64(),
            "floor": f.floor.map(|floor| json!({
                "step_seconds": floor.step().as_secs_f64(),
                "dispatch_seconds": floor.dispatch.as_secs_f64(),
                "experts_seconds": floor.experts.as_secs_f64(),
                "combine_seconds": floor.combine.as_secs_f64(),
            })),
        })
    };
    json!({
        "ceilings": ceilings.map(|found| json!({
            "memory_bytes_per_second": found.memory_bytes_per_second,
            "tensor_flops": found.tensor_sustained_flops,
            "link_bytes_per_second": found.link_bytes_per_second,
        })),
        "sizes": figures.iter().map(one).collect::<Vec<_>>(),
    })
}
