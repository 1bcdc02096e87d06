//! An opened checkpoint: what it holds, and views of its weights.

use std::path::{Path, PathBuf};

use super::config::Config;
use super::fingerprint::fingerprint;
use super::plan::{LayerPlan, MlpPlan};
use super::resolve::resolve;
use super::store::Store;
use super::{ModelError, ModelSpec};
use crate::MatrixView;
use expertd_types::{ExpertId, LayerId, WeightVersion};

/// A checkpoint in Hugging Face's layout, memory-mapped and checked from its headers. Weights are only read from disk
/// when a view of them is used; tensors outside the MoE blocks are never touched.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    spec: ModelSpec,
    plans: Vec<Option<LayerPlan>>,
    store: Store,
    version: WeightVersion,
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
    /// `[hidden]`, weighted with the expert's output.
    pub down_bias: Option<Vec<f32>>,
}

/// The shared experts of a layer.
#[derive(Clone, Debug)]
pub struct SharedTensors<'a> {
    /// All of them as one MLP.
    pub mlp: ExpertTensors<'a>,
    /// `[hidden]`: the output is multiplied with the sigmoid of its product with the token.
    pub gate: Option<Vec<f32>>,
}

/// The gate of a layer.
#[derive(Clone, Debug)]
pub struct GateTensors<'a> {
    /// `[E, hidden]`, in bf16, f16 or f32.
    pub weight: MatrixView<'a>,
    /// Added to the logits, `[E]`.
    pub bias: Option<Vec<f32>>,
    /// Added for the choice only, `[E]`.
    pub correction_bias: Option<Vec<f32>>,
    /// Experts by token id, `[vocab, top_k]`: all in range, no expert twice in a row.
    pub token_table: Option<Vec<i32>>,
}

impl Checkpoint {
    /// Opens a directory with `config.json` and safetensors files, and checks every tensor of every MoE block: that it
    /// is there, lies whole in its file, has the shape that follows from the config, and a type that can be used.
    ///
    /// # Errors
    /// Whatever is wrong, with file, tensor or field, expectation and finding.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        let config = Config::read(dir)?;
        let mut store = Store::open(dir)?;
        let resolved = resolve(&config, &mut store)?;
        let version = fingerprint(config.text(), &store);
        Ok(Self { dir: dir.to_owned(), spec: resolved.spec, plans: resolved.plans, store, version })
    }

    /// The directory it was opened from.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What it holds.
    #[must_use]
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// A number that follows from the contents: the same wherever and whenever the same checkpoint is opened, another
    /// (all but surely) for other weights. See `server/model/fingerprint.rs` for what it is taken of.
    #[must_use]
    pub fn weight_version(&self) -> WeightVersion {
        self.version
    }

    fn plan(&self, layer: LayerId) -> Result<&LayerPlan, ModelError> {
        self.spec.layer(layer)?;
        self.plans[layer.index()].as_ref().ok_or(ModelError::DenseLayer { layer })
    }

    /// The weights of one routed expert.
    ///
    /// # Errors
    /// A layer without MoE block, or no such layer or expert.
    pub fn expert(&self, layer: LayerId, expert: ExpertId) -> Result<ExpertTensors<'_>, ModelError> {
        let plan = self.plan(layer)?;
        match plan.experts.get(expert.index()) {
            Some(mlp) => Ok(self.mlp(mlp)),
            None => Err(ModelError::NoSuchExpert { layer, expert, num_experts: plan.experts.len() }),
        }
    }

    /// The weights of the layer's shared experts, if it has any.
    ///
    /// # Errors
    /// A layer without MoE block, or no such layer.
    pub fn shared(&self, layer: LayerId) -> Result<Option<SharedTensors<'_>>, ModelError> {
        let plan = self.plan(layer)?;
        Ok(plan.shared.as_ref().map(|(mlp, gate)| SharedTensors {
            mlp: self.mlp(mlp),
            gate: gate.map(|gate| gate.read(&self.store)),
        }))
    }

    /// The weights of the layer's gate. Reads and checks the token table of a layer that routes by token id.
    ///
    /// # Errors
    /// A layer without MoE block, no such layer, or a token table with an expert out of range or repeated.
    pub fn gate(&self, layer: LayerId) -> Result<GateTensors<'_>, ModelError> {
        let plan = &self.plan(layer)?.gate;
        let spec = &self.spec.layer(layer)?.gate;
        Ok(GateTensors {
            weight: plan.weight.view(&self.store),
            bias: plan.bias.map(|bias| bias.read(&self.store)),
            correction_bias: plan.correction.map(|bias| bias.read(&self.store)),
            token_table: match plan.table {
                Some(id) => Some(self.store.token_table(id, spec.top_k, spec.num_experts)?),
                None => None,
            },
        })
    }

    /// Bytes of one routed expert of a layer in the checkpoint, scales and biases included; 0 where there is none.
    #[must_use]
    pub fn expert_bytes(&self, layer: LayerId) -> u64 {
        self.spec.layer(layer).map_or(0, |moe| moe.experts.bytes)
    }

    fn mlp(&self, plan: &MlpPlan) -> ExpertTensors<'_> {
        let bias = |i: usize| plan.biases.map(|biases| biases[i].read(&self.store));
        ExpertTensors {
            gate: plan.gate.view(&self.store),
            up: plan.up.view(&self.store),
            down: plan.down.view(&self.store),
            gate_bias: bias(0),
            up_bias: bias(1),
            down_bias: bias(2),
        }
    }
}
