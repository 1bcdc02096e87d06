//! Settings of `expertd serve`. Flags override `EXPERTD_*` variables, which override a TOML file, which overrides defaults.

use std::fmt;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{ArgMatches, Args};
use serde::Deserialize;

use expertd_scheduler::OnFault;
use expertd_types::{Fp8Compute, GpuPath};

use super::kinds::{Kinds, MemorySize, RankNumbers};
use crate::predict::MemoryRates;

/// Source of a setting's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SettingSource {
    /// A command line flag.
    Flag,
    /// The environment variable of this name.
    Environment(&'static str),
    /// The configuration file.
    File,
    /// The default, with the reason if it was derived.
    Default(String),
}

impl fmt::Display for SettingSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SettingSource::Flag => f.write_str("flag"),
            SettingSource::Environment(name) => write!(f, "{name}"),
            SettingSource::File => f.write_str("config file"),
            SettingSource::Default(why) if why.is_empty() => f.write_str("default"),
            SettingSource::Default(why) => write!(f, "default: {why}"),
        }
    }
}

/// Why the settings are invalid.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum SettingsError {
    #[error("config file {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// The file is not valid TOML, or has an unknown setting or a value of the wrong type.
    #[error("config file {}: {source}", path.display())]
    Parse { path: PathBuf, source: Box<toml::de::Error> },
    #[error("{name}: {problem}")]
    Value { name: &'static str, problem: String },
}

/// A resolved setting as it is printed.
#[derive(Clone, Debug)]
pub struct ShownSetting {
    /// Name of the setting in the file; the flag has dashes instead of underscores.
    pub name: &'static str,
    /// The value as TOML writes it; `None` if the setting has none.
    pub value: Option<String>,
    /// Source of the value.
    pub source: SettingSource,
}

/// Writes a value as TOML does.
trait Show {
    fn show(&self) -> String;
}

macro_rules! show_plain {
    ($($ty:ty),*) => { $(impl Show for $ty { fn show(&self) -> String { self.to_string() } })* };
}
show_plain!(u32, u64, usize, bool, MemorySize);

