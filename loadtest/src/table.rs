//! The report as text.

use std::fmt::Write as _;

use crate::report::{DecodeReport, Report};
use crate::stats::{PHASES, Summary};

/// Formats the whole report.
#[must_use]
pub fn table(report: &Report) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut out, report);
    out
}

fn write(out: &mut String, report: &Report) -> std::fmt::Result {
    let Report { settings, checks, cpu, .. } = report;
    let open = settings.rate_per_second.map(|rate| format!("open loop, {rate} requests/s (Poisson)"));
    let each = (settings.mode == "stream").then(|| format!(" × {}", count(settings.streams, "stream")));
    let each = each.unwrap_or_default();
    let closed = format!("closed loop, {} outstanding on each", settings.outstanding);
    writeln!(
        out,
        "{} ({}), weight version {}, at {}",
        settings.model, settings.family, settings.weight_version, settings.address
    )?;
    writeln!(
        out,
        "{}: {}{each}; {}; {} tokens of {}; {}; routing {}; seed {}",
        settings.mode,
        count(
            settings.connections,
            &settings.session.map_or("connection".to_owned(), |kind| format!("{kind} session"))
        ),
        open.unwrap_or(closed),
        settings.tokens,
        settings.dtype,
        count(settings.layers.len(), "layer"),
        settings.routing,
        settings.seed
    )?;
    writeln!(out)?;
    writeln!(
        out,
        "throughput   {:.1} requests/s   {:.0} tokens/s   {:.1} MB/s of rows both ways   {:.1} steps/s{}",
        report.requests_per_second,
        report.tokens_per_second,
        report.row_bytes_per_second * 1e-6,
        report.steps_per_second,
        report.tokens_per_step.map_or(String::new(), |tokens| format!("   {tokens:.1} tokens/step"))
    )?;
    if let Some(decode) = &report.decode {
        writeln!(
            out,
            "decode       {:.1} model steps/s through {}   {:.0} tokens/s of all sequences{}",
            decode.model_steps_per_second,
            count(settings.layers.len(), "layer"),
            decode.sequence_tokens_per_second,
            if decode.failed > 0 {
                format!("   {} model steps failed", decode.failed)
            } else {
                String::new()
            }
        )?;
    }
    writeln!(
        out,
        "measured     {} requests, {} tokens in {:.2} s; {} answers with warm-up and checks",
        report.requests, report.tokens, report.elapsed_seconds, report.answers
    )?;
    writeln!(out)?;
    writeln!(
        out,
        "{:<12} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "", "mean", "p50", "p90", "p99", "p99.9", "max"
    )?;
    durations(out, "latency", &report.latency)?;
    durations(out, "  queue", &report.queue)?;
    durations(out, "  step", &report.step)?;
    durations(out, "  rest", &report.rest)?;
    if let Some(decode) = &report.decode {
        durations(out, "model step", &decode.model_step)?;
        durations(out, "  in calls", &decode.in_calls)?;
        layers(out, decode)?;
    }
    if let Some(late) = &report.late {
        durations(out, "sent late", late)?;
    }
    for phase in PHASES {
        if let Some(summary) = report.phases.get(phase) {
            durations(out, phase, summary)?;
        }
    }
    writeln!(out)?;
    echo(out, report)?;
    writeln!(
        out,
        "processor    load generator {:.2} of {} cores{}",
        cpu.load_generator_cores,
        cpu.cores,
        cpu.machine_busy_share.map_or(String::new(), |busy| format!(", machine {:.0} % busy", busy * 100.0))
    )?;
    for memory in &report.memory {
        writeln!(
            out,
            "memory       {:.1} MiB ({:.1} shared) on average from {:.0} s, {:.1} ({:.1}) from {:.0} s, {:+.2} %, peak {:.1}: {} {}",
            mib(memory.early.bytes),
            mib(memory.early.shared_bytes),
            memory.early.seconds,
            mib(memory.last.bytes),
            mib(memory.last.shared_bytes),
            memory.last.seconds,
            memory.growth() * 100.0,
            mib(memory.peak_bytes),
            memory.pid,
            memory.command
        )?;
    }
    writeln!(out, "limited by   {}", report.limit)?;
    writeln!(out)?;
    for (code, status) in &report.statuses {
        writeln!(out, "status       {:>8} {code}: {}", status.count, status.example)?;
    }
    if report.retries > 0 {
        writeln!(out, "retries      {:>8}", report.retries)?;
    }
    if report.not_sent > 0 {
        writeln!(out, "not sent     {:>8} arrivals, because of --max-outstanding", report.not_sent)?;
    }
    if report.generations.len() > 1 {
        writeln!(out, "generations  {:?}", report.generations)?;
    }
    writeln!(
        out,
        "checked      {:>8} answers sent again, {} compared with recorded answers, {} not compared; largest error {:.1e} of \
         {:.0e}",
        checks.again, checks.known, checks.unchecked, checks.largest_error, checks.tolerance
    )?;
    writeln!(out, "wrong        {:>8}", report.wrong)?;
    writeln!(out, "lost         {:>8}", report.lost)?;
    for note in &report.notes {
        writeln!(out, "             {note}")?;
    }
    writeln!(out, "{}", if report.ok { "ok" } else { "FAILED" })
}

