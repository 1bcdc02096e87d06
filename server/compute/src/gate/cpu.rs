//! The gate on the CPU.

use expertd_shm::ThreadTeam;

use super::choose::{GroupScratch, finish_weights, limit_groups, score, sparse_mixer, top_k};
use crate::linalg::{MatmulScratch, PackedMatrix, for_each, matmul};
use expertd_model::{Choice, GateSpec, GateTensors, ScoreFn};

/// An error that prevents rows from being routed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum GateError {
    #[error(
        "this layer routes by token id: expected one token id for each of {tokens} tokens, none were given"
    )]
    TokenIdsMissing { tokens: usize },
    #[error("expected one token id for each of {tokens} tokens, found {found}")]
    TokenIdCount { tokens: usize, found: usize },
    #[error("token id {id} of token {token} is out of range: the vocabulary has {vocab}, 0 to {}", vocab - 1)]
    TokenIdRange { token: usize, id: i32, vocab: usize },
    #[error("{what}: expected {expected} elements, found {found}")]
    Size { what: &'static str, expected: usize, found: usize },
}

/// The parts of a [`CpuGate`].
#[derive(Debug)]
pub struct GateParts {
    /// Packed weights, `[E, hidden]`.
    pub weight: PackedMatrix,
    /// Added to the logits, `[E]`.
    pub bias: Option<Vec<f32>>,
    /// Added to the values that experts are chosen by, `[E]`.
    pub correction: Option<Vec<f32>>,
    /// Experts by token id, `[vocab, top_k]`; empty for layers that do not route by token id.
    pub table: Vec<i32>,
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
    /// Packs a layer's gate.
    ///
    /// # Panics
    /// If `tensors` do not match `spec`; opening a checkpoint checks that they do.
    #[must_use]
    pub fn new(spec: &GateSpec, tensors: &GateTensors<'_>) -> Self {
        assert_eq!(tensors.weight.rows, spec.num_experts, "the gate needs one row of weights per expert");
        for bias in [&tensors.bias, &tensors.correction_bias].into_iter().flatten() {
            assert_eq!(bias.len(), spec.num_experts, "the gate needs one bias per expert");
        }
        let table = tensors.token_table.clone().unwrap_or_default();
        assert_eq!(
            table.len(),
            spec.vocab().unwrap_or(0) * spec.top_k,
            "the table needs one row per token id"
        );
        Self {
            spec: spec.clone(),
            hidden: tensors.weight.cols,
            weight: PackedMatrix::pack(&tensors.weight).expect("opening a checkpoint checks its views"),
            bias: tensors.bias.clone(),
            correction: tensors.correction_bias.clone(),
            table,
        }
    }

    /// A gate of parts that are packed already; `None` if they do not fit `spec`.
    #[must_use]
    pub fn from_parts(spec: &GateSpec, parts: GateParts) -> Option<Self> {
        let GateParts { weight, bias, correction, table } = parts;
        let experts = spec.num_experts;
        let fits = weight.n() == experts
            && !weight.is_gated()
            && [&bias, &correction].into_iter().flatten().all(|bias| bias.len() == experts)
            && table.len() == spec.vocab().unwrap_or(0) * spec.top_k
            && table.iter().all(|&id| usize::try_from(id).is_ok_and(|id| id < experts));
        fits.then(|| CpuGate { spec: spec.clone(), hidden: weight.k(), weight, bias, correction, table })
    }

    /// The packed weights.
    pub const fn weight(&self) -> &PackedMatrix {
        &self.weight
    }

    /// The biases of the logits and of the choice, and the table by token id, which is empty if there is none.
    #[must_use]
    pub fn vectors(&self) -> (Option<&[f32]>, Option<&[f32]>, &[i32]) {
        (self.bias.as_deref(), self.correction.as_deref(), &self.table)
    }

    /// How the layer routes.
    pub fn spec(&self) -> &GateSpec {
        &self.spec
    }

