//! Every metric of the service in one place: name, kind, labels, buckets, meaning. A test checks that `docs/metrics.md`
//! agrees with this file, and writes the page on request.

/// The kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// A value that only grows; the name ends in `_total`.
    Counter,
    /// A value that goes up and down.
    Gauge,
    /// Counts observations in the given buckets (upper bounds).
    Histogram(&'static [f64]),
}

/// One metric.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// Its name; units are in it.
    pub name: &'static str,
    /// Counter, gauge or histogram.
    pub kind: Kind,
    /// Its unit, for `describe_*`.
    pub unit: metrics::Unit,
    /// Names of its labels.
    pub labels: &'static [&'static str],
    /// Meaning of a sample.
    pub help: &'static str,
}

/// Seconds from 10 µs to 10 s: whole requests, queues and steps.
pub const LATENCY_BUCKETS: &[f64] = &[
    1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 3.5e-4, 5e-4, 7.5e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 7.5e-3, 1e-2, 2e-2,
    5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
];

/// Seconds from 1 µs to 1 s: the phases of a step.
pub const PHASE_BUCKETS: &[f64] = &[
    1e-6, 2e-6, 3.5e-6, 5e-6, 7.5e-6, 1e-5, 1.5e-5, 2e-5, 3.5e-5, 5e-5, 7.5e-5, 1e-4, 1.5e-4, 2e-4, 3.5e-4,
    5e-4, 7.5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0,
];

/// Token counts, powers of two.
pub const TOKEN_BUCKETS: &[f64] = &[
    1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0,
    32768.0,
];

