//! Resolves settings against the machine and a checkpoint to a complete plan of a service.

mod devices;
mod machine;
mod model;
mod network;
mod sessions;
mod sizes;
mod split;
mod values;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) use self::devices::gpus;
pub use self::sessions::SessionPlan;
pub(crate) use self::sizes::{MAX_BYTES_IN_FLIGHT, default_bytes_in_flight, group_shape};

use self::machine::Machine;
use self::model::model_info;
use self::sizes::Sizes;
use self::values::{derive, millis, value, within};
use super::division::Division;
use super::layers;
use super::reload::ReloadRules;
use super::settings::{Given, SettingSource, SettingsError, ShownSetting};
use crate::admin::default_admin_address;
use crate::predict::MemoryRates;
use expertd_core::backend::{Limits, MAX_NAME_BYTES, ModelInfo};
use expertd_core::cluster::ClusterConfig;
use expertd_core::steps::SchedulerConfig;
use expertd_grpc::{AccessConfig, ConnectionLimits};
use expertd_ipc::GroupShape;
use expertd_ipc::control::{CheckpointSource, DeviceKind, RankSetup};
use expertd_model::{Checkpoint, LayerChoice, ModelError, ModelSpec};
use expertd_rank_cuda as gpu;
use expertd_sessions::NetworkConfig;
use expertd_shm::SharedRegion;
use expertd_tier::{TierLayout, TierShape};
use expertd_types::{Coverage, ExpertPlacement};

/// Largest number of router threads that copy rows of large steps for GPUs. Each moves about 10 GB/s.
const MAX_COPY_THREADS: usize = 16;

/// Time for the memory of an earlier service, whose ranks may still be ending, to become available.
const MEMORY_WAIT: Duration = Duration::from_secs(5);

/// Default of `device-timeout-ms` if ranks share a GPU.
const SHARED_GPU_TIMEOUT_MS: u64 = 30_000;

/// Why a service cannot be planned; exit status 64.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum PlanError {
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("{0}")]
    Sizes(String),
}

/// Everything that a service needs to start.
pub struct ServePlan {
    /// Every setting with its value and source.
    pub shown: Vec<ShownSetting>,
    skip_memory_check: bool,
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
    /// Where and for whom sessions are served; `None` without a session socket and without network sessions.
    pub sessions: Option<SessionPlan>,
    /// How agents of network sessions are started, if there are any.
    pub network: Option<NetworkConfig>,
    /// Address of the Prometheus endpoint.
    pub metrics_listen: String,
    /// Age of a thread's last progress above which `/healthz` answers 503.
    pub health_timeout: Duration,
    /// Receiver of traces; `None` leaves it to OpenTelemetry's own variables.
    pub otlp_endpoint: Option<String>,
    /// Who may call the service.
    pub access: AccessConfig,
    /// Limits on connections, before the limit on descriptors is applied.
    pub connections: ConnectionLimits,
    /// Bytes of one rank's window, or of the wire of a mixed group.
    pub window_bytes: usize,
    /// Bytes of the channels of all ranks, staging included.
    pub channel_bytes: usize,
    /// Rates by which the time of steps of a mixed group is predicted.
    pub memory_rates: MemoryRates,
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
                "no checkpoint was given; pass its folder (`expertd serve DIR`, or --model DIR), or try `expertd demo`, which makes one",
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
        if name.is_empty() || name.len() > MAX_NAME_BYTES {
            let found = name.len();
            return Err(value("model-name", format!("has {found} bytes, must have 1 to {MAX_NAME_BYTES}")));
        }

