//! `expertd call`: sends one request and shows its receipt.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use expertd_client::transport::Credentials;
use expertd_proto::received_duration;
use expertd_proto::v1::forward_request::Payload;
use expertd_proto::v1::{
    ForwardRequest, ForwardResponse, GetModelResponse, MoeLayer, Receipt, Routing, SharedExperts, StepTiming,
};
use rand::SeedableRng as _;
use rand::rngs::SmallRng;
use rand_distr::{Distribution as _, StandardNormal};
use serde_json::json;

use super::client::{self, RoutingSource, call_failed, printable};
use super::exit::CommandError;
use super::golden::{Golden, GoldenLayer};
use super::units::time;
use expertd_types::{DType, Phase, rows};

/// Number of rows whose routing is printed.
const ROUTING_ROWS: usize = 8;

/// Send random or recorded tokens through one MoE layer and show the receipt
///
/// Exits with status 0 if the answer has the right size, 64 for a file or arguments that cannot be used, 1 otherwise. Use `expertd verify` to check recorded rows.
#[derive(Args, Clone, Debug)]
pub struct CallArgs {
    /// The service: HOST:PORT or unix:PATH
    #[arg(long, default_value = client::DEFAULT_ADDRESS, env = "EXPERTD_ADDRESS")]
    pub address: String,
    /// Name of the model; not needed if the service has one model
    #[arg(long, default_value = "", hide_default_value = true)]
    pub model: String,
    /// Decoder layer [default: the first MoE layer]
    #[arg(long, value_name = "L")]
    pub layer: Option<u32>,
    /// Number of rows to send [default: 8, or all recorded rows]
    #[arg(long, value_name = "N")]
    pub tokens: Option<usize>,
    /// Element type of the rows [default: bf16, or f32 for recorded rows]
    #[arg(long, value_enum)]
    pub dtype: Option<DType>,
    /// Seed of the random rows [default: a random one]
    #[arg(long)]
    pub seed: Option<u64>,
    /// Send rows recorded in this file (golden.safetensors) instead of random ones, and compare the answer
    #[arg(long, value_name = "FILE")]
    pub golden: Option<PathBuf>,
    /// Source of the routing; `recorded` needs --golden
    #[arg(long, value_enum, default_value_t)]
    pub routing: RoutingSource,
    /// Leave the shared experts out of the output
    #[arg(long)]
    pub exclude_shared_experts: bool,
    /// Fail unless this version of the weights is loaded
    #[arg(long, value_name = "VERSION")]
    pub expected_weight_version: Option<u64>,
    /// Fail unless weights with this fingerprint are loaded
    #[arg(long, value_name = "FINGERPRINT")]
    pub expected_weight_fingerprint: Option<String>,
    /// Request and show the phase timings of the steps
    #[arg(long)]
    pub timings: bool,
    /// Credentials of the caller, and how the service is authenticated.
    #[command(flatten)]
    pub credentials: Credentials,
    /// Print the receipt as JSON
    #[arg(long)]
    pub json: bool,
}

/// A request and its answer.
#[derive(Clone, Debug)]
pub struct CallOutcome {
    /// The served model.
    pub model: GetModelResponse,
    /// The layer.
    pub layer: u32,
    /// Number of rows sent.
    pub tokens: usize,
    /// Element type of the rows.
    pub dtype: DType,
    /// Seed of the rows, if they were random.
    pub seed: Option<u64>,
    /// The answer.
    pub response: ForwardResponse,
    /// Time from sending the request to the decoded answer.
    pub latency: Duration,
    /// Largest relative L2 error of a row against the recorded output.
    pub error: Option<f64>,
}

/// Makes the call without printing anything.
///
/// # Errors
/// If the arguments contradict each other, or the service cannot be reached or refuses the request.
pub async fn call(args: &CallArgs) -> Result<CallOutcome, CommandError> {
    if args.routing == RoutingSource::Recorded && args.golden.is_none() {
        return Err(CommandError::usage("--routing recorded needs --golden FILE".to_owned()));
    }
    let golden = args.golden.as_deref().map(Golden::read).transpose()?;
    let connection = client::connect(&args.address, &args.credentials).await?;
    let (mut connection, model) = client::get_model(connection, &args.model).await?;
    let layer = pick_layer(args, &model)?;
    let recorded = match &golden {
        Some(golden) => Some(golden.layers.get(&layer.layer).ok_or_else(|| {
            let has = golden.layers.keys().map(u32::to_string).collect::<Vec<_>>().join(", ");
            CommandError::usage(format!("layer {} is not in the golden file, which has {has}", layer.layer))
        })?),
        None => None,
    };
    let token_ids = golden.as_ref().map_or(&[][..], |golden| &golden.token_ids);
    let dtype = args.dtype.unwrap_or(if recorded.is_some() { DType::F32 } else { DType::Bf16 });
    let seed = args.seed.unwrap_or_else(rand::random);
    let input = Input::new(args, &model, layer, recorded, token_ids, seed)?;
    let request = input.request(args, layer, dtype);
    let sent = Instant::now();
    let response = connection
        .forward(request)
        .await
        .map_err(|status| call_failed(format!("Forward of layer {}", layer.layer), &status))?
        .into_inner();
    let latency = sent.elapsed();
    let error = recorded.map(|recorded| {
        let output = rows::decode(&response.rows, dtype);
        let wanted = &recorded.output[..input.tokens * recorded.hidden];
        if output.len() == wanted.len() {
            let rows = output.chunks(recorded.hidden).zip(wanted.chunks(recorded.hidden));
            rows.map(|(got, wanted)| rows::relative_error(got, wanted)).fold(0.0, f64::max)
        } else {
            f64::INFINITY
        }
    });
    let (layer, tokens) = (layer.layer, input.tokens);
    let seed = recorded.is_none().then_some(seed);
    Ok(CallOutcome { model, layer, tokens, dtype, seed, response, latency, error })
}

