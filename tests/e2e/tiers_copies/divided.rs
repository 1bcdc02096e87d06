//! Steps for which some experts of CPU ranks come to the source, while CPU ranks compute the others.

use expertd_model::synth::{SynthConfig, SynthFormat};
use rand::RngExt as _;

use super::pair::{Pair, all};
use crate::gpu::gpus;
use crate::tiers::POISONED_WIRE;

/// Middling steps are divided: some experts of CPU ranks come to the source, the others stay.
async fn middling_steps_are_divided(device: &str, environment: &[(&str, &str)]) {
    let (all_from, divided_from) = (160, 8);
    let mut pair = Pair::start(device, &["--stream-rows", &all_from.to_string()], environment).await;
    for layer in 0..2 {
        pair.call_until(layer, 64, |[of_source, _]| of_source > 0).await;
    }
    let mut divided = 0;
    for step in 0..60 {
        let tokens = pair.rng.random_range(1..200);
        let (_, [of_source, of_others]) = pair.counted_call(step % 2, tokens, &all()).await;
        let what = format!("{tokens} rows: {of_source} at the source, {of_others} elsewhere");
        assert_eq!(of_others == 0, tokens >= all_from, "{what}");
        assert!(of_source == 0 || tokens >= divided_from, "{what}");
        divided += usize::from(of_source > 0 && of_others > 0);
        // With so many rows each expert that comes has some. A GPU's share moves to where copies and CPU ranks end together.
        let share = tokens as f64 / (tokens as f64 + all_from as f64 / 4.0);
        let expected = share * (of_source + of_others) as f64;
        if device == "cpu,cpu" && (40..all_from).contains(&tokens) {
            assert!((0.6..1.3).contains(&(of_source as f64 / expected)), "{what}, expected {expected}");
        }
    }
    assert!(divided > 5, "{divided} steps were divided");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_computes_some_experts_of_middling_steps() {
    middling_steps_are_divided("cpu,cpu", &[POISONED_WIRE]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn some_experts_come_to_a_gpu_for_middling_steps() {
    let _in_use = gpus();
    middling_steps_are_divided("cuda,cpu", &[POISONED_WIRE]).await;
    middling_steps_are_divided("cuda,cpu", &[POISONED_WIRE, ("EXPERTD_CUDA_POISON", "50")]).await;
}

/// Divided steps of other families and formats, which overlap one another and whole ones while slots change.
async fn divided_steps_overlap(device: &str, environment: &[(&str, &str)]) {
    for (family, format) in [
        ("gpt_oss", SynthFormat::Mxfp4),
        ("qwen2_moe", SynthFormat::Bf16),
        ("qwen3_moe", SynthFormat::Int4),
        ("qwen3_moe", SynthFormat::Nvfp4),
    ] {
        let like = SynthConfig { format, ..SynthConfig::new(family) };
        let more = ["--stream-rows", "160", "--slot-memory", "300K"];
        let mut pair = Pair::of(&like, device, &more, environment).await;
        let ranks = pair.mixed.1.ranks();
        for round in 0..2 {
            if round == 1 {
                pair.call_until(0, 64, |[of_source, _]| of_source > 0).await;
            }
            for _ in 0..30 {
                let tokens = [0, 1].map(|_| pair.rng.random_range(1..200));
                pair.call_both_layers(tokens).await;
            }
        }
        assert_eq!(pair.mixed.1.ranks(), ranks, "{family}: a step failed");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn divided_steps_of_a_source_overlap() {
    divided_steps_overlap("cpu,cpu", &[POISONED_WIRE]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn divided_steps_of_a_gpu_overlap() {
    let _in_use = gpus();
    divided_steps_overlap("cuda,cpu", &[POISONED_WIRE, ("EXPERTD_CUDA_POISON", "50")]).await;
}