        let machine = Machine::choose(&mut given)?;
        // Before the fingerprint, which may read all weights.
        let division = split::division(&given, &machine);
        let placement = placement(&given, &spec, &machine, division.as_ref())?;
        let (stream_rows, slot_bytes) =
            (split::stream_rows(&mut given, &spec, &machine), split::slot_bytes(&given));
        let sizes = Sizes::choose(&mut given, &spec, &machine)?;
        let timeouts = Timeouts::of(&mut given, gpu::is_shared(&machine.gpus))?;
        if given.admin_listen.0.is_none() {
            let address = default_admin_address().map_err(|problem| value("admin-listen", problem))?;
            derive(&mut given.admin_listen, address, "a socket of this user");
        }
        let sessions = SessionPlan::new(&mut given, machine.sources)?;
        let access = access(&given);
        let network = network::config(&given, access.insecure)?;
        let connections = connections(&mut given, &sizes.limits)?;
        let listen = |s: &(Option<String>, SettingSource)| s.0.clone().unwrap_or_default();
        let coverage =
            if given.verify_weights.0.unwrap_or(false) { Coverage::Whole } else { Coverage::Sampled };
        let fingerprint = checkpoint.fingerprint(coverage);
        let Sizes { shape, limits, queued, window_bytes, channel_bytes } = sizes;
        let skip_memory_check = given.skip_memory_check.0.unwrap_or(false);
        let rules = ReloadRules { sources: shape.sources as usize, division, skip_memory_check };
        let scheduler = scheduler(&given, limits.max_tokens_per_step, queued, &machine, rules)?;
        let model = model_info(&spec, name, fingerprint, limits, &machine, placement.as_ref());
        let checkpoint =
            CheckpointSource { folder: absolute(&path), layers: spec.held, fingerprint, placement };
        let description = serde_json::to_value(&spec).unwrap_or_default();
        Ok(ServePlan {
            model,
            cluster: ClusterConfig {
                stream_rows,
                slot_bytes,
                ..cluster(machine, shape, &timeouts, checkpoint, description, given.max_weight_bytes.0)
            },
            scheduler,
            listen: listen(&given.listen),
            admin_listen: listen(&given.admin_listen),
            sessions,
            network,
            metrics_listen: listen(&given.metrics_listen),
            health_timeout: timeouts.health,
            otlp_endpoint: given.otlp_endpoint.0.clone(),
            access,
            connections,
            window_bytes,
            channel_bytes,
            memory_rates: given.memory_rates.0.unwrap_or_default(),
            shown: given.shown(),
            skip_memory_check,
            spec,
        })
    }

    /// Checks that host memory has room for the weights of CPU ranks, and that `max-weight-bytes` allows them. Loaders of GPU ranks check
    /// the memory of their devices.
    ///
    /// # Errors
    /// If they are not allowed, or there is too little memory, also after a wait of five seconds.
    pub fn check_memory(&self) -> Result<(), PlanError> {
        let ClusterConfig { devices, checkpoint, max_weight_bytes, .. } = &self.cluster;
        let placement = checkpoint.placement.as_ref();
        let sources = self.cluster.shape.sources as usize;
        let packed = super::reload::packed_bytes(&self.spec, devices, sources, placement);
        if let Some(most) = max_weight_bytes.filter(|&most| packed > most) {
            let problem =
                format!("is {most}, but the packed weights take up to {packed} bytes of host memory");
            return Err(value("max-weight-bytes", problem));
        }
        if self.skip_memory_check || !devices.contains(&DeviceKind::Cpu) {
            return Ok(());
        }
        // The wire of a mixed group is pinned. Slots of a source on a CPU are in host memory.
        let of_slots = if self.cluster.device() == DeviceKind::Cpu { self.cluster.slot_bytes } else { 0 };
        let exchange = match self.cluster.shape.is_mixed() {
            true => (self.window_bytes + self.channel_bytes) as u64 + of_slots,
            false => 0,
        };
        let lack = || super::reload::lack_of_memory(&self.spec, devices, sources, placement, exchange);
        let end = Instant::now() + MEMORY_WAIT;
        let (available, needed) = loop {
            match lack() {
                None => return Ok(()),
                Some(lack) if Instant::now() >= end => break lack,
                Some(_) => std::thread::sleep(Duration::from_millis(200)),
            }
        };
        let missing = needed.saturating_sub(available);
        let found =
            format!("{needed} MiB, and {available} MiB of memory are available: {missing} MiB are missing");
        Err(match placement {
            Some(_) if self.cluster.shape.is_mixed() => value(
                "model",
                format!(
                    "the weights of the CPU ranks, staging and the wire need {found}; give the GPU more of the weights, lower \
                     max-tokens-per-step, or use a machine with more memory"
                ),
            ),
            Some(_) => value(
                "placement",
                format!("the weights need {found}, copies of experts included; use fewer spare experts"),
            ),
            None => value(
                "model",
                format!(
                    "the weights need {found}; use a machine with more memory or GPUs, or share the layers among several \
                     services (--layers). If memory that is in use now will be free by the time they are loaded, pass \
                     --skip-memory-check"
                ),
            ),
        })
    }
}

