//! Tests that synthesised checkpoints of every family and format open and give outputs of reasonable size.
//!
//! `EXPERTD_SYNTH_OUT=DIR` keeps the checkpoints, so that `scripts/golden.py DIR --record` can run them through
//! transformers.
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use expertd_compute::experts::reference::block;
use expertd_compute::gate::CpuGate;
use expertd_model::synth::{self, SynthConfig, SynthFormat};
use expertd_model::{Checkpoint, WeightFormat};
use expertd_types::{Coverage, Fp8Products};
use rand::{RngExt, SeedableRng};
use rand_distr::StandardNormal;

const FORMATS: [(SynthFormat, &str); 10] = [
    (SynthFormat::Bf16, "bf16"),
    (SynthFormat::F16, "f16"),
    (SynthFormat::F32, "f32"),
    (SynthFormat::Fp8, "fp8"),
    (SynthFormat::Mxfp4, "mxfp4"),
    (SynthFormat::Mxfp8, "mxfp8"),
    (SynthFormat::Nvfp4, "nvfp4"),
    (SynthFormat::Int4, "int4"),
    (SynthFormat::Int4Gptq, "int4-gptq"),
    (SynthFormat::Int4Awq, "int4-awq"),
];

fn configs(family: &str) -> Vec<(String, SynthConfig)> {
    let mut all = Vec::new();
    for (format, name) in FORMATS {
        let small = SynthConfig { format, layers: 3, seed: 11, ..SynthConfig::new(family) };
        all.push((format!("{family}-{name}"), small.clone()));
        // Sizes that are not divisors of 128 or of each other, and several files.
        let odd = match format {
            SynthFormat::Bf16 | SynthFormat::F16 | SynthFormat::F32 | SynthFormat::Fp8 => (72, 136),
            SynthFormat::Nvfp4 => (80, 144),
            _ => (96, 160),
        };
        let top_k = if family == "phimoe" { 2 } else { 3 };
        let (hidden, width) = odd;
        let odd = SynthConfig { hidden, width, experts: 9, top_k, max_shard_bytes: 1 << 20, ..small };
        all.push((format!("{family}-{name}-odd"), odd));
    }
    all
}

fn directory(temporary: &tempfile::TempDir, name: &str) -> PathBuf {
    let root = std::env::var_os("EXPERTD_SYNTH_OUT").map_or(temporary.path().to_owned(), PathBuf::from);
    root.join(name)
}

fn check(name: &str, config: &SynthConfig, dir: &Path) {
    let checkpoint = Checkpoint::open(dir).unwrap_or_else(|error| panic!("{name}: {error}"));
    let spec = checkpoint.spec();
    assert_eq!(
        (spec.family.as_str(), spec.hidden, spec.num_layers),
        (config.family.as_str(), config.hidden, 3)
    );
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(5);
    for (layer, moe) in spec.moe_layers() {
        let expected = match config.format {
            SynthFormat::Bf16 => WeightFormat::Bf16,
            SynthFormat::F16 => WeightFormat::F16,
            SynthFormat::F32 => WeightFormat::F32,
            SynthFormat::Fp8 => WeightFormat::Fp8E4m3,
            SynthFormat::Mxfp4 => WeightFormat::Mxfp4,
            SynthFormat::Mxfp8 => WeightFormat::Mxfp8,
            SynthFormat::Nvfp4 => WeightFormat::Nvfp4,
            SynthFormat::Int4 | SynthFormat::Int4Gptq | SynthFormat::Int4Awq => WeightFormat::Int4,
        };
        assert_eq!(moe.experts.format, expected, "{name}");
        let zero_points = matches!(config.format, SynthFormat::Int4Gptq | SynthFormat::Int4Awq);
        assert_eq!(moe.experts.zero_points, zero_points, "{name}");
        match expected {
            WeightFormat::Int4 => assert_eq!(moe.experts.scale_cols, Some(32), "{name}"),
            WeightFormat::Nvfp4 => assert_eq!(moe.experts.scale_cols, Some(16), "{name}"),
            _ => {}
        }
        assert_eq!((moe.experts.count, moe.gate.top_k), (config.experts, config.top_k), "{name}");
        let tokens = 6;
        let rows: Vec<f32> = (0..tokens * config.hidden).map(|_| rng.sample(StandardNormal)).collect();
        let token_ids: Vec<i32> = (0..tokens).map(|_| rng.random_range(0..128)).collect();
        let gate = CpuGate::new(&moe.gate, &checkpoint.gate(layer).unwrap());
        let (mut ids, mut weights) = (vec![-1; tokens * config.top_k], vec![f32::NAN; tokens * config.top_k]);
        gate.route(&rows, Some(&token_ids), &mut ids, &mut weights).unwrap();
        let output = block(&checkpoint, layer, &rows, (&ids, &weights), Fp8Products::NONE).unwrap();
        let square = output.iter().map(|x| x * x).sum::<f64>() / output.len() as f64;
        assert!((0.01..300.0).contains(&square), "{name} layer {layer}: outputs have mean square {square}");
        let different = ids.iter().collect::<std::collections::BTreeSet<_>>().len();
        assert!(different > config.experts / 4, "{name} layer {layer}: only {different} experts were chosen");
    }
}

