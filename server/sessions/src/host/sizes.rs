//! The sizes of a host session's request, and the places in the session's memory that follow from them.

use std::ops::Range;

use expertd_core::backend::ModelInfo;
use expertd_core::failure::Failure;
use expertd_session::wire::RequestRecord;
use expertd_types::{DType, LayerId};

use super::table::RequestPlaces;

/// Sizes of a request that were checked against the model's limits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) tokens: usize,
    pub(super) k: usize,
    row_bytes: usize,
}

impl Sizes {
    /// Checks what decides how many bytes of the row area the request uses.
    pub(super) fn new(record: &RequestRecord, model: &ModelInfo) -> Result<Sizes, Failure> {
        if record.flags & !RequestRecord::FLAGS != 0 || record.reserved != 0 {
            let (flags, reserved) = (record.flags, record.reserved);
            let text = format!(
                "flags {flags:#x} and reserved {reserved}; this version has flags {:#x}",
                RequestRecord::FLAGS
            );
            return Err(Failure::field("flags", text));
        }
        let (tokens, limit) = (record.tokens as usize, model.limits.max_tokens_per_request);
        if tokens == 0 || tokens > limit {
            return Err(Failure::field("tokens", format!("must be 1 to {limit}, found {tokens}")));
        }
        let Some(dtype) = DType::from_code(record.dtype) else {
            let text = format!("must be 1 (bf16), 2 (f16) or 3 (f32), found {}", record.dtype);
            return Err(Failure::field("dtype", text));
        };
        let layer = model.layers.get(&LayerId(record.layer));
        let own_k = layer.map_or(1, |layer| layer.top_k);
        let given = record.flags & RequestRecord::GIVEN_ROUTING != 0;
        let k = if record.k == 0 { own_k } else { record.k as usize };
        let max_k = layer.map_or(1, |layer| layer.max_k);
        if k > max_k || (!given && k != own_k) {
            let expected =
                if given { format!("1 to {max_k}") } else { format!("0 or {own_k}, as the gate chooses") };
            return Err(Failure::field("k", format!("must be {expected}, found {k}")));
        }
        Ok(Sizes { tokens, k, row_bytes: model.hidden * dtype.size() })
    }

    pub(super) fn places(&self, record: &RequestRecord) -> RequestPlaces {
        let has = |flag| record.flags & flag != 0;
        let range = |offset: u64, bytes: usize| -> Range<usize> {
            let start = usize::try_from(offset).unwrap_or(usize::MAX);
            // A sum beyond the address space is reported as a range beyond the area.
            start..start.saturating_add(bytes)
        };
        let when = |condition: bool, offset: u64, bytes: usize| {
            if condition { range(offset, bytes) } else { 0..0 }
        };
        let (rows, routing) = (self.tokens * self.row_bytes, self.tokens * self.k * 4);
        let given = has(RequestRecord::GIVEN_ROUTING);
        let returned = has(RequestRecord::RETURN_ROUTING);
        // Given routing that is returned is copied before it is written.
        let reads = given && !returned;
        let token_ids = if has(RequestRecord::TOKEN_IDS) { self.tokens * 4 } else { 0 };
        RequestPlaces {
            read: [
                range(record.rows, rows),
                when(reads, record.ids, routing),
                when(reads, record.weights, routing),
                when(token_ids > 0, record.token_ids, token_ids),
            ],
            written: [
                range(record.output, rows),
                when(returned, record.ids, routing),
                when(returned, record.weights, routing),
            ],
            copied: token_ids + if given { 2 * routing } else { 0 },
        }
    }
}
