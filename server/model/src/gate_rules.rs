//! The gates of a model's layers, from its family's rules and its config.

use super::ModelError;
use super::config::Config;
use super::context::{MAX_EXPERTS, MAX_LAYERS};
use super::family::{Family, GroupRule, LayerRule, NormaliseRule, ScoreRule};
use super::gate_spec::{Choice, GateSpec, GroupLimit, GroupScore, MAX_TOP_K, Normalise, ScoreFn};

/// The kind of a decoder layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LayerKind {
    Dense,
    Moe,
    /// An MoE block that routes by token id.
    Hashed,
}

/// Determines the kind of each layer.
pub(super) fn layer_kinds(
    config: &Config,
    family: &Family,
    layers: usize,
) -> Result<Vec<LayerKind>, ModelError> {
    let moe_if = |yes: bool| if yes { LayerKind::Moe } else { LayerKind::Dense };
    let number = |field, default| Ok(config.opt_usize(field, MAX_LAYERS)?.unwrap_or(default));
    let rule: Box<dyn Fn(usize) -> LayerKind> = match family.layers {
        LayerRule::All => Box::new(|_| LayerKind::Moe),
        LayerRule::FirstDense { count, flags, default } => {
            if let Some(kinds) =
                typed_layers(config, layers, &[("dense", LayerKind::Dense), ("sparse", LayerKind::Moe)])?
            {
                return Ok(kinds);
            }
            if let Some(field) = flags
                && let Some(list) = config.opt_flags(field)?
            {
                one_for_each_layer(config, field, list.len(), layers)?;
                return Ok(list.into_iter().take(layers).map(moe_if).collect());
            }
            let first = count.map_or(Ok(default), |field| number(field, default))?;
            Box::new(move |layer| moe_if(layer >= first))
        }
        LayerRule::SparseStep => {
            let step = config.opt_size(&["decoder_sparse_step"], MAX_LAYERS)?.unwrap_or(1);
            let dense = config.opt_indices("mlp_only_layers")?.unwrap_or_default();
            Box::new(move |layer| moe_if(!dense.contains(&layer) && (layer + 1) % step == 0))
        }
        LayerRule::Window => {
            let start = number("moe_layer_start_index", 1)?;
            // -1 means the last layer.
            let open = config.raw("moe_layer_end_index").is_some_and(|value| value.as_i64() == Some(-1));
            let end = if open { layers } else { number("moe_layer_end_index", layers)? };
            let step = config.opt_size(&["moe_layer_interval"], MAX_LAYERS)?.unwrap_or(1);
            Box::new(move |layer| moe_if((layer + 1) % step == 0 && (start..=end).contains(&layer)))
        }
        LayerRule::Period { period, offset } => {
            let period = config.opt_size(&["expert_layer_period"], MAX_LAYERS)?.unwrap_or(period);
            let offset = number("expert_layer_offset", offset)?;
            Box::new(move |layer| moe_if(layer % period == offset))
        }
        LayerRule::Listed => match config.opt_indices("moe_layers")? {
            Some(list) => Box::new(move |layer| moe_if(list.contains(&layer))),
            None => {
                let step = config.opt_size(&["interleave_moe_layer_step"], MAX_LAYERS)?.unwrap_or(1);
                Box::new(move |layer| moe_if((layer + 1) % step == 0))
            }
        },
        LayerRule::Hashed { default } => {
            if let Some(kinds) =
                typed_layers(config, layers, &[("hash_moe", LayerKind::Hashed), ("moe", LayerKind::Moe)])?
            {
                return Ok(kinds);
            }
            let hashed = number("num_hash_layers", default)?;
            Box::new(move |layer| if layer < hashed { LayerKind::Hashed } else { LayerKind::Moe })
        }
    };
    Ok((0..layers).map(rule).collect())
}

/// The layer kinds in `mlp_layer_types`, if the field is present.
fn typed_layers(
    config: &Config,
    layers: usize,
    words: &[(&str, LayerKind)],
) -> Result<Option<Vec<LayerKind>>, ModelError> {
    const FIELD: &str = "mlp_layer_types";
    let Some(list) = config.opt_words(FIELD)? else { return Ok(None) };
    one_for_each_layer(config, FIELD, list.len(), layers)?;
    let kind = |word: &&str| {
        words.iter().find(|(known, _)| known == word).map(|(_, kind)| *kind).ok_or_else(|| {
            let known: Vec<_> = words.iter().map(|(word, _)| format!("`{word}`")).collect();
            config.wrong_text(FIELD, &format!("entries {}", known.join(" or ")), &format!("`{word}`"))
        })
    };
    list.iter().take(layers).map(kind).collect::<Result<_, _>>().map(Some)
}

