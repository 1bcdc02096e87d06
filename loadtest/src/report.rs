//! The outcome of a load, as data.

use std::collections::BTreeMap;

use serde::Serialize;
use tonic::Code;

use crate::args::{Args, Mode, RoutingSource};
use crate::echo::OneOutstanding;
use crate::load::explained;
use crate::request::Workload;
use crate::resources::{CpuUse, Memory};
use crate::stats::{PHASES, Stats, Summary};
use crate::window::Window;

/// What was run.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs, reason = "as on the command line")]
pub struct Settings {
    pub address: String,
    pub model: String,
    pub family: String,
    pub weight_version: u64,
    pub layers: Vec<u32>,
    pub mode: &'static str,
    pub connections: usize,
    pub streams: usize,
    pub outstanding: usize,
    /// Open loop only.
    pub rate_per_second: Option<f64>,
    pub tokens: String,
    pub dtype: &'static str,
    pub routing: String,
    pub seed: u64,
    pub warm_up_seconds: f64,
    pub version: &'static str,
}

impl Settings {
    /// From the command line and the served model.
    #[must_use]
    pub fn new(args: &Args, workload: &Workload) -> Settings {
        let stream = args.shape.mode == Mode::Stream;
        Settings {
            address: args.address.clone(),
            model: workload.model.name.clone(),
            family: workload.model.family.clone(),
            weight_version: workload.model.weight_version,
            layers: workload.layers.iter().map(|layer| layer.layer).collect(),
            mode: if stream { "stream" } else { "unary" },
            connections: args.shape.connections.get(),
            streams: if stream { args.shape.streams.get() } else { 1 },
            outstanding: args.shape.outstanding.get(),
            rate_per_second: args.shape.rate,
            tokens: args.content.tokens.to_string(),
            dtype: workload.dtype.name(),
            routing: match args.content.routing {
                RoutingSource::Gate => "gate".to_owned(),
                RoutingSource::Zipf(exponent) => format!("zipf:{exponent}"),
            },
            seed: workload.seed,
            warm_up_seconds: args.bounds.warm_up,
            version: env!("CARGO_PKG_VERSION"),
        }
    }
}

/// Statuses of one code.
#[derive(Clone, Debug, Serialize)]
pub struct StatusCount {
    /// How many.
    pub count: u64,
    /// The text of one of them.
    pub example: String,
    /// Whether load or a fault may cause it; others make the run fail.
    pub explained: bool,
}

/// What was checked.
#[derive(Clone, Debug, Serialize)]
pub struct CheckReport {
    /// Answers compared with recorded ones.
    pub known: u64,
    /// Answers compared with the same rows in another batch.
    pub again: u64,
    /// Samples that could not be compared, because the service could not answer or the checker was busy.
    pub unchecked: u64,
    /// Largest relative L2 error of a row.
    pub largest_error: f64,
    /// What is tolerated.
    pub tolerance: f64,
}

/// The echo beside the service.
#[derive(Clone, Debug, Default, Serialize)]
pub struct EchoReport {
    /// One request outstanding, alternating with the service.
    pub one_outstanding: Option<OneOutstanding>,
    /// Closed loop with the connections, streams and outstanding requests of the load.
    pub same_load: Option<EchoLoad>,
}

/// The echo under the load's own shape.
#[derive(Clone, Copy, Debug, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct EchoLoad {
    pub requests_per_second: f64,
    pub row_bytes_per_second: f64,
    pub latency: Summary,
}

/// All of it.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// What was run.
    pub settings: Settings,
    /// From the end of the warm-up to the last measured answer.
    pub elapsed_seconds: f64,
    /// Measured requests answered.
    pub requests: u64,
    /// Rows in them.
    pub tokens: u64,
    /// Rates over the elapsed time.
    pub requests_per_second: f64,
    /// Rows per second.
    pub tokens_per_second: f64,
    /// Bytes of rows per second, both directions.
    pub row_bytes_per_second: f64,
    /// From the intended arrival (open loop) or the sending (closed loop) to the decoded answer.
    pub latency: Summary,
    /// Parts of it: waiting for a step,
    pub queue: Summary,
    /// the steps,
    pub step: Summary,
    /// and the rest, transport and client.
    pub rest: Summary,
    /// Open loop: how late the client itself sent.
    pub late: Option<Summary>,
    /// Steps per second of the whole service, by step numbers.
    pub steps_per_second: f64,
    /// Mean rows of a step, with `--timings`.
    pub tokens_per_step: Option<f64>,
    /// By phase, with `--timings`.
    pub phases: BTreeMap<&'static str, Summary>,
    /// Generations seen; more than one means that the EP group was formed anew.
    pub generations: Vec<u64>,
    /// Answers from the first request on, warm-up and checks included.
    pub answers: u64,
    /// By code, from the first request on.
    pub statuses: BTreeMap<String, StatusCount>,
    /// Requests sent again after a retryable status.
    pub retries: u64,
    /// Requests without an answer or a status.
    pub lost: u64,
    /// Wrong answers.
    pub wrong: u64,
    /// Arrivals that the client did not send.
    pub not_sent: u64,
    /// What was wrong, the first few.
    pub notes: Vec<String>,
    /// What was checked.
    pub checks: CheckReport,
    /// The echo.
    pub echo: EchoReport,
    /// Processor use while measured.
    pub cpu: CpuUse,
    /// Memory of the watched processes.
    pub memory: Vec<Memory>,
    /// What seems to limit the throughput.
    pub limit: String,
    /// Whether nothing was wrong or lost, and every error is explained.
    pub ok: bool,
}