/// Time limits of the EP group.
struct Timeouts {
    step: Duration,
    device: Duration,
    liveness: Duration,
    forming: Duration,
    health: Duration,
}

impl Timeouts {
    /// `share_gpu` says whether ranks share a GPU.
    fn of(given: &mut Given, share_gpu: bool) -> Result<Timeouts, PlanError> {
        if share_gpu && matches!(given.device_timeout_ms.1, SettingSource::Default(_)) {
            let why = "ranks that share a GPU take turns";
            given.device_timeout_ms = (Some(SHARED_GPU_TIMEOUT_MS), SettingSource::Default(why.to_owned()));
        }
        let step = millis("step-timeout-ms", &given.step_timeout_ms)?;
        let device = millis("device-timeout-ms", &given.device_timeout_ms)?;
        let liveness = millis("liveness-timeout-ms", &given.liveness_timeout_ms)?;
        if liveness < Duration::from_millis(300) {
            return Err(value(
                "liveness-timeout-ms",
                "must be at least 300, because the heartbeat's interval is up to 100 ms",
            ));
        }
        let forming = millis("forming-timeout-ms", &given.forming_timeout_ms)?;
        let health = within("health-timeout-ms", given.health_timeout_ms.0.unwrap_or(0), 1000, 3_600_000)?;
        Ok(Timeouts { step, device, liveness, forming, health: Duration::from_millis(health) })
    }
}

/// Configuration of the EP group. `description` is the model's specification for ranks.
fn cluster(
    machine: Machine,
    shape: GroupShape,
    timeouts: &Timeouts,
    checkpoint: CheckpointSource,
    description: serde_json::Value,
    max_weight_bytes: Option<u64>,
) -> ClusterConfig {
    let devices = machine.devices();
    let Machine { device, gpus, environment, fp8_products, usable_cores, shares, spin, .. } = machine;
    ClusterConfig {
        windows: match device {
            _ if shape.is_mixed() => Some(tier_wire),
            DeviceKind::Cpu => Some(cpu_windows),
            DeviceKind::Cuda => None,
        },
        shape,
        devices,
        description,
        checkpoint,
        max_weight_bytes,
        fp8_products,
        cores: shares,
        usable_cores,
        spin,
        peer_timeout: match device {
            DeviceKind::Cpu => timeouts.step,
            DeviceKind::Cuda => timeouts.device.min(timeouts.step),
        },
        liveness_timeout: timeouts.liveness,
        forming_timeout: timeouts.forming,
        step_timeout: timeouts.step,
        stream_rows: usize::MAX,
        slot_bytes: 0,
        environment,
        gpus,
    }
}

