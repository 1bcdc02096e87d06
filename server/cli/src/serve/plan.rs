//! Resolves settings against the machine and a checkpoint to a complete plan of a service.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::super::admin::default_admin_address;
use super::layers;
use super::settings::{Given, SettingsError, Shown, Source, parse_cores};
use expertd_ipc::control::{CheckpointSource, DeviceKind, Fp8Compute, RankSetup};
use expertd_ipc::wait::SPIN_TIME;
use expertd_ipc::{GroupShape, SharedRegion};
use expertd_memory as memory;
use expertd_model::{Checkpoint, LayerChoice, ModelError, ModelSpec, Placement};
use expertd_rank_cuda as gpu;
use expertd_router::api::{AccessConfig, ConnectionLimits};
use expertd_router::backend::{Limits, ModelInfo, MoeLayerInfo, RankPlacement};
use expertd_router::cluster::{
    ClusterConfig, WeightHolder, available_cores, numa_nodes, share_cores, share_cores_near, usable,
};
use expertd_router::steps::{ReloadPlanner, SchedulerConfig};
use expertd_types::{Coverage, Generation, Rank, WeightFingerprint, WeightVersion};

/// Largest number of ranks on one host.
const MAX_RANKS: u32 = 8;
/// Largest number of router threads that copy rows of large steps for GPUs. Each moves about 10 GB/s.
const MAX_COPY_THREADS: usize = 16;
/// Largest number of requests in flight on one stream.
const MAX_REQUESTS_PER_STREAM: u32 = 256;
/// Smallest default of max-bytes-in-flight.
const BYTES_IN_FLIGHT: usize = 1 << 30;

/// Why a service cannot be planned; exit status 64.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A setting is invalid.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The checkpoint cannot be served.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The sizes contradict each other or exceed the address space.
    #[error("{0}")]
    Sizes(String),
}

/// Everything that a service needs to start.
#[derive(Debug)]
pub struct ServePlan {
    /// Every setting with its value and source.
    pub shown: Vec<Shown>,
    /// Description of the model for callers.
    pub model: ModelInfo,
    /// Specification of the model's layers.
    pub spec: ModelSpec,
    /// Configuration of the EP group.
    pub cluster: ClusterConfig,
    /// Configuration of step forming and admission.
    pub scheduler: SchedulerConfig,
    /// Address of the public API.
    pub listen: String,
    /// Address of the Admin service.
    pub admin_listen: String,
    /// Address of the Prometheus endpoint.
    pub metrics_listen: String,
    /// Who may call the service.
    pub access: AccessConfig,
    /// Limits on connections, before the limit on descriptors is applied.
    pub connections: ConnectionLimits,
    /// Bytes of one rank's window.
    pub window_bytes: usize,
    /// Bytes of the channels of all ranks, staging included.
    pub channel_bytes: usize,
    /// Memory for messages and answers.
    pub buffers: MessageMemory,
}

/// Memory of the router for messages and answers; see [`memory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageMemory {
    /// Bytes that are resident from the start.
    pub resident_bytes: usize,
    /// Largest number of bytes.
    pub max_bytes: usize,
}

impl MessageMemory {
    /// Derives the sizes from the bytes that may be in flight. There are up to four copies of them: a message as frames and assembled,
    /// and its answer as rows and encoded. Memory for four copies of a step's rows in f32 is resident from the start, up to a limit.
    fn new(in_flight: usize, tokens_per_step: usize, hidden: usize) -> Self {
        const COPIES: usize = 4;
        const MAX_RESIDENT: usize = 256 << 20;
        let max_bytes = in_flight.saturating_mul(COPIES);
        let step = tokens_per_step.saturating_mul(hidden * 4 * COPIES);
        MessageMemory { resident_bytes: step.min(MAX_RESIDENT).min(max_bytes), max_bytes }
    }

    /// The sizes for the default of max-bytes-in-flight, with the largest message of `message_bytes`.
    pub(crate) fn of_largest_message(message_bytes: usize, tokens_per_step: usize, hidden: usize) -> Self {
        Self::new(default_bytes_in_flight(message_bytes), tokens_per_step, hidden)
    }

