//! Tests of INT4, NVFP4, MXFP4 and MXFP8 matrices in every arrangement of tensors that the loader knows, against values computed from
//! the formats' definitions. Tensors are packed here nibble by nibble, by rules that the loader does not share.

use expertd_model::{Checkpoint, MatrixView};
use expertd_types::{ExpertId, LayerId};
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::layouts::{CheckpointParts, EXPERTS, HIDDEN, WIDTH, all_experts, fp8_value};

/// One linear module whose tensors are written.
pub(crate) struct Module<'a> {
    parts: &'a mut CheckpointParts,
    name: String,
    rows: usize,
    cols: usize,
    salt: usize,
}

impl Module<'_> {
    fn put(&mut self, leaf: &str, dtype: Dtype, shape: &[usize], data: Vec<u8>) {
        self.parts.put(format!("{}.{leaf}", self.name), dtype, shape, data);
    }

    /// Writes 4-bit numbers as words `[rows, cols / 8]`, the nibbles of a word in an order of columns.
    fn put_words(
        &mut self,
        leaf: &str,
        [rows, cols]: [usize; 2],
        order: [usize; 8],
        of: impl Fn(usize, usize) -> u8,
    ) {
        let words = cols.div_ceil(8);
        let mut data = Vec::new();
        for (r, w) in (0..rows).flat_map(|r| (0..words).map(move |w| (r, w))) {
            let mut word = 0_u32;
            for (place, col) in order.iter().enumerate() {
                // A last word may be longer than the row.
                let number = if 8 * w + col < cols { of(r, 8 * w + col) } else { 13 };
                word |= u32::from(number) << (4 * place);
            }
            data.extend(word.to_le_bytes());
        }
        self.put(leaf, Dtype::I32, &[rows, words], data);
    }

    /// Writes scales, which are exact in all types.
    fn put_scales(
        &mut self,
        leaf: &str,
        dtype: Dtype,
        [rows, cols]: [usize; 2],
        of: impl Fn(usize, usize) -> f32,
    ) {
        let values = (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c))).map(|(r, c)| of(r, c));
        let data = values
            .flat_map(|x| match dtype {
                Dtype::F16 => half::f16::from_f32(x).to_le_bytes().to_vec(),
                Dtype::BF16 => half::bf16::from_f32(x).to_le_bytes().to_vec(),
                _ => x.to_le_bytes().to_vec(),
            })
            .collect();
        self.put(leaf, dtype, &[rows, cols], data);
    }

    /// The values of all elements.
    fn values(&self, of: impl Fn(usize, usize) -> f64) -> Vec<f64> {
        (0..self.rows).flat_map(|r| (0..self.cols).map(move |c| (r, c))).map(|(r, c)| of(r, c)).collect()
    }
}

const IN_ORDER: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

fn code(salt: usize, r: usize, c: usize) -> u8 {
    ((r * 11 + c * 7 + c / 16 + salt) % 16) as u8
}

/// Zero points, all sixteen of them.
fn zero(r: usize, g: usize) -> u8 {
    ((r * 5 + g * 3) % 16) as u8
}

/// A scale that is exact in bf16 and f16.
fn scale(r: usize, g: usize) -> f32 {
    (1.0 + ((r * 5 + g * 3) % 7) as f32 / 8.0) / 64.0
}