    /// Routes `rows [T, hidden]`: writes `ids [T, k]` (in range and distinct within a row, whatever the scores) and
    /// `weights [T, k]`, best first. Layers that route by token id take `token_ids [T]` and keep the table's order. If
    /// scores of a row are NaN, its weights may be NaN.
    ///
    /// Runs on the calling thread and allocates its scratch; see [`Self::route_with`].
    ///
    /// # Errors
    /// If a buffer has the wrong length, or token ids are missing or out of range. Nothing is written then.
    pub fn route(
        &self,
        rows: &[f32],
        token_ids: Option<&[i32]>,
        ids: &mut [i32],
        weights: &mut [f32],
    ) -> Result<(), GateError> {
        self.route_with(rows, token_ids, ids, weights, &mut GateScratch::new(self.hidden, 1), None)
    }

    /// Like [`Self::route`], with given scratch memory and on the threads of `team`. The result depends on neither.
    ///
    /// # Errors
    /// See [`Self::route`].
    pub fn route_with(
        &self,
        rows: &[f32],
        token_ids: Option<&[i32]>,
        ids: &mut [i32],
        weights: &mut [f32],
        scratch: &mut GateScratch,
        team: Option<&ThreadTeam>,
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
        matmul(rows, &self.weight, logits, &mut scratch.matmul, team);
        // Scoring takes about 5 ns per expert; below this size waking threads takes longer than the work.
        let rows_per_chunk = match team {
            Some(team) if tokens * e >= 16384 => tokens.div_ceil(4 * team.threads()),
            _ => tokens.max(1),
        };
        let mut chunks: Vec<RowChunk<'_>> = logits
            .chunks_mut(rows_per_chunk * e)
            .zip(ids.chunks_mut(rows_per_chunk * k).zip(weights.chunks_mut(rows_per_chunk * k)))
            .enumerate()
            .map(|(i, (logits, (ids, weights)))| {
                let first = i * rows_per_chunk;
                let token_ids = token_ids.map(|all| &all[first..first + logits.len() / e]);
                RowChunk { logits, token_ids, ids, weights }
            })
            .collect();
        for_each(team, &mut chunks, |chunk| self.route_chunk(chunk));
        Ok(())
    }

    fn route_chunk(&self, chunk: &mut RowChunk<'_>) {
        let (e, k) = (self.spec.num_experts, self.spec.top_k);
        let mut row = TokenGate { gate: self, scratch: GroupScratch::new(&self.spec), choice: vec![0.0; e] };
        let outputs = chunk.ids.chunks_exact_mut(k).zip(chunk.weights.chunks_exact_mut(k));
        for (t, (logits, (ids, weights))) in chunk.logits.chunks_exact_mut(e).zip(outputs).enumerate() {
            for (logit, bias) in logits.iter_mut().zip(self.bias.iter().flatten()) {
                *logit += bias;
            }
            row.route(logits, chunk.token_ids.map(|ids| ids[t]), ids, weights);
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

/// Scratch memory for routing by the gates of any layer of a model.
#[derive(Debug)]
pub struct GateScratch {
    matmul: MatmulScratch,
    logits: Vec<f32>,
}

impl GateScratch {
    /// Scratch for rows of `hidden` elements and a team of `threads` threads; it grows with the number of rows.
    #[must_use]
    pub fn new(hidden: usize, threads: usize) -> Self {
        Self { matmul: MatmulScratch::new(hidden, threads), logits: Vec::new() }
    }
}

/// Logits and outputs of consecutive tokens.
struct RowChunk<'a> {
    logits: &'a mut [f32],
    token_ids: Option<&'a [i32]>,
    ids: &'a mut [i32],
    weights: &'a mut [f32],
}

fn check(what: &'static str, expected: usize, found: usize) -> Result<(), GateError> {
    if expected == found { Ok(()) } else { Err(GateError::Size { what, expected, found }) }
}

/// A gate with the scratch memory for one token.
struct TokenGate<'a> {
    gate: &'a CpuGate,
    scratch: GroupScratch,
    choice: Vec<f32>,
}

impl TokenGate<'_> {
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
        finish_weights(spec, weights);
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
