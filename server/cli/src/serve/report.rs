//! Output of `expertd serve`: the settings, the plan, the progress of loading, and how to use the service.

use std::fmt::Write as _;
use std::io::IsTerminal as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use indicatif::{HumanCount, ProgressBar, ProgressStyle};

use super::plan::ServePlan;
use super::settings::{SettingSource, ShownSetting};
use crate::mps;
use crate::predict;
use crate::units::{bytes, count, wrap};
use crate::weight_bytes::{bytes_of_ranks, gpu_bytes_of_ranks};
use expertd_core::backend::{Backend, RankState, ServiceState};
use expertd_core::listen::Address;
use expertd_core::steps::Service;
use expertd_grpc::AccessConfig;
use expertd_ipc::control::DeviceKind;
use expertd_model::MoeLayer;
use expertd_rank::share::ExpertShare;
use expertd_rank_cuda as gpu;
use expertd_types::{Fp8Compute, Fp8Products, LayerRange, Rank};

/// Largest width of the column of values.
const MAX_ALIGNED: usize = 60;

/// Columns of the names in the plan and of the space after them.
const PLAN_INDENT: usize = 11;

/// One line for each setting that was given, and a line that says how to see the others, which are also in the log at level debug.
#[must_use]
pub(super) fn given_settings(shown: &[ShownSetting]) -> String {
    let is_default = |s: &&ShownSetting| matches!(s.source, SettingSource::Default(_));
    let (defaults, given): (Vec<_>, Vec<_>) = shown.iter().partition(is_default);
    for ShownSetting { name, value, source } in &defaults {
        tracing::debug!(name, value = value.as_deref(), %source, "setting");
    }
    let more = defaults.len();
    let text = lines(given);
    format!(
        "{text}# {more} more settings have their defaults; the same command with --print-config prints all\n"
    )
}

/// One line of TOML for each setting, with its source; those without a value are comments.
#[must_use]
pub(super) fn settings(shown: &[ShownSetting]) -> String {
    lines(shown.iter().collect())
}

fn lines(shown: Vec<&ShownSetting>) -> String {
    let name = shown.iter().map(|s| s.name.len()).max().unwrap_or(0);
    // Longer values are printed whole; only their sources are not aligned.
    let length = |s: &&ShownSetting| s.value.as_ref().map_or(0, String::len);
    let value = shown.iter().map(length).max().unwrap_or(0).min(MAX_ALIGNED);
    let mut text = String::new();
    for ShownSetting { name: setting, value: found, source } in shown {
        let _ = match found {
            Some(found) => writeln!(text, "{setting:name$} = {found:value$}  # {source}"),
            None => writeln!(text, "# {setting} is not set"),
        };
    }
    text
}