/// Configuration of step forming and admission.
fn scheduler(
    given: &Given,
    max_tokens_per_step: usize,
    max_queued_tokens: usize,
    machine: &Machine,
    rules: ReloadRules,
) -> Result<SchedulerConfig, PlanError> {
    let max_wait_us =
        given.max_wait_us.0.map(|wait| within("max-wait-us", wait, 0, 60_000_000)).transpose()?;
    Ok(SchedulerConfig {
        max_tokens_per_step,
        max_queued_tokens,
        max_wait: max_wait_us.map(Duration::from_micros),
        on_fault: given.on_fault.0.unwrap_or_default(),
        drain_timeout: millis("drain-timeout-ms", &given.drain_timeout_ms)?,
        expert_metrics: given.expert_metrics.0.unwrap_or(false),
        reload: Arc::new(move |context, folder| rules.plan(context, folder)),
        copy_threads: match machine.device {
            // Ranks use all cores.
            DeviceKind::Cpu => 1,
            DeviceKind::Cuda => (machine.usable_cores / 2).clamp(1, MAX_COPY_THREADS),
        },
    })
}

/// Reads the placement, if there is one, or divides the experts of a mixed group.
fn placement(
    given: &Given,
    spec: &ModelSpec,
    machine: &Machine,
    division: Option<&Division>,
) -> Result<Option<ExpertPlacement>, PlanError> {
    let Some(path) = &given.placement.0 else {
        return division.map(|division| split::choose(given, spec, division)).transpose();
    };
    if given.gpu_memory.0.is_some() {
        return Err(value(
            "gpu-memory",
            "is given beside a placement, which says already what the GPU holds",
        ));
    }
    let refused = |problem| value("placement", problem);
    let placement = read_placement(path, spec, machine.ranks as usize).map_err(refused)?;
    if let Some(division) = division {
        division.check(spec, &placement).map_err(refused)?;
    }
    Ok(Some(placement))
}

/// Reads a placement, and checks that it is for this model and number of ranks.
///
/// # Errors
/// The problem, with the name of the file.
pub(crate) fn read_placement(path: &Path, spec: &ModelSpec, ranks: usize) -> Result<ExpertPlacement, String> {
    let failed = |problem: String| format!("{}: {problem}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    let experts = spec.moe_layers().map(|(layer, moe)| (layer, moe.experts.count)).collect();
    let placement = ExpertPlacement::from_json(&text)
        .and_then(|placement| placement.check(ranks, &experts).map(|()| placement));
    placement.map_err(|error| failed(error.to_string()))
}

/// Files with credentials.
fn access(given: &Given) -> AccessConfig {
    let names = |setting: &(Option<String>, SettingSource)| -> Vec<String> {
        let names = setting.0.as_deref().unwrap_or_default().split(',').map(str::trim);
        names.filter(|name| !name.is_empty()).map(str::to_owned).collect()
    };
    AccessConfig {
        tls_cert: given.tls_cert.0.clone(),
        tls_key: given.tls_key.0.clone(),
        tls_client_ca: given.tls_client_ca.0.clone(),
        tls_client_names: names(&given.tls_client_names),
        token_file: given.token_file.0.clone(),
        admin_token_file: given.admin_token_file.0.clone(),
        insecure: given.insecure.0.unwrap_or(false),
        metrics_hosts: names(&given.metrics_hosts),
    }
}

/// Limits on connections.
fn connections(given: &mut Given, limits: &Limits) -> Result<ConnectionLimits, PlanError> {
    let connections = ConnectionLimits::for_tcp(limits.max_connections as usize);
    let per_client = derive(
        &mut given.max_connections_per_client,
        u32::try_from(connections.per_client).unwrap_or(u32::MAX),
        "half of max-connections",
    );
    let per_client = within("max-connections-per-client", per_client, 1, limits.max_connections)? as usize;
    Ok(ConnectionLimits { per_client, per_address: per_client, ..connections })
}

/// Makes the wire of a mixed group.
fn tier_wire(setup: &RankSetup) -> Result<Arc<SharedRegion>, String> {
    let layout = TierLayout::new(TierShape::of(&setup.shape));
    layout.and_then(|layout| layout.create(setup.generation)).map_err(|error| error.to_string())
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
