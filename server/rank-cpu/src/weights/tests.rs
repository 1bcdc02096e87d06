use std::path::Path;
use std::time::Duration;

use expertd_compute::linalg::Fp8Scales;
use expertd_ipc::control::{CheckpointSource, DeviceKind};
use expertd_model::synth::{self, SynthConfig, SynthFormat};
use expertd_types::{Coverage, LayerPlacement, LayerRange};

use super::*;

const BF16: Fp8Products = Fp8Products::NONE;

fn setup(folder: &Path, rank: u32, fingerprint: WeightFingerprint) -> LoaderSetup {
    LoaderSetup {
        rank: Rank(rank),
        ranks: 3,
        sources: 3,
        device: DeviceKind::Cpu,
        gpus: Vec::new(),
        fp8_products: Fp8Products::OF_FP8,
        checkpoint: CheckpointSource {
            folder: folder.to_owned(),
            layers: LayerRange::whole(2),
            fingerprint,
            placement: None,
        },
        cores: Vec::new(),
        threads: 1,
        heartbeat: Duration::from_secs(1),
        in_background: false,
    }
}

/// Families with biases, token tables, correction biases and gated shared experts.
#[test]
fn a_share_is_mapped_as_it_was_packed() {
    for family in ["gpt_oss", "qwen2_moe", "deepseek_v3"] {
        let folder = tempfile::tempdir().unwrap();
        synth::write(&SynthConfig::new(family), &folder.path().join("model")).unwrap();
        let folder = folder.path().join("model");
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let fingerprint = checkpoint.fingerprint(Coverage::Sampled);
        let packed = pack(&setup(&folder, 1, fingerprint), &Progress::default()).unwrap();
        let mapped = map(packed.memory[0].try_clone().unwrap(), Rank(1), (3, 3), &fingerprint, BF16).unwrap();
        assert_eq!(&mapped.spec, checkpoint.spec(), "{family}");
        assert_eq!(mapped.weight_bytes, packed.weight_bytes);
        for (layer, moe) in checkpoint.spec().moe_layers() {
            let of_rank = mapped.layers[layer.index()].as_ref().unwrap();
            let share = ExpertShare::of_rank(Rank(1), 3, None).experts(layer, moe);
            assert_eq!((of_rank.mine.clone(), of_rank.experts.len()), (share.clone(), share.len()));
            let gate = CpuGate::new(&moe.gate, &checkpoint.gate(layer).unwrap());
            let of_rank_gate = of_rank.gate.as_ref().unwrap();
            assert_eq!(of_rank_gate.weight().elements(), gate.weight().elements());
            assert_eq!(of_rank_gate.vectors(), gate.vectors());
            for (expert, mapped) in share.into_iter().zip(&of_rank.experts) {
                let own = pack_expert(&checkpoint, layer, expert, &ReadBuffers::new(&checkpoint)).unwrap();
                for (mapped, own) in mapped.matrices().into_iter().zip(own.matrices()) {
                    assert_eq!((mapped.form(), mapped.elements()), (own.form(), own.elements()));
                    assert_eq!(mapped.scales(), own.scales());
                }
                assert_eq!(mapped.biases(), own.biases(), "{family}");
            }
            assert_eq!(of_rank.shared.is_some(), moe.shared.is_some());
        }
        // Another rank, other numbers of ranks and other weights are refused.
        let other = WeightFingerprint { digest: [0; 16], ..fingerprint };
        for (rank, group, fingerprint) in
            [(0, (3, 3), fingerprint), (1, (2, 2), fingerprint), (1, (3, 1), fingerprint), (1, (3, 3), other)]
        {
            let refused = map(packed.memory[0].try_clone().unwrap(), Rank(rank), group, &fingerprint, BF16);
            assert!(matches!(refused, Err(WeightsError::Contents { .. })), "{rank} of {group:?}");
        }
        let refused = pack(&setup(&folder, 1, other), &Progress::default());
        assert!(matches!(refused, Err(WeightsError::Model(ModelError::OtherWeights { .. }))));
    }
}

/// A rank's experts need not be consecutive, and another rank may hold copies of them.
#[test]
fn a_placed_share_is_mapped_as_it_was_packed() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("model");
    synth::write(&SynthConfig::new("mixtral"), &folder).unwrap();
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let fingerprint = checkpoint.fingerprint(Coverage::Sampled);
    let (layer, moe) = checkpoint.spec().moe_layers().next().unwrap();
    let last = moe.experts.count as u32 - 1;
    let placed = LayerPlacement::new(vec![(0..=last).collect(), vec![last, 0], vec![]]);
    let mut setup = setup(&folder, 1, fingerprint);
    setup.checkpoint.placement = Some(ExpertPlacement::new(3, [(layer, placed)]));
    let packed = pack(&setup, &Progress::default()).unwrap();
    let mapped = map(packed.memory[0].try_clone().unwrap(), Rank(1), (3, 3), &fingerprint, BF16).unwrap();
    let found = mapped.layers[layer.index()].as_ref().unwrap();
    assert_eq!((found.mine.as_slice(), found.experts.len()), ([0, last].as_slice(), 2));
    assert_eq!((found.local[0], found.local[1], found.local[last as usize]), (0, NOT_HERE, 1));
    assert_eq!(found.owners.of(ExpertId(last)).unwrap(), [Rank(0), Rank(1)]);
    for (&expert, mapped) in found.mine.iter().zip(&found.experts) {
        let own = pack_expert(&checkpoint, layer, expert, &ReadBuffers::new(&checkpoint)).unwrap();
        for (mapped, own) in mapped.matrices().into_iter().zip(own.matrices()) {
            assert_eq!(mapped.elements(), own.elements());
        }
    }
}