/// A checkpoint whose experts `write` stores, which returns their values.
pub(crate) fn stored(
    declared: Value,
    write: impl Fn(&mut Module<'_>) -> Vec<f64>,
) -> (CheckpointParts, Vec<[Vec<f64>; 3]>) {
    let mut parts = CheckpointParts::of("qwen3_moe");
    parts.config.insert("quantization_config".into(), declared);
    let mut expected = Vec::new();
    for (layer, e) in (0..2).flat_map(|layer| (0..EXPERTS).map(move |e| (layer, e))) {
        let matrices =
            [("gate_proj", [WIDTH, HIDDEN]), ("up_proj", [WIDTH, HIDDEN]), ("down_proj", [HIDDEN, WIDTH])];
        let salts = [0, 1, 2].map(|i| 17 * layer + 5 * e + i);
        let mut i = 0;
        expected.push(matrices.map(|(leaf, [rows, cols])| {
            let name = format!("model.layers.{layer}.mlp.experts.{e}.{leaf}");
            parts.tensors.remove(&format!("{name}.weight")).unwrap();
            i += 1;
            write(&mut Module { parts: &mut parts, name, rows, cols, salt: salts[i - 1] })
        }));
    }
    (parts, expected)
}

/// Checks the values of all experts: those of the slow reference exactly, and those that kernels start from, which are f32.
#[track_caller]
pub(crate) fn same((parts, expected): (CheckpointParts, Vec<[Vec<f64>; 3]>)) -> Checkpoint {
    let (_dir, checkpoint) = parts.open().unwrap_or_else(|error| panic!("{error}"));
    assert!(all_experts(&checkpoint) == expected, "dequantised matrices differ");
    let experts = (0..2).flat_map(|layer| (0..EXPERTS).map(move |e| (LayerId(layer), ExpertId(e as u32))));
    for ((layer, e), expected) in experts.zip(expected) {
        let tensors = checkpoint.expert(layer, e).unwrap();
        for (view, expected) in [tensors.gate, tensors.up, tensors.down].iter().zip(expected) {
            view.check().unwrap();
            same_in_f32(view, &expected);
        }
    }
    checkpoint
}

#[track_caller]
fn same_in_f32(view: &MatrixView<'_>, expected: &[f64]) {
    for (i, expected) in expected.iter().enumerate() {
        let found = f64::from(view.value(i / view.cols, i % view.cols));
        // A code times a scale, times a factor for NVFP4: two roundings.
        let most = expected.abs() * 2f64.powi(-23);
        assert!((found - expected).abs() <= most, "element {i} is {found}, expected {expected}");
    }
}

pub(crate) fn compressed(format: &str, weights: &Value) -> Value {
    json!({"quant_method": "compressed-tensors", "format": format,
           "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}})
}

fn shape_bytes(shape: [usize; 2], wide: bool) -> (Dtype, Vec<u8>) {
    let data = shape.iter().flat_map(|n| {
        if wide { (*n as i64).to_le_bytes().to_vec() } else { (*n as i32).to_le_bytes().to_vec() }
    });
    (if wide { Dtype::I64 } else { Dtype::I32 }, data.collect())
}

#[test]
fn integers_of_compressed_tensors() {
    // Groups that both sides are multiples of, and one group for each row.
    for (group, asymmetric, dtype) in [
        (Some(32), false, Dtype::BF16),
        (Some(16), true, Dtype::F16),
        (Some(8), true, Dtype::F32),
        (None, false, Dtype::BF16),
        (None, true, Dtype::F32),
    ] {
        let weights = match group {
            Some(size) => {
                json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": size, "symmetric": !asymmetric})
            }
            None => json!({"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": !asymmetric}),
        };
        let checkpoint = same(stored(compressed("pack-quantized", &weights), |module| {
            let (rows, cols, salt) = (module.rows, module.cols, module.salt);
            let size = group.unwrap_or(cols);
            module.put_words("weight_packed", [rows, cols], IN_ORDER, |r, c| code(salt, r, c));
            module.put_scales("weight_scale", dtype, [rows, cols / size], scale);
            let (shape_type, shape) = shape_bytes([rows, cols], dtype == Dtype::F32);
            module.put("weight_shape", shape_type, &[2], shape);
            if asymmetric {
                // Eight rows share a word: the words of the transposed matrix, transposed back.
                let groups = cols / size;
                let mut data = vec![0_u8; rows.div_ceil(8) * groups * 4];
                for (r, g) in (0..rows).flat_map(|r| (0..groups).map(move |g| (r, g))) {
                    data[(r / 8 * groups + g) * 4 + r % 8 / 2] |= zero(r, g) << (r % 2 * 4);
                }
                module.put("weight_zero_point", Dtype::I32, &[rows.div_ceil(8), groups], data);
            }
            module.values(|r, c| {
                let zero = if asymmetric { zero(r, c / size) } else { 8 };
                (f64::from(code(salt, r, c)) - f64::from(zero)) * f64::from(scale(r, c / size))
            })
        }));
        let experts = &checkpoint.spec().layer(LayerId(0)).unwrap().experts;
        assert_eq!((experts.scale_cols, experts.zero_points), (group, asymmetric));
    }
}

/// Zero points as the first version of GPTQ's files has them: 1 is subtracted from each nibble of a word, as one number.
fn less_one(word: u32) -> u32 {
    word.wrapping_sub(0x1111_1111)
}

/// Writes a module in GPTQ's tensors, in the first version of its files or the second. Returns its values.
pub(crate) fn put_gptq(module: &mut Module<'_>, group: i32, first_version: bool) -> Vec<f64> {
    let (rows, cols, salt) = (module.rows, module.cols, module.salt);
    let size = usize::try_from(group).unwrap_or(cols);
    let groups = cols.div_ceil(size);
    let mut words = vec![0_u32; cols / 8 * rows];
    for (r, c) in (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c))) {
        words[c / 8 * rows + r] |= u32::from(code(salt, r, c)) << (c % 8 * 4);
    }
    let data = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    module.put("qweight", Dtype::I32, &[cols / 8, rows], data);
    let mut zeros = vec![0_u32; groups * rows / 8];
    for (r, g) in (0..rows).flat_map(|r| (0..groups).map(move |g| (r, g))) {
        zeros[g * rows / 8 + r / 8] |= u32::from(zero(r, g)) << (r % 8 * 4);
    }
    let stored = |word: &u32| if first_version { less_one(*word) } else { *word }.to_le_bytes();
    let data = zeros.iter().flat_map(stored).collect();
    module.put("qzeros", Dtype::I32, &[groups, rows / 8], data);
    module.put_scales("scales", Dtype::F16, [groups, rows], |g, r| scale(r, g));
    let index = (0..cols).flat_map(|c| ((c / size) as i32).to_le_bytes()).collect();
    module.put("g_idx", Dtype::I32, &[cols], index);
    module.values(|r, c| {
        (f64::from(code(salt, r, c)) - f64::from(zero(r, c / size))) * f64::from(scale(r, c / size))
    })
}

#[test]
fn integers_of_gptq() {
    // 40 divides neither side: the last group of a row is smaller.
    for (group, version, reordered) in
        [(32, "gptq", false), (40, "gptq", true), (40, "gptq_v2", false), (-1, "gptq_v2", true)]
    {
        let declared = json!({"quant_method": "gptq", "bits": 4, "group_size": group, "checkpoint_format": version,
            "desc_act": reordered, "sym": false, "dynamic": {"-:.*gate$": {}}});
        let checkpoint = same(stored(declared, |module| put_gptq(module, group, version == "gptq")));
        let experts = &checkpoint.spec().layer(LayerId(0)).unwrap().experts;
        assert_eq!((experts.scale_cols, experts.zero_points), (usize::try_from(group).ok(), true));
    }
}

/// Writes a module in AWQ's tensors. Returns its values.
pub(crate) fn put_awq(module: &mut Module<'_>, group: usize) -> Vec<f64> {
    // The nibbles of a word, from the lowest on, hold these of its eight outputs.
    let order = [0, 2, 4, 6, 1, 3, 5, 7];
    let (rows, cols, salt) = (module.rows, module.cols, module.salt);
    module.put_words("qweight", [cols, rows], order, |c, r| code(salt, r, c));
    module.put_words("qzeros", [cols / group, rows], order, |g, r| zero(r, g));
    module.put_scales("scales", Dtype::F16, [cols / group, rows], |g, r| scale(r, g));
    module.values(|r, c| {
        (f64::from(code(salt, r, c)) - f64::from(zero(r, c / group))) * f64::from(scale(r, c / group))
    })
}

#[test]
fn integers_of_awq() {
    for (group, zero_point) in [(8, true), (32, false)] {
        let declared = json!({"quant_method": "awq", "version": "GEMM", "bits": 4, "group_size": group, "zero_point": zero_point,
            "modules_to_not_convert": ["gate"]});
        same(stored(declared, |module| put_awq(module, group)));
    }
}

/// The value by the definition of e2m1: sign, two bits of exponent with bias 1, one bit of mantissa.
fn fp4_value(code: u8) -> f64 {
    let magnitude = match (code >> 1 & 3, f64::from(code & 1)) {
        (0, mantissa) => mantissa / 2.0,
        (exponent, mantissa) => (2.0 + mantissa) * 2f64.powi(i32::from(exponent) - 2),
    };
    if code & 8 == 0 { magnitude } else { -magnitude }
}

fn fp4_bytes(module: &Module<'_>) -> Vec<u8> {
    let (rows, cols, salt) = (module.rows, module.cols, module.salt);
    let pairs = (0..rows).flat_map(|r| (0..cols / 2).map(move |p| (r, 2 * p)));
    pairs.map(|(r, c)| code(salt, r, c) | code(salt, r, c + 1) << 4).collect()
}

/// All codes of FP8 scales: positive numbers.
fn fp8_scale(r: usize, g: usize) -> u8 {
    ((r * 13 + g) % 0x7f) as u8
}

#[test]
fn nvfp4_of_modelopt_and_compressed_tensors() {
    let weights = json!({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": true});
    let of_modelopt = json!({"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]});
    for (declared, names, scalar) in [
        (compressed("nvfp4-pack-quantized", &weights), ["weight_packed", "weight_global_scale"], vec![1]),
        (json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}), ["weight", "weight_scale_2"], vec![]),
        (
            json!({"quant_method": "modelopt", "quantization": of_modelopt}),
            ["weight", "weight_scale_2"],
            vec![1],
        ),
        (
            json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
                   "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A16_NVFP4", "group_size": 16}}}),
            ["weight", "weight_scale_2"],
            vec![],
        ),
    ] {
        // An exact reciprocal, so that dividing and multiplying by it give the same numbers.
        let factor = if names[0] == "weight" { 2f32.powi(-9) } else { 2f32.powi(9) };
        let checkpoint = same(stored(declared, |module| {
            let (rows, cols, salt) = (module.rows, module.cols, module.salt);
            module.put(names[0], Dtype::U8, &[rows, cols / 2], fp4_bytes(module));
            let scales = (0..rows).flat_map(|r| (0..cols / 16).map(move |g| fp8_scale(r, g))).collect();
            module.put("weight_scale", Dtype::F8_E4M3, &[rows, cols / 16], scales);
            module.put(names[1], Dtype::F32, &scalar, factor.to_le_bytes().to_vec());
            module.put("input_scale", Dtype::F32, &[], 0.5_f32.to_le_bytes().to_vec());
            module.values(|r, c| {
                fp4_value(code(salt, r, c)) * (fp8_value(fp8_scale(r, c / 16)) * 2f64.powi(-9))
            })
        }));
        let experts = &checkpoint.spec().layer(LayerId(0)).unwrap().experts;
        assert_eq!((experts.scale_cols, experts.zero_points), (Some(16), false));
        assert_eq!(experts.bytes, (3 * (HIDDEN * WIDTH / 2 + HIDDEN * WIDTH / 16 + 4)) as u64);
    }
}

