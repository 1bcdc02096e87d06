//! The command line.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, ValueEnum};
use expertd_client::transport::Credentials;
use expertd_types::DType;

use crate::Error;
use crate::connect::is_several;
use crate::distribution::TokenCounts;

/// Load generator for expertd: closed or open loop, with checked answers.
///
/// Every request carries different random rows. A sample of the answers is checked: rows are sent again with the same
/// routing in other batches, and recorded rows (--check-golden) are compared with their recorded answers. A bare gRPC
/// echo of the same payload is measured for comparison, so that the cost of the transport is known.
///
/// The exit status is 0 if no answer was wrong, none was lost, every error was one that load explains
/// (RESOURCE_EXHAUSTED, UNAVAILABLE, DEADLINE_EXCEEDED), and memory stayed within its limits; 1 otherwise; 2
/// for an invalid command line or if the service cannot be reached.
#[derive(Parser, Clone, Debug)]
#[command(name = "expertd-loadtest", version, args_override_self = true)]
pub struct Args {
    /// Address of the service: HOST:PORT or unix:PATH. Several addresses, separated by commas, are used as one service:
    /// each request goes to a service that holds its layer, and elsewhere if that one fails
    #[arg(long, default_value = "127.0.0.1:50051", env = "EXPERTD_ADDRESS")]
    pub address: String,
    /// Send requests through sessions instead of gRPC; the address of sessions on this host is that of the session socket, unix:PATH
    #[arg(long, value_enum, value_name = "KIND")]
    pub session: Option<SessionKind>,
    /// The GPU of a CUDA session, by its number among those that this process sees
    #[arg(long, default_value_t = 0, value_name = "GPU")]
    pub session_device: u32,
    /// Name of the model; optional if the service has only one
    #[arg(long, default_value = "", hide_default_value = true)]
    pub model: String,
    /// How requests are sent
    #[command(flatten)]
    pub shape: Shape,
    /// What requests contain
    #[command(flatten)]
    pub content: Content,
    /// Duration of the load
    #[command(flatten)]
    pub bounds: Bounds,
    /// Checks of the answers
    #[command(flatten)]
    pub checks: Checks,
    /// Credentials of the client
    #[command(flatten)]
    pub credentials: Credentials,
    /// Reporting
    #[command(flatten)]
    pub output: Output,
}

impl Args {
    /// Checks options against each other.
    ///
    /// # Errors
    /// [`Error::Unfit`], with the options that exclude each other.
    pub fn check(&self) -> Result<(), Error> {
        let unfit = |text: &str| Err(Error::Unfit(text.to_owned()));
        if self.shape.mode == Mode::Decode && self.shape.rate.is_some() {
            return unfit("--mode decode waits for each layer before the next one, so it has no --rate");
        }
        if self.shape.mode == Mode::Stream && is_several(&self.address) {
            return unfit(
                "--mode stream takes one address, because a stream goes to one service; use --mode unary for several",
            );
        }
        if self.session.is_some() && (self.shape.mode == Mode::Stream || self.shape.rate.is_some()) {
            return unfit(
                "--session has closed loops only: leave out --rate, and use --mode unary or decode",
            );
        }
        Ok(())
    }
}

/// How requests are sent.
#[derive(ClapArgs, Clone, Debug)]
#[command(next_help_heading = "Load")]
pub struct Shape {
    /// Unary calls, streams, or decode steps of an engine
    #[arg(long, value_enum, default_value_t)]
    pub mode: Mode,
    /// Number of connections
    #[arg(long, default_value = "1", value_name = "N")]
    pub connections: NonZeroUsize,
    /// Number of streams per connection (with --mode stream)
    #[arg(long, default_value = "1", value_name = "N")]
    pub streams: NonZeroUsize,
    /// Closed loop: number of outstanding requests per connection or stream
    #[arg(long, default_value = "1", value_name = "N")]
    pub outstanding: NonZeroUsize,
    /// Open loop: mean arrival rate in requests per second, Poisson-distributed and independent of answers; latency
    /// counts from the intended arrival
    #[arg(long, value_name = "PER_SECOND", value_parser = positive)]
    pub rate: Option<f64>,
    /// Open loop: largest number of outstanding requests; the client drops and reports further arrivals
    #[arg(long, default_value = "10000", value_name = "N")]
    pub max_outstanding: NonZeroUsize,
    /// Number of times that a request is sent again after a retryable status
    #[arg(long, default_value_t = 0, value_name = "TIMES")]
    pub retry: u32,
    /// Number of threads of the load generator [default: one per core]
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroUsize>,
}

