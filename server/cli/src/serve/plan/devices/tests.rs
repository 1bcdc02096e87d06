//! Tests of `devices`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use expertd_core::cluster::ClusterConfig;
use expertd_ipc::GroupShape;
use expertd_ipc::control::CheckpointSource;
use expertd_model::{Checkpoint, LayerChoice};
use expertd_rank_cuda::{GpuFacts, NcclFacts};
use expertd_test_fixtures::fixture;
use expertd_types::{Coverage, Fp8Products};

use super::*;
use crate::serve::plan::machine::Machine;
use crate::serve::plan::sizes::Sizes;
use crate::serve::plan::{Timeouts, cluster};
use crate::serve::settings::SettingSource;

const HOPPER: (i32, i32) = (9, 0);
const TURING: (i32, i32) = (7, 5);

fn inventory(gpus: &[(i32, i32)], nccl: Result<(u32, u32, u32), &str>) -> Inventory {
    let gpu = |&capability: &(i32, i32)| GpuFacts { name: "A card".into(), capability, multiprocessors: 132 };
    let nccl = nccl.map(|version| NcclFacts { version, origin: "libnccl.so.2".into() });
    let peers = vec![vec![true; gpus.len()]; gpus.len()];
    Inventory { gpus: gpus.iter().map(gpu).collect(), peers, nccl: nccl.map_err(str::to_owned) }
}

fn choose(serve: ServeArgs, found: &Inventory) -> (Result<Devices, String>, Given) {
    let ask = || Ok(found.clone());
    let host = Host { has_gpu_ranks: true, gpus: found.gpus.len() as u32, inventory: &ask, nodes: 2 };
    let mut given = Given::merge(&serve, None).unwrap();
    let chosen = Devices::choose(&mut given, &host).map_err(|error| error.to_string());
    (chosen, given)
}

fn listed(gpus: &str, share: bool) -> ServeArgs {
    ServeArgs { gpus: Some(gpus.into()), share_gpu: Some(share), ..ServeArgs::default() }
}

fn on_gpus(gpus: &[u32]) -> Result<Devices, String> {
    Ok(Devices {
        device: DeviceKind::Cuda,
        ranks: gpus.len() as u32,
        sources: gpus.len() as u32,
        gpus: gpus.to_vec(),
        kernels: Some(KernelPath::Hopper),
    })
}

#[test]
fn a_list_gives_each_rank_its_gpu() {
    let four = inventory(&[HOPPER; 4], Ok((2, 28, 9)));
    let (chosen, given) = choose(listed("2, 0", false), &four);
    assert_eq!(chosen, on_gpus(&[2, 0]));
    assert_eq!(given.ranks, (Some(2.into()), SettingSource::Default("one per GPU listed".into())));
    assert_eq!(given.device.0, Some(DeviceKind::Cuda.into()));
    let same = ServeArgs { ranks: Some(2.into()), ..listed("3,1", true) };
    assert_eq!(choose(same, &four).0, on_gpus(&[3, 1]), "permission that is not used changes nothing");
}

#[test]
fn ranks_share_a_gpu_if_that_is_allowed_and_nccl_can() {
    let of = |version| inventory(&[HOPPER; 2], Ok(version));
    assert_eq!(choose(listed("0,1,0,0", true), &of((2, 30, 7))).0, on_gpus(&[0, 1, 0, 0]));
    let refused = choose(listed("0,0", false), &of((2, 30, 7))).0.unwrap_err();
    assert!(refused.starts_with("gpus: ") && refused.contains("--share-gpu"), "{refused}");
    let old = choose(listed("0,0", true), &of((2, 28, 9))).0.unwrap_err();
    assert!(old.starts_with("share-gpu: ") && old.contains("2.28.9") && old.contains("2.30"), "{old}");
    let none = inventory(&[HOPPER], Err("cannot open NCCL from libnccl.so.2"));
    let none = choose(listed("0,0", true), &none).0.unwrap_err();
    assert!(none.contains("cannot open NCCL") && none.contains("2.30"), "{none}");
}