/// Description of how the service will run this model on this machine.
#[must_use]
pub fn plan(plan: &ServePlan) -> String {
    let ServePlan { model, spec, cluster, scheduler, .. } = plan;
    let shape = &cluster.shape;
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "{name:>9}  {}", wrap(&value, PLAN_INDENT));
    };
    line("model", format!("{} ({}), weights {}", model.name, model.family, model.weight_formats.join(" + ")));
    let moe: Vec<_> = spec.moe_layers().collect();
    if let Some((layer, first)) = moe.first() {
        line(
            "layers",
            format!(
                "{}; hidden {}; {} experts of width {}, {} per token{}",
                if spec.held == LayerRange::whole(spec.num_layers) {
                    format!("{} with MoE of {}", moe.len(), spec.num_layers)
                } else {
                    format!("{} of {} held, {} with MoE", spec.held, spec.num_layers, moe.len())
                },
                spec.hidden,
                first.experts.count,
                first.experts.width,
                first.gate.top_k,
                first.shared.as_ref().map_or_else(String::new, |s| format!("; shared width {}", s.width)),
            ),
        );
        line("gate", first.gate.describe());
        for (rank, placed) in model.placement.iter().enumerate() {
            let ranges = placed.experts.iter().filter(|(of, _, count)| of == layer && *count > 0);
            let ranges: Vec<String> = ranges
                .map(|&(_, first, count)| match count {
                    1 => first.to_string(),
                    _ => format!("{first} to {}", first + count - 1),
                })
                .collect();
            let owned = match ranges.len() {
                0 => "no experts".to_owned(),
                1 => format!("experts {}", ranges[0]),
                _ => format!("experts {} of layer {layer}", ranges.join(", ")),
            };
            line(if rank == 0 { "ranks" } else { "" }, format!("{rank}: {}; {owned}", placed.device));
        }
    }
    if gpu::is_shared(&cluster.gpus) {
        let timeout = cluster.peer_timeout.as_millis();
        line("", format!("ranks share a GPU, which is for tests; device_timeout_ms is {timeout}"));
    }
    let serves_gpus = cluster.device() == DeviceKind::Cuda && plan.sessions.is_some();
    if let Some(text) = serves_gpus.then(mps::warning).flatten() {
        line("sessions", text);
    }
    if shape.is_mixed() {
        line("tiers", tiers(plan));
        if let Some(text) = steps(plan) {
            line("steps", text);
        }
    }
    if let Some(text) = weights(plan) {
        line("weights", text);
    }
    line(
        "memory",
        format!(
            "{} ({} slots), staging and rings {}; up to {} of requests in flight{}",
            if shape.is_mixed() {
                format!("wire to CPU ranks {}", bytes(plan.window_bytes as u64))
            } else {
                format!("windows {} per rank", bytes(plan.window_bytes as u64))
            },
            shape.slots,
            bytes(plan.channel_bytes as u64),
            bytes(model.limits.max_bytes_in_flight as u64),
            plan.sessions.as_ref().map_or_else(String::new, |sessions| format!(
                ", {} of sessions",
                bytes(sessions.router_bytes() as u64)
            )),
        ),
    );
    line(
        "limits",
        format!(
            "{} tokens per step ({} per rank), {} per request, {} queued; a request has up to {}",
            HumanCount(scheduler.max_tokens_per_step as u64),
            HumanCount(shape.max_tokens_per_rank as u64),
            HumanCount(model.limits.max_tokens_per_request as u64),
            HumanCount(scheduler.max_queued_tokens as u64),
            bytes(model.limits.max_message_bytes as u64),
        ),
    );
    let connections = &plan.connections;
    line(
        "callers",
        format!(
            "{}; {} connections, {} from one address or client",
            match (plan.access.tls_cert.is_some(), plan.access.token_file.is_some()) {
                (true, true) => "TLS, tokens",
                (true, false) => "TLS",
                (false, true) => "tokens",
                (false, false) => "anyone who can connect",
            },
            HumanCount(connections.tcp as u64),
            HumanCount(connections.per_address as u64),
        ),
    );
    text
}

/// What lies on the source rank and what on the CPU ranks of a mixed group.
fn tiers(plan: &ServePlan) -> String {
    let ServePlan { spec, cluster, .. } = plan;
    let ranks = cluster.shape.ranks as usize;
    let sources = cluster.shape.sources as usize;
    let placement = cluster.checkpoint.placement.clone();
    let share = ExpertShare::of_rank(Rank(0), ranks, placement).with_sources(sources);
    let (mut all, mut resident, mut whole, mut layers) = (0, 0, 0, 0);
    for (layer, moe) in spec.moe_layers() {
        let of_source = share.layer(layer, moe).experts_of(Rank(0)).len();
        (all, resident, layers) = (all + moe.experts.count, resident + of_source, layers + 1);
        whole += usize::from(of_source == moe.experts.count);
    }
    let held = |layer, moe: &MoeLayer, rank| share.held(layer, moe, rank);
    let on_cpus: u64 = bytes_of_ranks(spec, ranks, sources, held).iter().skip(sources).sum();
    let workers = ranks - sources;
    if resident == all {
        return format!(
            "all {all} experts on rank 0, so CPU ranks never compute: leave them out (--device {})",
            cluster.device()
        );
    }
    let streamed = match cluster.stream_rows {
        usize::MAX => String::new(),
        rows => format!(
            "; rank 0 computes all experts of steps of {rows} rows and more, some from {} rows on",
            expertd_tier::least_divided(rows)
        ),
    };
    format!(
        "{resident} of {all} experts on rank 0 ({whole} of {layers} layers whole), the others on {}, in {} of host memory{streamed}",
        count(workers as u64, "CPU rank"),
        bytes(on_cpus),
    )
}

/// The expected time of steps; `None` if no CPU rank computes beside a GPU rank.
fn steps(plan: &ServePlan) -> Option<String> {
    let ServePlan { spec, cluster, .. } = plan;
    let (ranks, sources) = (cluster.shape.ranks as usize, cluster.shape.sources as usize);
    let placement = cluster.checkpoint.placement.clone();
    let share = ExpertShare::of_rank(Rank(0), ranks, placement).with_sources(sources);
    let on_gpu = |layer, moe: &MoeLayer| share.layer(layer, moe).experts_of(Rank(0)).len();
    let misses = spec.moe_layers().any(|(layer, moe)| on_gpu(layer, moe) < moe.experts.count);
    let group = predict::Group {
        rates: plan.memory_rates,
        cores: cluster.cores.iter().skip(sources).map(Vec::len).sum(),
        stream_rows: cluster.stream_rows,
        uploads: 0,
    };
    (misses && cluster.device() == DeviceKind::Cuda)
        .then(|| predict::steps(spec, cluster.fp8_products, &group, on_gpu))
}