fn echo(out: &mut String, report: &Report) -> std::fmt::Result {
    if let Some(one) = &report.echo.one_outstanding {
        writeln!(
            out,
            "beside echo  one outstanding, p50: echo {}, service {}, service less step {}: {} added",
            short(one.echo.p50_seconds),
            short(one.service.p50_seconds),
            short(one.service_less_step.p50_seconds),
            short(one.added_p50_seconds)
        )?;
        writeln!(
            out,
            "             an echo after as much memory traffic as a step has: {}; compared with it, {} added",
            short(one.cold_echo.p50_seconds),
            short(one.added_to_cold_p50_seconds)
        )?;
    }
    if let Some(same) = &report.echo.same_load {
        writeln!(
            out,
            "echo's load  same connections and outstanding: {:.1} requests/s, {:.1} MB/s of rows, p50 {}",
            same.requests_per_second,
            same.row_bytes_per_second * 1e-6,
            short(same.latency.p50_seconds)
        )?;
    }
    Ok(())
}

/// Layers of a table of decode.
const SHOWN_LAYERS: usize = 8;

/// The calls of each layer; of many layers, the slowest ones.
fn layers(out: &mut String, decode: &DecodeReport) -> std::fmt::Result {
    let mut slowest: Vec<_> = decode.layers.iter().collect();
    let left_out = slowest.len().saturating_sub(SHOWN_LAYERS);
    if left_out > 0 {
        slowest.sort_by(|a, b| b.1.p50_seconds.total_cmp(&a.1.p50_seconds));
        slowest.truncate(SHOWN_LAYERS);
        slowest.sort_by_key(|(layer, _)| **layer);
    }
    for (layer, summary) in slowest {
        durations(out, &format!("  layer {layer}"), summary)?;
    }
    if left_out > 0 {
        writeln!(out, "  ({left_out} layers with a smaller p50 are left out; --json has them)")?;
    }
    Ok(())
}

fn durations(out: &mut String, name: &str, summary: &Summary) -> std::fmt::Result {
    let columns = [
        summary.mean_seconds,
        summary.p50_seconds,
        summary.p90_seconds,
        summary.p99_seconds,
        summary.p999_seconds,
        summary.max_seconds,
    ];
    write!(out, "{name:<12}")?;
    for seconds in columns {
        write!(out, " {:>9}", short(seconds))?;
    }
    writeln!(out)
}

/// Formats a duration with three digits and a unit.
fn short(seconds: f64) -> String {
    let size = seconds.abs();
    let (value, unit) = match size {
        _ if size >= 1.0 => (seconds, "s"),
        _ if size >= 1e-3 => (seconds * 1e3, "ms"),
        _ => (seconds * 1e6, "µs"),
    };
    let digits = if value.abs() >= 100.0 {
        0
    } else if value.abs() >= 10.0 {
        1
    } else {
        2
    };
    format!("{value:.digits$} {unit}")
}

/// A number and the noun that it counts, as in `1 layer` and `2 layers`.
fn count(number: usize, one: &str) -> String {
    format!("{number} {one}{}", if number == 1 { "" } else { "s" })
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn of_many_layers_the_slowest_are_shown_in_order() {
        let at = |layer: u32| Summary { p50_seconds: f64::from(layer % 10) * 1e-3, ..Summary::default() };
        let decode = |count: u32| DecodeReport {
            model_steps_per_second: 1.0,
            sequence_tokens_per_second: 1.0,
            model_step: Summary::default(),
            in_calls: Summary::default(),
            failed: 0,
            layers: (0..count).map(|layer| (layer, at(layer))).collect(),
        };
        let shown = |count| {
            let mut out = String::new();
            layers(&mut out, &decode(count)).unwrap();
            out
        };
        assert_eq!(shown(8).lines().count(), 8);
        let twelve = shown(12);
        let first: Vec<&str> = twelve.lines().filter_map(|line| line.split_whitespace().nth(1)).collect();
        assert_eq!(first, ["2", "3", "4", "5", "6", "7", "8", "9", "layers"]);
        assert!(twelve.contains("(4 layers with a smaller p50 are left out"), "{twelve}");
        assert_eq!(shown(0), "");
    }

    #[test]
    fn durations_are_short() {
        assert_eq!(short(0.0), "0.00 µs");
        assert_eq!(short(0.000_123_4), "123 µs");
        assert_eq!(short(0.012_34), "12.3 ms");
        assert_eq!(short(2.5), "2.50 s");
        assert_eq!(short(-0.000_05), "-50.0 µs");
    }
}
