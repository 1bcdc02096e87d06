//! The results of a load, as data.

use std::collections::BTreeMap;

use expertd_types::DType;
use serde::Serialize;
use tonic::Code;

use crate::args::{Args, Mode, RoutingSource, SessionKind};
use crate::echo::OneOutstanding;
use crate::load::explained;
use crate::period::LoadPeriod;
use crate::request::Workload;
use crate::resources::{CpuUse, Memory};
use crate::stats::{PHASES, Stats, Summary};

/// The parameters of a run.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs, reason = "the fields are named like the command line's options")]
pub struct Settings {
    pub address: String,
    pub model: String,
    pub family: String,
    pub weight_version: u64,
    pub layers: Vec<u32>,
    pub mode: &'static str,
    /// The kind of session that requests go through.
    pub session: Option<&'static str>,
    pub connections: usize,
    pub streams: usize,
    pub outstanding: usize,
    /// Arrival rate of an open loop.
    pub rate_per_second: Option<f64>,
    pub tokens: String,
    pub dtype: DType,
    pub routing: String,
    pub seed: u64,
    pub warm_up_seconds: f64,
    pub version: &'static str,
}

impl Settings {
    /// Collects the parameters from the command line and the served model.
    #[must_use]
    pub fn new(args: &Args, workload: &Workload) -> Settings {
        let stream = args.shape.mode == Mode::Stream;
        Settings {
            address: args.address.clone(),
            model: workload.model.name.clone(),
            family: workload.model.family.clone(),
            weight_version: workload.model.weight_version,
            layers: workload.layers.iter().map(|layer| layer.layer).collect(),
            mode: match args.shape.mode {
                Mode::Unary => "unary",
                Mode::Stream => "stream",
                Mode::Decode => "decode",
            },
            session: args.session.map(|kind| match kind {
                SessionKind::Host => "host",
                SessionKind::Cuda => "cuda",
                SessionKind::Network => "network",
            }),
            connections: args.shape.connections.get(),
            streams: if stream { args.shape.streams.get() } else { 1 },
            outstanding: args.shape.outstanding.get(),
            rate_per_second: args.shape.rate,
            tokens: args.content.tokens.to_string(),
            dtype: workload.dtype,
            routing: match args.content.routing {
                RoutingSource::Gate => "gate".to_owned(),
                RoutingSource::Zipf(exponent) => format!("zipf:{exponent}"),
                RoutingSource::Reuse => "reuse".to_owned(),
            },
            seed: workload.seed,
            warm_up_seconds: args.bounds.warm_up,
            version: env!("CARGO_PKG_VERSION"),
        }
    }
}

/// The calls that ended with one status code.
#[derive(Clone, Debug, Serialize)]
pub struct StatusCount {
    /// Number of calls.
    pub count: u64,
    /// The message of one answer with this status.
    pub example: String,
    /// Whether load or a fault explains the status; any other status fails the run.
    pub explained: bool,
}

/// The checks of answers.
#[derive(Clone, Debug, Serialize)]
pub struct CheckReport {
    /// Number of answers compared with recorded ones.
    pub known: u64,
    /// Number of answers compared with the same rows in another batch.
    pub again: u64,
    /// Number of samples that were not compared, because the service did not answer or the checkers were busy.
    pub unchecked: u64,
    /// Largest relative L2 error of any row.
    pub largest_error: f64,
    /// Largest accepted error.
    pub tolerance: f64,
}

/// The echo measurements.
#[derive(Clone, Debug, Default, Serialize)]
pub struct EchoReport {
    /// Latencies with one outstanding request, in turn with the service.
    pub one_outstanding: Option<OneOutstanding>,
    /// Closed loop with the load's connections, streams and outstanding requests.
    pub same_load: Option<EchoLoad>,
}

/// The echo under the load's connections, streams and outstanding requests.
#[derive(Clone, Copy, Debug, Serialize)]
#[allow(missing_docs, reason = "the names are complete descriptions")]
pub struct EchoLoad {
    pub requests_per_second: f64,
    pub row_bytes_per_second: f64,
    pub latency: Summary,
}

/// Model steps of --mode decode: each is a walk of one batch of sequences through all layers.
#[derive(Clone, Debug, Serialize)]
pub struct DecodeReport {
    /// Complete model steps per second of elapsed time, all batches together.
    pub model_steps_per_second: f64,
    /// Rows of complete model steps per second of elapsed time: the tokens that the sequences gain.
    pub sequence_tokens_per_second: f64,
    /// Time of a model step.
    pub model_step: Summary,
    /// The part of a model step in calls. The load generator spends the rest between two calls, where an engine computes attention.
    pub in_calls: Summary,
    /// Number of model steps in which a call failed; the other figures exclude them.
    pub failed: u64,
    /// Time of a call by decoder layer, to two digits. Empty for CUDA sessions: one graph has the calls of all layers.
    pub layers: BTreeMap<u32, Summary>,
}

impl DecodeReport {
    fn new(stats: &Stats, elapsed: f64) -> DecodeReport {
        DecodeReport {
            model_steps_per_second: stats.walks.count() as f64 / elapsed,
            sequence_tokens_per_second: stats.walk_rows as f64 / elapsed,
            model_step: stats.walks.summary(),
            in_calls: stats.walks_in_calls.summary(),
            failed: stats.walks_failed,
            layers: stats.layers.iter().map(|(&layer, calls)| (layer, calls.summary())).collect(),
        }
    }
}