#[test]
fn contradictions_and_unknown_gpus_are_named() {
    let two = inventory(&[HOPPER, TURING], Ok((2, 30, 7)));
    let refused = |serve: ServeArgs| choose(serve, &two).0.unwrap_err();
    for (serve, part) in [
        (
            ServeArgs { ranks: Some(4.into()), ..listed("0,0", true) },
            "has 2 entries, one for each rank, but ranks is 4",
        ),
        (ServeArgs { device: Some(DeviceKind::Cpu.into()), ..listed("0", false) }, "device is cpu"),
        (listed("2", false), "names GPU 2, but this process sees 2 GPUs"),
        (listed("0,0,0,0,0,0,0,0,0", true), "has 9 entries"),
        (listed("1", false), "compute capability 7.5, needed: compute capability 8.0 (Ampere) or newer"),
        (listed("", false), "is not the number of a GPU"),
        (listed("0-1", false), "`0-1` in `0-1`"),
        (listed("0,-1", false), "`-1` in"),
    ] {
        let refused = refused(serve);
        assert!(refused.starts_with("gpus: ") && refused.contains(part), "{part:?} is not in {refused}");
    }
    let host = Host { has_gpu_ranks: false, gpus: 2, inventory: &|| unreachable!(), nodes: 1 };
    let mut given = Given::merge(&listed("0", false), None).unwrap();
    let refused = Devices::choose(&mut given, &host).unwrap_err().to_string();
    assert!(refused.contains("no GPU ranks"), "{refused}");
}

#[test]
fn without_a_list_ranks_take_the_supported_gpus_in_turn() {
    let found = inventory(&[TURING, HOPPER, HOPPER], Err("none"));
    assert_eq!(choose(ServeArgs::default(), &found).0, on_gpus(&[1, 2]));
    let one = ServeArgs { ranks: Some(1.into()), ..ServeArgs::default() };
    let (chosen, given) = choose(one, &found);
    assert_eq!((chosen, given.gpus.0.as_deref()), (on_gpus(&[1]), Some("1")));
    let three = ServeArgs { ranks: Some(3.into()), ..ServeArgs::default() };
    let refused = choose(three, &found).0.unwrap_err();
    assert!(refused.contains("is 3, but only 2 GPUs") && refused.contains("7.5"), "{refused}");
}

#[test]
fn unsupported_gpus_leave_the_cpu_unless_gpus_were_asked_for() {
    let found = inventory(&[TURING], Err("none"));
    let (chosen, given) = choose(ServeArgs::default(), &found);
    assert_eq!(
        chosen,
        Ok(Devices { device: DeviceKind::Cpu, ranks: 2, sources: 2, gpus: Vec::new(), kernels: None })
    );
    let SettingSource::Default(why) = &given.device.1 else { panic!("{:?}", given.device) };
    assert!(why.contains("GPU 0 (A card) has compute capability 7.5"), "{why}");
    assert_eq!(given.gpus.0, None);
    let cuda = ServeArgs { device: Some(DeviceKind::Cuda.into()), ..ServeArgs::default() };
    let refused = choose(cuda, &found).0.unwrap_err();
    assert!(refused.starts_with("device: ") && refused.contains("use --device cpu"), "{refused}");
}

#[test]
fn the_kernels_follow_from_the_cards_and_the_setting() {
    const ADA: (i32, i32) = (8, 9);
    let kernels = |serve: ServeArgs, cards: &[(i32, i32)]| {
        let (chosen, given) = choose(serve, &inventory(cards, Err("none")));
        (chosen.map(|devices| devices.kernels), given.gpu_path)
    };
    let (chosen, path) = kernels(ServeArgs::default(), &[ADA, TURING]);
    assert_eq!(chosen, Ok(Some(KernelPath::Portable)));
    assert_eq!(path, (Some(GpuPath::Auto), SettingSource::Default("the ranks run portable kernels".into())));
    let forced = ServeArgs { gpu_path: Some(GpuPath::Portable), ..ServeArgs::default() };
    assert_eq!(kernels(forced.clone(), &[HOPPER, ADA]).0, Ok(Some(KernelPath::Portable)));
    assert_eq!(kernels(ServeArgs::default(), &[HOPPER]).0, Ok(Some(KernelPath::Hopper)));
    let refused = kernels(listed("0,1", false), &[HOPPER, ADA]).0.unwrap_err();
    assert!(refused.starts_with("gpus: ") && refused.contains("different kernels"), "{refused}");
}

