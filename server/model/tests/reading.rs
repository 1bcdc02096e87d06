//! Tests of experts that are read to memory instead of through a mapping.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs::File;
use std::path::Path;

use expertd_model::synth::{self, SynthConfig, SynthFormat};
use expertd_model::{Checkpoint, ExpertTensors, ModelError, ReadBuffer, Scales};
use expertd_types::{ExpertId, LayerId};
use rustix::fs::{Advice, fadvise};

const FIRST: LayerId = LayerId(0);

/// The bytes of all matrices, and of the exponents, scales and zero points that are used as they are stored.
fn bytes<'a>(tensors: &'a ExpertTensors<'_>) -> Vec<&'a [u8]> {
    let of = |scales: &'a Scales<'_>| match scales {
        Scales::Mx { exponents, .. } => [*exponents, &[]],
        Scales::Groups(groups) => [groups.data, groups.zeros.map_or(&[][..], |zeros| zeros.data)],
        Scales::None | Scales::Block { .. } => [&[][..], &[]],
    };
    let matrices = [&tensors.gate, &tensors.up, &tensors.down];
    matrices.into_iter().flat_map(|m| [&[m.data][..], &of(&m.scales)].concat()).collect()
}

/// Compares every expert that is read with the mapped one; returns the number of experts.
fn compare(checkpoint: &Checkpoint, buffer: &mut ReadBuffer) -> usize {
    let mut experts = 0;
    for (layer, moe) in checkpoint.spec().moe_layers() {
        for expert in (0..moe.experts.count as u32).map(ExpertId) {
            let read = checkpoint.read_expert(layer, expert, buffer).unwrap();
            assert_eq!(bytes(&read), bytes(&checkpoint.expert(layer, expert).unwrap()), "{layer}, {expert}");
            experts += 1;
        }
        let read = checkpoint.read_shared(layer, buffer).unwrap();
        let mapped = checkpoint.shared(layer).unwrap();
        assert_eq!(read.is_some(), mapped.is_some());
        if let (Some(read), Some(mapped)) = (read, mapped) {
            assert_eq!(bytes(&read.mlp), bytes(&mapped.mlp), "{layer}, shared");
        }
    }
    experts
}

#[test]
fn experts_of_all_families_are_read_as_they_are_stored() {
    let folders = ["golden", "quantised"].map(expertd_test_fixtures::all).concat();
    assert!(folders.len() >= 30, "{folders:?}");
    let mut buffer = ReadBuffer::past_cache();
    for folder in folders {
        assert!(compare(&Checkpoint::open(&folder).unwrap(), &mut buffer) > 0, "{}", folder.display());
    }
}

/// A checkpoint of 25 MB on the disk of the build, whose pages the page cache does not hold.
fn on_disk(folder: &Path) -> Checkpoint {
    let config = SynthConfig {
        hidden: 1024,
        width: 512,
        experts: 8,
        layers: 1,
        format: SynthFormat::Bf16,
        ..SynthConfig::new("qwen3_moe")
    };
    synth::write(&config, folder).unwrap();
    let file = File::open(folder.join("model.safetensors")).unwrap();
    file.sync_all().unwrap();
    fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    let checkpoint = Checkpoint::open(folder).unwrap();
    checkpoint.expect_reads_past_cache();
    checkpoint
}

#[test]
fn what_the_page_cache_lacks_is_read_past_it() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let checkpoint = on_disk(folder.path());
    let mut buffer = ReadBuffer::past_cache();
    let mut read = Vec::new();
    for expert in (0..8).map(ExpertId) {
        let tensors = checkpoint.read_expert(FIRST, expert, &mut buffer).unwrap();
        read.push(bytes(&tensors).concat());
    }
    let total = buffer.total();
    assert_eq!(total.cached + total.direct, 8 * checkpoint.expert_bytes(FIRST));
    // File systems in memory have nothing to read past.
    let in_memory = rustix::fs::statfs(folder.path()).unwrap().f_type == libc::TMPFS_MAGIC;
    assert!(in_memory || total.direct > total.cached, "{total:?}");
    for (expert, read) in (0..8).map(ExpertId).zip(read) {
        let mapped = checkpoint.expert(FIRST, expert).unwrap();
        assert!(read == bytes(&mapped).concat(), "expert {expert} is not what the file holds");
    }
    // Comparing has brought everything to the page cache.
    let mut buffer = ReadBuffer::past_cache();
    compare(&checkpoint, &mut buffer);
    assert_eq!(buffer.total().direct, 0);
}

#[test]
fn a_file_that_has_become_shorter_is_an_error() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let checkpoint = on_disk(folder.path());
    File::options()
        .write(true)
        .open(folder.path().join("model.safetensors"))
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    let mut buffer = ReadBuffer::past_cache();
    let mut failed = 0;
    for expert in (0..8).map(ExpertId) {
        match checkpoint.read_expert(FIRST, expert, &mut buffer) {
            Ok(_) => {}
            Err(ModelError::Written { path }) => {
                assert!(path.ends_with("model.safetensors"), "{path:?}");
                failed += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!(failed >= 7, "{failed} experts end behind the first MiB");
}
