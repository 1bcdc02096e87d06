//! `expertd demo`: makes a checkpoint, serves it on this machine, calls the service and verifies its answers.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use expertd_client::transport::Credentials;
use expertd_proto::v1::forward_request::Payload;
use expertd_proto::v1::{self, ForwardRequest};
use rand::SeedableRng as _;
use rand::rngs::SmallRng;
use rand_distr::{Distribution as _, StandardNormal};

use super::client::{self, call_failed};
use super::exit::CommandError;
use super::serve::plan::ServePlan;
use super::serve::settings::{Given, ServeArgs};
use super::serve::{PreparedService, RunningService, describe_plan, follow_loading};
use super::units::{bytes, count, time};
use expertd_compute::experts::reference;
use expertd_core::backend::{Backend, ServiceState};
use expertd_ipc::control::DeviceKind;
use expertd_model::Checkpoint;
use expertd_model::synth::{self, SynthConfig, SynthFormat};
use expertd_types::{DType, Fp8Products, rows};

/// Largest relative error of a correct row, which f32 arithmetic computes and sums in f64 check.
const TOLERANCE: f64 = 1e-5;

/// See it work: make a checkpoint, serve it, call it, verify the answers
///
/// Synthesises a random checkpoint in a temporary folder, starts a service with several expert ranks on free loopback
/// ports, sends random tokens through every MoE layer over gRPC, compares each row with a plain f64 computation of the
/// block, prints the results, and removes everything.
///
/// Exits with status 0 if every row is right, otherwise with 1.
#[derive(Args, Clone, Debug)]
pub struct DemoArgs {
    /// Model family of the checkpoint; an unknown name lists all families
    #[arg(long, default_value = "qwen3_moe")]
    pub family: String,
    /// Number of expert ranks
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=8))]
    pub ranks: u32,
    /// Device of the ranks
    #[arg(long, value_enum, default_value = "cpu")]
    pub device: DeviceKind,
    /// Number of tokens per request
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: u32,
    /// Elements of a token
    #[arg(long, default_value_t = 256)]
    pub hidden: usize,
    /// Number of experts per layer
    #[arg(long, default_value_t = 32)]
    pub experts: usize,
    /// Number of experts per token
    #[arg(long, default_value_t = 4)]
    pub top_k: usize,
    /// Intermediate size of an expert
    #[arg(long, default_value_t = 192)]
    pub width: usize,
    /// Number of decoder layers
    #[arg(long, default_value_t = 3)]
    pub layers: usize,
}

/// Runs the demo.
///
/// # Errors
/// If the checkpoint or the service cannot be made. A wrong answer is not an error but exit status 1.
pub async fn run(args: DemoArgs) -> Result<ExitCode, CommandError> {
    let folder = tempfile::Builder::new().prefix("expertd-demo-").tempdir();
    let folder =
        folder.map_err(|error| CommandError::failed(format!("cannot make a temporary folder: {error}")))?;
    let config = SynthConfig {
        hidden: args.hidden,
        experts: args.experts,
        top_k: args.top_k,
        width: args.width,
        layers: args.layers,
        format: SynthFormat::Bf16,
        seed: rand::random(),
        ..SynthConfig::new(&args.family)
    };
    let path = folder.path().join(&args.family);
    println!("1. a random {} checkpoint of {}, bf16", args.family, bytes(synth::size(&config)?));
    synth::write(&config, &path)?;

    println!("2. a service with {}, one process each", count(args.ranks.into(), "expert rank"));
    let serve = ServeArgs {
        model: Some(path.clone()),
        ranks: Some(args.ranks.into()),
        device: Some(args.device.into()),
        listen: Some("127.0.0.1:0".into()),
        admin_listen: Some(format!("unix:{}", folder.path().join("admin.sock").display())),
        metrics_listen: Some("127.0.0.1:0".into()),
        max_tokens_per_step: Some(args.tokens.max(64) as usize),
        ..ServeArgs::default()
    };
    let plan = ServePlan::new(Given::merge(&serve, None)?)?;
    print!("{}", describe_plan(&plan));
    let running = RunningService::start(PreparedService::new(plan)?).await?;
    let service = std::sync::Arc::clone(running.service());
    let _ = tokio::task::spawn_blocking(move || follow_loading(&service)).await;
    let verdict = call_all(&args, &running, &Checkpoint::open(&path)?).await;
    let status = running.service().status();
    running.drain().await;
    let steps = count(status.steps_total, "step");
    println!("5. drained; {steps} in all, ranks reaped, nothing left behind");
    let right = verdict?;
    println!("{}", if right { "demo: every row is right" } else { "demo: WRONG ROWS, see above" });
    Ok(if right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Sends tokens through every layer; returns whether all rows were right.
async fn call_all(
    args: &DemoArgs,
    running: &RunningService,
    checkpoint: &Checkpoint,
) -> Result<bool, CommandError> {
    let status = running.service().status();
    if status.state != ServiceState::Serving {
        return Err(CommandError::failed(format!("the service did not get ready: {}", status.reason)));
    }
    let address = running.address().map(ToString::to_string).unwrap_or_default();
    println!("3. {} tokens of random f32 rows through each MoE layer, over gRPC at {address}", args.tokens);
    println!("4. each row against a plain f64 computation of the block, with the largest relative error:");
    let client = client::connect(&address, &Credentials::default()).await?;
    let (mut client, _) = client::get_model(client, "").await?;
    let (tokens, hidden) = (args.tokens as usize, checkpoint.spec().hidden);
    let mut random = SmallRng::seed_from_u64(rand::random());
    let mut all_right = true;
    for (layer, moe) in checkpoint.spec().moe_layers() {
        let values: Vec<f32> = StandardNormal.sample_iter(&mut random).take(tokens * hidden).collect();
        let token_ids: Vec<i32> = match moe.gate.vocab() {
            Some(vocabulary) => (0..tokens).map(|t| (t * 7 % vocabulary) as i32).collect(),
            None => Vec::new(),
        };
        let request = ForwardRequest {
            layer: layer.0,
            tokens: args.tokens,
            dtype: v1::DType::DtypeF32.into(),
            payload: Some(Payload::Inline(rows::encode(&values, DType::F32))),
            token_ids: rows::encode_i32(&token_ids),
            return_routing: true,
            return_timings: true,
            ..ForwardRequest::default()
        };
        let sent = Instant::now();
        let answer =
            client.forward(request).await.map_err(|status| call_failed("Forward", &status))?.into_inner();
        let latency = sent.elapsed();
        let receipt = answer.receipt.unwrap_or_default();
        let ids = rows::decode_i32(&receipt.topk_ids);
        let weights = rows::decode_f32(&receipt.topk_weights);
        let expected = reference::block(checkpoint, layer, &values, (&ids, &weights), Fp8Products::NONE)?;
        let error = reference::worst_row(&expected, &rows::decode_f32(&answer.rows), hidden);
        let right = error <= TOLERANCE && answer.rows.len() == values.len() * 4;
        all_right &= right;
        let experts = receipt.timings.iter().map(|t| Duration::from_nanos(t.experts_ns)).sum::<Duration>();
        println!(
            "   layer {layer}: {}; {} (experts {}); error {error:.1e} {}",
            client::steps_in_words(&receipt),
            time(latency),
            time(experts),
            if right { "ok" } else { "WRONG" },
        );
    }
    Ok(all_right)
}
