//! Completion records: what a client reads of a call that has ended.

use std::time::Duration;

use bytemuck::Zeroable as _;
use expertd_core::backend::Receipt;
use expertd_core::failure::Failure;
use expertd_session::wire::{CompletionRecord, MAX_RANKS};

/// The completion of a call that was answered.
pub(crate) fn completion(call: u64, receipt: &Receipt) -> CompletionRecord {
    let mut tokens_per_rank = [0; MAX_RANKS];
    let ranks = receipt.tokens_per_rank.len().min(MAX_RANKS);
    tokens_per_rank[..ranks].copy_from_slice(&receipt.tokens_per_rank[..ranks]);
    let mut phase_ns = [0_u64; 7];
    for timing in &receipt.timings {
        for (sum, time) in phase_ns.iter_mut().zip(timing.phases) {
            *sum = sum.saturating_add(nanos(time));
        }
    }
    let record = CompletionRecord {
        call,
        generation: receipt.generation.0,
        weight_version: receipt.weight_version.0,
        first_step: receipt.steps.first().map_or(0, |step| step.0),
        last_step: receipt.steps.last().map_or(0, |step| step.0),
        steps: receipt.steps.len() as u32,
        ranks: ranks as u32,
        queue_ns: nanos(receipt.queue_time),
        step_ns: nanos(receipt.step_time),
        phase_ns,
        tokens_per_rank,
        ..CompletionRecord::zeroed()
    };
    record.with_text(&receipt.weight_fingerprint.to_string())
}

/// The completion of a call that failed.
pub(crate) fn failed(call: u64, failure: &Failure) -> CompletionRecord {
    let record = CompletionRecord::failed(call, failure.code() as u32, &failure.message());
    let fields = failure.violations().iter().map(|violation| violation.field);
    CompletionRecord {
        retry_after_ns: failure.retry_after().map_or(0, nanos),
        ..record.with_reason(failure.reason(), fields)
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
