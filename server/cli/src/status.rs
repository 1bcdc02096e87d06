//! `expertd status`: the state of a running service.

use std::fmt::Write as _;
use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use expertd_core::backend::{ExpertRows, LayerRows, TierRows};
use expertd_proto::v1::{
    GetExpertRowsRequest, GetStatusRequest, GetStatusResponse, GpuUsage, Imbalance, RankStatus, ServiceState,
    SessionStatus, TierStatus,
};
use expertd_types::LayerId;
use serde_json::json;

use super::admin::{AdminAddress, call_error};
use super::client::printable;
use super::exit::CommandError;
use super::units::{bytes, count};

/// Show the state of a running service, its EP group and its ranks
///
/// Exits with status 0 if requests are admitted, 64 for an address or a file that cannot be used, 1 otherwise.
#[derive(Args, Clone, Debug)]
pub struct StatusArgs {
    /// Address of Admin.
    #[command(flatten)]
    pub admin: AdminAddress,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Print the rows that each expert of each layer has computed on each rank since the service started, as JSON
    #[arg(long, conflicts_with_all = ["json", "watch"])]
    pub expert_rows: bool,
    /// Show the state again at this interval in seconds, until interrupted
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1", value_parser = interval)]
    pub watch: Option<f64>,
}

fn interval(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("expected a number of seconds from 0.1 to 3600".to_owned()),
    }
}

/// Gets the state of a service.
pub async fn status(args: &StatusArgs) -> Result<GetStatusResponse, CommandError> {
    let mut admin = args.admin.connect().await?;
    match admin.get_status(GetStatusRequest {}).await {
        Ok(response) => Ok(response.into_inner()),
        Err(status) => Err(call_error("GetStatus", &args.admin.shown(), status)),
    }
}

/// Gets the rows that experts have computed.
pub async fn expert_rows(address: &AdminAddress) -> Result<ExpertRows, CommandError> {
    let mut admin = address.connect().await?;
    let response = admin.get_expert_rows(GetExpertRowsRequest {}).await;
    let response = response.map_err(|status| call_error("GetExpertRows", &address.shown(), status))?;
    let layers = response.into_inner().layers.into_iter().map(|layer| LayerRows {
        layer: LayerId(layer.layer),
        ranks: layer.ranks.into_iter().map(|rank| rank.rows).collect(),
        source_experts: layer.source_experts.map(|experts| experts as usize),
    });
    Ok(ExpertRows { layers: layers.collect() })
}

