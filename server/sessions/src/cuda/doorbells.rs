//! The prepared calls and the doorbells of one CUDA session as a state machine without threads, clock or I/O.

use std::ops::Range;

use expertd_core::backend::{ModelInfo, MoeLayerInfo};
use expertd_session::cuda::wire::{MAX_PREPARED, MAX_ROWS, PreparedCall, Ring, RoutingLayout};
use expertd_session::wire::{ALIGN, RequestRecord};
use expertd_types::{DType, LayerId};

/// The outcome of a ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RingVerdict {
    /// The call is in flight now.
    Admitted {
        /// Number of the call, from 1, among the doorbell's calls.
        call: u64,
        /// The call, as it was prepared.
        prepared: PreparedCall,
    },
    /// The call fails with INVALID_ARGUMENT, for this reason.
    Invalid {
        /// Its number.
        call: u64,
        /// The reason.
        reason: String,
    },
    /// The session is ending; no client waits for the call.
    Closing,
}

#[derive(Clone, Debug, Default)]
struct DoorbellCalls {
    calls: u64,
    /// At most 2: a call that has ended for the client's stream but not yet for the router, and the next one.
    in_flight: u32,
}

/// The prepared calls and doorbells of one session.
#[derive(Debug)]
pub(super) struct DoorbellTable {
    prepared: Vec<PreparedCall>,
    doorbells: Vec<DoorbellCalls>,
    is_closing: bool,
}

impl DoorbellTable {
    pub(super) fn new(doorbells: u32) -> Self {
        let doorbells = vec![DoorbellCalls::default(); doorbells as usize];
        DoorbellTable { prepared: Vec::new(), doorbells, is_closing: false }
    }

    /// Adds prepared calls, which were [checked](check); returns the number of the first.
    ///
    /// # Errors
    /// The error message for the client.
    pub(super) fn prepare(&mut self, calls: &[PreparedCall]) -> Result<u32, String> {
        let first = self.prepared.len();
        if first + calls.len() > MAX_PREPARED {
            return Err(format!(
                "{first} calls are prepared and {} more would exceed {MAX_PREPARED}; use prepared calls again",
                calls.len()
            ));
        }
        self.prepared.extend_from_slice(calls);
        Ok(first as u32)
    }

    /// Number of calls of a doorbell in flight.
    pub(super) fn in_flight_of(&self, doorbell: u32) -> u32 {
        self.doorbells.get(doorbell as usize).map_or(0, |bell| bell.in_flight)
    }

    /// Whether `call` is the latest call of its doorbell.
    pub(super) fn is_last(&self, doorbell: u32, call: u64) -> bool {
        self.doorbells.get(doorbell as usize).is_some_and(|bell| bell.calls == call)
    }

    /// Admits the call of a ring, or says why not. The client may have stored any number. A doorbell has at most one other call
    /// in flight; a client that keeps the rules has seen that call's completion word.
    pub(super) fn ring(&mut self, doorbell: u32, ring: Ring) -> RingVerdict {
        let Some(bell) = self.doorbells.get_mut(doorbell as usize) else { return RingVerdict::Closing };
        // Also while the session ends: the ring is taken, so the call before it is no longer the last one.
        bell.calls += 1;
        let call = bell.calls;
        if self.is_closing {
            return RingVerdict::Closing;
        }
        let count = self.prepared.len();
        let Some(prepared) = self.prepared.get(ring.prepared as usize) else {
            let reason = format!("call {} is not prepared; {count} calls are", ring.prepared);
            return RingVerdict::Invalid { call, reason };
        };
        if ring.rows == 0 || ring.rows > prepared.max_rows {
            let reason =
                format!("must have 1 to {} rows as prepared, found {}", prepared.max_rows, ring.rows);
            return RingVerdict::Invalid { call, reason };
        }
        bell.in_flight += 1;
        RingVerdict::Admitted { call, prepared: *prepared }
    }