/// Cards whose ranks would fail only after they have loaded.
#[test]
fn gpus_that_cannot_form_a_group_have_one_rank() {
    let ranks = |count: u32| ServeArgs { ranks: Some(count.into()), ..ServeArgs::default() };
    let three = inventory(&[HOPPER; 3], Ok((2, 28, 9)));
    let mut no_peers = three.clone();
    no_peers.peers = (0..3).map(|from| (0..3).map(|to| from == to).collect()).collect();
    let mut unequal = three.clone();
    unequal.gpus[0].multiprocessors = 28;
    unequal.gpus[2].multiprocessors = 114;
    for (found, apart) in [(no_peers, "no peer access to GPU"), (unequal, "has 28 multiprocessors")] {
        let (chosen, given) = choose(ServeArgs::default(), &found);
        assert_eq!(chosen, on_gpus(&[0]));
        let SettingSource::Default(why) = &given.ranks.1 else { panic!("{:?}", given.ranks) };
        assert!(why.contains(apart), "{apart:?} is not in {why}");
        let refused = choose(ranks(2), &found).0.unwrap_err();
        assert!(
            refused.starts_with("ranks: is 2, but the largest group of GPUs that was found has 1")
                && refused.contains(apart),
            "{refused}"
        );
        let refused = choose(listed("0,1", false), &found).0.unwrap_err();
        assert!(refused.starts_with("gpus: ") && refused.contains(apart), "{refused}");
        assert_eq!(choose(listed("1", false), &found).0, on_gpus(&[1]));
        assert_eq!(choose(ranks(1), &found).0, on_gpus(&[0]));
    }
    // The last two of three are alike.
    let mut pair = three;
    pair.gpus[0].multiprocessors = 28;
    assert_eq!(choose(ServeArgs::default(), &pair).0, on_gpus(&[1, 2]));
    assert_eq!(choose(ranks(2), &pair).0, on_gpus(&[1, 2]));
    assert!(choose(ranks(3), &pair).0.unwrap_err().contains("found has 2"));
}

#[test]
fn a_cache_that_the_driver_cannot_write_is_refused_where_kernels_are_compiled() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let with = |cache: &Path, card| {
        let serve = ServeArgs { gpu_cache_dir: Some(cache.to_owned()), ..ServeArgs::default() };
        choose(serve, &inventory(&[card], Err("none"))).0.map(|devices| devices.kernels)
    };
    let (blackwell, new) = ((12, 0), folder.path().join("new/folder"));
    assert_eq!(with(&new, blackwell), Ok(Some(KernelPath::Portable)));
    assert!(new.is_dir());
    let refused = with(&file.join("in"), blackwell).unwrap_err();
    assert!(refused.starts_with("gpu-cache-dir: ") && refused.contains("Not a directory"), "{refused}");
    assert_eq!(with(&file.join("in"), HOPPER), Ok(Some(KernelPath::Hopper)), "nothing is compiled");
}

/// A machine with a rank on each of these GPUs.
fn machine_with(gpus: &[u32]) -> Machine {
    let ranks = gpus.len();
    Machine {
        device: DeviceKind::Cuda,
        ranks: ranks as u32,
        sources: ranks as u32,
        gpus: gpus.to_vec(),
        kernels: Some(KernelPath::Hopper),
        environment: gpu::environment(gpus),
        fp8_products: Fp8Products::default(),
        usable_cores: ranks,
        shares: (0..ranks).map(|core| vec![core]).collect(),
        nodes: vec![None; ranks],
        spin: Duration::ZERO,
    }
}