#[test]
fn modelopt_may_declare_in_a_file_of_its_own() {
    let (mut parts, _) = stored(Value::Null, |module| {
        let (rows, cols) = (module.rows, module.cols);
        module.put("weight", Dtype::U8, &[rows, cols / 2], fp4_bytes(module));
        module.put("weight_scale", Dtype::F8_E4M3, &[rows, cols / 16], vec![0x38; rows * cols / 16]);
        module.put("weight_scale_2", Dtype::F32, &[], 1_f32.to_le_bytes().to_vec());
        Vec::new()
    });
    parts.config.remove("quantization_config");
    let dir = tempfile::tempdir().unwrap();
    parts.write(dir.path());
    let message = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("is stored as U8"), "{message}");
    let declare = |algorithm: &str| {
        let file = json!({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm, "group_size": 16}});
        std::fs::write(dir.path().join("hf_quant_config.json"), file.to_string()).unwrap();
        Checkpoint::open(dir.path())
    };
    declare("NVFP4").unwrap();
    let message = declare("INT4_AWQ").unwrap_err().to_string();
    assert!(
        message.contains("hf_quant_config.json: quantization.quant_algo = \"INT4_AWQ\" is not"),
        "{message}"
    );
}

/// E8M0 exponents around that of 1.
fn exponent(r: usize, g: usize) -> u8 {
    (110 + (r * 3 + g) % 35) as u8
}

