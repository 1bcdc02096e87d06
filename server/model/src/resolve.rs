//! Resolution of a config and tensor headers to a [`ModelSpec`] and the location of every tensor. All checks that
//! headers allow are made here, so that a checkpoint which resolves can be loaded.

use super::config::Config;
use super::context::{Context, MAX_EXPERTS, MAX_LAYERS, vector};
use super::experts::{self, Dims};
use super::families::{FAMILIES, by_model_type};
use super::family::{ActivationRule, Family, SharedWidth};
use super::gate_rules::{LayerKind, gate_spec, layer_kinds};
use super::gate_spec::{Choice, GateSpec};
use super::plan::{GatePlan, LayerPlan, MlpPlan, VectorRef};
use super::quant::Quantization;
use super::spec::{ExpertsSpec, ModelSpec, MoeLayer, SharedSpec};
use super::store::{Store, TensorId};
use super::{LayerChoice, ModelError, matrices};
use crate::Activation;
use expertd_types::LayerId;
use serde_json::Value;

/// Bounds of further values in a config.
const MAX_HIDDEN: usize = 1 << 20;
const MAX_VOCAB: usize = 1 << 24;

/// Prefixes of `layers.N.`, in the order in which they are tried.
const PREFIXES: [&str; 6] =
    ["model.", "model.language_model.", "language_model.model.", "language_model.", "thinker.model.", ""];

/// The resolved description of a checkpoint.
pub(super) struct Resolved {
    pub(super) spec: ModelSpec,
    pub(super) plans: Vec<Option<LayerPlan>>,
    /// The parts of `config.json` that the fingerprint covers, the same whatever layers are held.
    pub(super) description: Vec<u8>,
}

pub(super) fn resolve(
    config: &Config,
    store: &mut Store,
    choice: LayerChoice,
) -> Result<Resolved, ModelError> {
    let model_type = config.model_type()?;
    let family = find_family(config, model_type)?;
    check_fields(config, family)?;
    let num_layers = config.size(&["num_hidden_layers"], MAX_LAYERS)?;
    let context = Context {
        config,
        family,
        quantization: Quantization::read(config)?,
        hidden: config.size(&["hidden_size"], MAX_HIDDEN)?,
        num_experts: config.size(family.experts, MAX_EXPERTS)?,
        width: config.size(family.width, MAX_HIDDEN)?,
        activation: activation(config, family)?,
    };
    let kinds = layer_kinds(config, family, num_layers)?;
    let gate = gate_spec(config, family, context.num_experts)?;
    let moe: Vec<usize> = (0..num_layers).filter(|&layer| kinds[layer] != LayerKind::Dense).collect();
    let Some(&first) = moe.first() else {
        return Err(unsupported(
            config,
            "a model without MoE layers",
            "according to its config every layer is dense",
        ));
    };
    let held = choice.range(num_layers, &moe).map_err(|reason| ModelError::Layers {
        path: config.path().to_owned(),
        chosen: choice,
        reason,
    })?;
    let mut spec = ModelSpec {
        family: family.name.to_owned(),
        model_type: model_type.to_owned(),
        hidden: context.hidden,
        num_layers,
        held,
        layers: vec![None; num_layers],
    };
    let mut plans: Vec<Option<LayerPlan>> = (0..num_layers).map(|_| None).collect();
    let names = TensorNames::detect(store, family, first)?;
    let description = description(&spec, &context, &gate, &kinds);
    for &layer in &moe {
        if !held.contains(LayerId(layer as u32)) {
            continue;
        }
        let mut gate = gate.clone();
        if kinds[layer] == LayerKind::Hashed {
            gate.choice = Choice::TokenIds { vocab: config.size(&["vocab_size"], MAX_VOCAB)? };
            gate.correction_bias = false;
        }
        let (moe, plan) = resolve_layer(&context, store, &names.block(layer), gate)?;
        spec.layers[layer] = Some(moe);
        plans[layer] = Some(plan);
    }
    store.find_all(moe.iter().map(|&layer| names.block(layer)).collect())?;
    Ok(Resolved { spec, plans, description })
}

/// The description of a model that follows from its config alone.
fn description(spec: &ModelSpec, context: &Context<'_>, gate: &GateSpec, kinds: &[LayerKind]) -> Vec<u8> {
    let kinds: String = kinds
        .iter()
        .map(|kind| match kind {
            LayerKind::Dense => 'd',
            LayerKind::Moe => 'm',
            LayerKind::Hashed => 'h',
        })
        .collect();
    let mut text = serde_json::json!({
        "family": spec.family,
        "hidden": spec.hidden,
        "layers": kinds,
        "experts": context.num_experts,
        "width": context.width,
        "activation": context.activation,
        "gate": gate,
        "power_of_two_scales": context.quantization.power_of_two_scales,
    });
    // The same tensors mean other numbers if they are declared otherwise.
    if let Some(int4) = context.quantization.int4 {
        text["int4"] = serde_json::json!(int4);
    }
    text.to_string().into_bytes()
}

