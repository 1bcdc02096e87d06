//! An opened checkpoint: its description, and views of its weights.

use std::path::{Path, PathBuf};

use super::config::Config;
use super::fingerprint::fingerprint;
use super::plan::{LayerPlan, MlpPlan};
use super::resolve::{Resolved, resolve};
use super::store::Store;
use super::{LayerChoice, ModelError, ModelSpec, MoeLayer};
use crate::{MatrixView, ReadBuffer};
use expertd_types::{Coverage, ExpertId, LayerId, WeightFingerprint};

/// A checkpoint in Hugging Face's layout, memory-mapped and checked by its headers. Weights are read from disk only
/// when a view of them is used; tensors outside the MoE blocks are never read.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    spec: ModelSpec,
    plans: Vec<Option<LayerPlan>>,
    /// The parts of `config.json` that the fingerprint covers.
    description: Vec<u8>,
    store: Store,
}

/// The MLP of an expert: `down(activation(gate(x), up(x)))`.
#[derive(Clone, Debug)]
pub struct ExpertTensors<'a> {
    /// `[width, hidden]`.
    pub gate: MatrixView<'a>,
    /// `[width, hidden]`.
    pub up: MatrixView<'a>,
    /// `[hidden, width]`.
    pub down: MatrixView<'a>,
    /// `[width]`.
    pub gate_bias: Option<Vec<f32>>,
    /// `[width]`.
    pub up_bias: Option<Vec<f32>>,
    /// `[hidden]`; multiplied by the routing weight like the rest of the expert's output.
    pub down_bias: Option<Vec<f32>>,
}

/// The shared experts of a layer.
#[derive(Clone, Debug)]
pub struct SharedTensors<'a> {
    /// All shared experts as one MLP.
    pub mlp: ExpertTensors<'a>,
    /// `[hidden]`: the output is multiplied by the sigmoid of the product of this vector and the token.
    pub gate: Option<Vec<f32>>,
}

/// The gate of a layer.
#[derive(Clone, Debug)]
pub struct GateTensors<'a> {
    /// `[E, hidden]`, in bf16, f16 or f32.
    pub weight: MatrixView<'a>,
    /// Added to the logits, `[E]`.
    pub bias: Option<Vec<f32>>,
    /// Added to the values that experts are chosen by, not to their weights, `[E]`.
    pub correction_bias: Option<Vec<f32>>,
    /// Experts by token id, `[vocab, top_k]`: all ids are in range and distinct within a row.
    pub token_table: Option<Vec<i32>>,
}

impl<'a> ExpertTensors<'a> {
    /// Reads the matrices to a buffer, where they are not in the page cache, and refers to them there.
    fn read(mut self, store: &'a Store, buffer: &'a mut ReadBuffer) -> Result<Self, ModelError> {
        let mut matrices = [&mut self.gate, &mut self.up, &mut self.down];
        let mut slices = Vec::new();
        for matrix in &matrices {
            slices.push(matrix.data);
            slices.extend(matrix.scales.mapped());
        }
        let mut copies = buffer.read(store, &slices)?.into_iter();
        let mut next = || copies.next().expect("each slice has a copy");
        for matrix in &mut matrices {
            matrix.data = next();
            for bytes in matrix.scales.mapped_mut() {
                *bytes = next();
            }
        }
        Ok(self)
    }
}