/// What requests contain.
#[derive(ClapArgs, Clone, Debug)]
#[command(next_help_heading = "Requests")]
pub struct Content {
    /// Decoder layers, comma-separated; each request names one of them at random [default: all MoE layers]
    #[arg(long, value_delimiter = ',', value_name = "L")]
    pub layers: Vec<u32>,
    /// Rows per request, at most the service's limit: N, uniform:MIN-MAX, lognormal:MEDIAN,SIGMA, zipf:MAX,EXPONENT or
    /// list:N,N,...
    #[arg(long, default_value = "8", value_name = "DISTRIBUTION")]
    pub tokens: TokenCounts,
    /// Element type of the rows
    #[arg(long, value_enum, default_value = "bf16")]
    pub dtype: DType,
    /// `gate`: the service's gate routes. `zipf:S`: each request carries routing drawn from a Zipf distribution with
    /// exponent S over the experts (0 is uniform). `reuse`: each row of a worker's request is the next token of a sequence of its
    /// own, which tends to use experts again (of 256, the 64 used last have 67 % of a token's experts)
    #[arg(long, default_value = "gate", value_name = "ROUTING")]
    pub routing: RoutingSource,
    /// Leave the shared experts out of the output
    #[arg(long)]
    pub exclude_shared_experts: bool,
    /// Deadline of each request in milliseconds [default: none]
    #[arg(long, value_name = "MS")]
    pub deadline_ms: Option<u32>,
    /// Seed of all random numbers [default: a new one for each run, which is reported]
    #[arg(long)]
    pub seed: Option<u64>,
}

/// Duration of the load.
#[derive(ClapArgs, Clone, Debug)]
#[command(next_help_heading = "Bounds")]
pub struct Bounds {
    /// Seconds of load before the measurement starts
    #[arg(long, default_value_t = 2.0, value_name = "SECONDS", value_parser = not_negative)]
    pub warm_up: f64,
    /// Seconds of measured load [default: 10, or 600 with --requests]
    #[arg(long, value_name = "SECONDS", value_parser = positive)]
    pub duration: Option<f64>,
    /// Largest number of measured requests
    #[arg(long, value_name = "N")]
    pub requests: Option<u64>,
    /// Seconds after which a request without an answer counts as lost (after its deadline, if it has one)
    #[arg(long, default_value_t = 60.0, value_name = "SECONDS", value_parser = positive)]
    pub give_up: f64,
}

/// Checks of the answers.
#[derive(ClapArgs, Clone, Debug)]
#[command(next_help_heading = "Checks")]
pub struct Checks {
    /// Share of requests whose answers are checked
    #[arg(long, default_value_t = 0.01, value_name = "SHARE", value_parser = share)]
    pub check: f64,
    /// Recorded rows and answers of the served model (golden.safetensors); they make up half of the checked requests
    #[arg(long, value_name = "FILE")]
    pub check_golden: Option<PathBuf>,
    /// Largest relative L2 error of a checked row [default: 1e-3 for f32 rows computed by CPU ranks, else 2e-2]
    #[arg(long, value_name = "ERROR", value_parser = positive)]
    pub tolerance: Option<f64>,
}

