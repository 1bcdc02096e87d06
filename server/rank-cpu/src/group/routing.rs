//! The routing state of a slot: which token goes to which rank, and in which row.

use super::{HostRouting, NO_EXPERT};
use crate::config::EpConfig;
use crate::error::EpError;
use crate::exchange::Outgoing;
use expertd_types::{ExpertId, Rank};

/// Entry of [`Routes::rows`] for a token that does not go to the rank.
pub(super) const NOT_SENT: u32 = u32::MAX;

/// The routing of one exchange, in buffers that are reused.
#[derive(Debug)]
pub(super) struct Routes {
    ranks: usize,
    max_tokens: usize,
    max_top_k: usize,
    tokens: usize,
    /// `[max_tokens, ranks]`, of which `[tokens, ranks]` are valid: the token's row among those that go to the rank, or
    /// [`NOT_SENT`].
    rows: Vec<u32>,
    /// `[ranks, max_tokens]`, of which `[rank, ..counts[rank]]` are valid: tokens that go to the rank, ascending.
    sent: Vec<u32>,
    /// `[ranks]`: number of tokens that go to each rank.
    counts: Vec<usize>,
}

/// The tokens that go to one rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Route<'a> {
    /// Indices of the tokens, in the order of their rows.
    pub(super) tokens: &'a [u32],
}

impl HostRouting<'_> {
    /// The rank whose copy of expert `id` computes a token; `None` if there is no such expert.
    fn owner(&self, id: i32, token: usize) -> Option<Rank> {
        self.owners.for_row(ExpertId(u32::try_from(id).ok()?), token + self.turn)
    }
}

impl Routes {
    pub(super) fn new(config: &EpConfig) -> Self {
        let &EpConfig { ranks, max_tokens_per_rank: max_tokens, max_top_k, .. } = config;
        let table = vec![NOT_SENT; ranks * max_tokens];
        Self {
            ranks,
            max_tokens,
            max_top_k,
            tokens: 0,
            rows: table.clone(),
            sent: table,
            counts: vec![0; ranks],
        }
    }

    /// Number of this rank's tokens in the exchange.
    pub(super) const fn tokens(&self) -> usize {
        self.tokens
    }

    /// `[tokens, ranks]`: the token's row among those that went to the rank, or [`NOT_SENT`].
    pub(super) fn rows(&self) -> &[u32] {
        &self.rows[..self.tokens * self.ranks]
    }

    /// The route to each rank, in ascending order.
    pub(super) fn routes(&self) -> impl Iterator<Item = Route<'_>> {
        self.sent
            .chunks_exact(self.max_tokens)
            .zip(&self.counts)
            .map(|(sent, &count)| Route { tokens: &sent[..count] })
    }

    /// Checks a routing and lays it out. After an error the exchange has no tokens.
    pub(super) fn lay_out(&mut self, routing: &HostRouting<'_>) -> Result<(), EpError> {
        let &HostRouting { owners, tokens, k, ids, weights, .. } = routing;
        self.tokens = 0;
        self.counts.fill(0);
        if tokens > self.max_tokens {
            return Err(EpError::Limit { what: "tokens", found: tokens, limit: self.max_tokens });
        }
        if k == 0 || k > self.max_top_k {
            return Err(EpError::Limit { what: "k", found: k, limit: self.max_top_k });
        }
        for (what, found) in [("ids", ids.len()), ("weights", weights.len())] {
            if found != tokens * k {
                return Err(EpError::Length { what, expected: tokens * k, found });
            }
        }
        let rows = self.rows[..tokens * self.ranks].chunks_exact_mut(self.ranks);
        for (token, (rows, ids)) in rows.zip(ids.chunks_exact(k)).enumerate() {
            rows.fill(NOT_SENT);
            for &id in ids {
                if id == NO_EXPERT {
                    continue;
                }
                let Some(Rank(owner)) = routing.owner(id, token) else {
                    return Err(EpError::Expert { token, id, last: owners.len() as i64 - 1 });
                };
                let Some(row) = rows.get_mut(owner as usize) else {
                    return Err(EpError::Owner { id, owner, ranks: self.ranks });
                };
                if *row == NOT_SENT {
                    let count = &mut self.counts[owner as usize];
                    *row = *count as u32;
                    self.sent[owner as usize * self.max_tokens + *count] = token as u32;
                    *count += 1;
                }
            }
        }
        self.tokens = tokens;
        Ok(())
    }
}

impl Route<'_> {
    /// Writes the header and each token's choices; a choice whose expert `rank` does not own becomes [`NO_EXPERT`].
    pub(super) fn write(&self, routing: &HostRouting<'_>, rank: Rank, out: Outgoing<'_>) {
        let k = routing.k;
        out.head.rows = self.tokens.len() as u32;
        out.head.k = k as u32;
        let choices = out.ids.chunks_exact_mut(k).zip(out.weights.chunks_exact_mut(k));
        for ((out_ids, out_weights), &token) in choices.zip(self.tokens) {
            let from = token as usize * k;
            let choices = routing.ids[from..from + k].iter().zip(&routing.weights[from..from + k]);
            for ((out_id, out_weight), (&id, &weight)) in out_ids.iter_mut().zip(out_weights).zip(choices) {
                let here = routing.owner(id, token as usize) == Some(rank);
                (*out_id, *out_weight) = if here { (id, weight) } else { (NO_EXPERT, 0.0) };
            }
        }
    }
}