    /// A doorbell's call ends, with or without an answer.
    pub(super) fn complete(&mut self, doorbell: u32) {
        if let Some(bell) = self.doorbells.get_mut(doorbell as usize) {
            bell.in_flight = bell.in_flight.saturating_sub(1);
        }
    }

    /// The session ends: no call enters any more.
    pub(super) fn close(&mut self) {
        self.is_closing = true;
    }

    /// Number of calls in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.doorbells.iter().map(|bell| bell.in_flight as usize).sum()
    }
}

/// Checks a call that is to be prepared in `memory_bytes` bytes of the client's GPU, with routing areas of `routing_bytes` bytes.
///
/// # Errors
/// The reason why it is refused.
pub(super) fn check(
    call: &PreparedCall,
    model: &ModelInfo,
    memory_bytes: u64,
    routing_bytes: usize,
) -> Result<(), String> {
    let PreparedCall { layer, dtype, max_rows, flags, reserved, .. } = *call;
    let Some(moe) = model.layers.get(&LayerId(layer)) else {
        return Err(format!("layer {layer} has no MoE block here; GetModel lists the layers with one"));
    };
    if flags & !RequestRecord::FLAGS != 0 || reserved != 0 {
        let known = RequestRecord::FLAGS;
        return Err(format!("flags {flags:#x} and reserved {reserved}; this version has flags {known:#x}"));
    }
    if moe.routes_by_token_id && flags & RequestRecord::TOKEN_IDS == 0 {
        return Err(format!(
            "layer {layer} routes by token ids; its calls need flag {}",
            RequestRecord::TOKEN_IDS
        ));
    }
    let Some(dtype) = DType::from_code(dtype) else {
        return Err(format!("dtype must be 1 (bf16), 2 (f16) or 3 (f32), found {dtype}"));
    };
    let limit = model.limits.max_tokens_per_request.min(MAX_ROWS as usize);
    if max_rows == 0 || max_rows as usize > limit {
        return Err(format!("max_rows must be 1 to {limit}, found {max_rows}"));
    }
    check_routing(call, moe, routing_bytes)?;
    let bytes = (model.hidden * dtype.size()) as u64 * u64::from(max_rows);
    let place = |what: &str, offset: u64| -> Result<Range<u64>, String> {
        let end = offset.checked_add(bytes).filter(|&end| end <= memory_bytes);
        match end {
            Some(end) if offset.is_multiple_of(ALIGN as u64) => Ok(offset..end),
            _ => Err(format!(
                "{what} of {bytes} bytes at {offset} must lie within {memory_bytes} bytes of memory and begin at a \
                 multiple of {ALIGN}"
            )),
        }
    };
    let (rows, output) = (place("rows", call.rows)?, place("output", call.output)?);
    if rows.start < output.end && output.start < rows.end {
        return Err(format!("output {output:?} overlaps rows {rows:?}"));
    }
    Ok(())
}

/// Checks what a call carries beside rows.
fn check_routing(call: &PreparedCall, moe: &MoeLayerInfo, routing_bytes: usize) -> Result<(), String> {
    let PreparedCall { max_rows, flags, k, .. } = *call;
    let has = |flag| flags & flag != 0;
    let MoeLayerInfo { top_k, max_k, .. } = *moe;
    let (found, is_allowed, allowed) = if has(RequestRecord::GIVEN_ROUTING) {
        (k as usize, (1..=max_k).contains(&(k as usize)), format!("1 to {max_k}"))
    } else if has(RequestRecord::RETURN_ROUTING) {
        (k as usize, k as usize == top_k, format!("{top_k}, as the gate chooses"))
    } else {
        (k as usize, k == 0 || k as usize == top_k, format!("0 or {top_k}, as the gate chooses"))
    };
    if !is_allowed {
        return Err(format!("k must be {allowed}, found {found}"));
    }
    let needed = RoutingLayout::new(flags, max_rows, k).bytes;
    if needed > routing_bytes {
        return Err(format!(
            "{max_rows} rows carry {needed} bytes of routing and token ids, and the session's doorbells have room for \
             {routing_bytes}; open it with more routing_bytes"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