fn exponents(module: &Module<'_>) -> Vec<u8> {
    let (rows, cols) = (module.rows, module.cols);
    (0..rows).flat_map(|r| (0..cols / 32).map(move |g| exponent(r, g))).collect()
}

#[test]
fn microscaling_formats_with_separate_experts() {
    let weights =
        |bits: u8| json!({"num_bits": bits, "type": "float", "strategy": "group", "group_size": 32});
    for (declared, leaf) in [
        (compressed("mxfp4-pack-quantized", &weights(4)), "weight_packed"),
        (json!({"quant_method": "modelopt", "quant_algo": "mxfp4"}), "weight"),
    ] {
        same(stored(declared, |module| {
            let (rows, cols, salt) = (module.rows, module.cols, module.salt);
            module.put(leaf, Dtype::U8, &[rows, cols / 2], fp4_bytes(module));
            module.put("weight_scale", Dtype::U8, &[rows, cols / 32], exponents(module));
            module
                .values(|r, c| fp4_value(code(salt, r, c)) * 2f64.powi(i32::from(exponent(r, c / 32)) - 127))
        }));
    }
    for (declared, leaf, dtype) in [
        (compressed("mxfp8-quantized", &weights(8)), "weight_scale", Dtype::U8),
        (json!({"quant_method": "modelopt", "quant_algo": "MXFP8"}), "weight_scale", Dtype::F8_E8M0),
        (json!({"quant_method": "mxfp8", "weight_block_size": [1, 32]}), "weight_scale_inv", Dtype::U8),
    ] {
        same(stored(declared, |module| {
            let (rows, cols, salt) = (module.rows, module.cols, module.salt);
            // All FP8 codes but those that are no numbers.
            let code = |r: usize, c: usize| match ((r * 31 + c * 7 + salt) % 256) as u8 {
                code if code & 0x7f == 0x7f => code ^ 1,
                code => code,
            };
            let codes = (0..rows * cols).map(|i| code(i / cols, i % cols)).collect();
            module.put("weight", Dtype::F8_E4M3, &[rows, cols], codes);
            module.put(leaf, dtype, &[rows, cols / 32], exponents(module));
            module.values(|r, c| fp8_value(code(r, c)) * 2f64.powi(i32::from(exponent(r, c / 32)) - 127))
        }));
    }
}