/// Makes the call and prints the result; exit status 0 if the answer has the right size.
pub async fn run(args: CallArgs) -> Result<ExitCode, CommandError> {
    let outcome = call(&args).await?;
    let expected = outcome.tokens * outcome.model.hidden as usize * outcome.dtype.size();
    if args.json {
        println!("{:#}", outcome.to_json());
    } else {
        outcome.print();
    }
    if outcome.response.rows.len() == expected {
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("wrong answer: expected {expected} bytes of rows, found {}", outcome.response.rows.len());
    Ok(ExitCode::FAILURE)
}

fn pick_layer<'a>(args: &CallArgs, model: &'a GetModelResponse) -> Result<&'a MoeLayer, CommandError> {
    let found = match args.layer {
        Some(layer) => model.moe_layers.iter().find(|moe| moe.layer == layer),
        None => model.moe_layers.first(),
    };
    found.ok_or_else(|| {
        let all = model.moe_layers.iter().map(|moe| moe.layer.to_string()).collect::<Vec<_>>().join(", ");
        let wanted = args.layer.map_or("any layer".to_owned(), |layer| format!("layer {layer}"));
        CommandError::usage(format!(
            "{wanted} of {} is not a MoE layer that this service holds; it holds {all}",
            model.name
        ))
    })
}

/// Rows to send.
struct Input {
    tokens: usize,
    values: Vec<f32>,
    token_ids: Vec<i32>,
    routing: Option<Routing>,
}

impl Input {
    fn new(
        args: &CallArgs,
        model: &GetModelResponse,
        layer: &MoeLayer,
        recorded: Option<&GoldenLayer>,
        token_ids: &[i32],
        seed: u64,
    ) -> Result<Input, CommandError> {
        let hidden = model.hidden as usize;
        let mut rng = SmallRng::seed_from_u64(seed);
        let Some(recorded) = recorded else {
            let tokens = args.tokens.unwrap_or(8);
            let normal = StandardNormal;
            let values = (0..tokens * hidden).map(|_| normal.sample(&mut rng)).collect();
            // Nearly every vocabulary has these ids. If one does not, the service refuses the request.
            let ids =
                if layer.routes_by_token_id { (0..tokens as i32).map(|i| i % 64).collect() } else { vec![] };
            return Ok(Input { tokens, values, token_ids: ids, routing: None });
        };
        let tokens = args.tokens.unwrap_or(recorded.tokens);
        if tokens > recorded.tokens {
            return Err(CommandError::usage(format!(
                "--tokens is {tokens}, but the golden file has only {} rows",
                recorded.tokens
            )));
        }
        if recorded.hidden != hidden {
            return Err(CommandError::usage(format!(
                "the golden file has rows of {} elements, but the hidden size of {} is {hidden}",
                recorded.hidden, model.name
            )));
        }
        let routing = match (args.routing, &recorded.routing) {
            (RoutingSource::Gate, _) => None,
            (RoutingSource::Recorded, Some(routing)) => Some(routing.of_rows(0..tokens)),
            (RoutingSource::Recorded, None) => {
                let problem =
                    format!("the golden file has no routing for layer {}; use --routing gate", layer.layer);
                return Err(CommandError::usage(problem));
            }
        };
        let values = recorded.input[..tokens * hidden].to_vec();
        let token_ids = token_ids.get(..tokens).unwrap_or_default().to_vec();
        Ok(Input { tokens, values, token_ids, routing })
    }

    fn request(&self, args: &CallArgs, layer: &MoeLayer, dtype: DType) -> ForwardRequest {
        let shared =
            if args.exclude_shared_experts { SharedExperts::Exclude } else { SharedExperts::Include };
        ForwardRequest {
            model: args.model.clone(),
            layer: layer.layer,
            tokens: u32::try_from(self.tokens).unwrap_or(u32::MAX),
            dtype: dtype as i32,
            payload: Some(Payload::Inline(rows::encode(&self.values, dtype))),
            routing: self.routing.clone(),
            token_ids: rows::encode_i32(&self.token_ids),
            shared_experts: shared as i32,
            expected_weight_version: args.expected_weight_version,
            expected_weight_fingerprint: args.expected_weight_fingerprint.clone().unwrap_or_default(),
            return_routing: true,
            return_timings: args.timings,
        }
    }
}