/// How to call and watch a service with these addresses. Clients that connect over TCP need `access`.
pub(super) fn usage(address: &Address, metrics: SocketAddr, access: &AccessConfig) -> String {
    let near = |address: SocketAddr| match address.ip() {
        ip if !ip.is_unspecified() => address,
        IpAddr::V4(_) => SocketAddr::from((Ipv4Addr::LOCALHOST, address.port())),
        IpAddr::V6(_) => SocketAddr::from((Ipv6Addr::LOCALHOST, address.port())),
    };
    let mut call = match address {
        Address::Tcp(address) => format!("expertd call --tokens 16 --address {}", near(*address)),
        Address::Unix(_) => format!("expertd call --tokens 16 --address {address}"),
    };
    if matches!(address, Address::Tcp(_)) {
        // NAME is one of the certificate's: the address need not be among them.
        let flags = [
            (&access.tls_cert, " --tls-ca FILE --tls-server-name NAME"),
            (&access.token_file, " --token-file FILE"),
        ];
        for (file, flag) in flags {
            call.push_str(if file.is_some() { flag } else { "" });
        }
    }
    format!("  call it  {call}\n watch it  http://{}/\n", near(metrics))
}

/// How ranks hold the experts and what rows they multiply; `None` if CPU ranks have only experts that always take rows in f32.
pub fn weights(plan: &ServePlan) -> Option<String> {
    let on_cpus = cpu_weights(plan);
    if plan.cluster.device() == DeviceKind::Cuda {
        let on_gpus = gpu_weights(plan);
        let on_cpus = on_cpus.filter(|_| plan.cluster.shape.is_mixed());
        return Some(on_cpus.map_or(on_gpus.clone(), |text| format!("{on_gpus}; on CPUs {text}")));
    }
    on_cpus
}

/// The format of the rows that CPU ranks multiply; `None` if it is always f32.
fn cpu_weights(plan: &ServePlan) -> Option<String> {
    let Fp8Products { of_fp8, of_mxfp4 } = plan.cluster.fp8_products;
    let formats =
        [("FP8", "fp8", of_fp8, Fp8Products::OF_FP8), ("MXFP4", "mxfp4", of_mxfp4, Fp8Products::OF_MXFP4)];
    let text = |(format, flag, in_fp8, products): (&str, &str, bool, Fp8Products)| {
        let takes = |(_, moe): (_, &MoeLayer)| {
            let shared = moe.shared.as_ref();
            moe.experts.take_fp8_rows(products) || shared.is_some_and(|shared| shared.take_fp8_rows(products))
        };
        let (rows, value) = if in_fp8 { ("FP8", Fp8Compute::Fp8) } else { ("f32", Fp8Compute::Bf16) };
        let text = || format!("{format} experts multiply rows in {rows} (--{flag}-compute {value})");
        plan.spec.moe_layers().any(takes).then(text)
    };
    let texts: Vec<String> = formats.into_iter().filter_map(text).collect();
    (!texts.is_empty()).then(|| texts.join("; "))
}

/// The formats of the experts in GPU memory, and the size of the largest share.
fn gpu_weights(plan: &ServePlan) -> String {
    let ServePlan { spec, cluster, .. } = plan;
    let mut formats: Vec<String> = Vec::new();
    for (_, moe) in spec.moe_layers() {
        let shared = moe.shared.as_ref().map(gpu::Stored::shared);
        for stored in [Some(gpu::Stored::routed(&moe.experts)), shared].into_iter().flatten() {
            let text = stored.explain(cluster.fp8_products);
            if !formats.contains(&text) {
                formats.push(text);
            }
        }
    }
    let held = gpu_bytes(plan);
    let on = |gpu: &u32| -> u64 {
        let ranks = cluster.gpus.iter().zip(&held);
        ranks.filter(|(of_rank, _)| *of_rank == gpu).map(|(_, bytes)| bytes).sum()
    };
    let largest = cluster.gpus.iter().map(on).max().unwrap_or(0);
    format!("on GPUs in {}; {} on the fullest one", formats.join(", and in "), bytes(largest))
}

/// `[GPU ranks]`: bytes of weights of each rank in the memory of its GPU.
pub(crate) fn gpu_bytes(plan: &ServePlan) -> Vec<u64> {
    let ServePlan { spec, cluster, .. } = plan;
    let ranks = cluster.shape.ranks as usize;
    let share = ExpertShare::of_rank(Rank(0), ranks, cluster.checkpoint.placement.clone());
    let held = |layer, moe: &MoeLayer, rank| share.held(layer, moe, rank);
    gpu_bytes_of_ranks(spec, cluster.fp8_products, cluster.gpus.len(), held)
}

