//! Tests of `size`.

#![allow(clippy::unwrap_used)]

use clap::Parser;
use expertd_model::synth::{self, SynthConfig};

use super::*;

#[derive(Debug, Parser)]
struct Cli {
    #[command(flatten)]
    size: SizeArgs,
}

fn printed(more: &[&str]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let config = SynthConfig { layers: 3, ..SynthConfig::new("mixtral") };
    synth::write(&config, dir.path()).unwrap();
    let line = [&["size", dir.path().to_str().unwrap()], more].concat();
    text(&Cli::try_parse_from(line).unwrap().size).unwrap()
}

#[test]
fn huge_numbers_are_bounded_or_refused() {
    let all = printed(&["--spare-experts", "8"]);
    assert_eq!(printed(&["--spare-experts", "18446744073709551615"]), all);
    printed(&["--max-session-bytes", "18446744073709551615"]);
    let dir = tempfile::tempdir().unwrap();
    synth::write(&SynthConfig::new("mixtral"), dir.path()).unwrap();
    let folder = dir.path().to_str().unwrap();
    let line = ["size", folder, "--max-bytes-in-flight", "18446744073709551615"];
    let error = text(&Cli::try_parse_from(line).unwrap().size).unwrap_err();
    assert!(error.contains("must be at most 1099511627776"), "{error}");
}

#[test]
fn the_block_has_requests_equal_to_limits() {
    let text = printed(&["--ranks", "2", "--cores", "6"]);
    // 2.25 GiB in the router, 256 MiB of ranks, and small windows and weights.
    let resources =
        "resources:\n  requests: { cpu: \"6\", memory: 3Gi }\n  limits: { cpu: \"6\", memory: 3Gi }\n";
    assert!(text.ends_with(resources), "{text}");
    let text = printed(&["--ranks", "4", "--device", "cuda"]);
    assert!(text.contains("nvidia.com/gpu: \"4\" }") && text.contains("cpu: \"16\""), "{text}");
    assert!(text.contains("# GPU"), "{text}");
    assert!(text.contains("# ranks      4.5 GiB") && text.contains("memory: 7Gi"), "{text}");
}

#[test]
fn limits_of_the_service_are_counted() {
    // 256 MiB of messages instead of 2 GiB, and 4 GiB of sessions, mapped by three processes.
    let text = printed(&[
        "--ranks",
        "2",
        "--max-bytes-in-flight",
        "134217728",
        "--max-session-bytes",
        "12884901888",
    ]);
    assert!(text.contains("# sessions   up to 4.0 GiB") && text.contains("memory: 5Gi"), "{text}");
    let dir = tempfile::tempdir().unwrap();
    synth::write(&SynthConfig::new("mixtral"), dir.path()).unwrap();
    let line = ["size", dir.path().to_str().unwrap(), "--max-bytes-in-flight", "1000"];
    let error = super::text(&Cli::try_parse_from(line).unwrap().size).unwrap_err();
    assert!(error.contains("--max-bytes-in-flight is 1000"), "{error}");
}