macro_rules! show_quoted {
    ($($ty:ty),*) => {
        $(impl Show for $ty { fn show(&self) -> String { toml::Value::String(self.to_string()).to_string() } })*
    };
}
show_quoted!(String, Kinds, MemoryRates, OnFault, Fp8Compute, GpuPath, std::path::Display<'_>);

impl Show for RankNumbers {
    fn show(&self) -> String {
        match self.second {
            None => self.first.show(),
            Some(_) => self.to_string().show(),
        }
    }
}

impl Show for PathBuf {
    fn show(&self) -> String {
        self.display().show()
    }
}

macro_rules! settings {
    ($( $(#[$doc:meta])* $name:ident : $ty:ty = $default:expr, env $env:literal, in $heading:literal $(, arg($($arg:tt)*))?; )*) => {
        /// Serve the MoE layers of a checkpoint
        ///
        /// Each setting comes from its flag, otherwise from the environment variable of its name (EXPERTD_MAX_SESSIONS for
        /// --max-sessions), otherwise from the file given by --config, otherwise from its default. The service first prints what was
        /// given and what it chose, and prints `ready:` once it serves.
        ///
        /// Exits with status 0 after a drain (SIGTERM, SIGINT, SIGHUP, `expertd drain`), 2 for an unknown flag or a value that does
        /// not parse, 64 for an invalid setting or a broken checkpoint, 65 if weights could not be loaded, 69 if an address
        /// could not be bound, 70 if ranks kept failing, 71 if a thread ended that the service needs.
        #[derive(Args, Clone, Debug, Default)]
        pub struct ServeArgs {
            /// The same as --model: folder of the checkpoint
            #[arg(value_name = "DIR")]
            pub folder: Option<PathBuf>,
            /// TOML file with any of the settings below; names have underscores instead of dashes
            #[arg(long, env = "EXPERTD_CONFIG", hide_env = true, value_name = "FILE")]
            pub config: Option<PathBuf>,
            /// Print every setting as TOML for --config, with its source or what its default was derived from, and exit
            #[arg(long)]
            pub print_config: bool,
            $( $(#[$doc])* #[arg(long, env = $env, hide_env = true, help_heading = $heading $(, $($arg)*)?)] pub $name: Option<$ty>, )*
        }

        #[derive(Deserialize, Default)]
        #[serde(deny_unknown_fields)]
        struct FileSettings { $( $name: Option<$ty>, )* }

        /// The settings with their sources, before defaults are derived.
        #[derive(Clone, Debug)]
        pub struct Given {
            $( $(#[$doc])* pub $name: (Option<$ty>, SettingSource), )*
        }

        impl Given {
            /// Merges flags and environment variables, which `matches` distinguishes, with the file.
            ///
            /// # Errors
            /// If the file cannot be read or parsed, or has an unknown setting.
            pub fn merge(args: &ServeArgs, matches: Option<&ArgMatches>) -> Result<Given, SettingsError> {
                let file = match &args.config {
                    Some(path) => read_file(path)?,
                    None => FileSettings::default(),
                };
                let from = |id: &str, env: &'static str| {
                    match matches.and_then(|m| m.value_source(id)) {
                        Some(ValueSource::EnvVariable) => SettingSource::Environment(env),
                        _ => SettingSource::Flag,
                    }
                };
                let mut given = Given { $(
                    $name: match (args.$name.clone(), file.$name) {
                        (Some(value), _) => (Some(value), from(stringify!($name), $env)),
                        (None, Some(value)) => (Some(value), SettingSource::File),
                        (None, None) => {
                            let default: Option<$ty> = $default;
                            (default, SettingSource::Default(String::new()))
                        }
                    },
                )* };
                if let Some(folder) = &args.folder {
                    if given.model.1 == SettingSource::Flag {
                        let problem = format!("the folder is given twice, as {} and by --model", folder.display());
                        return Err(SettingsError::Value { name: "model", problem });
                    }
                    given.model = (Some(folder.clone()), SettingSource::Flag);
                }
                Ok(given)
            }

            /// The environment variables of all settings.
            pub const VARIABLES: &[&str] = &[$($env),*];

            /// All settings in the order of the help text.
            pub fn shown(&self) -> Vec<ShownSetting> {
                vec![ $( ShownSetting {
                    name: stringify!($name),
                    value: self.$name.0.as_ref().map(Show::show),
                    source: self.$name.1.clone(),
                }, )* ]
            }
        }
    };
}

settings! {
    /// Folder of the checkpoint: config.json and *.safetensors in Hugging Face layout
    model: PathBuf = None, env "EXPERTD_MODEL", in "Model and weights";
    /// Name of the model for clients [default: the folder's name]
    model_name: String = None, env "EXPERTD_MODEL_NAME", in "Model and weights";
    /// Decoder layers to check, load and serve, as numbered in the checkpoint: FIRST-LAST, or ordinal/SHARES, which takes the
    /// share of MoE layers that the number at the end of the host name selects (modulo SHARES) [default: all]
    layers: String = None, env "EXPERTD_LAYERS", in "Model and weights";
    /// JSON file with the experts that each rank owns, as `expertd rebalance` prints it [default: contiguous ranges]
    placement: PathBuf = None, env "EXPERTD_PLACEMENT", in "Model and weights";
    /// Number of expert ranks, 1 to 8; each is a process. With --device cuda,cpu: 1,CPU_RANKS [default: one per NUMA node on CPU, one per
    /// GPU of the largest group on CUDA (see --gpus)]
    ranks: RankNumbers = None, env "EXPERTD_RANKS", in "Ranks and devices";
    /// The GPU of each rank, comma-separated, as CUDA numbers the GPUs that this process may use; implies --ranks [default: the
    /// largest group of equal GPUs that reach each other]
    gpus: String = None, env "EXPERTD_GPUS", in "Ranks and devices";
    /// Allow --gpus to name a GPU for several ranks, which is for tests: their kernels take turns; needs NCCL 2.30 [default: false]
    share_gpu: bool = Some(false), env "EXPERTD_SHARE_GPU", in "Ranks and devices", arg(num_args = 0..=1, default_missing_value = "true");
    /// Device of the ranks, cpu or cuda; cuda,cpu is one GPU rank, which gets all rows, with CPU ranks for the experts that it has no room
    /// for (docs/tiers.md) [default: cuda if this build and machine support it, otherwise cpu]
    device: Kinds = None, env "EXPERTD_DEVICE", in "Ranks and devices";
    /// With --device cuda,cpu: memory for weights on the GPU, such as 40GiB; it gets as many of each layer's first experts as fit
    gpu_memory: MemorySize = None, env "EXPERTD_GPU_MEMORY", in "Ranks and devices";
    /// With --device cuda,cpu: part of --gpu-memory for copies of those experts of CPU ranks that are used most, such as 20GiB; they change
    /// while the service runs [default: none]
    slot_memory: MemorySize = None, env "EXPERTD_SLOT_MEMORY", in "Ranks and devices";
    /// With --device cuda,cpu: least number of rows of a step whose experts of CPU ranks are all copied to the GPU and computed there; steps
    /// of 8 rows and more (16 if less than 16 MiB would come) divide them; 0: none are copied [default: four times where the copies take
    /// less time than the CPUs]
    stream_rows: usize = None, env "EXPERTD_STREAM_ROWS", in "Ranks and devices";
    /// Kernels of GPU ranks: auto takes those made for Hopper on Hopper and the portable ones on other GPUs; portable takes the portable
    /// ones everywhere [default: auto]
    gpu_path: GpuPath = None, env "EXPERTD_GPU_PATH", in "Ranks and devices";
    /// Folder in which the driver keeps kernels that it has compiled for GPUs without machine code in the build [default: the driver's
    /// (~/.nv/ComputeCache)]
    gpu_cache_dir: PathBuf = None, env "EXPERTD_GPU_CACHE_DIR", in "Ranks and devices";
    /// How ranks multiply FP8 weights: fp8 also quantises the rows, as the checkpoints are meant to be run; bf16 widens the weights
    /// (on CPUs to f32), which is more exact [default: fp8 on GPUs with kernels for Hopper, else bf16]
    fp8_compute: Fp8Compute = None, env "EXPERTD_FP8_COMPUTE", in "Model and weights";
    /// How ranks multiply MXFP4 weights: bf16 widens them (on CPUs to f32); fp8 quantises the rows to FP8, which is less exact, and
    /// on GPUs faster from some hundred rows per rank on [default: bf16]
    mxfp4_compute: Fp8Compute = None, env "EXPERTD_MXFP4_COMPUTE", in "Model and weights";
    /// Addresses of the public API, comma-separated: HOST:PORT or unix:PATH; port 0 picks a free one [default: 127.0.0.1:50051]
    listen: String = Some("127.0.0.1:50051".into()), env "EXPERTD_LISTEN", in "Listeners";
    /// Address of the Admin service with health: unix:PATH, or HOST:PORT with --admin-token-file [default: a socket of this user]
    admin_listen: String = None, env "EXPERTD_ADMIN_LISTEN", in "Listeners";
    /// Address of the session socket, unix:PATH, for clients on this host that share memory with the service [default: none]
    session_listen: String = None, env "EXPERTD_SESSION_LISTEN", in "Listeners";
    /// Address of the network device through which clients on other hosts reach network sessions: IP, IP:PORT or IP:FIRST-LAST; the
    /// sessions are opened through the public API [default: none]
    network_listen: String = None, env "EXPERTD_NETWORK_LISTEN", in "Listeners";
    /// NIXL's library or its folder (site-packages) [default: that of EXPERTD_NIXL, else the system's]
    network_library: PathBuf = None, env "EXPERTD_NETWORK_LIBRARY", in "Listeners";
    /// Users who may open sessions, comma-separated user ids [default: the service's own user]
    session_allow_uid: String = None, env "EXPERTD_SESSION_ALLOW_UID", in "Access";
    /// Largest number of open sessions [default: 16]
    max_sessions: u32 = Some(16), env "EXPERTD_MAX_SESSIONS", in "Limits";
    /// Largest number of mapped bytes of all sessions; each counts once for the router and once for each rank [default: 4 GiB]
    max_session_bytes: u64 = Some(4 << 30), env "EXPERTD_MAX_SESSION_BYTES", in "Limits";
    /// Address of the Prometheus endpoint, GET /metrics: IP:PORT [default: 127.0.0.1:9464]
    metrics_listen: String = Some("127.0.0.1:9464".into()), env "EXPERTD_METRICS_LISTEN", in "Listeners";
    /// Names besides localhost under which processes of this host may read metrics and the status page, comma-separated; requests with
    /// an address or a token need none [default: none]
    metrics_hosts: String = None, env "EXPERTD_METRICS_HOSTS", in "Listeners";
    /// Export the rows of each expert and layer as metrics: one series for each [default: false]
    expert_metrics: bool = Some(false), env "EXPERTD_EXPERT_METRICS", in "Listeners", arg(num_args = 0..=1, default_missing_value = "true");
    /// Receiver of traces, OTLP over gRPC, e.g. http://127.0.0.1:4317 [default: that of OTEL_EXPORTER_OTLP_ENDPOINT, else none]
    otlp_endpoint: String = None, env "EXPERTD_OTLP_ENDPOINT", in "Listeners";
    /// The server's certificate chain, PEM; every TCP listener then speaks TLS
    tls_cert: PathBuf = None, env "EXPERTD_TLS_CERT", in "Access";
    /// The private key of the server's certificate, PEM
    tls_key: PathBuf = None, env "EXPERTD_TLS_KEY", in "Access";
    /// Certificate authorities of clients, PEM; a client then needs a certificate, or a token where there are tokens
    tls_client_ca: PathBuf = None, env "EXPERTD_TLS_CLIENT_CA", in "Access";
    /// DNS names of client certificates that may call, comma-separated [default: all that the authorities signed]
    tls_client_names: String = None, env "EXPERTD_TLS_CLIENT_NAMES", in "Access";
    /// File with the tokens of clients, a line `NAME TOKEN` each; calls over TCP then need one
    token_file: PathBuf = None, env "EXPERTD_TOKEN_FILE", in "Access";
    /// File with the tokens of operators, for Admin over TCP
    admin_token_file: PathBuf = None, env "EXPERTD_ADMIN_TOKEN_FILE", in "Access";
    /// Allow plaintext and open metrics beyond loopback, on a network that is trusted [default: false]
    insecure: bool = Some(false), env "EXPERTD_INSECURE", in "Access", arg(num_args = 0..=1, default_missing_value = "true");
    /// Fingerprint every byte of the weights instead of samples; loading then reads them twice [default: false]
    verify_weights: bool = Some(false), env "EXPERTD_VERIFY_WEIGHTS", in "Model and weights", arg(num_args = 0..=1, default_missing_value = "true");
    /// Host memory for packed weights, in bytes, at least for one set; a reload for which two sets exceed it drops the present weights
    /// first, while requests wait [default: what the machine has available]
    max_weight_bytes: u64 = None, env "EXPERTD_MAX_WEIGHT_BYTES", in "Model and weights";
    /// Start although the weights need more host memory than is available now [default: false]
    skip_memory_check: bool = Some(false), env "EXPERTD_SKIP_MEMORY_CHECK", in "Model and weights", arg(num_args = 0..=1, default_missing_value = "true");
    /// Largest number of rows in one step, all ranks together; determines the size of windows and staging [default: 2048]
    max_tokens_per_step: usize = Some(2048), env "EXPERTD_MAX_TOKENS_PER_STEP", in "Limits";
    /// Largest number of rows in one request; a request larger than a step is split [default: twice max-tokens-per-step]
    max_tokens_per_request: usize = None, env "EXPERTD_MAX_TOKENS_PER_REQUEST", in "Limits";
    /// Largest number of rows in the queue; further requests are refused [default: 16 times max-tokens-per-step]
    max_queued_tokens: usize = None, env "EXPERTD_MAX_QUEUED_TOKENS", in "Limits";
    /// Time in microseconds that the oldest request waits for others to join its step, from its arrival [default: up to an eighth of the
    /// last step's time, for the connections of that step]
    max_wait_us: u64 = None, env "EXPERTD_MAX_WAIT_US", in "Limits";
    /// Number of slots (sets of step buffers), at least 2, so that copies of one step overlap compute of another [default: 2]
    slots: u32 = Some(2), env "EXPERTD_SLOTS", in "Ranks and devices";
    /// CPU cores to use, e.g. 0-7,16 [default: all that this process may run on]
    cores: String = None, env "EXPERTD_CORES", in "Ranks and devices";
    /// With --device cuda,cpu: rates by which the plan predicts the time of steps, such as gpu=4000,host=85,pcie=55 in GB/s,
    /// gpu-tflops=530, core-gflops=59 [default: these, measured with an H200 and with 14 threads beside an H100]
    memory_rates: MemoryRates = Some(MemoryRates::default()), env "EXPERTD_MEMORY_RATES", in "Ranks and devices";
    /// A rank without a heartbeat for this long ends the generation, in milliseconds [default: 1000]
    liveness_timeout_ms: u64 = Some(1000), env "EXPERTD_LIVENESS_TIMEOUT_MS", in "Timeouts and faults";
    /// A generation whose ranks are not ready this long after their start ends, in milliseconds [default: 300000]
    forming_timeout_ms: u64 = Some(300_000), env "EXPERTD_FORMING_TIMEOUT_MS", in "Timeouts and faults";
    /// A step that takes longer than this ends the generation, in milliseconds [default: 60000]
    step_timeout_ms: u64 = Some(60_000), env "EXPERTD_STEP_TIMEOUT_MS", in "Timeouts and faults";
    /// A GPU that waits longer than this for other GPUs within a step ends the generation, in milliseconds [default: 2000, or 30000 with
    /// ranks that share a GPU]
    device_timeout_ms: u64 = Some(2000), env "EXPERTD_DEVICE_TIMEOUT_MS", in "Timeouts and faults";
    /// `/healthz` answers 503 if a thread that the service needs has made no progress for this long, in milliseconds [default: 5000]
    health_timeout_ms: u64 = Some(5000), env "EXPERTD_HEALTH_TIMEOUT_MS", in "Timeouts and faults";
    /// What happens to requests without an answer after a fault of a rank [default: retry]
    on_fault: OnFault = Some(OnFault::Retry), env "EXPERTD_ON_FAULT", in "Timeouts and faults";
    /// Time limit for requests in flight after SIGTERM or a drain, in milliseconds [default: 10000]
    drain_timeout_ms: u64 = Some(10_000), env "EXPERTD_DRAIN_TIMEOUT_MS", in "Timeouts and faults";
    /// Largest number of open connections [default: 1024]
    max_connections: u32 = Some(1024), env "EXPERTD_MAX_CONNECTIONS", in "Limits";
    /// Largest number of open connections from one address or of one client [default: half of max-connections]
    max_connections_per_client: u32 = None, env "EXPERTD_MAX_CONNECTIONS_PER_CLIENT", in "Limits";
    /// Largest number of streams on one connection [default: 128]
    max_streams_per_connection: u32 = Some(128), env "EXPERTD_MAX_STREAMS_PER_CONNECTION", in "Limits";
    /// Largest number of bytes of requests held at once [default: 1 GiB, or the size of 4 largest requests if that is more]
    max_bytes_in_flight: u64 = None, env "EXPERTD_MAX_BYTES_IN_FLIGHT", in "Limits";
}

fn read_file(path: &Path) -> Result<FileSettings, SettingsError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| SettingsError::Read { path: path.to_owned(), source })?;
    toml::from_str(&text)
        .map_err(|source| SettingsError::Parse { path: path.to_owned(), source: Box::new(source) })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use clap::{CommandFactory, FromArgMatches, Parser};

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        serve: ServeArgs,
    }

    fn given(words: &[&str]) -> Result<Given, SettingsError> {
        let matches =
            Cli::command().get_matches_from(std::iter::once("expertd").chain(words.iter().copied()));
        let cli = Cli::from_arg_matches(&matches).unwrap();
        Given::merge(&cli.serve, Some(&matches))
    }

    #[test]
    fn flags_win_over_the_file_and_the_file_over_defaults() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("expertd.toml");
        std::fs::write(&path, "ranks = 3\nmax_wait_us = 50\nmodel = \"/models/m\"\n").unwrap();
        let got = given(&["--config", path.to_str().unwrap(), "--ranks", "2"]).unwrap();
        assert_eq!(got.ranks, (Some(2.into()), SettingSource::Flag));
        assert_eq!(got.max_wait_us, (Some(50), SettingSource::File));
        assert_eq!(got.slots, (Some(2), SettingSource::Default(String::new())));
        assert_eq!(got.model.0, Some(PathBuf::from("/models/m")));
    }

    #[test]
    fn a_misspelt_field_of_the_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("expertd.toml");
        std::fs::write(&path, "rank = 3\n").unwrap();
        let error = given(&["--config", path.to_str().unwrap()]).unwrap_err().to_string();
        assert!(error.contains("rank") && error.contains("expertd.toml"), "{error}");
    }

    #[test]
    fn the_folder_may_stand_alone_but_not_beside_the_flag() {
        assert_eq!(given(&["/models/m"]).unwrap().model, (Some("/models/m".into()), SettingSource::Flag));
        let error = given(&["/models/m", "--model", "/models/n"]).unwrap_err().to_string();
        assert!(error.contains("/models/m") && error.contains("twice"), "{error}");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("expertd.toml");
        std::fs::write(&path, "model = \"/models/n\"\n").unwrap();
        let found = given(&["/models/m", "--config", path.to_str().unwrap()]).unwrap();
        assert_eq!(found.model.0, Some(PathBuf::from("/models/m")));
    }

    /// The help names the variables by this rule only.
    #[test]
    fn variables_have_the_names_of_their_settings() {
        let shown = given(&[]).unwrap().shown();
        let names: Vec<String> = shown.iter().map(|s| format!("EXPERTD_{}", s.name.to_uppercase())).collect();
        assert_eq!(Given::VARIABLES, names);
    }

    /// Defaults are part of the interface: a change must change this test.
    #[test]
    fn defaults_are_pinned() {
        let got = given(&[]).unwrap();
        let shown: Vec<String> =
            got.shown().iter().map(|s| format!("{}={}", s.name, s.value.as_deref().unwrap_or("-"))).collect();
        assert_eq!(
            shown.join(" "),
            "model=- model_name=- layers=- placement=- ranks=- gpus=- share_gpu=false device=- gpu_memory=- slot_memory=- stream_rows=- gpu_path=- gpu_cache_dir=- fp8_compute=- mxfp4_compute=- listen=\"127.0.0.1:50051\" admin_listen=- \
             session_listen=- network_listen=- network_library=- session_allow_uid=- max_sessions=16 max_session_bytes=4294967296 \
             metrics_listen=\"127.0.0.1:9464\" metrics_hosts=- expert_metrics=false otlp_endpoint=- tls_cert=- tls_key=- tls_client_ca=- \
             tls_client_names=- token_file=- \
             admin_token_file=- insecure=false verify_weights=false max_weight_bytes=- skip_memory_check=false max_tokens_per_step=2048 max_tokens_per_request=- max_queued_tokens=- \
             max_wait_us=- slots=2 cores=- memory_rates=\"gpu=4000,host=85,pcie=55,gpu-tflops=530,core-gflops=59\" liveness_timeout_ms=1000 forming_timeout_ms=300000 step_timeout_ms=60000 device_timeout_ms=2000 health_timeout_ms=5000 on_fault=\"retry\" \
             drain_timeout_ms=10000 max_connections=1024 max_connections_per_client=- max_streams_per_connection=128 max_bytes_in_flight=-"
        );
    }
}