fn unsupported(config: &Config, what: &str, why: &str) -> ModelError {
    ModelError::Unsupported { path: config.path().to_owned(), what: what.to_owned(), why: why.to_owned() }
}

fn find_family(config: &Config, model_type: &str) -> Result<&'static Family, ModelError> {
    by_model_type(model_type).ok_or_else(|| {
        let mut known: Vec<&str> = FAMILIES.iter().flat_map(|family| family.model_types).copied().collect();
        known.sort_unstable();
        unsupported(
            config,
            &format!("model_type `{model_type}`"),
            &format!("the supported types are {}", known.join(", ")),
        )
    })
}

/// Refuses fields that might change the block's arithmetic in a way that the family's description does not cover.
fn check_fields(config: &Config, family: &Family) -> Result<(), ModelError> {
    for field in config.names() {
        if family.is_unknown(field) {
            let why = format!(
                "the description of family `{}` does not cover this field, and its name suggests that it matters; \
                 if it does not matter, add it to the fields that the family ignores",
                family.name
            );
            return Err(unsupported(config, &format!("config field `{field}`"), &why));
        }
    }
    for (field, allowed) in family.only {
        let Some(value) = config.raw(field) else { continue };
        let allows = |value: &Value| {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            allowed.contains(&text.as_str())
        };
        // Some fields have one value, or a list with one value for each layer.
        let all = value.as_array().is_some_and(|list| !list.is_empty() && list.iter().all(allows));
        if !all && !allows(value) {
            let expected: Vec<_> = allowed.iter().map(|value| format!("`{value}`")).collect();
            return Err(config.wrong(field, &expected.join(" or "), value));
        }
    }
    Ok(())
}

fn activation(config: &Config, family: &Family) -> Result<Activation, ModelError> {
    if !matches!(family.activation, ActivationRule::Oai { .. }) {
        let act = config.opt_str("hidden_act")?.unwrap_or("silu");
        if !matches!(act, "silu" | "swish") {
            return Err(config.wrong_text("hidden_act", "`silu`", &format!("`{act}`")));
        }
    }
    let limit = |default: f32| -> Result<f32, ModelError> {
        let limit = config.opt_f32("swiglu_limit")?.unwrap_or(default);
        if limit > 0.0 {
            Ok(limit)
        } else {
            Err(config.wrong_text("swiglu_limit", "a positive number", &limit.to_string()))
        }
    };
    Ok(match family.activation {
        ActivationRule::HiddenAct => Activation::SwiGlu,
        ActivationRule::Clamped { default } => Activation::SwiGluClamped { limit: limit(default)? },
        ActivationRule::Oai { alpha, limit: default } => Activation::SwiGluOai {
            alpha: config.opt_f32("swiglu_alpha")?.unwrap_or(alpha),
            limit: limit(default)?,
        },
    })
}

/// The names of tensors in this checkpoint.
struct TensorNames {
    prefix: &'static str,
    block: &'static str,
}

impl TensorNames {
    fn detect(store: &Store, family: &'static Family, first: usize) -> Result<Self, ModelError> {
        for prefix in PREFIXES {
            for block in family.block {
                let names = Self { prefix, block };
                let base = names.block(first);
                if family.gate.weight.iter().any(|gate| store.has(&format!("{base}{gate}"))) {
                    return Ok(names);
                }
            }
        }
        let gate = family.gate.weight[0];
        let stem = gate.trim_end_matches("weight");
        let quantised = ["qweight", "weight_packed"].map(|leaf| store.example(&format!("{stem}{leaf}")));
        let seen = match (store.example(gate), quantised.into_iter().flatten().next()) {
            (Some(name), _) => format!("found `{name}`"),
            (None, Some(name)) => {
                format!(
                    "found `{name}`, but gates in formats of 4 bits are not supported: quantise experts only"
                )
            }
            (None, None) => format!("no tensor name ends in `{gate}`"),
        };
        let prefixes: Vec<_> = PREFIXES.iter().map(|prefix| format!("`{prefix}`")).collect();
        Err(store.missing(
            &format!("model.layers.{first}.{}.{gate}", family.block[0]),
            &format!(
                "according to the config it is the gate of the first layer with an MoE block; {seen}; prefixes tried: {}",
                prefixes.join(", ")
            ),
        ))
    }

    fn block(&self, layer: usize) -> String {
        format!("{}layers.{layer}.{}.", self.prefix, self.block)
    }
}