/// The ranks' configuration on these GPUs; `given` has the other settings.
fn cluster_on(gpus: &[u32], given: ServeArgs) -> ClusterConfig {
    let machine = machine_with(gpus);
    let shape = GroupShape {
        ranks: machine.ranks,
        sources: machine.ranks,
        slots: 2,
        max_tokens_per_rank: 1,
        max_segments: 1,
        hidden: 64,
        max_top_k: 1,
    };
    let spec = Checkpoint::open_layers(&fixture("golden/qwen3_moe"), LayerChoice::All).unwrap();
    let checkpoint = CheckpointSource {
        folder: PathBuf::new(),
        layers: spec.spec().held,
        fingerprint: spec.fingerprint(Coverage::Sampled),
        placement: None,
    };
    let mut given = Given::merge(&given, None).unwrap();
    let timeouts = Timeouts::of(&mut given, gpu::is_shared(gpus)).unwrap();
    cluster(machine, shape, &timeouts, checkpoint, serde_json::Value::Null, None)
}

#[test]
fn portable_kernels_take_every_stored_format_in_every_group() {
    let sizes = |name: &str, ranks| {
        let machine = Machine { kernels: Some(KernelPath::Portable), ranks, ..machine_with(&[0]) };
        let checkpoint = Checkpoint::open_layers(&fixture(name), LayerChoice::All).unwrap();
        let mut given = Given::merge(&ServeArgs::default(), None).unwrap();
        Sizes::choose(&mut given, checkpoint.spec(), &machine).map(|_| ()).map_err(|error| error.to_string())
    };
    // One GPU rank, alone and with two CPU ranks beside it.
    for ranks in [1, 3] {
        for name in ["deepseek_v3-nvfp4", "qwen3_moe-mxfp8-library", "deepseek_v3-int4"] {
            assert_eq!(sizes(&format!("quantised/{name}"), ranks), Ok(()), "{name}");
        }
    }
}

#[test]
fn ranks_that_share_a_gpu_get_more_time_and_the_permission_of_nccl() {
    let allows = |config: &ClusterConfig| {
        config.environment.iter().any(|(name, value)| name == "NCCL_MULTI_RANK_GPU_ENABLE" && value == "1")
    };
    let shared = cluster_on(&[1, 1, 0], ServeArgs::default());
    assert_eq!((shared.gpus.as_slice(), shared.peer_timeout), (&[1, 1, 0][..], Duration::from_secs(30)));
    assert!(allows(&shared));
    let apart = cluster_on(&[1, 0], ServeArgs::default());
    assert_eq!((apart.gpus.as_slice(), apart.peer_timeout), (&[1, 0][..], Duration::from_secs(2)));
    assert!(!allows(&apart));
    let given = ServeArgs { device_timeout_ms: Some(7000), ..ServeArgs::default() };
    assert_eq!(cluster_on(&[0, 0], given).peer_timeout, Duration::from_secs(7));
}

/// The GPU rank's loader has most of the weights, and the rank itself one or two cores. CPU ranks are loaded on their own NUMA nodes.
#[test]
fn the_loader_of_a_gpu_rank_beside_cpu_ranks_may_use_all_cores() {
    use expertd_types::Rank;
    let mut config = cluster_on(&[0], ServeArgs::default());
    assert_eq!((config.loader_cores(Rank(0)), config.loader_threads(Rank(0))), (vec![0], 1));
    config.shape.ranks = 3;
    config.devices = vec![DeviceKind::Cuda, DeviceKind::Cpu, DeviceKind::Cpu];
    config.cores = vec![vec![0, 1], vec![2, 3, 4, 5, 6], vec![7, 8, 9, 10, 11]];
    config.usable_cores = 12;
    assert_eq!((config.loader_cores(Rank(0)), config.loader_threads(Rank(0))), ((0..12).collect(), 4));
    assert_eq!((config.loader_cores(Rank(2)), config.loader_threads(Rank(2))), (vec![7, 8, 9, 10, 11], 5));
    assert_eq!((config.cores[0].len(), config.threads(Rank(0))), (2, 2), "the rank keeps its cores");
    config.devices[0] = DeviceKind::Cpu;
    assert_eq!((config.loader_cores(Rank(0)), config.loader_threads(Rank(0))), (vec![0, 1], 2));
}