#[test]
fn copies_of_experts_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("placement.json");
    let sizes = |text: &str, more: &[&str]| {
        std::fs::write(&file, text).unwrap();
        let line = [&["size", "x", "--ranks", "2"], more].concat();
        let dir = tempfile::tempdir().unwrap();
        synth::write(&SynthConfig { layers: 2, ..SynthConfig::new("mixtral") }, dir.path()).unwrap();
        let checkpoint = Checkpoint::open_layers(dir.path(), LayerChoice::All).unwrap();
        MemoryNeeds::new(checkpoint.spec(), &Cli::try_parse_from(line).unwrap().size)
    };
    let path = file.to_str().unwrap();
    let even = sizes("", &[]).unwrap();
    assert_eq!(even, sizes(r#"{"ranks": 2, "layers": []}"#, &["--placement", path]).unwrap());
    // Layer 1 has eight experts: rank 0 owns six, rank 1 all of them.
    let placed = r#"{"ranks": 2, "layers": [{"layer": 1, "experts": [[0,1,2,3,4,5], [0,1,2,3,4,5,6,7]]}]}"#;
    let placed = sizes(placed, &["--placement", path]).unwrap();
    let more = |sizes: &MemoryNeeds, rank: usize| sizes.weights[rank] - even.weights[rank];
    assert!(more(&placed, 0).abs_diff(more(&placed, 1) / 2) < 100, "{placed:?} {even:?}");
    // Two spare experts in each of two layers.
    let spare = sizes("", &["--spare-experts", "2"]).unwrap();
    assert!(more(&spare, 0).abs_diff(more(&placed, 1)) < 100, "{spare:?}");
    assert_eq!(sizes("", &["--spare-experts", "9"]), sizes("", &["--spare-experts", "4"]));
    let error = sizes(r#"{"ranks": 3, "layers": []}"#, &["--placement", path]).unwrap_err();
    assert!(error.contains("placement.json") && error.contains("3 ranks"), "{error}");
}

#[test]
fn mxfp4_multiplied_in_fp8_takes_the_memory_of_a_wider_multiple() {
    use expertd_model::synth::SynthFormat;
    let dir = tempfile::tempdir().unwrap();
    let config =
        SynthConfig { hidden: 256, width: 192, format: SynthFormat::Mxfp4, ..SynthConfig::new("gpt_oss") };
    synth::write(&config, dir.path()).unwrap();
    let checkpoint = Checkpoint::open_layers(dir.path(), LayerChoice::All).unwrap();
    let weights = |more: &[&str]| {
        let line = [&["size", "x", "--mxfp4-compute"], more].concat();
        MemoryNeeds::new(checkpoint.spec(), &Cli::try_parse_from(line).unwrap().size).unwrap().weights[0]
    };
    let (widened, fp8) = (weights(&["bf16", "--device", "cuda"]), weights(&["fp8", "--device", "cuda"]));
    // 96 units for each expert instead of 80; gates are as large.
    assert!(fp8 > widened * 11 / 10 && fp8 < widened * 12 / 10, "{widened} {fp8}");
    assert_eq!(weights(&["bf16"]), weights(&["fp8"]));
}

#[test]
fn fewer_layers_need_less() {
    let spec = |choice| {
        let dir = tempfile::tempdir().unwrap();
        synth::write(&SynthConfig { layers: 3, ..SynthConfig::new("mixtral") }, dir.path()).unwrap();
        Checkpoint::open_layers(dir.path(), choice).unwrap().spec().clone()
    };
    let args = Cli::try_parse_from(["size", "x", "--ranks", "2"]).unwrap().size;
    let all = MemoryNeeds::new(&spec(LayerChoice::All), &args).unwrap();
    let share = MemoryNeeds::new(&spec(LayerChoice::Share { index: 0, of: 3 }), &args).unwrap();
    let total = |sizes: &MemoryNeeds| sizes.weights.iter().sum::<u64>();
    assert!((3 * total(&share)).abs_diff(total(&all)) < 100, "{share:?} {all:?}");
    assert_eq!(all.windows, share.windows);
}

#[test]
fn cpu_ranks_of_a_mixed_group_need_no_gates_and_shared_experts() {
    let dir = tempfile::tempdir().unwrap();
    synth::write(&SynthConfig { layers: 2, ..SynthConfig::new("qwen2_moe") }, dir.path()).unwrap();
    let checkpoint = Checkpoint::open_layers(dir.path(), LayerChoice::All).unwrap();
    let weights = |more: &[&str]| {
        let line = [&["size", "x", "--device", "cpu,cpu", "--ranks", "1,2"], more].concat();
        MemoryNeeds::new(checkpoint.spec(), &Cli::try_parse_from(line).unwrap().size).unwrap().weights
    };
    let of_expert: u64 = checkpoint.spec().moe_layers().map(|(_, moe)| moe.experts.bytes).sum();
    let count = checkpoint.spec().max_experts() as u64;
    let found = weights(&[]);
    let experts = |rank: u64| (count / 3 + u64::from(rank < count % 3)) * of_expert;
    let padded = |bytes: u64| bytes / 10 * PADDING_TENTHS;
    assert_eq!(found[1..], [padded(experts(1)), padded(experts(2))]);
    assert!(found[0] > padded(experts(0)), "the source has both");
    // Copies beside the first owner are not held.
    let file = dir.path().join("placement.json");
    std::fs::write(
        &file,
        r#"{"ranks": 3, "layers": [{"layer": 0, "experts": [[0,1,2,3,4,5,6,7], [0,1,2], [3]]}]}"#,
    )
    .unwrap();
    let copies = weights(&["--placement", file.to_str().unwrap()]);
    assert_eq!(copies[1..], [1, 2].map(|rank| padded(experts(rank) / 2)));
}

#[test]
fn spare_experts_and_the_memory_of_a_gpu_exclude_each_other() {
    let both =
        ["size", "x", "--device", "cuda,cpu", "--ranks", "1,1", "--gpu-memory", "1G", "--spare-experts", "1"];
    let refused = Cli::try_parse_from(both).unwrap_err().to_string();
    assert!(refused.contains("--gpu-memory") && refused.contains("--spare-experts"), "{refused}");
}

#[test]
fn a_mixed_group_has_weights_in_both_memories() {
    let all = printed(&["--device", "cuda"]);
    let mixed = printed(&["--device", "cuda,cpu", "--ranks", "1,2", "--gpu-memory", "300K"]);
    for part in
        ["# wire", "# GPU", "of CPU ranks", "3 ranks on cuda,cpu", "nvidia.com/gpu: \"1\"", "cpu: \"20\""]
    {
        assert!(mixed.contains(part), "{part} is not in {mixed}");
    }
    assert!(!all.contains("# wire") && !all.contains("# steps"), "{all}");
    assert!(mixed.starts_with("# steps      a layer takes about"), "{mixed}");
    let is_comment = |line: &str| line.starts_with("# ") && line.chars().count() <= crate::units::COLUMNS;
    assert!(mixed.lines().take_while(|line| *line != "resources:").all(is_comment), "{mixed}");
    let refused = |more: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        synth::write(&SynthConfig::new("mixtral"), dir.path()).unwrap();
        let line = [&["size", dir.path().to_str().unwrap()], more].concat();
        text(&Cli::try_parse_from(line).unwrap().size).unwrap_err()
    };
    for (more, part) in [
        (&["--device", "cuda,cpu", "--ranks", "1,2"][..], "needs --gpu-memory or --placement"),
        (&["--device", "cuda,cpu", "--ranks", "2"], "expected 1,CPU_RANKS"),
        (&["--device", "cuda", "--ranks", "1,2"], "expected 1,CPU_RANKS"),
        (&["--ranks", "9"], "must be 1 to 8"),
        (&["--gpu-memory", "1G"], "needs --device cuda,cpu"),
        (&["--device", "cuda,cpu", "--ranks", "1,2", "--gpu-memory", "1K"], "one expert of each layer"),
    ] {
        let error = refused(more);
        assert!(error.contains(part), "{more:?}: {part:?} is not in {error}");
    }
}