fn resolve_layer(
    context: &Context<'_>,
    store: &mut Store,
    base: &str,
    gate: GateSpec,
) -> Result<(MoeLayer, LayerPlan), ModelError> {
    let gate_plan = resolve_gate(context, store, base, &gate)?;
    let dims = Dims { hidden: context.hidden, width: context.width, experts: context.num_experts };
    let plans = experts::resolve(context, store, base, dims)?;
    let shared = resolve_shared(context, store, base)?;
    let experts = ExpertsSpec {
        count: context.num_experts,
        width: context.width,
        activation: context.activation,
        weight_on_input: context.family.weight_on_input,
        biases: context.family.expert_biases,
        format: plans[0].gate.format,
        scale_cols: plans[0].scale_cols(),
        zero_points: plans[0].zero_points(),
        power_of_two_scales: context.quantization.power_of_two_scales,
        bytes: plans[0].bytes,
    };
    let (shared_spec, shared_plan) = shared.unzip();
    let plan = LayerPlan { gate: gate_plan, experts: plans, shared: shared_plan };
    Ok((MoeLayer { gate, experts, shared: shared_spec }, plan))
}

fn resolve_gate(
    context: &Context<'_>,
    store: &mut Store,
    base: &str,
    gate: &GateSpec,
) -> Result<GatePlan, ModelError> {
    let names = &context.family.gate;
    let e = context.num_experts;
    let reason = format!("`{}` × `hidden_size` in config.json", context.family.experts[0]);
    let name = first_present(store, base, names.weight);
    let weight = matrices::plain(store, &name, [e, context.hidden], &reason)?;
    let bias = match names.bias {
        Some(bias) => Some(vector(store, &format!("{base}{bias}"), &[&[e]], "the gate's bias")?),
        None => None,
    };
    let correction = if gate.correction_bias {
        let name = first_present(store, base, names.correction);
        Some(vector(store, &name, &[&[e], &[1, e]], "the gate's correction bias")?)
    } else {
        None
    };
    let table = match gate.vocab() {
        Some(vocab) => Some(token_table(store, &format!("{base}{}", names.table), [vocab, gate.top_k])?),
        None => None,
    };
    Ok(GatePlan { weight, bias, correction, table })
}

fn token_table(store: &mut Store, name: &str, shape: [usize; 2]) -> Result<TensorId, ModelError> {
    let id = store.find(name, "the layer routes by token id")?;
    store.expect_shape(id, &shape, "`vocab_size` × experts per token in config.json")?;
    match store.info(id).dtype {
        safetensors::Dtype::I64 | safetensors::Dtype::I32 => Ok(id),
        _ => Err(store.wrong_dtype(id, "I64 or I32")),
    }
}

/// The first of several names that the checkpoint has; the first of all if it has none.
fn first_present(store: &Store, base: &str, names: &[&str]) -> String {
    let found = names.iter().map(|name| format!("{base}{name}")).find(|name| store.has(name));
    found.unwrap_or_else(|| format!("{base}{}", names[0]))
}

type ResolvedShared = (SharedSpec, (MlpPlan, Option<VectorRef>));

fn resolve_shared(
    context: &Context<'_>,
    store: &mut Store,
    base: &str,
) -> Result<Option<ResolvedShared>, ModelError> {
    let Some(rule) = context.family.shared else { return Ok(None) };
    let config = context.config;
    let (width, reason) = match rule.width {
        SharedWidth::Field(field) => {
            let width = config.opt_usize(field, MAX_HIDDEN)?;
            let missing = || config.wrong_text(field, "an integer", "nothing: the field is missing");
            (width.ok_or_else(missing)?, format!("`{field}` and `hidden_size` in config.json"))
        }
        SharedWidth::Count { field, default } => {
            // An explicit null means no shared experts; for an absent field the reference implementation's default
            // holds.
            let absent = if config.has(field) { 0 } else { default };
            let count = config.opt_usize(field, MAX_EXPERTS)?.unwrap_or(absent);
            let width = count.saturating_mul(context.width).min(MAX_HIDDEN);
            (width, format!("`{field}` × `{}` and `hidden_size` in config.json", context.family.width[0]))
        }
        SharedWidth::SameAsExperts => {
            (context.width, format!("`{}` and `hidden_size` in config.json", context.family.width[0]))
        }
    };
    if width == 0 {
        return Ok(None);
    }
    let biases = match rule.bias_field {
        Some(field) => config.opt_bool(field)?.unwrap_or(false),
        None => false,
    };
    let module = format!("{base}{}.", rule.module);
    let dims = Dims { hidden: context.hidden, width, experts: 1 };
    let mut plan = experts::separate(context, store, &module, dims, biases, &reason)?;
    let gate = match rule.gate {
        Some(name) => {
            let name = format!("{base}{name}");
            let gate = vector(store, &name, &[&[1, context.hidden]], "the gate of the shared experts")?;
            plan.bytes += store.bytes(gate.tensor).len() as u64;
            Some(gate)
        }
        None => None,
    };
    let spec = SharedSpec {
        width,
        activation: context.activation,
        gated: gate.is_some(),
        biases,
        format: plan.gate.format,
        other_formats: plan.other_formats(),
        scale_cols: plan.scale_cols(),
        zero_points: plan.zero_points(),
        power_of_two_scales: context.quantization.power_of_two_scales,
        bytes: plan.bytes,
    };
    Ok(Some((spec, (plan, gate))))
}