#[test]
fn every_family_and_format_can_be_written_and_opened() {
    let temporary = tempfile::tempdir().unwrap();
    assert_eq!(synth::families().len(), 31);
    for family in synth::families() {
        for (name, config) in configs(family) {
            let dir = directory(&temporary, &name);
            let mut written = 0;
            synth::write_with(&config, &dir, &mut |bytes| written += bytes).unwrap();
            assert_eq!(written, synth::size(&config).unwrap(), "{name}");
            check(&name, &config, &dir);
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_fingerprint_and_another_seed_another() {
    let temporary = tempfile::tempdir().unwrap();
    let fingerprint = |name: &str, seed, coverage| {
        let dir = temporary.path().join(name);
        synth::write(&SynthConfig { seed, ..SynthConfig::new("qwen2_moe") }, &dir).unwrap();
        Checkpoint::open(&dir).unwrap().fingerprint(coverage)
    };
    for coverage in [Coverage::Sampled, Coverage::Whole] {
        let first = fingerprint("a", 1, coverage);
        assert_eq!(first.coverage, coverage);
        assert_eq!(first, fingerprint("b", 1, coverage));
        assert_ne!(first, fingerprint("c", 2, coverage));
    }
    let (sampled, whole) = (fingerprint("a", 1, Coverage::Sampled), fingerprint("a", 1, Coverage::Whole));
    assert_ne!(sampled.digest, whole.digest);
}

#[test]
fn bytes_are_counted_while_all_of_them_are_digested() {
    let temporary = tempfile::tempdir().unwrap();
    synth::write(&SynthConfig::new("qwen2_moe"), temporary.path()).unwrap();
    let checkpoint = Checkpoint::open(temporary.path()).unwrap();
    let digested = |coverage| {
        let count = AtomicUsize::new(0);
        let add = |bytes| _ = count.fetch_add(bytes, Ordering::Relaxed);
        checkpoint.expect(&checkpoint.fingerprint(coverage), &add).unwrap();
        count.into_inner() as u64
    };
    assert_eq!(digested(Coverage::Sampled), 0);
    // Gates belong to MoE blocks, too.
    assert!(digested(Coverage::Whole) > checkpoint.bytes());
}

#[test]
fn invalid_sizes_are_refused_by_name() {
    let temporary = tempfile::tempdir().unwrap();
    let refused = |config: SynthConfig| synth::write(&config, temporary.path()).unwrap_err().to_string();
    let base = SynthConfig::new("mixtral");
    assert!(refused(SynthConfig::new("gpt2")).contains("`gpt2` is unknown; the known families are mixtral"));
    assert!(refused(SynthConfig { top_k: 9, ..base.clone() }).contains("top-k: expected 1 to 8, found 9"));
    assert!(refused(SynthConfig { hidden: 0, ..base.clone() }).contains("hidden"));
    let odd = SynthConfig { format: SynthFormat::Mxfp4, width: 100, ..base };
    assert!(refused(odd).contains("width: expected a multiple of 32"));
}

#[test]
fn weights_that_do_not_fit_the_file_system_are_refused_before_any_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let sizes =
        SynthConfig { hidden: 1 << 20, width: 1 << 20, experts: 64, layers: 64, ..SynthConfig::new("olmoe") };
    let error = synth::write(&sizes, folder.path()).unwrap_err();
    let synth::SynthError::Space { needed, free, .. } = error else { panic!("{error}") };
    assert!(needed > free, "{needed} {free}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
