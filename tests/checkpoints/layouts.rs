//! Tests of experts stored in every layout and format that the loader distinguishes: separate or fused in either
//! orientation, under other prefixes, inside multimodal configs, quantised with scales of every granularity.
use std::collections::BTreeMap;
use std::path::Path;

use expertd_compute::experts::reference::dense;
use expertd_ipc::GroupShape;
use expertd_model::synth::{self, SynthConfig, SynthFormat};
use expertd_model::{Checkpoint, ModelError};
use expertd_rank_cuda as gpu;
use expertd_types::{ExpertId, Fp8Products, LayerId};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors, serialize_to_file};
use serde_json::{Map, Value, json};

pub(crate) const HIDDEN: usize = 64;
pub(crate) const WIDTH: usize = 96;
pub(crate) const EXPERTS: usize = 4;

#[derive(Clone)]
pub(crate) struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

#[derive(Clone)]
pub(crate) struct CheckpointParts {
    pub(crate) config: Map<String, Value>,
    pub(crate) tensors: BTreeMap<String, Tensor>,
}

impl CheckpointParts {
    pub(crate) fn of(family: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let format = SynthFormat::F32;
        let config = SynthConfig {
            hidden: HIDDEN,
            width: WIDTH,
            experts: EXPERTS,
            format,
            ..SynthConfig::new(family)
        };
        synth::write(&config, dir.path()).unwrap();
        let bytes = std::fs::read(dir.path().join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensor = |view: TensorView<'_>| Tensor {
            dtype: view.dtype(),
            shape: view.shape().to_vec(),
            data: view.data().to_vec(),
        };
        Self {
            config: serde_json::from_slice(&std::fs::read(dir.path().join("config.json")).unwrap()).unwrap(),
            tensors: file.tensors().into_iter().map(|(name, view)| (name, tensor(view))).collect(),
        }
    }

    pub(crate) fn write(&self, dir: &Path) {
        let config = Value::Object(self.config.clone()).to_string();
        std::fs::write(dir.join("config.json"), config).unwrap();
        let views = self
            .tensors
            .iter()
            .map(|(name, t)| (name.clone(), TensorView::new(t.dtype, t.shape.clone(), &t.data).unwrap()));
        serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
    }

    pub(crate) fn open(&self) -> Result<(tempfile::TempDir, Checkpoint), ModelError> {
        let dir = tempfile::tempdir().unwrap();
        self.write(dir.path());
        let checkpoint = Checkpoint::open(dir.path())?;
        Ok((dir, checkpoint))
    }