/// In a mixed group the ranks beside the source have neither gates nor shared experts, and no copies of experts that an earlier rank
/// owns.
#[test]
fn ranks_without_rows_hold_only_what_they_compute() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("model");
    synth::write(&SynthConfig { layers: 2, ..SynthConfig::new("qwen2_moe") }, &folder).unwrap();
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let fingerprint = checkpoint.fingerprint(Coverage::Sampled);
    let layers: Vec<_> = checkpoint.spec().moe_layers().collect();
    let experts = layers[0].1.experts.count as u32;
    // Layer 0 is whole on the source. In layer 1 rank 1 has a copy of the source's expert 0, rank 2 one of rank 1's.
    let whole = LayerPlacement::new(vec![(0..experts).collect(), vec![1], vec![]]);
    let split = LayerPlacement::new(vec![vec![0], (0..experts - 1).collect(), vec![1, experts - 1]]);
    let placement = ExpertPlacement::new(3, [(layers[0].0, whole), (layers[1].0, split)]);
    let loader = |rank| LoaderSetup {
        sources: 1,
        checkpoint: CheckpointSource {
            placement: Some(placement.clone()),
            ..setup(&folder, rank, fingerprint).checkpoint
        },
        ..setup(&folder, rank, fingerprint)
    };
    let expert_bytes = layers[0].1.experts.bytes;
    for (rank, held) in [(1, (1..experts - 1).collect::<Vec<_>>()), (2, vec![experts - 1])] {
        let packed = pack(&loader(rank), &Progress::default()).unwrap();
        assert_eq!(packed.weight_bytes, held.len() as u64 * expert_bytes);
        let memory = packed.memory[0].try_clone().unwrap();
        let mapped = map(memory, Rank(rank), (3, 1), &fingerprint, BF16).unwrap();
        let found: Vec<_> = mapped.layers.iter().flatten().collect();
        assert!(found.iter().all(|layer| layer.gate.is_none() && layer.shared.is_none()));
        assert_eq!((found[0].mine.len(), &found[1].mine), (0, &held));
    }
    let source = pack(&loader(0), &Progress::default()).unwrap();
    let mapped = map(source.memory[0].try_clone().unwrap(), Rank(0), (3, 1), &fingerprint, BF16).unwrap();
    assert!(mapped.layers.iter().flatten().all(|layer| layer.gate.is_some() && layer.shared.is_some()));
}

/// Only experts that are stored in FP8 or MXFP4 multiply FP8 rows, and only on request.
#[test]
fn fp8_rows_follow_from_the_format_and_the_setting() {
    let fp8_takers = [Fp8Products::OF_FP8, Fp8Products::OF_BOTH];
    let mxfp4_takers = [Fp8Products::OF_MXFP4, Fp8Products::OF_BOTH];
    for (family, format, takers) in [
        ("qwen2_moe", SynthFormat::Fp8, &fp8_takers[..]),
        ("gpt_oss", SynthFormat::Mxfp4, &mxfp4_takers),
        ("qwen2_moe", SynthFormat::Bf16, &[]),
        ("qwen2_moe", SynthFormat::Mxfp8, &[]),
        ("qwen2_moe", SynthFormat::Nvfp4, &[]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("model");
        synth::write(&SynthConfig { format, ..SynthConfig::new(family) }, &folder).unwrap();
        let fingerprint = Checkpoint::open(&folder).unwrap().fingerprint(Coverage::Sampled);
        let packed = pack(&setup(&folder, 1, fingerprint), &Progress::default()).unwrap();
        for products in [BF16, Fp8Products::OF_FP8, Fp8Products::OF_MXFP4, Fp8Products::OF_BOTH] {
            let expected = takers.contains(&products).then_some(Fp8Scales::F32);
            let memory = packed.memory[0].try_clone().unwrap();
            let mapped = map(memory, Rank(1), (3, 3), &fingerprint, products).unwrap();
            for layer in mapped.layers.iter().flatten() {
                let shared = layer.shared.as_ref().map(|shared| shared.kind);
                for kind in [layer.kind].into_iter().chain(shared) {
                    assert_eq!(kind.fp8_rows, expected, "{format:?}, {products:?}");
                }
            }
        }
    }
}

#[test]
fn memory_with_other_contents_is_refused() {
    let fingerprint = WeightFingerprint { coverage: Coverage::Sampled, digest: [1; 16] };
    let header = Header { magic: MAGIC, layout: LAYOUT, reserved: 0, index_bytes: u64::MAX };
    let later = Header { layout: LAYOUT + 1, index_bytes: 2, ..header };
    let empty = Header { index_bytes: 2, ..header };
    let layout = format!("layout {LAYOUT}");
    let contents: [(&str, Vec<u8>); 4] = [
        ("a header", b"short".to_vec()),
        ("an index", bytemuck::bytes_of(&header).to_vec()),
        (&layout, [bytemuck::bytes_of(&later), b"{}"].concat()),
        ("an index", [bytemuck::bytes_of(&empty), b"{}"].concat()),
    ];
    for (expected, bytes) in contents {
        let mut memory = SealedWriter::create("test").unwrap();
        memory.write_at(0, &bytes).unwrap();
        let refused = map(memory.seal().unwrap(), Rank(0), (1, 1), &fingerprint, BF16);
        let Err(error) = refused else { panic!("mapped") };
        assert!(error.to_string().contains(expected), "{error}");
    }
}