/// Reporting.
#[derive(ClapArgs, Clone, Debug)]
#[command(next_help_heading = "Report")]
pub struct Output {
    /// Do not measure the bare echo
    #[arg(long)]
    pub no_echo: bool,
    /// Request phase timings and report them
    #[arg(long)]
    pub timings: bool,
    /// Process id; the memory (RssAnon + RssShmem) of this process and its descendants is sampled during the load, and their processor
    /// time is measured
    #[arg(long, value_name = "PID")]
    pub watch_memory: Option<u32>,
    /// Fail if the mean memory of a watched process grows by more than this share from the second-last minute to the last (in
    /// loads shorter than three minutes: from the second third to the last)
    #[arg(long, value_name = "SHARE", requires = "watch_memory", value_parser = not_negative)]
    pub max_memory_growth: Option<f64>,
    /// Fail if the watched process, without its children, has more memory at any time
    #[arg(long, value_name = "BYTES", requires = "watch_memory")]
    pub max_memory_bytes: Option<u64>,
    /// Write the report as JSON to this file (`-`: to standard output, instead of the table)
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Do not show a progress bar
    #[arg(long, short)]
    pub quiet: bool,
}

/// Unary calls or streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// `Forward`
    #[default]
    Unary,
    /// `ForwardStream`
    Stream,
    /// `Forward`, as an engine decodes: --outstanding batches, each of --tokens sequences, walk all layers in order, and each layer waits
    /// for the one before. Reports model steps per second and the latency of each layer
    Decode,
}

/// Kind of session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SessionKind {
    /// Rows lie in host memory that the service shares
    Host,
    /// Rows lie in the memory of the client's GPU; with --mode decode, a CUDA graph has the calls of all layers
    Cuda,
    /// Rows travel over NIXL (EXPERTD_NIXL names its folder) to a service with --network-listen
    Network,
}

/// The source of a request's routing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RoutingSource {
    /// The gate of the service.
    Gate,
    /// The client: draws from a Zipf distribution over the experts with this exponent.
    Zipf(f64),
    /// The client: each row of a worker's request continues a sequence of its own, which tends to use experts again.
    Reuse,
}

impl std::str::FromStr for RoutingSource {
    type Err = String;

    fn from_str(text: &str) -> Result<RoutingSource, String> {
        if text == "gate" {
            return Ok(RoutingSource::Gate);
        }
        if text == "reuse" {
            return Ok(RoutingSource::Reuse);
        }
        let exponent = text.strip_prefix("zipf:").and_then(|number| number.parse::<f64>().ok());
        match exponent {
            Some(exponent) if (0.0..=20.0).contains(&exponent) => Ok(RoutingSource::Zipf(exponent)),
            _ => Err(format!("expected `gate`, `reuse`, or `zipf:S` with S from 0 to 20, found `{text}`")),
        }
    }
}

fn number(text: &str) -> Result<f64, String> {
    text.parse::<f64>()
        .ok()
        .filter(|value| value.is_finite())
        .ok_or_else(|| format!("expected a number, found `{text}`"))
}

fn positive(text: &str) -> Result<f64, String> {
    number(text)
        .and_then(|value| if value > 0.0 { Ok(value) } else { Err("the value must be above 0".to_owned()) })
}

fn not_negative(text: &str) -> Result<f64, String> {
    number(text).and_then(|value| {
        if value >= 0.0 { Ok(value) } else { Err("the value must not be negative".to_owned()) }
    })
}

fn share(text: &str) -> Result<f64, String> {
    number(text).and_then(|value| {
        if (0.0..=1.0).contains(&value) { Ok(value) } else { Err("the value must be from 0 to 1".to_owned()) }
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn bad_values_are_refused() {
        for bad in [
            ["--rate", "0"],
            ["--rate", "nan"],
            ["--check", "1.5"],
            ["--warm-up", "-1"],
            ["--tokens", "uniform:9-3"],
            ["--routing", "zipf:x"],
            ["--connections", "0"],
        ] {
            assert!(Args::try_parse_from(["loadtest", bad[0], bad[1]]).is_err(), "{bad:?}");
        }
        let args = Args::try_parse_from(["loadtest", "--routing", "zipf:1.1", "--rate", "50"]).unwrap();
        assert_eq!(args.content.routing, RoutingSource::Zipf(1.1));
        assert_eq!("reuse".parse(), Ok(RoutingSource::Reuse));
        assert_eq!(args.shape.rate, Some(50.0));
    }
}