impl Report {
    /// Fails the run if a watched process grew by more than `share`.
    #[must_use]
    pub fn with_growth_limit(mut self, share: Option<f64>) -> Report {
        for memory in &self.memory {
            if let Some(share) = share
                && memory.growth() > share
            {
                let growth = memory.growth() * 100.0;
                self.notes.push(format!("process {} grew by {growth:.2} %: {}", memory.pid, memory.command));
                self.ok = false;
            }
        }
        self
    }

    /// Sums up.
    #[must_use]
    pub fn new(
        settings: Settings,
        window: &Window,
        stats: &Stats,
        tolerance: f64,
        echo: EchoReport,
        cpu: CpuUse,
        memory: Vec<Memory>,
    ) -> Report {
        let end = stats.last_answer.unwrap_or(window.stop);
        let elapsed = end.saturating_duration_since(window.measured).as_secs_f64().max(1e-9);
        let statuses = stats.statuses.iter().map(|(&code, &count)| {
            let code = Code::from_i32(code);
            let example = stats.status_texts.get(&(code as i32)).cloned().unwrap_or_default();
            (format!("{code:?}"), StatusCount { count, example, explained: explained(code) })
        });
        let statuses: BTreeMap<_, _> = statuses.collect();
        let steps = stats.steps.map_or(0, |(first, last)| last - first + 1);
        let unexplained = statuses.values().any(|status| !status.explained);
        let mut report = Report {
            settings,
            elapsed_seconds: elapsed,
            requests: stats.answered,
            tokens: stats.tokens,
            requests_per_second: stats.answered as f64 / elapsed,
            tokens_per_second: stats.tokens as f64 / elapsed,
            row_bytes_per_second: stats.row_bytes as f64 / elapsed,
            latency: stats.latency.summary(),
            queue: stats.queue.summary(),
            step: stats.step.summary(),
            rest: stats.rest.summary(),
            late: (stats.late.count() > 0).then(|| stats.late.summary()),
            steps_per_second: steps as f64 / elapsed,
            tokens_per_step: (stats.step_tokens.1 > 0)
                .then(|| stats.step_tokens.0 as f64 / stats.step_tokens.1 as f64),
            phases: stats.phases.iter().map(|(&phase, all)| (PHASES[phase], all.summary())).collect(),
            generations: stats.generations.iter().copied().collect(),
            answers: stats.answered_all,
            statuses,
            retries: stats.retries,
            lost: stats.lost,
            wrong: stats.wrong,
            not_sent: stats.shed,
            notes: stats.notes.clone(),
            checks: CheckReport {
                known: stats.checked_known,
                again: stats.checked_again,
                unchecked: stats.unchecked,
                largest_error: stats.largest_error,
                tolerance,
            },
            echo,
            cpu,
            memory,
            limit: String::new(),
            ok: stats.wrong == 0 && stats.lost == 0 && !unexplained && stats.answered_all > 0,
        };
        report.limit = report.limiting();
        report
    }

    /// What the figures say about the limit. A reading of them, not a measurement of its own.
    fn limiting(&self) -> String {
        let cpu = &self.cpu;
        let refused = self.statuses.get("ResourceExhausted").map_or(0, |status| status.count);
        if self.requests == 0 {
            return "nothing was answered while measured".to_owned();
        }
        if let Some(rate) = self.settings.rate_per_second
            && self.requests_per_second > 0.95 * rate
            && self.queue.p50_seconds < self.step.p50_seconds
        {
            return format!("the offered rate: {rate} requests/s arrive, and the service keeps up");
        }
        if refused as f64 > 0.01 * self.requests as f64 {
            return format!("admission: {refused} requests were refused (RESOURCE_EXHAUSTED)");
        }
        if let Some(echo) = &self.echo.same_load
            && self.requests_per_second > 0.8 * echo.requests_per_second
        {
            return format!(
                "the transport: a bare echo of this load answers {:.0} requests/s",
                echo.requests_per_second
            );
        }
        if cpu.load_generator_cores > 0.85 * cpu.cores as f64 {
            return format!(
                "the load generator, with {:.2} of {} cores",
                cpu.load_generator_cores, cpu.cores
            );
        }
        if self.settings.connections * self.settings.streams * self.settings.outstanding == 1 {
            return "one request is outstanding at a time: latency".to_owned();
        }
        let busy = cpu.machine_busy_share.unwrap_or(0.0);
        if self.queue.p50_seconds > 0.2 * self.step.p50_seconds {
            let busy =
                if busy > 0.0 { format!("; machine {:.0} % busy", busy * 100.0) } else { String::new() };
            return format!("the service's steps: requests wait for the step before them{busy}");
        }
        if busy > 0.92 {
            return format!("processor cores: the machine is {:.0} % busy", busy * 100.0);
        }
        "requests outstanding: more of them would raise the throughput".to_owned()
    }
}
