//! Tests of the real service on GPU ranks: recorded answers at every number of ranks, answers under load while steps
//! overlap, and a rank killed under load. They use as many ranks as there are GPUs, at most four, or those that `EXPERTD_TEST_GPUS`
//! lists. They are ignored by default:
//!
//!     cargo test --release --features cuda --test e2e gpu:: -- --ignored --nocapture

use std::process::Command;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::service::load::{Load, Rows};
use crate::service::{Service, alive, families, golden, part, program, send, test_gpus};
use clap::Parser as _;
use expertd_cli::verify::{VerifyArgs, verify};
use expertd_rank_cuda as gpu;
use expertd_types::GpuPath;
use rustix::process::Signal;
use tonic::Code;

/// Relative L2 error of a row computed in bf16.
pub(crate) const TOLERANCE: f64 = 1e-2;
/// A fixture with a row whose scores are so close that bf16 rows get other routing (docs/gpu.md).
const BF16_ROUTED_OTHERWISE: &str = "granitemoe-fp8-odd";
/// Fixtures with FP8 and MXFP4 experts, in addition to those of the families.
pub(crate) const QUANTISED: [&str; 4] = [
    "../quantised/deepseek_v3-fp8-odd",
    "../quantised/gpt_oss-mxfp4-odd",
    "../quantised/granitemoe-fp8-odd",
    "../quantised/llama4_text-fp8-odd",
];
/// Fixtures in INT4, NVFP4 and MXFP8, in MXFP4 as a library writes it, and in FP8 that is held in bf16 at least in part
/// (docs/models.md).
pub(super) const REPACKED: [&str; 11] = [
    "../quantised/deepseek_v3-fp8-narrow",
    "../quantised/deepseek_v3-int4",
    "../quantised/deepseek_v3-nvfp4",
    "../quantised/qwen2_moe-fp8-mixed",
    "../quantised/qwen2_moe-int4-awq",
    "../quantised/qwen3_moe-int4-asymmetric-library",
    "../quantised/qwen3_moe-int4-channel-library",
    "../quantised/qwen3_moe-int4-gptq",
    "../quantised/qwen3_moe-mxfp4-library",
    "../quantised/qwen3_moe-mxfp8-library",
    "../quantised/qwen3_moe-nvfp4-library",
];
/// A fixture whose rows need no padding: copy engines carry only such rows.
const UNPADDED: &str = "../unpadded/qwen2_moe";
/// Time limit of each wait in these tests.
const TIME_LIMIT: Duration = Duration::from_secs(120);

#[derive(clap::Parser)]
struct Verify {
    #[command(flatten)]
    args: VerifyArgs,
}

/// The number of ranks to test with.
pub(crate) fn most_ranks() -> u32 {
    let gpus = if gpu::BUILT { gpu::present().min(4) } else { 0 };
    assert!(gpus > 0, "these tests need a build with feature `cuda` and at least one GPU");
    test_gpus().map_or(gpus, |of_ranks| of_ranks.len() as u32)
}

/// The number of ranks to test with, and a lock on the GPUs.
pub(crate) fn gpus() -> (u32, MutexGuard<'static, ()>) {
    static IN_USE: Mutex<()> = Mutex::new(());
    (most_ranks(), IN_USE.lock().unwrap_or_else(PoisonError::into_inner))
}

pub(crate) fn start(family: &str, ranks: u32, more: &[&str]) -> Service {
    Service::start(family, ranks, &[&["--device", "cuda"], more].concat())
}

