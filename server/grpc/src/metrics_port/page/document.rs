//! What the status page reads about the service beside its metrics.

use serde_json::{Value, json};

use expertd_core::backend::{Backend, RankState, ServiceState};
use expertd_core::failure::public_text;

/// The rows of each layer's experts since the start, all ranks together, as JSON.
pub(in crate::metrics_port) fn experts(backend: &dyn Backend) -> Value {
    let layers = backend.expert_rows().layers.into_iter();
    let layers = layers.map(|layer| json!({ "layer": layer.layer.0, "rows": layer.of_experts() }));
    json!({ "layers": layers.collect::<Vec<_>>() })
}

/// The state of the service, its model, its ranks and its sessions as JSON. It names no paths and no processes.
pub(in crate::metrics_port) fn document(backend: &dyn Backend) -> Value {
    let (model, status) = (backend.model(), backend.status());
    json!({
        "version": expertd_telemetry::build(),
        "state": match status.state {
            ServiceState::Loading => "loading",
            ServiceState::Serving => "serving",
            ServiceState::Reforming => "re-forming",
            ServiceState::Draining => "draining",
            ServiceState::Failed => "failed",
        },
        "reason": public_text(&status.reason),
        "uptime_seconds": status.uptime.as_secs_f64(),
        "generation": status.generation,
        "steps_total": status.steps_total,
        "requests_in_flight": status.requests_in_flight,
        "requests_queued": status.requests_queued,
        "tokens_queued": status.tokens_queued,
        "reload": status.reload.map(|(loaded, total)| json!({
            "weight_bytes_loaded": loaded,
            "weight_bytes_total": total,
        })),
        "model": {
            "name": model.name,
            "family": model.family,
            "hidden": model.hidden,
            "weight_version": model.weight_version.0,
            "weight_fingerprint": model.weight_fingerprint.to_string(),
            "weight_formats": model.weight_formats,
            "max_tokens_per_step": model.limits.max_tokens_per_step,
            "layers": model.layers.iter().map(|(layer, info)| json!({
                "layer": layer.0,
                "num_experts": info.num_experts,
                "top_k": info.top_k,
            })).collect::<Vec<_>>(),
        },
        "ranks": status.ranks.iter().map(|rank| json!({
            "rank": rank.rank.0,
            "device": rank.device,
            "state": match rank.state {
                RankState::Loading => "loading",
                RankState::Ready => "ready",
                RankState::Gone => "gone",
            },
            "weight_bytes_loaded": rank.weight_bytes_loaded,
            "weight_bytes_total": rank.weight_bytes_total,
            "gpu": rank.usage.map(|usage| json!({
                "memory_used_bytes": usage.memory_used_bytes,
                "memory_total_bytes": usage.memory_total_bytes,
                "utilization_percent": usage.utilization_percent,
            })),
        })).collect::<Vec<_>>(),
        "tier": status.tier.as_ref().map(|tier| json!({
            "layers": tier.layers.iter().map(|(layer, rows)| json!({
                "layer": layer.0,
                "source": rows.source,
                "copied": rows.copied,
                "cpu": rows.cpu,
            })).collect::<Vec<_>>(),
            "copied_bytes": tier.copied_bytes,
        })),
        "sessions": status.sessions.iter().map(|session| json!({
            "session": session.session,
            "user": session.user,
            "age_seconds": session.age.as_secs_f64(),
            "bytes": session.bytes,
            "calls_total": session.calls_total,
            "rows_total": session.rows_total,
            "calls_in_flight": session.calls_in_flight,
        })).collect::<Vec<_>>(),
    })
}