    fn take(&mut self, name: &str) -> Vec<f32> {
        let tensor = self.tensors.remove(name).unwrap_or_else(|| panic!("no {name}"));
        tensor.data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    pub(crate) fn put(&mut self, name: String, dtype: Dtype, shape: &[usize], data: Vec<u8>) {
        self.tensors.insert(name, Tensor { dtype, shape: shape.to_vec(), data });
    }

    fn put_f32(&mut self, name: String, shape: &[usize], values: &[f32]) {
        self.put(name, Dtype::F32, shape, values.iter().flat_map(|x| x.to_le_bytes()).collect());
    }

    fn rename(&mut self, from: &str, to: &str) {
        let all = std::mem::take(&mut self.tensors);
        self.tensors = all.into_iter().map(|(name, tensor)| (name.replacen(from, to, 1), tensor)).collect();
    }
}

fn transpose(values: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    (0..cols).flat_map(|c| (0..rows).map(move |r| values[r * cols + c])).collect()
}

/// Gathers a layer's separate experts into the two fused tensors.
fn fuse(parts: &mut CheckpointParts, base: &str, transposed: bool) {
    let (mut gate_up, mut down) = (Vec::new(), Vec::new());
    for e in 0..EXPERTS {
        let mut take = |leaf: &str| parts.take(&format!("{base}experts.{e}.{leaf}.weight"));
        let both = [take("gate_proj"), take("up_proj")].concat();
        let back = take("down_proj");
        if transposed {
            gate_up.extend(transpose(&both, 2 * WIDTH, HIDDEN));
            down.extend(transpose(&back, HIDDEN, WIDTH));
        } else {
            gate_up.extend(both);
            down.extend(back);
        }
    }
    let (up_shape, down_shape) = if transposed {
        ([EXPERTS, HIDDEN, 2 * WIDTH], [EXPERTS, WIDTH, HIDDEN])
    } else {
        ([EXPERTS, 2 * WIDTH, HIDDEN], [EXPERTS, HIDDEN, WIDTH])
    };
    parts.put_f32(format!("{base}experts.gate_up_proj"), &up_shape, &gate_up);
    parts.put_f32(format!("{base}experts.down_proj"), &down_shape, &down);
}

pub(crate) fn all_experts(checkpoint: &Checkpoint) -> Vec<[Vec<f64>; 3]> {
    let layers: Vec<LayerId> = checkpoint.spec().moe_layers().map(|(layer, _)| layer).collect();
    let expert = |layer, e| {
        let tensors = checkpoint.expert(layer, ExpertId(e)).unwrap();
        [dense(&tensors.gate), dense(&tensors.up), dense(&tensors.down)]
    };
    layers
        .into_iter()
        .flat_map(|layer| (0..EXPERTS as u32).map(move |e| (layer, e)))
        .map(|(l, e)| expert(l, e))
        .collect()
}

#[test]
fn fused_experts_are_told_apart_by_shape() {
    let original = CheckpointParts::of("qwen3_moe");
    let expected = all_experts(&original.open().unwrap().1);
    for transposed in [false, true] {
        let mut parts = original.clone();
        for layer in 0..2 {
            fuse(&mut parts, &format!("model.layers.{layer}.mlp."), transposed);
        }
        let (_dir, checkpoint) = parts.open().unwrap();
        assert!(all_experts(&checkpoint) == expected, "transposed: {transposed}");
        assert_eq!(checkpoint.expert_bytes(LayerId(1)), (3 * HIDDEN * WIDTH * 4) as u64);
    }
}

#[test]
fn prefixes_and_nested_configs_are_recognised() {
    let original = CheckpointParts::of("qwen3_moe");
    let expected = all_experts(&original.open().unwrap().1);
    for prefix in ["model.language_model.", "language_model.model.", "language_model.", ""] {
        let mut parts = original.clone();
        parts.rename("model.", prefix);
        let mut text = std::mem::take(&mut parts.config);
        text.insert("quantization_config".into(), Value::Null);
        parts.config = json!({
            "model_type": "some_wrapper",
            "text_config": text,
            "vision_config": {"model_type": "x", "num_experts": 5, "moe_of_its_own": true},
        })
        .as_object()
        .unwrap()
        .clone();
        let (_dir, checkpoint) = parts.open().unwrap();
        assert!(all_experts(&checkpoint) == expected, "{prefix:?}");
        parts.config.insert("router_of_the_whole".into(), json!(1));
        let message = parts.open().unwrap_err().to_string();
        assert!(message.contains("`router_of_the_whole` is not supported"), "{message}");
    }
}

/// All FP8 codes in turn, except the two that are NaN.
fn fp8_codes(count: usize, salt: usize) -> Vec<u8> {
    (0..count)
        .map(|i| ((i * 7 + salt) % 256) as u8)
        .map(|b| if b & 0x7f == 0x7f { b ^ 1 } else { b })
        .collect()
}

/// The value by the definition of e4m3: sign, four bits of exponent with bias 7, three bits of mantissa.
pub(crate) fn fp8_value(code: u8) -> f64 {
    let magnitude = match (code >> 3 & 15, f64::from(code & 7)) {
        (0, mantissa) => mantissa * 2f64.powi(-9),
        (exponent, mantissa) => (8.0 + mantissa) * 2f64.powi(i32::from(exponent) - 10),
    };
    if code >= 128 { -magnitude } else { magnitude }
}

pub(crate) type Scale = fn(usize, usize) -> f32;

/// A checkpoint with separate FP8 experts, and the values of its matrices.
pub(crate) fn quantised(
    suffix: &str,
    dtype: Dtype,
    shape: impl Fn([usize; 2]) -> (Vec<usize>, [usize; 2]),
    scale: Scale,
) -> (CheckpointParts, Vec<[Vec<f64>; 3]>) {
    let mut parts = CheckpointParts::of("qwen3_moe");
    let mut expected = Vec::new();
    for layer in 0..2 {
        for e in 0..EXPERTS {
            let matrices = [
                ("gate_proj", [WIDTH, HIDDEN]),
                ("up_proj", [WIDTH, HIDDEN]),
                ("down_proj", [HIDDEN, WIDTH]),
            ];
            expected.push(matrices.map(|(leaf, [rows, cols])| {
                let name = format!("model.layers.{layer}.mlp.experts.{e}.{leaf}.weight");
                let codes = fp8_codes(rows * cols, e + 31 * layer);
                let (scale_shape, [block_rows, block_cols]) = shape([rows, cols]);
                let grid_cols = cols.div_ceil(block_cols);
                let count: usize = scale_shape.iter().product();
                let scales: Vec<f32> = (0..count).map(|i| scale(i / grid_cols, i % grid_cols)).collect();
                let values = (0..rows * cols).map(|i| {
                    let (r, c) = (i / cols, i % cols);
                    fp8_value(codes[i]) * f64::from(scales[r / block_rows * grid_cols + c / block_cols])
                });
                let values = values.collect();
                let bytes = scales.iter().flat_map(|s| match dtype {
                    Dtype::BF16 => half::bf16::from_f32(*s).to_le_bytes().to_vec(),
                    _ => s.to_le_bytes().to_vec(),
                });
                parts.put(format!("{name}{suffix}"), dtype, &scale_shape, bytes.collect());
                parts.put(name, Dtype::F8_E4M3, &[rows, cols], codes);
                values
            }));
        }
    }
    (parts, expected)
}

/// A scale that is exact in bf16 and different everywhere.
pub(crate) fn scale_of(r: usize, c: usize) -> f32 {
    (1.0 + ((r * 5 + c * 3) % 7) as f32 / 8.0) / 64.0
}

#[track_caller]
pub(crate) fn same(parts: &CheckpointParts, expected: &[[Vec<f64>; 3]]) {
    let (_dir, checkpoint) = parts.open().unwrap();
    assert!(all_experts(&checkpoint) == expected, "dequantised matrices differ");
}

#[test]
fn fp8_scales_by_block_channel_and_tensor() {
    let blocks = |side: usize| {
        move |[rows, cols]: [usize; 2]| (vec![rows.div_ceil(side), cols.div_ceil(side)], [side; 2])
    };
    let (mut parts, expected) = quantised("_scale_inv", Dtype::F32, blocks(40), scale_of);
    let config = json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [40, 40]});
    parts.config.insert("quantization_config".into(), config);
    same(&parts, &expected);
    // The config declares how rows are scaled next to the format of the weights.
    for (declared, expected) in [(None, false), (Some("ue8m0"), true)] {
        let mut config = json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [40, 40]});
        if let Some(declared) = declared {
            config["scale_fmt"] = json!(declared);
        }
        parts.config.insert("quantization_config".into(), config);
        let (_dir, checkpoint) = parts.open().unwrap();
        let found = checkpoint.spec().moe_layers().map(|(_, moe)| moe.experts.power_of_two_scales);
        assert!(found.collect::<Vec<_>>().iter().all(|found| *found == expected), "{declared:?}");
    }
    // GPU ranks keep these weights in bf16.
    let shape = GroupShape {
        ranks: 1,
        sources: 1,
        slots: 2,
        max_tokens_per_rank: 8,
        max_segments: 8,
        hidden: HIDDEN,
        max_top_k: 2,
    };
    let (_dir, checkpoint) = parts.open().unwrap();
    gpu::check(checkpoint.spec(), &shape).unwrap();
    let (_, moe) = checkpoint.spec().moe_layers().next().unwrap();
    for fp8 in [Fp8Products::OF_BOTH, Fp8Products::NONE] {
        let stored = gpu::Stored::routed(&moe.experts);
        assert_eq!(stored.on_device(fp8), gpu::DeviceFormat::Bf16);
        assert!(stored.explain(fp8).contains("blocks of 40 columns"), "{}", stored.explain(fp8));
    }

    let (mut parts, expected) = quantised("_scale_inv", Dtype::F32, blocks(128), scale_of);
    let config = json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]});
    parts.config.insert("quantization_config".into(), config);
    same(&parts, &expected);
    gpu::check(parts.open().unwrap().1.spec(), &shape).unwrap();

    let (mut parts, expected) = quantised("_scale", Dtype::BF16, blocks(32), scale_of);
    let weights = json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]});
    let config =
        json!({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}});
    parts.config.insert("quantization_config".into(), config);
    same(&parts, &expected);

    let compressed = |strategy: &str| {
        let weights = json!({"num_bits": 8, "type": "float", "strategy": strategy});
        json!({"quant_method": "compressed-tensors", "format": "float-quantized",
               "config_groups": {"group_0": {"weights": weights}}})
    };
    for flat in [false, true] {
        let shape =
            move |[rows, cols]: [usize; 2]| (if flat { vec![rows] } else { vec![rows, 1] }, [1, cols]);
        let (mut parts, expected) = quantised("_scale", Dtype::BF16, shape, scale_of);
        parts.config.insert("quantization_config".into(), compressed("channel"));
        same(&parts, &expected);
    }
    for shape in [vec![], vec![1], vec![1, 1]] {
        let (mut parts, expected) =
            quantised("_scale", Dtype::F32, |[r, c]| (shape.clone(), [r, c]), |_, _| 0.03125);
        parts.config.insert("quantization_config".into(), compressed("tensor"));
        same(&parts, &expected);
    }
}

#[test]
fn layers_that_a_quantised_checkpoint_leaves_alone_stay_as_they_are() {
    let (mut parts, mut expected) = quantised(
        "_scale_inv",
        Dtype::F32,
        |[r, c]| (vec![r.div_ceil(128), c.div_ceil(128)], [128, 128]),
        scale_of,
    );
    let plain = CheckpointParts::of("qwen3_moe");
    let all = all_experts(&plain.open().unwrap().1);
    for (name, tensor) in &plain.tensors {
        if name.starts_with("model.layers.1.") {
            parts.tensors.insert(name.clone(), tensor.clone());
        }
    }
    expected.truncate(EXPERTS);
    expected.extend_from_slice(&all[EXPERTS..]);
    parts.config.insert(
        "quantization_config".into(),
        json!({"quant_method": "fp8", "weight_block_size": [128, 128]}),
    );
    same(&parts, &expected);
}