/// Verifies one family and returns the largest relative error of a row.
async fn verified(service: &Service, family: &str, dtype: &str, batch: &str, tolerance: &str) -> f64 {
    let path = golden(family);
    let mut largest: f64 = 0.0;
    for routing in ["gate", "recorded"] {
        let otherwise = dtype == "bf16" && family.ends_with(BF16_ROUTED_OTHERWISE);
        if routing == "gate" && otherwise {
            continue;
        }
        // The blocks of this family do not return their ids.
        if routing == "recorded" && family.contains("llama4_text") {
            continue;
        }
        let line = ["verify", "--address", &service.address, "--golden", path.to_str().unwrap()];
        let flags = ["--routing", routing, "--batch", batch, "--dtype", dtype, "--tolerance", tolerance];
        let report = verify(&Verify::try_parse_from([&line[..], &flags[..]].concat()).unwrap().args).await;
        let report = report.unwrap_or_else(|error| panic!("{family}, {routing}: {error}"));
        assert!(report.ok(), "{family}, {routing}, batches of {batch}: {report:#?}");
        largest = largest.max(report.largest_error());
    }
    largest
}

/// Verifies f32 rows all at once and bf16 rows three at a time.
pub(crate) async fn verified_in_both_types(service: &Service, family: &str, ranks: u32, tolerance: &str) {
    let f32_rows = verified(service, family, "f32", "1000", tolerance).await;
    let bf16_rows = verified(service, family, "bf16", "3", tolerance).await;
    println!("{family}: {ranks} ranks, largest error {f32_rows:.1e} (bf16 rows: {bf16_rows:.1e})");
}

/// Whether the services refuse the checkpoint, because the portable kernels have no kernel for its format.
pub(super) fn is_refused(name: &str) -> bool {
    is_portable() && ["nvfp4", "mxfp8"].iter().any(|format| name.contains(format))
}

