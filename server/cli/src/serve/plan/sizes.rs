//! The sizes of steps, requests and buffers.

use super::PlanError;
use super::machine::Machine;
use super::values::{derive, value, within};
use crate::serve::settings::{Given, SettingSource};
use expertd_core::backend::Limits;
use expertd_ipc::GroupShape;
use expertd_ipc::control::DeviceKind;
use expertd_model::ModelSpec;
use expertd_rank_cuda as gpu;

/// Largest number of requests in flight on one stream.
const MAX_REQUESTS_PER_STREAM: u32 = 256;

/// Smallest default of max-bytes-in-flight.
const BYTES_IN_FLIGHT: usize = 1 << 30;

/// Largest max-bytes-in-flight.
pub(crate) const MAX_BYTES_IN_FLIGHT: usize = 1 << 40;

/// 1 GiB, or 4 of the largest requests.
pub(crate) const fn default_bytes_in_flight(message_bytes: usize) -> usize {
    if 4 * message_bytes > BYTES_IN_FLIGHT { 4 * message_bytes } else { BYTES_IN_FLIGHT }
}

/// The shape of a group for a model, with steps of at most `per_step` rows.
pub(crate) fn group_shape(
    spec: &ModelSpec,
    ranks: u32,
    sources: u32,
    slots: u32,
    per_step: usize,
) -> GroupShape {
    let per_rank = per_step.div_ceil(sources as usize);
    GroupShape {
        ranks,
        sources,
        slots,
        max_tokens_per_rank: per_rank,
        max_segments: per_rank,
        hidden: spec.hidden,
        max_top_k: spec.max_top_k(),
    }
}

/// The sizes of steps, requests and buffers.
#[derive(Clone, Debug)]
pub(super) struct Sizes {
    /// Sizes that all ranks share.
    pub(super) shape: GroupShape,
    /// Limits for callers.
    pub(super) limits: Limits,
    /// Largest number of waiting rows.
    pub(super) queued: usize,
    /// Bytes of one rank's window, or of the wire of a mixed group.
    pub(super) window_bytes: usize,
    /// Bytes of the channels of all ranks.
    pub(super) channel_bytes: usize,
}

impl Sizes {
    /// Derives the sizes from the settings and the model.
    ///
    /// # Errors
    /// The first setting that is out of bounds or contradicts another one.
    pub(super) fn choose(given: &mut Given, spec: &ModelSpec, machine: &Machine) -> Result<Self, PlanError> {
        let &Machine { device, ranks, sources, .. } = machine;
        let setting = |s: &(Option<usize>, SettingSource)| s.0.unwrap_or_default();
        let per_step = within("max-tokens-per-step", setting(&given.max_tokens_per_step), 1, 1 << 20)?;
        let per_request =
            derive(&mut given.max_tokens_per_request, 2 * per_step, "twice max-tokens-per-step");
        let per_request = within("max-tokens-per-request", per_request, 1, 1 << 22)?;
        let queued = derive(&mut given.max_queued_tokens, 16 * per_step, "16 times max-tokens-per-step");
        let slots = within("slots", given.slots.0.unwrap_or(2), 2, 8)?;
        let shape = group_shape(spec, ranks, sources, slots, per_step);
        let message_bytes = Limits::message_bytes(per_request, spec.hidden, shape.max_top_k);
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
        within("max-bytes-in-flight", in_flight, message_bytes, MAX_BYTES_IN_FLIGHT)?;
        let limits = Limits {
            max_tokens_per_request: per_request,
            max_tokens_per_step: per_step,
            max_tokens_per_rank: shape.max_tokens_per_rank,
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
        if device == DeviceKind::Cuda {
            gpu::check(spec, &shape).map_err(PlanError::Sizes)?;
            if machine.kernels == Some(gpu::KernelPath::Portable) {
                gpu::check_portable_sizes(&gpu::kernel_shape(&shape, spec.max_experts()))
                    .map_err(PlanError::Sizes)?;
            }
        }
        let window_bytes = match device {
            _ if shape.is_mixed() => expertd_tier::TierLayout::new(expertd_tier::TierShape::of(&shape))
                .map_err(|error| PlanError::Sizes(error.to_string()))?
                .bytes(),
            DeviceKind::Cpu => {
                expertd_rank_cpu::window_bytes(&shape).map_err(|e| PlanError::Sizes(e.to_string()))?
            }
            DeviceKind::Cuda => gpu::window_bytes(&shape, spec.max_experts()),
        };
        let channel_bytes = shape.channel_bytes().map_err(|e| PlanError::Sizes(e.to_string()))?;
        let queued = within("max-queued-tokens", queued, 1, usize::MAX)?;
        Ok(Sizes { shape, limits, queued, window_bytes, channel_bytes })
    }
}