    /// Reserves the memory. A process without the reservation serves as well, but uses more memory.
    pub fn reserve(&self) {
        if let Err(error) = memory::reserve(self.max_bytes, self.resident_bytes) {
            tracing::warn!(%error, bytes = self.resident_bytes, "cannot reserve memory for messages");
        }
    }
}

/// 1 GiB, or 4 of the largest requests.
const fn default_bytes_in_flight(message_bytes: usize) -> usize {
    if 4 * message_bytes > BYTES_IN_FLIGHT { 4 * message_bytes } else { BYTES_IN_FLIGHT }
}

fn value(name: &'static str, problem: impl Into<String>) -> PlanError {
    PlanError::Settings(SettingsError::Value { name, problem: problem.into() })
}

/// Returns the setting's value; sets it to `default`, with `why` as its source, if it was not given.
fn derive<T: Clone>(setting: &mut (Option<T>, Source), default: T, why: impl Into<String>) -> T {
    setting
        .0
        .get_or_insert_with(|| {
            setting.1 = Source::Default(why.into());
            default
        })
        .clone()
}

fn within<T: PartialOrd + std::fmt::Display>(
    name: &'static str,
    found: T,
    low: T,
    high: T,
) -> Result<T, PlanError> {
    if found < low || found > high {
        return Err(value(name, format!("is {found}, must be {low} to {high}")));
    }
    Ok(found)
}