/// Whether the services run the portable kernels, which have no products of FP8: as their card and the environment decide.
pub(super) fn is_portable() -> bool {
    static FOUND: LazyLock<bool> = LazyLock::new(|| {
        let output = Command::new(program()).arg("inventory").envs(gpu::environment(&[])).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "`expertd inventory` fails: {errors}");
        let inventory: gpu::Inventory = serde_json::from_slice(&output.stdout).unwrap();
        let path = std::env::var(gpu::GPU_PATH).map_or(GpuPath::Auto, |path| path.parse().unwrap());
        let group = inventory.group(path);
        let kernels = group.first().and_then(|&gpu| inventory.gpus[gpu as usize].kernels(path));
        kernels.expect("a GPU that ranks can use") == gpu::KernelPath::Portable
    });
    *FOUND
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn recorded_answers_of_every_family() {
    let (most, _in_use) = gpus();
    for (index, family) in part((0..).zip(families()).collect()) {
        // Each family runs at one number of ranks, taken in turn; two families run at every number.
        let at_all = ["qwen3_moe", "deepseek_v3"].contains(&family.as_str());
        for ranks in 1..=most {
            if at_all || index % most + 1 == ranks {
                let service = start(&family, ranks, &[]);
                assert_eq!(service.ranks().len(), ranks as usize);
                verified_in_both_types(&service, &family, ranks, "1e-2").await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn recorded_answers_of_quantised_checkpoints() {
    let (most, _in_use) = gpus();
    for name in part(QUANTISED.to_vec()).into_iter().filter(|name| !is_refused(name)) {
        for ranks in 1..=most {
            // FP8 products differ from f32 by the rounding of quantised rows, in any implementation.
            for (compute, tolerance) in [("bf16", "1e-2"), ("fp8", "1e-1")] {
                if compute == "fp8" && is_portable() {
                    continue;
                }
                let setting = if name.contains("-fp8-") { "--fp8-compute" } else { "--mxfp4-compute" };
                let service = start(name, ranks, &[setting, compute]);
                verified_in_both_types(&service, name, ranks, tolerance).await;
            }
        }
    }
}

/// At every number of ranks. `scripts/gpu_checks.py` also runs this with copy engines and poisoned memory.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn recorded_answers_of_rows_without_padding() {
    let (most, _in_use) = gpus();
    for ranks in 1..=most {
        let service = start(UNPADDED, ranks, &[]);
        assert_unpadded(&service).await;
        verified_in_both_types(&service, UNPADDED, ranks, "1e-2").await;
        // All rows in one step, in bf16: copy engines bring them to where the gate and dispatch read them.
        verified(&service, UNPADDED, "bf16", "1000", "1e-2").await;
    }
}

/// Checks that the kernels' rows are as long as the service's, so that copy engines may carry them.
async fn assert_unpadded(service: &Service) {
    let client = expertd_client::Client::connect(&service.address).await.unwrap();
    let hidden = client.model("").await.unwrap().hidden;
    assert!(hidden.is_multiple_of(64), "rows of {hidden} elements are padded");
}

/// Each fixture runs at one number of ranks, taken in turn. Only the mixed one has products in FP8.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn recorded_answers_of_repacked_checkpoints() {
    let (most, _in_use) = gpus();
    for (index, name) in part((0..).zip(REPACKED).collect()) {
        if is_refused(name) {
            continue;
        }
        let ranks = index % most + 1;
        let service = start(name, ranks, &["--fp8-compute", "bf16"]);
        verified_in_both_types(&service, name, ranks, "1e-2").await;
        drop(service);
        let tolerance = if name.ends_with("-mixed") { "1e-1" } else { "1e-2" };
        if name.contains("-fp8-") && !is_portable() {
            let service = start(name, ranks, &["--fp8-compute", "fp8"]);
            verified_in_both_types(&service, name, ranks, tolerance).await;
        }
    }
}

/// Steps are small, so that many are formed and the next one is staged, copied and launched while one runs.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn every_answer_is_right_while_steps_overlap() {
    let (ranks, _in_use) = gpus();
    // Kernels copy the rows in one case; copy engines copy them into poisoned memory in the other.
    for environment in [&[][..], &[("EXPERTD_CUDA_POISON", "0")]] {
        let flags = ["--device", "cuda", "--max-tokens-per-step", "48"];
        let service = Service::start_with(UNPADDED, ranks, &flags, environment);
        assert_unpadded(&service).await;
        let load = Load::start_within(TOLERANCE, &service.address, &golden(UNPADDED), 64).await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        let calls = load.stop().await;
        let failed = calls.iter().find_map(|call| call.result.as_ref().err());
        assert!(failed.is_none(), "{failed:?}");
        assert!(calls.len() > 100, "{} calls", calls.len());
        println!("{environment:?}: {} answers", calls.len());
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn a_rank_killed_under_load() {
    let (ranks, _in_use) = gpus();
    let service = start("qwen3_moe", ranks, &[]);
    let load = Load::start_within(TOLERANCE, &service.address, &golden("qwen3_moe"), 64).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let old = service.ranks();
    let fault = Instant::now();
    send(*old.last().unwrap(), Signal::KILL);
    let client = expertd_client::Client::connect(&service.address).await.unwrap();
    let mut rows = Rows::new(&golden("qwen3_moe"), 77, 8);
    tokio::time::sleep(Duration::from_millis(200)).await;
    while client.forward(rows.draw().0, None).await.is_err() {
        assert!(fault.elapsed() < TIME_LIMIT, "serving did not resume within {TIME_LIMIT:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    println!("serving again after {:?}", fault.elapsed());
    tokio::time::sleep(Duration::from_millis(500)).await;
    let calls = load.stop().await;
    for (code, message) in calls.iter().filter_map(|call| call.result.as_ref().err()) {
        assert!(matches!(code, Code::Unavailable | Code::ResourceExhausted), "{code:?} {message}");
    }
    let generations = |after: bool| {
        calls.iter().filter(move |call| (call.begun > fault) == after).flat_map(|c| c.result.clone())
    };
    // Calls that were in flight at the fault may be answered by the next generation.
    assert!(generations(false).min().unwrap() < generations(true).max().unwrap());
    assert!(calls.iter().any(|call| call.in_flight_at(fault)), "calls must have been in flight");
    for pid in old {
        assert!(!alive(pid), "rank process {pid} of the ended generation must have ended");
    }
}