/// The report of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The parameters of the run.
    pub settings: Settings,
    /// Time from the end of the warm-up to the last measured answer, in seconds.
    pub elapsed_seconds: f64,
    /// Number of measured requests that were answered.
    pub requests: u64,
    /// Number of rows in these answers.
    pub tokens: u64,
    /// Answered requests per second of elapsed time.
    pub requests_per_second: f64,
    /// Rows per second of elapsed time.
    pub tokens_per_second: f64,
    /// Bytes of rows per second of elapsed time, in both directions together.
    pub row_bytes_per_second: f64,
    /// Time from the intended arrival (open loop) or the sending (closed loop) to the decoded answer.
    pub latency: Summary,
    /// The part of the latency spent waiting for a step.
    pub queue: Summary,
    /// The part of the latency spent in steps.
    pub step: Summary,
    /// The rest of the latency: transport and client.
    pub rest: Summary,
    /// Open loop: delay of the client's own sending.
    pub late: Option<Summary>,
    /// With --mode decode: model steps.
    pub decode: Option<DecodeReport>,
    /// Steps per second of the whole service, from step numbers.
    pub steps_per_second: f64,
    /// Mean rows per step, with `--timings`.
    pub tokens_per_step: Option<f64>,
    /// Durations by phase, with `--timings`.
    pub phases: BTreeMap<&'static str, Summary>,
    /// Generations seen in receipts; several mean that the EP group was re-formed.
    pub generations: Vec<u64>,
    /// Number of answers since the start, warm-up and checks included.
    pub answers: u64,
    /// Statuses by code since the start.
    pub statuses: BTreeMap<String, StatusCount>,
    /// Number of requests sent again after a retryable status.
    pub retries: u64,
    /// Number of requests that ended without an answer or a status.
    pub lost: u64,
    /// Number of wrong answers.
    pub wrong: u64,
    /// Number of arrivals that the client did not send.
    pub not_sent: u64,
    /// Descriptions of the first wrong and lost answers.
    pub notes: Vec<String>,
    /// The checks of answers.
    pub checks: CheckReport,
    /// The echo measurements.
    pub echo: EchoReport,
    /// Processor use during the measurement.
    pub cpu: CpuUse,
    /// Memory of the watched processes.
    pub memory: Vec<Memory>,
    /// The likely limit of the throughput, in words.
    pub limit: String,
    /// Whether no answer was wrong or lost and every error is explained.
    pub ok: bool,
}

impl Report {
    /// Fails the run if a watched process grew by more than `share`, or if the first one had more than `bytes`.
    #[must_use]
    pub fn with_memory_limits(mut self, share: Option<f64>, bytes: Option<u64>) -> Report {
        if let (Some(bytes), Some(memory)) = (bytes, self.memory.first())
            && memory.peak_bytes > bytes
        {
            let peak = memory.peak_bytes;
            self.notes.push(format!(
                "process {} had {peak} bytes, more than {bytes}: {}",
                memory.pid, memory.command
            ));
            self.ok = false;
        }
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

    /// Computes the report.
    #[must_use]
    pub fn new(
        settings: Settings,
        period: &LoadPeriod,
        stats: &Stats,
        tolerance: f64,
        echo: EchoReport,
        cpu: CpuUse,
        memory: Vec<Memory>,
    ) -> Report {
        let end = stats.last_answer.unwrap_or(period.stop);
        let elapsed = end.saturating_duration_since(period.measured).as_secs_f64().max(1e-9);
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
            decode: (stats.walks.count() + stats.walks_failed > 0).then(|| DecodeReport::new(stats, elapsed)),
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

    /// The likely limit, derived from the other figures.
    fn limiting(&self) -> String {
        let cpu = &self.cpu;
        let refused = self.statuses.get("ResourceExhausted").map_or(0, |status| status.count);
        if self.requests == 0 {
            return "no request was answered during the measurement".to_owned();
        }
        if let Some(rate) = self.settings.rate_per_second
            && self.requests_per_second > 0.95 * rate
            && self.queue.p50_seconds < self.step.p50_seconds
        {
            return format!("the offered rate: the service answers all {rate} requests/s");
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
        let open_loop = self.settings.rate_per_second.is_some();
        if !open_loop && self.settings.connections * self.settings.streams * self.settings.outstanding == 1 {
            return "latency: only one request is outstanding at a time".to_owned();
        }
        let busy = cpu.machine_busy_share.unwrap_or(0.0);
        if self.queue.p50_seconds > 0.2 * self.step.p50_seconds {
            let busy =
                if busy > 0.0 { format!("; machine {:.0} % busy", busy * 100.0) } else { String::new() };
            return format!("the service's steps: requests wait for earlier steps{busy}");
        }
        if busy > 0.92 {
            return format!("processor cores: the machine is {:.0} % busy", busy * 100.0);
        }
        if open_loop {
            return "the offered rate".to_owned();
        }
        "the number of outstanding requests: more would raise the throughput".to_owned()
    }
}