impl ServePlan {
    /// Resolves settings against the machine and the checkpoint. Binds no port and starts no process.
    ///
    /// # Errors
    /// The first setting that is invalid, or the checkpoint's error.
    pub fn new(mut given: Given) -> Result<Self, PlanError> {
        let path = given.model.0.clone().ok_or_else(|| {
            value(
                "model",
                "no checkpoint was given; pass --model DIR, or try `expertd demo`, which makes one",
            )
        })?;
        let layers = match &given.layers.0 {
            Some(text) => {
                layers::parse(text, layers::host_name).map_err(|problem| value("layers", problem))?
            }
            None => LayerChoice::All,
        };
        let checkpoint = Checkpoint::open_layers(&path, layers)?;
        let spec = checkpoint.spec().clone();
        derive(&mut given.layers, spec.held.to_string(), "all");
        let name = derive(&mut given.model_name, folder_name(&path), "the folder's name");

        let cores = match &given.cores.0 {
            Some(text) => chosen_cores(text).map_err(|problem| value("cores", problem))?,
            None => available_cores(),
        };
        derive(&mut given.cores, list(&cores), "all that this process may run on");
        let usable_cores = usable(&cores);
        if usable_cores < cores.len() {
            tracing::warn!(
                cores = cores.len(),
                usable_cores,
                "a CPU quota allows fewer cores than this process sees, so fewer threads are started; steps stall when the \
                 quota is used up: give the container whole cores (Kubernetes: static CPU manager policy)"
            );
        }
        let gpus = gpu::present();
        let (default, why) = match (gpu::BUILT, gpus) {
            (false, _) => (DeviceKind::Cpu, "this build has no GPU ranks"),
            (true, 0) => (DeviceKind::Cpu, "no GPU found"),
            (true, _) => (DeviceKind::Cuda, "GPUs found"),
        };
        let device = derive(&mut given.device, default, why);
        let ranks = match device {
            DeviceKind::Cpu => {
                let nodes = numa_nodes(&cores).len().clamp(1, MAX_RANKS as usize) as u32;
                derive(&mut given.ranks, nodes, "one per NUMA node")
            }
            DeviceKind::Cuda => {
                if !gpu::BUILT {
                    return Err(value("device", gpu::BUILD_HINT));
                }
                if gpus == 0 {
                    return Err(value(
                        "device",
                        "is cuda, but no GPU was found (no /dev/nvidia0, or CUDA_VISIBLE_DEVICES hides it); see \
                         `expertd doctor`, or use --device cpu",
                    ));
                }
                derive(&mut given.ranks, gpus.min(MAX_RANKS), "one per GPU")
            }
        };
        if device == DeviceKind::Cuda && ranks > gpus {
            return Err(value(
                "ranks",
                format!("is {ranks}, but only {gpus} GPUs were found; each rank needs one"),
            ));
        }
        let ranks = within("ranks", ranks, 1, MAX_RANKS)?;
        let fp8_compute = match device {
            DeviceKind::Cpu => {
                derive(&mut given.fp8_compute, Fp8Compute::Bf16, "CPU ranks widen FP8 weights")
            }
            DeviceKind::Cuda => {
                derive(&mut given.fp8_compute, Fp8Compute::Fp8, "as FP8 checkpoints are meant to be run")
            }
        };
        if device == DeviceKind::Cpu && fp8_compute == Fp8Compute::Fp8 {
            return Err(value(
                "fp8-compute",
                "is fp8, which CPU ranks do not support; leave the setting out, or use bf16",
            ));
        }

        let setting = |s: &(Option<usize>, Source)| s.0.unwrap_or_default();
        let per_step = within("max-tokens-per-step", setting(&given.max_tokens_per_step), 1, 1 << 20)?;
        let per_request =
            derive(&mut given.max_tokens_per_request, 2 * per_step, "twice max-tokens-per-step");
        let per_request = within("max-tokens-per-request", per_request, 1, 1 << 22)?;
        let queued = derive(&mut given.max_queued_tokens, 16 * per_step, "16 times max-tokens-per-step");
        let slots = within("slots", given.slots.0.unwrap_or(2), 2, 8)?;
        let per_rank = per_step.div_ceil(ranks as usize);

        let max_top_k = spec.max_top_k();
        let shape = GroupShape {
            ranks,
            slots,
            max_tokens_per_rank: per_rank,
            max_segments: per_rank,
            hidden: spec.hidden,
            max_top_k,
        };
        let millis = |name, s: &(Option<u64>, Source)| {
            Ok::<_, PlanError>(Duration::from_millis(within(name, s.0.unwrap_or(0), 1, 24 * 3_600_000)?))
        };
        let step_timeout = millis("step-timeout-ms", &given.step_timeout_ms)?;
        let device_timeout = millis("device-timeout-ms", &given.device_timeout_ms)?;
        let liveness_timeout = millis("liveness-timeout-ms", &given.liveness_timeout_ms)?;
        if liveness_timeout < Duration::from_millis(300) {
            return Err(value(
                "liveness-timeout-ms",
                "must be at least 300, because the heartbeat's interval is up to 100 ms",
            ));
        }
        let near = match device {
            DeviceKind::Cpu => vec![None; ranks as usize],
            DeviceKind::Cuda => gpu::numa_nodes(ranks as usize),
        };
        let shares = match device {
            DeviceKind::Cpu => share_cores(&cores, ranks as usize),
            DeviceKind::Cuda => share_cores_near(&cores, &near),
        };
        // GPU ranks leave most of their cores idle; CPU ranks use all of theirs.
        let spare_cores = device == DeviceKind::Cuda && usable_cores > 2 * ranks as usize;
        let spin = if spare_cores { SPIN_TIME } else { Duration::ZERO };

        let message_bytes = Limits::message_bytes(per_request, spec.hidden, max_top_k);
        let in_flight = derive(
            &mut given.max_bytes_in_flight,
            default_bytes_in_flight(message_bytes) as u64,
            "1 GiB, or 4 of the largest requests",
        );
        let in_flight = usize::try_from(in_flight).unwrap_or(usize::MAX);
        if in_flight < message_bytes {
            return Err(value(
                "max-bytes-in-flight",
                format!(
                    "is {in_flight}, but one request of max-tokens-per-request = {per_request} tokens needs up to \
                     {message_bytes} bytes: raise max-bytes-in-flight or lower max-tokens-per-request"
                ),
            ));
        }
        let limits = Limits {
            max_tokens_per_request: per_request,
            max_tokens_per_step: per_step,
            max_tokens_per_rank: per_rank,
            max_message_bytes: message_bytes,
            max_streams_per_connection: within(
                "max-streams-per-connection",
                given.max_streams_per_connection.0.unwrap_or(0),
                1,
                1 << 16,
            )?,
            max_requests_per_stream: MAX_REQUESTS_PER_STREAM,
            max_connections: within("max-connections", given.max_connections.0.unwrap_or(0), 1, 1 << 20)?,
            max_bytes_in_flight: in_flight,
        };
        let window_bytes = match device {
            DeviceKind::Cpu => {
                expertd_rank_cpu::window_bytes(&shape).map_err(|e| PlanError::Sizes(e.to_string()))?
            }
            DeviceKind::Cuda => {
                gpu::check(&spec, &shape).map_err(PlanError::Sizes)?;
                gpu::window_bytes(&shape, spec.max_experts())
            }
        };
        let channel_bytes = shape.channel_bytes().map_err(|e| PlanError::Sizes(e.to_string()))?;

        let connections = ConnectionLimits::for_tcp(limits.max_connections as usize);
        let per_client = derive(
            &mut given.max_connections_per_client,
            u32::try_from(connections.per_client).unwrap_or(u32::MAX),
            "half of max-connections",
        );
        let per_client =
            within("max-connections-per-client", per_client, 1, limits.max_connections)? as usize;
        let connections = ConnectionLimits { per_client, per_address: per_client, ..connections };
        if given.admin_listen.0.is_none() {
            let address = default_admin_address().map_err(|problem| value("admin-listen", problem))?;
            derive(&mut given.admin_listen, address, "a socket of this user");
        }
        let names = given.tls_client_names.0.clone().unwrap_or_default();
        let access = AccessConfig {
            tls_cert: given.tls_cert.0.clone(),
            tls_key: given.tls_key.0.clone(),
            tls_client_ca: given.tls_client_ca.0.clone(),
            tls_client_names: names
                .split(',')
                .map(str::trim)
                .filter(|name| !name.is_empty())
                .map(str::to_owned)
                .collect(),
            token_file: given.token_file.0.clone(),
            admin_token_file: given.admin_token_file.0.clone(),
            insecure: given.insecure.0.unwrap_or(false),
        };
        let listen = |s: &(Option<String>, Source)| s.0.clone().unwrap_or_default();
        let coverage =
            if given.verify_weights.0.unwrap_or(false) { Coverage::Whole } else { Coverage::Sampled };
        let fingerprint = checkpoint.fingerprint(coverage);
        let plan = ServePlan {
            model: model_info(&spec, name, fingerprint, limits, device, &shares, &near),
            cluster: ClusterConfig {
                shape,
                windows: match device {
                    DeviceKind::Cpu => Some(cpu_windows),
                    DeviceKind::Cuda => None,
                },
                device,
                description: serde_json::to_value(&spec).unwrap_or_default(),
                checkpoint: CheckpointSource { folder: absolute(&path), layers: spec.held, fingerprint },
                weights: match device {
                    DeviceKind::Cpu => WeightHolder::Router,
                    DeviceKind::Cuda => WeightHolder::Ranks,
                },
                fp8_compute,
                cores: shares,
                usable_cores,
                spin,
                peer_timeout: match device {
                    DeviceKind::Cpu => step_timeout,
                    DeviceKind::Cuda => device_timeout.min(step_timeout),
                },
                liveness_timeout,
                step_timeout,
                environment: match device {
                    DeviceKind::Cpu => Vec::new(),
                    DeviceKind::Cuda => gpu::environment(),
                },
            },
            scheduler: SchedulerConfig {
                max_tokens_per_step: per_step,
                max_queued_tokens: within("max-queued-tokens", queued, 1, usize::MAX)?,
                max_wait: Duration::from_micros(within(
                    "max-wait-us",
                    given.max_wait_us.0.unwrap_or(0),
                    0,
                    60_000_000,
                )?),
                on_fault: given.on_fault.0.unwrap_or_default(),
                drain_timeout: millis("drain-timeout-ms", &given.drain_timeout_ms)?,
                reload: ReloadPlanner(super::reload::plan),
                copy_threads: match device {
                    // Ranks use all cores.
                    DeviceKind::Cpu => 1,
                    DeviceKind::Cuda => (usable_cores / 2).clamp(1, MAX_COPY_THREADS),
                },
            },
            listen: listen(&given.listen),
            admin_listen: listen(&given.admin_listen),
            metrics_listen: listen(&given.metrics_listen),
            access,
            connections,
            window_bytes,
            channel_bytes,
            buffers: MessageMemory::new(in_flight, per_step, spec.hidden),
            shown: given.shown(),
            spec,
        };
        Ok(plan)
    }
}