#[test]
fn a_driver_that_does_not_answer_leaves_the_decision_to_the_ranks() {
    let host = Host { has_gpu_ranks: true, gpus: 2, inventory: &|| Err("hangs".into()), nodes: 1 };
    let mut given = Given::merge(&ServeArgs::default(), None).unwrap();
    let chosen = Devices::choose(&mut given, &host).map_err(|error| error.to_string());
    assert_eq!(chosen.map(|devices| (devices.gpus, devices.kernels)), Ok((vec![0, 1], None)));
}

#[test]
fn cpu_ranks_ask_no_driver() {
    let host = Host { has_gpu_ranks: true, gpus: 2, inventory: &|| unreachable!(), nodes: 3 };
    let cpu = ServeArgs { device: Some(DeviceKind::Cpu.into()), ..ServeArgs::default() };
    let mut given = Given::merge(&cpu, None).unwrap();
    let chosen = Devices::choose(&mut given, &host).map_err(|error| error.to_string());
    assert_eq!(
        chosen,
        Ok(Devices { device: DeviceKind::Cpu, ranks: 3, sources: 3, gpus: Vec::new(), kernels: None })
    );
}

#[test]
fn a_mixed_group_has_one_source_and_cpu_ranks() {
    let two = inventory(&[HOPPER; 2], Ok((2, 28, 9)));
    let mixed = |device: &str, ranks: Option<&str>| {
        let (device, ranks) = (device.parse().unwrap(), ranks.map(|ranks| ranks.parse().unwrap()));
        choose(ServeArgs { device: Some(device), ranks, ..ServeArgs::default() }, &two)
    };
    let of = |device, workers: u32, gpus: &[u32]| {
        let kernels = (device == DeviceKind::Cuda).then_some(KernelPath::Hopper);
        Ok(Devices { device, ranks: 1 + workers, sources: 1, gpus: gpus.to_vec(), kernels })
    };
    assert_eq!(mixed("cuda,cpu", Some("1,3")).0, of(DeviceKind::Cuda, 3, &[0]));
    assert_eq!(mixed("cpu,cpu", Some("1,2")).0, of(DeviceKind::Cpu, 2, &[]));
    let (chosen, given) = mixed("cuda,cpu", None);
    assert_eq!(
        (chosen, given.ranks.0.unwrap().to_string()),
        (of(DeviceKind::Cuda, 2, &[0]), "1,2".to_owned())
    );
    let cpu = ServeArgs { gpu_memory: Some("1GiB".parse().unwrap()), ..ServeArgs::default() };
    let listed_mixed = |gpus: &str, ranks: Option<&str>| {
        let device = Some("cuda,cpu".parse().unwrap());
        let ranks = ranks.map(|ranks| ranks.parse().unwrap());
        choose(ServeArgs { device, ranks, ..listed(gpus, false) }, &two).0
    };
    assert_eq!(listed_mixed("1", Some("1,2")), of(DeviceKind::Cuda, 2, &[1]));
    for (refused, part) in [
        (mixed("cuda,cpu", Some("2,2")).0, "has one cuda rank"),
        (mixed("cuda,cpu", Some("0,2")).0, "use --ranks 1,2"),
        (mixed("cpu,cpu", Some("0,2")).0, "is 0,2, but a mixed group has one cpu rank"),
        (mixed("cpu,cpu", Some("0,0")).0, "has no CPU ranks"),
        (mixed("cuda,cpu", Some("1,8")).0, "at most 8 ranks"),
        (mixed("cuda,cpu", Some("1,0")).0, "has no CPU ranks"),
        (mixed("cuda", Some("1,2")).0, "need --device cuda,cpu"),
        (choose(cpu, &two).0, "gpu-memory: "),
        (listed_mixed("0,1", None), "gpus: has 2 entries, but a mixed group has one GPU rank"),
        (listed_mixed("0,1", Some("1,2")), "name one GPU"),
    ] {
        let refused = refused.unwrap_err();
        assert!(refused.contains(part), "{part:?} is not in {refused}");
    }
}