#[test]
fn stacks_of_all_experts_in_nvfp4() {
    // One factor for all experts, one for each, and one for each gate and up.
    for factors in [0, 1, 2] {
        let mut parts = CheckpointParts::of("qwen3_moe");
        parts.tensors.retain(|name, _| !name.contains(".experts."));
        let declared = json!({"quant_method": "modelopt", "quant_algo": "NVFP4"});
        parts.config.insert("quantization_config".into(), declared);
        let factor = |e: usize, half: usize| match factors {
            0 => 2f32.powi(-9),
            1 => 2f32.powi(-9 - e as i32),
            _ => 2f32.powi(-9 - 2 * e as i32 - half as i32),
        };
        let mut expected = vec![[vec![], vec![], vec![]]; 2 * EXPERTS];
        for (layer, leaf, [rows, cols]) in (0..2).flat_map(|layer| {
            [("gate_up_proj", [2 * WIDTH, HIDDEN]), ("down_proj", [HIDDEN, WIDTH])]
                .map(|(leaf, shape)| (layer, leaf, shape))
        }) {
            let (mut codes, mut scales, mut numbers) = (Vec::new(), Vec::new(), Vec::new());
            let halves = if leaf == "down_proj" { 1 } else { 2 };
            for e in 0..EXPERTS {
                let name = String::new();
                let module = Module { parts: &mut parts, name, rows, cols, salt: 3 * e + layer };
                codes.extend(fp4_bytes(&module));
                scales.extend((0..rows).flat_map(|r| (0..cols / 16).map(move |g| fp8_scale(r + e, g))));
                numbers.extend((0..halves).map(|half| factor(e, half)));
                let values = module.values(|r, c| {
                    let half = r / (rows / halves);
                    fp4_value(code(3 * e + layer, r, c))
                        * (fp8_value(fp8_scale(r + e, c / 16)) * f64::from(factor(e, half)))
                });
                let place = &mut expected[layer * EXPERTS + e];
                if leaf == "down_proj" {
                    place[2] = values;
                } else {
                    let (gate, up) = values.split_at(WIDTH * HIDDEN);
                    (place[0], place[1]) = (gate.to_vec(), up.to_vec());
                }
            }
            let shape = match factors {
                0 => vec![],
                2 if halves == 2 => vec![EXPERTS, 2],
                _ => vec![EXPERTS],
            };
            if halves == 2 && factors == 1 {
                numbers = numbers.into_iter().step_by(2).collect();
            }
            numbers.truncate(shape.iter().product());
            let stem = format!("model.layers.{layer}.mlp.experts.{leaf}");
            parts.put(stem.clone(), Dtype::U8, &[EXPERTS, rows, cols / 2], codes);
            parts.put(format!("{stem}_weight_scale"), Dtype::F8_E4M3, &[EXPERTS, rows, cols / 16], scales);
            let data = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
            parts.put(format!("{stem}_weight_scale_2"), Dtype::F32, &shape, data);
        }
        let checkpoint = same((parts, expected));
        assert_eq!(checkpoint.spec().layer(LayerId(0)).unwrap().experts.scale_cols, Some(16));
    }
}
