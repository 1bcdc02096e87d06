//! The progress bar.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use tokio::task::JoinHandle;

use crate::load::Load;

const REFRESH: Duration = Duration::from_millis(250);

/// Shows a bar on standard error, if that is a terminal, until the handle is aborted.
pub fn show(load: Arc<Load>) -> JoinHandle<()> {
    tokio::spawn(async move {
        let (_, limit) = load.period.counted();
        let length = load.period.stop - load.period.start;
        let bar = ProgressBar::new(1000);
        if let Ok(style) = ProgressStyle::with_template("{elapsed:>4} [{bar:30}] {percent:>3}% {msg}") {
            bar.set_style(style.progress_chars("=> "));
        }
        let (mut last, walks) = ((Instant::now(), 0, 0, 0), load.workload.walks());
        loop {
            tokio::time::sleep(REFRESH).await;
            let now = Instant::now();
            let of_time = (now - load.period.start).as_secs_f64() / length.as_secs_f64();
            let of_count = limit.map_or(0.0, |limit| load.period.counted().0 as f64 / limit.max(1) as f64);
            bar.set_position((of_time.max(of_count).min(1.0) * 1000.0) as u64);
            let answered = load.progress.answered.load(Ordering::Relaxed);
            let tokens = load.progress.tokens.load(Ordering::Relaxed);
            let walked = load.progress.walks.load(Ordering::Relaxed);
            let seconds = (now - last.0).as_secs_f64();
            let phase = if now < load.period.measured { "warm-up, " } else { "" };
            let failed = load.progress.failed.load(Ordering::Relaxed);
            let failed = if failed > 0 { format!(", {failed} failed") } else { String::new() };
            let model_steps = match walks {
                true => format!("{:.1} model steps/s, ", (walked - last.3) as f64 / seconds),
                false => String::new(),
            };
            bar.set_message(format!(
                "{phase}{model_steps}{:.0} requests/s, {:.0} tokens/s, {} outstanding{failed}",
                (answered - last.1) as f64 / seconds,
                (tokens - last.2) as f64 / seconds,
                load.progress.outstanding.load(Ordering::Relaxed)
            ));
            last = (now, answered, tokens, walked);
        }
    })
}