/// Prints the state of a service; exit status 0 if requests are admitted.
pub async fn run(args: StatusArgs) -> Result<ExitCode, CommandError> {
    if let Some(seconds) = args.watch {
        return watch(&args, Duration::from_secs_f64(seconds)).await;
    }
    if args.expert_rows {
        println!("{}", json!(expert_rows(&args.admin).await?));
        return Ok(ExitCode::SUCCESS);
    }
    let status = status(&args).await?;
    print!("{}", if args.json { format!("{:#}\n", to_json(&status)) } else { to_text(&status) });
    Ok(if status.state() == ServiceState::Serving { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Shows the state repeatedly. A terminal is cleared each time; otherwise each state is a paragraph or a line of JSON. If the service
/// does not answer, that is shown, and the next call is made as usual.
async fn watch(args: &StatusArgs, interval: Duration) -> Result<ExitCode, CommandError> {
    /// Clears a terminal and goes to its first line.
    const CLEAR: &str = "\x1b[2J\x1b[H";
    let terminal = std::io::stdout().is_terminal();
    let mut earlier: Option<(Instant, u64)> = None;
    let mut ticks = tokio::time::interval(interval);
    loop {
        ticks.tick().await;
        let now = Instant::now();
        let text = match status(args).await {
            Ok(status) if args.json => format!("{}\n", to_json(&status)),
            Ok(status) => {
                let steps = status.steps_total;
                let rate = earlier
                    .replace((now, steps))
                    .map(|(then, before)| steps.saturating_sub(before) as f64 / (now - then).as_secs_f64());
                let rate = rate.map_or_else(String::new, |rate| format!("{:<12} {rate:.0}\n", "steps/s"));
                format!("{}{rate}", to_text(&status))
            }
            Err(error) => {
                earlier = None;
                format!("{error}\n")
            }
        };
        let (before, after) = if terminal { (CLEAR, "") } else { ("", if args.json { "" } else { "\n" }) };
        print!("{before}{text}{after}");
        if std::io::stdout().flush().is_err() {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

fn state_name(state: ServiceState) -> &'static str {
    match state {
        ServiceState::Unspecified => "unknown",
        ServiceState::Loading => "loading",
        ServiceState::Serving => "serving",
        ServiceState::Reforming => "re-forming",
        ServiceState::Draining => "draining",
        ServiceState::Failed => "failed",
    }
}

fn to_text(status: &GetStatusResponse) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "{name:<12} {}", printable(&value));
    };
    let state = state_name(status.state());
    line(
        "state",
        if status.reason.is_empty() { state.to_owned() } else { format!("{state} ({})", status.reason) },
    );
    line("model", status.model.clone());
    line("weights", format!("version {}, {}", status.weight_version, status.weight_fingerprint));
    // Services of earlier releases do not say it.
    if !status.weight_folder.is_empty() {
        line("folder", status.weight_folder.clone());
    }
    if let Some(reload) = &status.reload {
        line(
            "reload",
            format!("{} of {} loaded", bytes(reload.weight_bytes_loaded), bytes(reload.weight_bytes_total)),
        );
    }
    line("generation", status.generation.to_string());
    line("steps", status.steps_total.to_string());
    line(
        "requests",
        format!(
            "{} in flight, {} queued ({} tokens)",
            status.requests_in_flight, status.requests_queued, status.tokens_queued
        ),
    );
    line("up", format!("{:.0} s, expertd {}", status.uptime_seconds, status.version));
    if let Some(Imbalance { mean, largest, largest_layer }) = status.imbalance {
        line("imbalance", format!("{mean:.2}, at most {largest:.2} (layer {largest_layer})"));
    }
    if let Some(tier) = status.tier.as_ref().and_then(tier_text) {
        line("CPU experts", tier);
    }
    line("router", format!("{} resident", bytes(status.router_memory_bytes)));
    for rank in &status.ranks {
        line(&format!("rank {}", rank.rank), rank_text(rank));
    }
    for session in &status.sessions {
        line(&format!("session {}", session.session), session_text(session));
    }
    text
}

/// Where a mixed group computed the rows of experts; `None` without rows.
fn tier_text(tier: &TierStatus) -> Option<String> {
    let rows =
        |of: &expertd_proto::v1::TierRows| TierRows { source: of.source, copied: of.copied, cpu: of.cpu };
    let all: TierRows = tier.layers.iter().map(rows).sum();
    let shares = tier.layers.iter().filter_map(|of| Some((of.layer, rows(of).cpu_share()?)));
    let (layer, most) = shares.max_by(|a, b| a.1.total_cmp(&b.1))?;
    let hits = all.hit_rate().map_or_else(String::new, |rate| format!("; hit rate {rate:.2}"));
    Some(format!(
        "{:.2} of rows on CPU ranks, at most {most:.2} (layer {layer}){hits}, {} copied",
        all.cpu_share()?,
        bytes(tier.copied_bytes)
    ))
}

fn rank_text(rank: &RankStatus) -> String {
    let loaded = bytes(rank.weight_bytes_loaded);
    let weights = if rank.weight_bytes_loaded >= rank.weight_bytes_total {
        format!("{loaded} of weights")
    } else {
        format!("{loaded} of {} of weights", bytes(rank.weight_bytes_total))
    };
    let gpu = rank.gpu.as_ref().map_or_else(String::new, gpu_text);
    format!("{}, pid {}, {}, {weights}{gpu}", rank.state, rank.pid, rank.device)
}

/// Usage of a rank's GPU, with the comma before it.
fn gpu_text(gpu: &GpuUsage) -> String {
    let busy = gpu.utilization_percent.map_or_else(String::new, |percent| format!(", GPU {percent} % busy"));
    format!(
        ", {} of {} of GPU memory used{busy}",
        bytes(gpu.memory_used_bytes),
        bytes(gpu.memory_total_bytes)
    )
}

fn session_text(session: &SessionStatus) -> String {
    format!(
        "user {}, pid {}, {:.0} s, {}, {} ({} in flight), {} {}",
        session.user,
        session.pid,
        session.age_seconds,
        bytes(session.bytes),
        count(session.calls_total, "call"),
        session.calls_in_flight,
        count(session.rows_total, "row"),
        match (session.in_place, session.refusal.as_str()) {
            (true, _) => "in place".to_owned(),
            (false, "") => "(ranks have not attached the memory yet)".to_owned(),
            (false, refusal) => format!("(refused: {refusal})"),
        }
    )
}

fn to_json(status: &GetStatusResponse) -> serde_json::Value {
    let mut value = json!(status);
    value["state"] = state_name(status.state()).into();
    value
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn sample() -> GetStatusResponse {
        GetStatusResponse {
            state: ServiceState::Reforming.into(),
            reason: "rank 1 was killed by signal 9".to_owned(),
            generation: 4,
            model: "olmoe".to_owned(),
            ranks: vec![RankStatus {
                rank: 1,
                pid: 77,
                device: "cpu (2 cores)".to_owned(),
                state: "loading".to_owned(),
                weight_bytes_loaded: 1 << 20,
                weight_bytes_total: 3 << 20,
                gpu: Some(GpuUsage {
                    memory_used_bytes: 5 << 20,
                    memory_total_bytes: 9 << 20,
                    utilization_percent: Some(40),
                }),
            }],
            sessions: vec![SessionStatus {
                session: 3,
                user: 7,
                pid: 99,
                bytes: 1 << 20,
                ..SessionStatus::default()
            }],
            imbalance: Some(Imbalance { mean: 1.25, largest: 1.5, largest_layer: 7 }),
            tier: Some(TierStatus {
                layers: vec![
                    expertd_proto::v1::TierRows { layer: 5, source: 60, copied: 10, cpu: 30 },
                    expertd_proto::v1::TierRows { layer: 7, source: 0, copied: 50, cpu: 50 },
                    expertd_proto::v1::TierRows { layer: 8, ..Default::default() },
                ],
                copied_bytes: 3 << 30,
            }),
            router_memory_bytes: 36 << 20,
            weight_folder: "/models/olmoe".to_owned(),
            ..GetStatusResponse::default()
        }
    }

    #[test]
    fn the_text_has_the_reason_and_the_ranks() {
        let text = to_text(&sample());
        assert!(text.contains("re-forming (rank 1 was killed by signal 9)"), "{text}");
        assert!(text.contains("loading, pid 77, cpu (2 cores), 1.0 MiB of 3.0 MiB of weights, 5.0 MiB of 9.0 MiB of GPU memory used, GPU 40 % busy"), "{text}");
        assert!(text.contains("imbalance    1.25, at most 1.50 (layer 7)"), "{text}");
        let of_tier =
            "CPU experts  0.40 of rows on CPU ranks, at most 0.50 (layer 7); hit rate 0.43, 3.0 GiB copied";
        assert!(text.contains(of_tier), "{text}");
        assert_eq!(tier_text(&TierStatus::default()), None);
        assert!(text.contains("router       36.0 MiB resident"), "{text}");
        assert!(text.contains("folder       /models/olmoe"), "{text}");
        assert!(text.contains("session 3    user 7, pid 99, 0 s, 1.0 MiB, 0 calls"), "{text}");
        let session = |in_place, refusal: &str| {
            let session = SessionStatus { in_place, refusal: refusal.to_owned(), ..SessionStatus::default() };
            session_text(&session)
        };
        assert!(session(true, "").ends_with("0 rows in place"));
        assert!(session(false, "").ends_with("0 rows (ranks have not attached the memory yet)"));
        assert!(session(false, "rank 1: no room").ends_with("0 rows (refused: rank 1: no room)"));
    }

    #[test]
    fn the_json_has_the_state_and_the_ranks() {
        let value = to_json(&sample());
        assert_eq!(
            (value["state"].as_str().unwrap(), value["generation"].as_u64().unwrap()),
            ("re-forming", 4)
        );
        assert_eq!(value["ranks"][0]["pid"], 77);
        assert_eq!(value["ranks"][0]["gpu"]["utilization_percent"], 40);
        assert_eq!(value["sessions"][0]["pid"], 99);
        assert_eq!(value["imbalance"]["largest_layer"], 7);
        assert_eq!(value["tier"]["layers"][1]["copied"], 50);
    }

    #[tokio::test]
    async fn a_service_that_does_not_answer_is_named() {
        let admin = AdminAddress { address: Some("127.0.0.1:1".to_owned()), ..AdminAddress::default() };
        let error = status(&StatusArgs { admin, json: false, expert_rows: false, watch: None })
            .await
            .unwrap_err()
            .to_string();
        assert!(error.contains("127.0.0.1:1") && error.contains("expertd serve"), "{error}");
    }
}