impl Checkpoint {
    /// Opens a directory with `config.json` and safetensors files. Every tensor of every MoE block is checked: it must
    /// be present, lie entirely within its file, and have the shape that the config implies and a supported type.
    ///
    /// # Errors
    /// The first defect, with file, tensor or field, and what was expected and found.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        Self::open_layers(dir, LayerChoice::All)
    }

    /// Like [`open`](Self::open), for some of the layers: only their tensors are checked and can be used. The files of
    /// all MoE blocks must be there nevertheless, because the fingerprint covers them, whatever layers are chosen.
    ///
    /// # Errors
    /// The first defect of the chosen layers or of a file's header; [`ModelError::Layers`] if the choice does not fit
    /// the model.
    pub fn open_layers(dir: &Path, layers: LayerChoice) -> Result<Self, ModelError> {
        let config = Config::read(dir)?;
        let mut store = Store::open(dir)?;
        let Resolved { spec, plans, description } = resolve(&config, &mut store, layers)?;
        Ok(Self { dir: dir.to_owned(), spec, plans, description, store })
    }

    /// The directory of the checkpoint.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The description of the model.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The fingerprint of the contents. `server/model/src/fingerprint.rs` states what it covers.
    #[must_use]
    pub fn fingerprint(&self, coverage: Coverage) -> WeightFingerprint {
        fingerprint(&self.description, &self.store, coverage, &|_| ())
    }

    /// Checks that the contents have a fingerprint. If it covers every byte, `digested` is told numbers of bytes as they are
    /// digested, from any thread.
    ///
    /// # Errors
    /// [`ModelError::OtherWeights`] if they have another one.
    pub fn expect(
        &self,
        expected: &WeightFingerprint,
        digested: &(dyn Fn(usize) + Sync),
    ) -> Result<(), ModelError> {
        let found = fingerprint(&self.description, &self.store, expected.coverage, digested);
        if found == *expected {
            return Ok(());
        }
        Err(ModelError::OtherWeights { path: self.dir.clone(), expected: *expected, found })
    }

    /// Checks that no file was written to since it was opened. What was read before is then what the fingerprint covers.
    pub fn check_unchanged(&self) -> Result<(), ModelError> {
        self.store.check_unchanged()
    }

    fn plan(&self, layer: LayerId) -> Result<&LayerPlan, ModelError> {
        self.spec.layer(layer)?;
        self.plans[layer.index()].as_ref().ok_or(ModelError::DenseLayer { layer })
    }

    /// The weights of one routed expert, mapped.
    ///
    /// # Errors
    /// If the layer has no MoE block, there is no such layer or expert, or the contents of a tensor of a few bytes contradict the
    /// headers (`weight_shape`, a factor of all scales that is not positive).
    pub fn expert(&self, layer: LayerId, expert: ExpertId) -> Result<ExpertTensors<'_>, ModelError> {
        let plan = self.plan(layer)?;
        match plan.experts.get(expert.index()) {
            Some(mlp) => self.mlp(mlp),
            None => Err(ModelError::NoSuchExpert { layer, expert, num_experts: plan.experts.len() }),
        }
    }

    /// Size of all experts of the layers that are held, in bytes.
    pub fn bytes(&self) -> u64 {
        let of = |moe: &MoeLayer| {
            moe.experts.count as u64 * moe.experts.bytes + moe.shared.as_ref().map_or(0, |s| s.bytes)
        };
        self.spec.moe_layers().map(|(_, moe)| of(moe)).sum()
    }

    /// Advises the kernel that experts are read with [`ReadBuffer::past_cache`]; it then reads nothing ahead through the
    /// mappings.
    pub fn expect_reads_past_cache(&self) {
        self.store.expect_few_bytes(true);
    }

    /// The weights of one routed expert, with its matrices in `buffer` if it reads them past the page cache. The threads of the
    /// current pool share the work.
    ///
    /// # Errors
    /// As [`expert`](Self::expert), or if a file cannot be read.
    pub fn read_expert<'a>(
        &'a self,
        layer: LayerId,
        expert: ExpertId,
        buffer: &'a mut ReadBuffer,
    ) -> Result<ExpertTensors<'a>, ModelError> {
        self.expert(layer, expert)?.read(&self.store, buffer)
    }

    /// The weights of the layer's shared experts, as [`read_expert`](Self::read_expert).
    ///
    /// # Errors
    /// As [`shared`](Self::shared), or if a file cannot be read.
    pub fn read_shared<'a>(
        &'a self,
        layer: LayerId,
        buffer: &'a mut ReadBuffer,
    ) -> Result<Option<SharedTensors<'a>>, ModelError> {
        let Some(SharedTensors { mlp, gate }) = self.shared(layer)? else { return Ok(None) };
        Ok(Some(SharedTensors { mlp: mlp.read(&self.store, buffer)?, gate }))
    }

    /// The weights of the layer's shared experts, if it has any.
    ///
    /// # Errors
    /// If the layer has no MoE block, there is no such layer, or contents contradict headers as for [`expert`](Self::expert).
    pub fn shared(&self, layer: LayerId) -> Result<Option<SharedTensors<'_>>, ModelError> {
        let plan = self.plan(layer)?;
        let Some((mlp, gate)) = &plan.shared else { return Ok(None) };
        Ok(Some(SharedTensors { mlp: self.mlp(mlp)?, gate: gate.map(|gate| gate.read(&self.store)) }))
    }

    /// The weights of the layer's gate. For a layer that routes by token id, this reads and checks the token table.
    ///
    /// # Errors
    /// If the layer has no MoE block, there is no such layer, or the token table has an expert out of range or
    /// repeated.
    pub fn gate(&self, layer: LayerId) -> Result<GateTensors<'_>, ModelError> {
        let plan = &self.plan(layer)?.gate;
        let spec = &self.spec.layer(layer)?.gate;
        let weight = plan.weight.view(&self.store);
        self.store.will_need(weight.data);
        Ok(GateTensors {
            weight,
            bias: plan.bias.map(|bias| bias.read(&self.store)),
            correction_bias: plan.correction.map(|bias| bias.read(&self.store)),
            token_table: match plan.table {
                Some(id) => Some(self.store.token_table(id, spec.top_k, spec.num_experts)?),
                None => None,
            },
        })
    }

    /// Size of one routed expert of a layer in the checkpoint, scales and biases included, in bytes; 0 for a layer
    /// without experts.
    pub fn expert_bytes(&self, layer: LayerId) -> u64 {
        self.spec.layer(layer).map_or(0, |moe| moe.experts.bytes)
    }

    fn mlp(&self, plan: &MlpPlan) -> Result<ExpertTensors<'_>, ModelError> {
        plan.check_contents(&self.store)?;
        let bias = |i: usize| plan.biases.map(|biases| biases[i].read(&self.store));
        Ok(ExpertTensors {
            gate: plan.gate.view(&self.store),
            up: plan.up.view(&self.store),
            down: plan.down.view(&self.store),
            gate_bias: bias(0),
            up_bias: bias(1),
            down_bias: bias(2),
        })
    }
}