/// Parses a list of cores, each of which must be available to this process.
fn chosen_cores(text: &str) -> Result<Vec<usize>, String> {
    let (cores, available) = (parse_cores(text)?, available_cores());
    match cores.iter().find(|core| !available.contains(core)) {
        Some(core) => Err(format!(
            "`{text}` contains core {core}, but this process may run only on {}",
            list(&available)
        )),
        None => Ok(cores),
    }
}

/// Makes the windows of CPU ranks.
fn cpu_windows(setup: &RankSetup) -> Result<Arc<SharedRegion>, String> {
    expertd_rank_cpu::create_windows(setup).map_err(|error| error.to_string())
}

fn folder_name(path: &Path) -> String {
    absolute(path).file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

fn absolute(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

fn list(cores: &[usize]) -> String {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for &core in cores {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == core => *last = core,
            _ => parts.push((core, core)),
        }
    }
    let show = |&(first, last): &(usize, usize)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    parts.iter().map(show).collect::<Vec<_>>().join(",")
}

/// Describes a model for callers, before its first generation.
fn model_info(
    spec: &ModelSpec,
    name: String,
    weight_fingerprint: WeightFingerprint,
    limits: Limits,
    device: DeviceKind,
    cores: &[Vec<usize>],
    near: &[Option<usize>],
) -> ModelInfo {
    let layers: BTreeMap<_, _> = spec
        .moe_layers()
        .map(|(layer, moe)| {
            let info = MoeLayerInfo {
                num_experts: moe.experts.count,
                top_k: moe.gate.top_k,
                max_k: moe.gate.top_k,
                expert_width: moe.experts.width,
                shared_width: moe.shared.as_ref().map_or(0, |shared| shared.width),
                gate: moe.gate.describe(),
                gate_json: serde_json::to_string(&moe.gate).unwrap_or_default(),
                routes_by_token_id: moe.gate.vocab().is_some(),
                vocabulary: moe.gate.vocab().unwrap_or(0),
            };
            (layer, info)
        })
        .collect();
    let mut weight_formats: Vec<String> =
        spec.moe_layers().map(|(_, moe)| moe.experts.format.to_string()).collect();
    weight_formats.sort();
    weight_formats.dedup();
    let ranks = cores.len();
    let placement = (0..)
        .zip(cores.iter().zip(near))
        .map(|(rank, (cores, near))| RankPlacement {
            rank: Rank(rank),
            device: match device {
                DeviceKind::Cpu => format!("cpu, cores {}", list(cores)),
                DeviceKind::Cuda => {
                    let near = near.map_or_else(String::new, |node| format!(" (NUMA node {node})"));
                    format!("cuda, GPU {rank}{near}, cores {}", list(cores))
                }
            },
            experts: spec
                .moe_layers()
                .map(|(layer, moe)| {
                    let range = Placement::new(moe.experts.count, ranks).range(Rank(rank));
                    (layer, range.start, range.len() as u32)
                })
                .collect(),
        })
        .collect();
    ModelInfo {
        name,
        family: spec.model_type.clone(),
        weight_version: WeightVersion(1),
        weight_fingerprint,
        generation: Generation(0),
        hidden: spec.hidden,
        num_layers: spec.num_layers,
        held: spec.held,
        layers,
        weight_formats,
        limits,
        placement,
    }
}