/// Shows the progress of loading until the service serves or has failed: a bar on a terminal, otherwise log lines.
pub fn follow_loading(service: &Service) {
    let style =
        ProgressStyle::with_template("  loading {bar:30} {bytes}/{total_bytes} {binary_bytes_per_sec} {msg}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = if std::io::stderr().is_terminal() {
        ProgressBar::new(0).with_style(style)
    } else {
        ProgressBar::hidden()
    };
    let mut shown_percent = 0;
    loop {
        let status = service.status();
        let total: u64 = status.ranks.iter().map(|r| r.weight_bytes_total).sum();
        let loaded: u64 = status.ranks.iter().map(|r| r.weight_bytes_loaded).sum();
        let ready = status.ranks.iter().filter(|r| r.state == RankState::Ready).count();
        bar.set_length(total);
        bar.set_position(loaded);
        bar.set_message(format!("{ready}/{} ranks ready", status.ranks.len()));
        let percent = (loaded * 100).checked_div(total).unwrap_or(0);
        if bar.is_hidden() && percent >= shown_percent + 25 && percent < 100 {
            shown_percent = percent;
            tracing::info!(percent, loaded_bytes = loaded, total_bytes = total, "loading weights");
        }
        if !matches!(status.state, ServiceState::Loading | ServiceState::Reforming) {
            bar.finish_and_clear();
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use expertd_model::synth::{self, SynthConfig, SynthFormat};

    use super::*;
    use crate::serve::settings::{Given, ServeArgs};

    /// The plan of a mixed group of one source and two further ranks.
    fn mixed(format: SynthFormat, gpu_memory: &str) -> ServePlan {
        let folder = tempfile::tempdir().unwrap();
        let config =
            SynthConfig { layers: 2, hidden: 128, width: 128, format, ..SynthConfig::new("qwen3_moe") };
        synth::write(&config, folder.path()).unwrap();
        let args = ServeArgs {
            model: Some(folder.path().to_owned()),
            device: Some("cpu,cpu".parse().unwrap()),
            ranks: Some("1,2".parse().unwrap()),
            gpu_memory: Some(gpu_memory.parse().unwrap()),
            ..ServeArgs::default()
        };
        ServePlan::new(Given::merge(&args, None).unwrap()).unwrap()
    }

    #[test]
    fn ranks_that_never_compute_are_named() {
        let all = tiers(&mixed(SynthFormat::Bf16, "1G"));
        assert!(all.contains("all 16 experts") && all.contains("leave them out (--device cpu)"), "{all}");
        let some = tiers(&mixed(SynthFormat::Bf16, "800K"));
        assert!(some.contains("of 16 experts on rank 0 (0 of 2 layers whole)"), "{some}");
    }

    #[test]
    fn the_time_of_steps_is_predicted_where_a_gpu_and_cpus_compute() {
        let mut some = mixed(SynthFormat::Bf16, "800K");
        assert_eq!(steps(&some), None, "rank 0 is on a CPU");
        some.cluster.devices[0] = DeviceKind::Cuda;
        let text = steps(&some).unwrap();
        assert!(text.contains("for 1, 8, 64, 2048 rows") && text.contains("host=85"), "{text}");
        let shown = plan(&some);
        assert!(shown.contains("    steps  a layer takes about"), "{shown}");
        assert!(shown.lines().all(|line| line.chars().count() <= crate::units::COLUMNS), "{shown}");
        let mut all = mixed(SynthFormat::Bf16, "1G");
        all.cluster.devices[0] = DeviceKind::Cuda;
        assert_eq!(steps(&all), None, "CPU ranks never compute");
    }

    #[test]
    fn the_weights_of_gpus_are_those_of_gpu_ranks() {
        let mut plan = mixed(SynthFormat::Fp8, "400K");
        assert_eq!(gpu_bytes(&plan), [0; 0]);
        plan.cluster.devices[0] = DeviceKind::Cuda;
        plan.cluster.gpus = vec![0];
        assert_eq!(gpu_bytes(&plan).len(), 1);
        let text = weights(&plan).unwrap();
        assert!(
            text.contains("on GPUs in") && text.contains("; on CPUs FP8 experts multiply rows in f32"),
            "{text}"
        );
        plan.cluster.fp8_products = Fp8Products::OF_FP8;
        assert!(weights(&plan).unwrap().contains("; on CPUs FP8 experts multiply rows in FP8"));
    }
}