macro_rules! metrics_table {
    ($($(#[doc = $help:literal])+ $constant:ident = $name:literal, $kind:expr, $unit:ident, [$($label:literal),*];)+) => {
        $($(#[doc = $help])+ pub const $constant: &str = $name;)+

        /// All metrics, in the order of `docs/metrics.md`.
        pub const ALL: &[Metric] = &[
            $(Metric {
                name: $name,
                kind: $kind,
                unit: metrics::Unit::$unit,
                labels: &[$($label),*],
                help: concat!($($help),+).trim_ascii(),
            },)+
        ];
    };
}

metrics_table! {
    /// Requests answered, by method (Forward, ForwardStream or Session) and gRPC status code. Every request of a stream counts.
    REQUESTS_TOTAL = "expertd_requests_total", Kind::Counter, Count, ["method", "code"];
    /// Time from the arrival of a request's last byte until its answer was handed to the transport.
    REQUEST_DURATION_SECONDS = "expertd_request_duration_seconds", Kind::Histogram(LATENCY_BUCKETS), Seconds, ["method"];
    /// Tokens in each admitted request.
    REQUEST_TOKENS = "expertd_request_tokens", Kind::Histogram(TOKEN_BUCKETS), Count, [];
    /// Requests in the queue, waiting for a step.
    QUEUE_REQUESTS = "expertd_queue_requests", Kind::Gauge, Count, [];
    /// Tokens of the requests in the queue.
    QUEUE_TOKENS = "expertd_queue_tokens", Kind::Gauge, Count, [];
    /// Time from the admission of a request until its first step formed.
    QUEUE_DURATION_SECONDS = "expertd_queue_duration_seconds", Kind::Histogram(LATENCY_BUCKETS), Seconds, [];
    /// Requests that their caller cancelled before the answer was ready.
    REQUESTS_CANCELLED_TOTAL = "expertd_requests_cancelled_total", Kind::Counter, Count, [];
    /// Requests that ended the EP group each time that it computed them, and were given up (POISONED).
    REQUESTS_POISONED_TOTAL = "expertd_requests_poisoned_total", Kind::Counter, Count, [];
    /// Steps completed.
    STEPS_TOTAL = "expertd_steps_total", Kind::Counter, Count, [];
    /// Tokens in each step, of all its requests together.
    STEP_TOKENS = "expertd_step_tokens", Kind::Histogram(TOKEN_BUCKETS), Count, [];
    /// Time from the forming of a step until its last row was back at the router rank.
    STEP_DURATION_SECONDS = "expertd_step_duration_seconds", Kind::Histogram(LATENCY_BUCKETS), Seconds, [];
    /// Time that a rank spent in one phase of a step: copy_in, gate, prepare, dispatch, experts, combine or copy_out.
    PHASE_DURATION_SECONDS = "expertd_phase_duration_seconds", Kind::Histogram(PHASE_BUCKETS), Seconds, ["rank", "phase"];
    /// Tokens that the router gave to a rank as their source rank.
    RANK_TOKENS_TOTAL = "expertd_rank_tokens_total", Kind::Counter, Count, ["rank"];
    /// Rows that a rank's experts computed: one for each token and chosen expert. The imbalance of expert load is the
    /// largest rank's rate divided by the mean rate.
    RANK_EXPERT_ROWS_TOTAL = "expertd_rank_expert_rows_total", Kind::Counter, Count, ["rank"];
    /// Bytes of weights that a rank has copied from host memory to its GPU since it serves, in a mixed group.
    RANK_COPIED_BYTES_TOTAL = "expertd_rank_copied_bytes_total", Kind::Counter, Bytes, ["rank"];
    /// Rows of a layer's experts in a mixed group by what computed them: source (experts that rank 0 owns), copy (CPU ranks' experts,
    /// from a copy in a slot or for a large or divided step), cpu (CPU ranks). The hit rate is copy / (copy + cpu).
    TIER_ROWS_TOTAL = "expertd_tier_rows_total", Kind::Counter, Count, ["layer", "by"];
    /// Imbalance of a layer's expert load over the last minute: rows of the rank with the most, divided by the mean over
    /// ranks; 1 is perfect. A layer without rows keeps its value.
    LAYER_IMBALANCE = "expertd_layer_imbalance", Kind::Gauge, Count, ["layer"];
    /// Rows that an expert computed, all ranks together; with `--expert-metrics` only.
    EXPERT_ROWS_TOTAL = "expertd_expert_rows_total", Kind::Counter, Count, ["layer", "expert"];
    /// Bytes of weights that a rank holds.
    RANK_WEIGHT_BYTES = "expertd_rank_weight_bytes", Kind::Gauge, Bytes, ["rank"];
    /// Memory in use on a rank's GPU, all processes and the driver's own reservation together. Absent on CPUs, on parts of a
    /// GPU (MIG) and without NVIDIA's management library; NaN while the rank is gone.
    GPU_MEMORY_USED_BYTES = "expertd_gpu_memory_used_bytes", Kind::Gauge, Bytes, ["rank"];
    /// Memory of a rank's GPU; absent and NaN as `expertd_gpu_memory_used_bytes`.
    GPU_MEMORY_TOTAL_BYTES = "expertd_gpu_memory_total_bytes", Kind::Gauge, Bytes, ["rank"];
    /// Share, from 0 to 1, of the driver's last sample period (at most a second) in which a kernel ran on a rank's GPU, as
    /// NVIDIA's management library says every two seconds; absent and NaN as `expertd_gpu_memory_used_bytes`.
    GPU_UTILIZATION_RATIO = "expertd_gpu_utilization_ratio", Kind::Gauge, Count, ["rank"];
    /// Number of the current generation (one life of the EP group); 0 before the first one.
    GENERATION = "expertd_generation", Kind::Gauge, Count, [];
    /// Generations that ended, by reason: exit, liveness, step, step_timeout, channel, load or setup.
    GENERATION_ENDS_TOTAL = "expertd_generation_ends_total", Kind::Counter, Count, ["reason"];
    /// Number of the loaded weights; counts from 1 within one process.
    WEIGHT_VERSION = "expertd_weight_version", Kind::Gauge, Count, [];
    /// 1 for the loaded weights, 0 for those loaded before. The label is the fingerprint of their contents, the same for the same
    /// weights on every host.
    WEIGHTS = "expertd_weights", Kind::Gauge, Count, ["fingerprint"];
    /// 1 while a generation serves and the service does not drain, otherwise 0.
    READY = "expertd_ready", Kind::Gauge, Count, [];
    /// Open client connections.
    CONNECTIONS = "expertd_connections", Kind::Gauge, Count, [];
    /// Client connections accepted.
    CONNECTIONS_ACCEPTED_TOTAL = "expertd_connections_accepted_total", Kind::Counter, Count, [];
    /// Connections that the service refused or closed, by reason: limit, address_limit (of one address or user) and client_limit (too
    /// many connections), tls (failed or slow handshake), silent (no call in time), unauthenticated (no credentials in time),
    /// stalled_answer (the peer does not read), idle, age. The reasons unauthenticated_limit, evicted, stalled_request, stalled_write,
    /// unread and flood stay at 0.
    CONNECTIONS_ENDED_TOTAL = "expertd_connections_ended_total", Kind::Counter, Count, ["reason"];
    /// Sessions: clients on the same host that share memory with the service, each until it has closed its socket.
    SESSIONS = "expertd_sessions", Kind::Gauge, Count, [];
    /// Sessions opened.
    SESSIONS_OPENED_TOTAL = "expertd_sessions_opened_total", Kind::Counter, Count, [];
    /// Sessions refused, by reason: user (not allowed), open (limits, version, no memory), protocol, limit (too many connections).
    SESSIONS_REFUSED_TOTAL = "expertd_sessions_refused_total", Kind::Counter, Count, ["reason"];
    /// Mapped bytes charged for sessions: the size of each, once for the router and once for each rank, until its pages are freed.
    SESSION_BYTES = "expertd_session_bytes", Kind::Gauge, Bytes, [];
    /// Calls of authenticated clients, by name. A stream is one call.
    CLIENT_CALLS_TOTAL = "expertd_client_calls_total", Kind::Counter, Count, ["client"];
    /// Tokens in admitted requests of authenticated clients, by name; sessions are not included.
    CLIENT_TOKENS_TOTAL = "expertd_client_tokens_total", Kind::Counter, Count, ["client"];
    /// Reloads of changed certificates and token files: ok, or error, which leaves the earlier ones in force.
    CREDENTIAL_RELOADS_TOTAL = "expertd_credential_reloads_total", Kind::Counter, Count, ["result"];
    /// Unix time at which the first certificate of the server's chain expires.
    CERTIFICATE_EXPIRES_SECONDS = "expertd_certificate_expires_seconds", Kind::Gauge, Seconds, [];
    /// Spans of requests that were sent to the receiver of traces.
    TRACE_SPANS_SENT_TOTAL = "expertd_trace_spans_sent_total", Kind::Counter, Count, [];
    /// Spans dropped because the receiver did not take them (reason export). The reason queue stays at 0.
    TRACE_SPANS_DROPPED_TOTAL = "expertd_trace_spans_dropped_total", Kind::Counter, Count, ["reason"];
    /// Log lines dropped because standard error did not take them in time.
    LOG_LINES_DROPPED_TOTAL = "expertd_log_lines_dropped_total", Kind::Counter, Count, [];
    /// Bytes charged for requests: each is charged from its arrival until its answer has left.
    BYTES_IN_FLIGHT = "expertd_bytes_in_flight", Kind::Gauge, Bytes, [];
    /// Upper bound of `expertd_bytes_in_flight`; requests beyond it wait or are refused.
    BYTES_IN_FLIGHT_LIMIT = "expertd_bytes_in_flight_limit", Kind::Gauge, Bytes, [];
    /// Resident memory of one process of the service (`router` or the number of a rank), by kind: anon, file or shmem.
    PROCESS_RESIDENT_BYTES = "expertd_process_resident_bytes", Kind::Gauge, Bytes, ["process", "kind"];
    /// Always 0: the router's memory has no bound beside the configured limits.
    ROUTER_MEMORY_LIMIT_BYTES = "expertd_router_memory_limit_bytes", Kind::Gauge, Bytes, [];
    /// Unix time at which the service started.
    START_TIME_SECONDS = "expertd_start_time_seconds", Kind::Gauge, Seconds, [];
    /// Always 1. The label is the name of the served model.
    MODEL_INFO = "expertd_model_info", Kind::Gauge, Count, ["model"];
    /// Always 1. The labels describe the build.
    BUILD_INFO = "expertd_build_info", Kind::Gauge, Count, ["version", "commit", "features"];
}
