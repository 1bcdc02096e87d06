//! Conversion of the backend's data to messages.

use std::time::Duration;

use bytes::Bytes;
use expertd_proto::v1;
use prost::Message as _;

use expertd_core::backend::{
    Answer, Attachment, ExpertRows, LayerRows, ModelInfo, RankState, Receipt, ServiceState, ServiceStatus,
    StepTiming, TierRows,
};
use expertd_types::{DType, uuid_text};

fn narrow(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

pub(crate) fn response(answer: Answer) -> v1::ForwardResponse {
    v1::ForwardResponse { rows: answer.rows, receipt: Some(receipt(answer.receipt)) }
}

fn receipt(receipt: Receipt) -> v1::Receipt {
    // A request without tokens has no steps, and thus no times.
    let of_steps = |time: Duration| time.try_into().ok().filter(|_| !receipt.steps.is_empty());
    v1::Receipt {
        steps: receipt.steps.iter().map(|step| step.0).collect(),
        generation: receipt.generation.0,
        weight_version: receipt.weight_version.0,
        weight_fingerprint: receipt.weight_fingerprint.to_string(),
        tokens_per_rank: receipt.tokens_per_rank,
        timings: receipt.timings.iter().map(step_timing).collect(),
        topk_ids: receipt.topk_ids,
        topk_weights: receipt.topk_weights,
        queue_time: of_steps(receipt.queue_time),
        step_time: of_steps(receipt.step_time),
        slot_versions: slot_versions(&receipt.timings),
    }
}

/// The version of the table of expert slots in each step; none if it was empty in all of them.
fn slot_versions(timings: &[StepTiming]) -> Vec<u64> {
    let versions: Vec<u64> = timings.iter().map(|timing| timing.slot_version).collect();
    if versions.iter().all(|&version| version == 0) { Vec::new() } else { versions }
}

fn step_timing(timing: &StepTiming) -> v1::StepTiming {
    let [copy_in_ns, gate_ns, prepare_ns, dispatch_ns, experts_ns, combine_ns, copy_out_ns] =
        timing.phases.map(nanos);
    v1::StepTiming {
        step: timing.step.0,
        tokens: timing.tokens,
        copy_in_ns,
        gate_ns,
        prepare_ns,
        dispatch_ns,
        experts_ns,
        combine_ns,
        copy_out_ns,
    }
}

pub(crate) fn summary(model: &ModelInfo) -> v1::ModelSummary {
    v1::ModelSummary {
        name: model.name.clone(),
        family: model.family.clone(),
        weight_version: model.weight_version.0,
        weight_fingerprint: model.weight_fingerprint.to_string(),
    }
}

pub(crate) fn model(model: &ModelInfo) -> v1::GetModelResponse {
    let limits = &model.limits;
    v1::GetModelResponse {
        name: model.name.clone(),
        family: model.family.clone(),
        weight_version: model.weight_version.0,
        weight_fingerprint: model.weight_fingerprint.to_string(),
        generation: model.generation.0,
        hidden: narrow(model.hidden),
        num_layers: narrow(model.num_layers),
        moe_layers: model
            .layers
            .iter()
            .map(|(id, layer)| v1::MoeLayer {
                layer: id.0,
                num_experts: narrow(layer.num_experts),
                top_k: narrow(layer.top_k),
                max_k: narrow(layer.max_k),
                expert_width: narrow(layer.expert_width),
                shared_width: narrow(layer.shared_width),
                gate: layer.gate.clone(),
                gate_json: layer.gate_json.clone(),
                routes_by_token_id: layer.routes_by_token_id,
            })
            .collect(),
        dtypes: DType::ALL.iter().map(|&dtype| dtype as i32).collect(),
        limits: Some(v1::Limits {
            max_tokens_per_request: narrow(limits.max_tokens_per_request),
            max_tokens_per_step: narrow(limits.max_tokens_per_step),
            max_tokens_per_rank: narrow(limits.max_tokens_per_rank),
            max_message_bytes: limits.max_message_bytes as u64,
            max_streams_per_connection: limits.max_streams_per_connection,
            max_connections: limits.max_connections,
            max_bytes_in_flight: limits.max_bytes_in_flight as u64,
            max_requests_per_stream: limits.max_requests_per_stream,
        }),
        placement: model
            .placement
            .iter()
            .map(|rank| v1::RankPlacement {
                rank: rank.rank.0,
                device: rank.device.clone(),
                experts: rank
                    .experts
                    .iter()
                    .map(|&(layer, first, count)| v1::ExpertRange { layer: layer.0, first, count })
                    .collect(),
            })
            .collect(),
        weight_formats: model.weight_formats.clone(),
        held_layers: Some(v1::LayerRange { first: model.held.first.0, last: model.held.last.0 }),
    }
}

/// The description of a model as an encoded `GetModelResponse`.
#[must_use]
pub fn encoded_model(info: &ModelInfo) -> Bytes {
    model(info).encode_to_vec().into()
}

pub(crate) fn status(model: &ModelInfo, status: ServiceStatus) -> v1::GetStatusResponse {
    v1::GetStatusResponse {
        state: match status.state {
            ServiceState::Loading => v1::ServiceState::Loading,
            ServiceState::Serving => v1::ServiceState::Serving,
            ServiceState::Reforming => v1::ServiceState::Reforming,
            ServiceState::Draining => v1::ServiceState::Draining,
            ServiceState::Failed => v1::ServiceState::Failed,
        }
        .into(),
        reason: status.reason,
        generation: status.generation,
        weight_version: model.weight_version.0,
        weight_fingerprint: model.weight_fingerprint.to_string(),
        model: model.name.clone(),
        version: expertd_telemetry::build().to_owned(),
        ranks: status
            .ranks
            .into_iter()
            .map(|rank| v1::RankStatus {
                rank: rank.rank.0,
                pid: rank.pid,
                device: rank.device,
                state: match rank.state {
                    RankState::Loading => "loading",
                    RankState::Ready => "ready",
                    RankState::Gone => "gone",
                }
                .to_owned(),
                weight_bytes_loaded: rank.weight_bytes_loaded,
                weight_bytes_total: rank.weight_bytes_total,
                gpu: rank.usage.map(|usage| v1::GpuUsage {
                    memory_used_bytes: usage.memory_used_bytes,
                    memory_total_bytes: usage.memory_total_bytes,
                    utilization_percent: usage.utilization_percent.map(u32::from),
                }),
            })
            .collect(),
        steps_total: status.steps_total,
        requests_in_flight: status.requests_in_flight,
        requests_queued: status.requests_queued,
        tokens_queued: status.tokens_queued,
        uptime_seconds: status.uptime.as_secs_f64(),
        reload: status.reload.map(|(loaded, total)| v1::ReloadStatus {
            weight_bytes_loaded: loaded,
            weight_bytes_total: total,
        }),
        sessions: status
            .sessions
            .into_iter()
            .map(|session| v1::SessionStatus {
                session: session.session,
                user: session.user,
                pid: session.pid,
                age_seconds: session.age.as_secs_f64(),
                bytes: session.bytes,
                calls_total: session.calls_total,
                rows_total: session.rows_total,
                calls_in_flight: session.calls_in_flight,
                in_place: session.attachment == Attachment::Attached,
                device: session.device.as_ref().map(uuid_text).unwrap_or_default(),
                refusal: match session.attachment {
                    Attachment::Refused(reason) => reason,
                    Attachment::Attached | Attachment::Awaited => String::new(),
                },
            })
            .collect(),
        tier: status.tier.map(|tier| v1::TierStatus {
            layers: tier
                .layers
                .into_iter()
                .map(|(layer, TierRows { source, copied, cpu })| v1::TierRows {
                    layer: layer.0,
                    source,
                    copied,
                    cpu,
                })
                .collect(),
            copied_bytes: tier.copied_bytes,
        }),
        imbalance: None,
        router_memory_bytes: 0,
        router_memory_limit_bytes: 0,
        weight_folder: status.weight_folder.display().to_string(),
    }
}

pub(crate) fn imbalance(rows: &ExpertRows) -> Option<v1::Imbalance> {
    let (mean, (layer, largest)) = (rows.mean_imbalance()?, rows.largest_imbalance()?);
    Some(v1::Imbalance { mean, largest, largest_layer: layer.0 })
}

pub(crate) fn expert_rows(rows: ExpertRows) -> v1::GetExpertRowsResponse {
    let layer = |layer: LayerRows| v1::LayerExpertRows {
        layer: layer.layer.0,
        ranks: layer.ranks.into_iter().map(|rows| v1::RankExpertRows { rows }).collect(),
        source_experts: layer.source_experts.map(|experts| experts as u32),
    };
    v1::GetExpertRowsResponse { layers: rows.layers.into_iter().map(layer).collect() }
}
