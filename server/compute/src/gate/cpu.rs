//! The gate on the CPU.

use rayon::ThreadPool;
use rayon::prelude::*;

use super::choose::{Scratch, finish, limit_groups, score, sparse_mixer, top_k};
use crate::linalg::{MatmulScratch, PackedMatrix, matmul};
use expertd_model::{Choice, GateSpec, GateTensors, ScoreFn};

/// Why rows cannot be routed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GateError {
    /// The layer routes by token id, and none were given.
    #[error("this layer routes by token id: expected one token id for each of {tokens} tokens, found none")]
    TokenIdsMissing {
        /// Rows to route.
        tokens: usize,
    },
    /// Not one token id for each row.
    #[error("expected one token id for each of {tokens} tokens, found {found}")]
    TokenIdCount {
        /// Rows to route.
        tokens: usize,
        /// Token ids given.
        found: usize,
    },
    /// A token id beyond the vocabulary.
    #[error("token id {id} of token {token} is out of range: the vocabulary has {vocab}, 0 to {}", vocab - 1)]
    TokenIdRange {
        /// Index of the row.
        token: usize,
        /// Its id.
        id: i32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// Buffers that do not fit each other.
    #[error("{what}: expected {expected} elements, found {found}")]
    Size {
        /// Which one.
        what: &'static str,
        /// What the number of rows asks for.
        expected: usize,
        /// Its length.
        found: usize,
    },
}

/// A layer's gate, ready to route.
#[derive(Debug)]
pub struct CpuGate {
    spec: GateSpec,
    hidden: usize,
    weight: PackedMatrix,
    bias: Option<Vec<f32>>,
    correction: Option<Vec<f32>>,
    table: Vec<i32>,
}

impl CpuGate {
    /// Takes over a layer's gate.
    ///
    /// # Panics
    /// When `tensors` are not those of `spec`; a checkpoint checks them when it is opened.
    #[must_use]
    pub fn new(spec: &GateSpec, tensors: &GateTensors<'_>) -> Self {
        assert_eq!(tensors.weight.rows, spec.num_experts, "one row of weights for each expert");
        for bias in [&tensors.bias, &tensors.correction_bias].into_iter().flatten() {
            assert_eq!(bias.len(), spec.num_experts, "one bias for each expert");
        }
        let table = tensors.token_table.clone().unwrap_or_default();
        assert_eq!(
            table.len(),
            spec.vocab().unwrap_or(0) * spec.top_k,
            "one row of the table for each token id"
        );
        Self {
            spec: spec.clone(),
            hidden: tensors.weight.cols,
            weight: PackedMatrix::pack(&tensors.weight).expect("a checkpoint's views hold together"),
            bias: tensors.bias.clone(),
            correction: tensors.correction_bias.clone(),
            table,
        }
    }

    /// How it routes.
    #[must_use]
    pub fn spec(&self) -> &GateSpec {
        &self.spec
    }

    /// Routes `rows [T, hidden]`: writes `ids [T, k]` (in range and distinct within a row, whatever the scores) and
    /// `weights [T, k]`, best first; layers that route by token id take `token_ids [T]` and keep the table's order. The
    /// weights of a row whose scores are not numbers may not be numbers.
    ///
    /// Works on this thread, in memory of its own; [`Self::route_with`] brings both.
    ///
    /// # Errors
    /// Buffers of the wrong length, or token ids that are missing or out of range; then nothing is written.
    pub fn route(
        &self,
        rows: &[f32],
        token_ids: Option<&[i32]>,
        ids: &mut [i32],
        weights: &mut [f32],
    ) -> Result<(), GateError> {
        self.route_with(rows, token_ids, ids, weights, &mut GateScratch::new(self.hidden, 1), None)
    }

    /// Like [`Self::route`], with scratch memory and on the threads of `pool`. The result does not depend on either.
    ///
    /// # Errors
    /// As [`Self::route`].
    pub fn route_with(
        &self,
        rows: &[f32],
        token_ids: Option<&[i32]>,
        ids: &mut [i32],
        weights: &mut [f32],
        scratch: &mut GateScratch,
        pool: Option<&ThreadPool>,
    ) -> Result<(), GateError> {
        let (e, k) = (self.spec.num_experts, self.spec.top_k);
        let tokens = rows.len() / self.hidden;
        check("rows", tokens * self.hidden, rows.len())?;
        check("ids", tokens * k, ids.len())?;
        check("weights", tokens * k, weights.len())?;
        self.check_token_ids(tokens, token_ids)?;
        if scratch.logits.len() < tokens * e {
            scratch.logits.resize(tokens * e, 0.0);
        }
        let logits = &mut scratch.logits[..tokens * e];
        matmul(rows, &self.weight, logits, &mut scratch.matmul, pool);
        // Scores take some 5 ns each; below this, waking threads takes longer.
        let per_piece = match pool {
            Some(pool) if tokens * e >= 16384 => tokens.div_ceil(4 * pool.current_num_threads()),
            _ => tokens.max(1),
        };
        let pieces: Vec<Piece<'_>> = logits
            .chunks_mut(per_piece * e)
            .zip(ids.chunks_mut(per_piece * k).zip(weights.chunks_mut(per_piece * k)))
            .enumerate()
            .map(|(i, (logits, (ids, weights)))| {
                let first = i * per_piece;
                let token_ids = token_ids.map(|all| &all[first..first + logits.len() / e]);
                Piece { logits, token_ids, ids, weights }
            })
            .collect();
        match pool {
            Some(pool) if pieces.len() > 1 => {
                pool.install(|| pieces.into_par_iter().for_each(|piece| self.route_piece(piece)));
            }
            _ => pieces.into_iter().for_each(|piece| self.route_piece(piece)),
        }
        Ok(())
    }