/// Refuses a list that is shorter than the number of layers. A longer one also describes layers that predict further tokens.
fn one_for_each_layer(config: &Config, field: &str, found: usize, layers: usize) -> Result<(), ModelError> {
    if found >= layers {
        return Ok(());
    }
    let expected = format!("a list of {layers} entries, one for each layer");
    Err(config.wrong_text(field, &expected, &format!("{found} entries")))
}

/// The gate of the family's scored layers; `hashed` turns it into the gate of a layer that routes by token id.
pub(super) fn gate_spec(
    config: &Config,
    family: &Family,
    num_experts: usize,
) -> Result<GateSpec, ModelError> {
    let top_k = match family.routing.scores {
        ScoreRule::SparseMixer => 2,
        _ => config.size(family.top_k, MAX_TOP_K)?,
    };
    if top_k > num_experts {
        let expected = format!("at most the number of experts, {num_experts}");
        let field = family.top_k.first().unwrap_or(&family.experts[0]);
        return Err(config.wrong_text(field, &expected, &top_k.to_string()));
    }
    let (scores, choice) = match family.routing.scores {
        ScoreRule::Softmax => (ScoreFn::Softmax, Choice::Scores),
        ScoreRule::SoftmaxOfChosen => (ScoreFn::SoftmaxOfChosen, Choice::Logits),
        ScoreRule::Sigmoid => (ScoreFn::Sigmoid, Choice::Scores),
        ScoreRule::SigmoidOfChosen => (ScoreFn::Sigmoid, Choice::Logits),
        ScoreRule::ScoringFunc => match config.opt_str("scoring_func")?.unwrap_or("sqrtsoftplus") {
            "sqrtsoftplus" => (ScoreFn::SqrtSoftplus, Choice::Scores),
            "sigmoid" => (ScoreFn::Sigmoid, Choice::Scores),
            other => return Err(config.wrong_text("scoring_func", "`sqrtsoftplus` or `sigmoid`", other)),
        },
        ScoreRule::SparseMixer => {
            let jitter = config.opt_f32("router_jitter_noise")?.unwrap_or(0.01);
            (ScoreFn::SparseMixer { jitter }, Choice::Logits)
        }
    };
    let normalise = match family.routing.normalise {
        NormaliseRule::Never => Normalise::No,
        NormaliseRule::Always(how) => how,
        NormaliseRule::If { fields, default, how } => {
            if config.opt_flag(fields)?.unwrap_or(default) {
                how
            } else {
                Normalise::No
            }
        }
        NormaliseRule::NormMin => {
            Normalise::SumAtLeast { floor: config.opt_f32("moe_norm_min")?.unwrap_or(1e-12) }
        }
    };
    let scale = match family.routing.scale {
        None => 1.0,
        Some((field, default)) => config.opt_f32(field)?.unwrap_or(default),
    };
    Ok(GateSpec {
        num_experts,
        top_k,
        scores,
        choice,
        logit_bias: family.gate.bias.is_some(),
        correction_bias: !family.gate.correction.is_empty(),
        groups: groups(config, family, num_experts, top_k)?,
        normalise,
        scale,
    })
}

fn groups(
    config: &Config,
    family: &Family,
    num_experts: usize,
    top_k: usize,
) -> Result<Option<GroupLimit>, ModelError> {
    let Some(GroupRule { by, count }) = family.routing.groups else { return Ok(None) };
    if by == GroupScore::Max {
        match config.opt_str("topk_method")?.unwrap_or("greedy") {
            "greedy" => return Ok(None),
            "group_limited_greedy" => {}
            other => {
                return Err(config.wrong_text("topk_method", "`greedy` or `group_limited_greedy`", other));
            }
        }
    }
    let groups = config.opt_size(count, MAX_EXPERTS)?.unwrap_or(1);
    let kept = config.opt_size(&["topk_group"], MAX_EXPERTS)?.unwrap_or(1);
    if !num_experts.is_multiple_of(groups) {
        let expected = format!("a divisor of the number of experts, {num_experts}");
        return Err(config.wrong_text(count[0], &expected, &groups.to_string()));
    }
    if kept > groups {
        return Err(config.wrong_text(
            "topk_group",
            &format!("at most `{}`, {groups}", count[0]),
            &kept.to_string(),
        ));
    }
    let size = num_experts / groups;
    if by == GroupScore::TopTwoSum && size < 2 {
        let expected = "groups of at least two experts, because the group's score is a sum of two";
        return Err(config.wrong_text(count[0], expected, &format!("{groups} groups of {size}")));
    }
    if by == GroupScore::TopTwoSum && kept * size < top_k {
        let expected = format!("enough groups of {size} experts to choose {top_k} from");
        return Err(config.wrong_text("topk_group", &expected, &kept.to_string()));
    }
    // A choice among all groups is no restriction.
    Ok((kept < groups).then_some(GroupLimit { groups, kept, by }))
}