impl CallOutcome {
    fn receipt(&self) -> Receipt {
        self.response.receipt.clone().unwrap_or_default()
    }

    /// `(id, weight)` of every row, in the order that the service returned.
    pub fn routing(&self) -> Vec<Vec<(i32, f32)>> {
        let receipt = self.receipt();
        let (ids, weights) = (rows::decode_i32(&receipt.topk_ids), rows::decode_f32(&receipt.topk_weights));
        let k = (ids.len() / self.tokens.max(1)).max(1);
        let pairs = ids.into_iter().zip(weights).collect::<Vec<_>>();
        pairs.chunks(k).map(<[_]>::to_vec).collect()
    }

    fn print(&self) {
        let (receipt, model) = (self.receipt(), &self.model);
        let output = rows::decode(&self.response.rows, self.dtype);
        let largest = output.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
        let bad = output.iter().filter(|value| !value.is_finite()).count();
        let finite = if bad == 0 { "all finite".to_owned() } else { format!("{bad} values not finite") };
        let seed =
            self.seed.map_or(", recorded rows".to_owned(), |seed| format!(", random rows of seed {seed}"));
        println!(
            "model        {} ({}), weight version {}, generation {}",
            printable(&model.name),
            printable(&model.family),
            receipt.weight_version,
            receipt.generation
        );
        println!(
            "request      layer {}, {} tokens of {} {}{seed}",
            self.layer, self.tokens, model.hidden, self.dtype
        );
        println!("answer       {} bytes, largest |x| {largest:.4}, {finite}", self.response.rows.len());
        if let Some(error) = self.error {
            println!("compared     largest relative L2 error of a row {error:.2e}");
        }
        let (queue, step) = (duration(receipt.queue_time), duration(receipt.step_time));
        let rest = self.latency.saturating_sub(queue + step);
        println!(
            "latency      {}: queue {}, step {}, transport and client {}",
            time(self.latency),
            time(queue),
            time(step),
            time(rest)
        );
        println!("computed     {}", client::steps_in_words(&receipt));
        for (row, pairs) in self.routing().iter().enumerate().take(ROUTING_ROWS) {
            let pairs = pairs.iter().map(|(id, weight)| format!("{id} ({weight:.4})")).collect::<Vec<_>>();
            println!("{:<12} row {row}: {}", if row == 0 { "routing" } else { "" }, pairs.join("  "));
        }
        if self.tokens > ROUTING_ROWS {
            println!("{:<12} and {} more rows", "", self.tokens - ROUTING_ROWS);
        }
        for timing in &receipt.timings {
            let phases = Phase::ALL.iter().zip(phase_ns(timing));
            let phases =
                phases.map(|(phase, ns)| format!("{} {}", phase.name(), time(Duration::from_nanos(ns))));
            let phases = phases.collect::<Vec<_>>().join(", ");
            println!("step {:<7} {} tokens: {phases}", timing.step, timing.tokens);
        }
    }

    fn to_json(&self) -> serde_json::Value {
        let receipt = self.receipt();
        json!({
            "model": self.model.name,
            "family": self.model.family,
            "layer": self.layer,
            "tokens": self.tokens,
            "dtype": self.dtype.to_string(),
            "seed": self.seed,
            "rows_bytes": self.response.rows.len(),
            "largest_error": self.error,
            "latency_seconds": self.latency.as_secs_f64(),
            "receipt": {
                "steps": receipt.steps,
                "generation": receipt.generation,
                "weight_version": receipt.weight_version,
                "weight_fingerprint": receipt.weight_fingerprint,
                "tokens_per_rank": receipt.tokens_per_rank,
                "queue_seconds": duration(receipt.queue_time).as_secs_f64(),
                "step_seconds": duration(receipt.step_time).as_secs_f64(),
                "routing": self.routing(),
                "timings": receipt.timings,
            },
        })
    }
}

fn duration(wire: Option<prost_types::Duration>) -> Duration {
    wire.and_then(|wire| received_duration(&wire)).unwrap_or_default()
}

/// Durations of a step's phases in nanoseconds, in the order of [`Phase::ALL`].
fn phase_ns(timing: &StepTiming) -> [u64; Phase::ALL.len()] {
    let StepTiming {
        copy_in_ns, gate_ns, prepare_ns, dispatch_ns, experts_ns, combine_ns, copy_out_ns, ..
    } = *timing;
    [copy_in_ns, gate_ns, prepare_ns, dispatch_ns, experts_ns, combine_ns, copy_out_ns]
}