    fn route_piece(&self, piece: Piece<'_>) {
        let (e, k) = (self.spec.num_experts, self.spec.top_k);
        let mut row = RowRouter { gate: self, scratch: Scratch::new(&self.spec), choice: vec![0.0; e] };
        let outputs = piece.ids.chunks_exact_mut(k).zip(piece.weights.chunks_exact_mut(k));
        for (t, (logits, (ids, weights))) in piece.logits.chunks_exact_mut(e).zip(outputs).enumerate() {
            for (logit, bias) in logits.iter_mut().zip(self.bias.iter().flatten()) {
                *logit += bias;
            }
            row.route(logits, piece.token_ids.map(|ids| ids[t]), ids, weights);
        }
    }

    fn check_token_ids(&self, tokens: usize, token_ids: Option<&[i32]>) -> Result<(), GateError> {
        let Some(vocab) = self.spec.vocab() else { return Ok(()) };
        let Some(token_ids) = token_ids else { return Err(GateError::TokenIdsMissing { tokens }) };
        if token_ids.len() != tokens {
            return Err(GateError::TokenIdCount { tokens, found: token_ids.len() });
        }
        let beyond = |id: &i32| usize::try_from(*id).map_or(true, |id| id >= vocab);
        match token_ids.iter().position(beyond) {
            Some(token) => Err(GateError::TokenIdRange { token, id: token_ids[token], vocab }),
            None => Ok(()),
        }
    }
}

/// Memory that routing works in, for gates of any layer of a model.
#[derive(Debug)]
pub struct GateScratch {
    matmul: MatmulScratch,
    logits: Vec<f32>,
}

impl GateScratch {
    /// Scratch for rows of `hidden` elements and a pool of `threads`; grows with the number of rows.
    #[must_use]
    pub fn new(hidden: usize, threads: usize) -> Self {
        Self { matmul: MatmulScratch::new(hidden, threads), logits: Vec::new() }
    }
}

/// Consecutive rows.
struct Piece<'a> {
    logits: &'a mut [f32],
    token_ids: Option<&'a [i32]>,
    ids: &'a mut [i32],
    weights: &'a mut [f32],
}

fn check(what: &'static str, expected: usize, found: usize) -> Result<(), GateError> {
    if expected == found { Ok(()) } else { Err(GateError::Size { what, expected, found }) }
}

/// One token at a time, with the room that needs.
struct RowRouter<'a> {
    gate: &'a CpuGate,
    scratch: Scratch,
    choice: Vec<f32>,
}

impl RowRouter<'_> {
    fn route(&mut self, scores: &mut [f32], token_id: Option<i32>, ids: &mut [i32], weights: &mut [f32]) {
        let spec = &self.gate.spec;
        if let ScoreFn::SparseMixer { jitter } = spec.scores {
            sparse_mixer(jitter, scores, ids, weights);
            return;
        }
        match (spec.choice, token_id) {
            (Choice::TokenIds { .. }, Some(token_id)) => {
                let start = token_id as usize * spec.top_k;
                ids.copy_from_slice(&self.gate.table[start..start + spec.top_k]);
                score(spec.scores, scores);
            }
            (Choice::Logits, _) => {
                top_k(scores, ids);
                score(spec.scores, scores);
            }
            _ => {
                score(spec.scores, scores);
                self.choose(scores, ids);
            }
        }
        for (weight, id) in weights.iter_mut().zip(ids.iter()) {
            *weight = scores[*id as usize];
        }
        finish(spec, weights);
    }

    fn choose(&mut self, scores: &mut [f32], ids: &mut [i32]) {
        self.choice.copy_from_slice(scores);
        for (value, bias) in self.choice.iter_mut().zip(self.gate.correction.iter().flatten()) {
            *value += bias;
        }
        if let Some(limit) = self.gate.spec.groups {
            limit_groups(limit, &mut self.choice, scores, &mut self.scratch);
        }
        top_k(&self.choice, ids);
    }
}
