//! `expertd verify`: sends recorded rows through a running service and compares the answers with the recorded ones.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use expertd_client::transport::Credentials;
use expertd_proto::v1::{DType as WireDType, ForwardRequest, GetModelResponse, forward_request::Payload};
use serde::Serialize;

use super::client::{self, RoutingSource, call_failed};
use super::exit::CommandError;
use super::golden::{Golden, GoldenLayer};
use expertd_types::{DType, rows};

mod ids;
pub use ids::{IdsCheck, RowMismatch};

/// Send recorded rows through a running service and compare the answers with the recorded ones
///
/// Exits with status 0 if every MoE layer of the file is within the tolerance and was routed as recorded, 64 for a file that cannot be
/// used, 1 otherwise.
#[derive(Args, Clone, Debug)]
pub struct VerifyArgs {
    /// The service: HOST:PORT or unix:PATH
    #[arg(long, default_value = client::DEFAULT_ADDRESS, env = "EXPERTD_ADDRESS")]
    pub address: String,
    /// File of recorded rows (golden.safetensors): layers.L.input, layers.L.output and, to compare routing,
    /// layers.L.topk_ids and layers.L.topk_weights
    #[arg(long, value_name = "FILE")]
    pub golden: PathBuf,
    /// Name of the model; not needed if the service has one model
    #[arg(long, default_value = "", hide_default_value = true)]
    pub model: String,
    /// Layers to verify, comma-separated [default: all layers of the file]
    #[arg(long, value_delimiter = ',', value_name = "L")]
    pub layers: Vec<u32>,
    /// Source of the routing
    #[arg(long, value_enum, default_value_t)]
    pub routing: RoutingSource,
    /// Largest accepted relative L2 error of a row [default: 1e-5 for f32 rows, 1e-2 for others]
    #[arg(long)]
    pub tolerance: Option<f64>,
    /// Element type of the rows on the wire
    #[arg(long, value_enum, default_value = "f32")]
    pub dtype: DType,
    /// Number of rows per request [default: all rows of a layer, or the service's limit]
    #[arg(long, value_name = "ROWS")]
    pub batch: Option<usize>,
    /// Credentials of the caller, and how the service is authenticated.
    #[command(flatten)]
    pub credentials: Credentials,
    /// Print the report as JSON
    #[arg(long)]
    pub json: bool,
}

/// Result of comparing one layer.
#[derive(Clone, Debug, Serialize)]
pub struct LayerReport {
    /// Index of the decoder layer.
    pub layer: u32,
    /// Number of rows compared.
    pub tokens: usize,
    /// Largest relative L2 error of a row, without rows that are exceptions.
    pub largest_error: f64,
    /// Index of the row with the largest error.
    pub largest_error_row: usize,
    /// Number of rows beyond the tolerance, without rows that are exceptions.
    pub rows_beyond_tolerance: usize,
    /// Comparison of the routing; `None` if the file has none.
    pub ids: Option<IdsCheck>,
    /// Whether the layer passed.
    pub ok: bool,
}

/// Result of comparing all layers.
#[derive(Clone, Debug, Serialize)]
pub struct VerifyReport {
    /// The served model.
    pub model: String,
    /// Family of the model.
    pub family: String,
    /// Weight version of the model.
    pub weight_version: u64,
    /// The tolerance that was applied.
    pub tolerance: f64,
    /// One result per layer.
    pub layers: Vec<LayerReport>,
}

impl VerifyReport {
    /// Whether every layer passed.
    pub fn ok(&self) -> bool {
        !self.layers.is_empty() && self.layers.iter().all(|layer| layer.ok)
    }

    /// Largest relative L2 error of a row in all layers.
    pub fn largest_error(&self) -> f64 {
        self.layers.iter().map(|layer| layer.largest_error).fold(0.0, f64::max)
    }
}

/// Compares all layers without printing anything.
///
/// # Errors
/// If the file is not usable, does not fit the model, or the service refuses a request.
pub async fn verify(args: &VerifyArgs) -> Result<VerifyReport, CommandError> {
    let golden = Golden::read(&args.golden)?;
    let dtype = args.dtype;
    let tolerance = args.tolerance.unwrap_or(if dtype == DType::F32 { 1e-5 } else { 1e-2 });
    let connection = client::connect(&args.address, &args.credentials).await?;
    let (mut connection, model) = client::get_model(connection, &args.model).await?;
    let mut report = VerifyReport {
        model: model.name.clone(),
        family: model.family.clone(),
        weight_version: model.weight_version,
        tolerance,
        layers: Vec::new(),
    };
    check_layers(args, &golden, &model)?;
    for (&layer, rows) in &golden.layers {
        if !args.layers.is_empty() && !args.layers.contains(&layer) {
            continue;
        }
        let job =
            LayerCheck { args, dtype, tolerance, model: &model, layer, rows, token_ids: &golden.token_ids };
        let answer = job.ask(&mut connection).await?;
        report.layers.push(job.compare(&answer));
    }
    Ok(report)
}

/// Compares all layers and prints the report; exit status 0 if every layer passed.
pub async fn run(args: VerifyArgs) -> Result<ExitCode, CommandError> {
    let report = verify(&args).await?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report).unwrap_or_default());
    } else {
        print(&args, &report);
    }
    Ok(if report.ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Checks that file and model have the same layers, so that a layer that is missing on either side does not go unnoticed.
fn check_layers(args: &VerifyArgs, golden: &Golden, model: &GetModelResponse) -> Result<(), CommandError> {
    let mismatch = |reason: String| {
        CommandError::failed(format!(
            "the golden file does not fit the served model {}: {reason}",
            model.name
        ))
    };
    for &layer in &args.layers {
        if !golden.layers.contains_key(&layer) {
            return Err(mismatch(format!("--layers has layer {layer}, which is not in the file")));
        }
    }
    for (&layer, rows) in &golden.layers {
        let Some(served) = model.moe_layers.iter().find(|moe| moe.layer == layer) else {
            return Err(mismatch(format!("layer {layer} of the file is not a MoE layer of the model")));
        };
        if rows.hidden != model.hidden as usize {
            return Err(mismatch(format!(
                "rows of the file have {} elements, but the model's hidden size is {}",
                rows.hidden, model.hidden
            )));
        }
        if let Some(routing) = &rows.routing
            && args.routing == RoutingSource::Gate
            && routing.k != served.top_k as usize
        {
            return Err(mismatch(format!(
                "layer {layer}: the file has {} experts per row, but the model's top_k is {}",
                routing.k, served.top_k
            )));
        }
        if rows.routing.is_none() && args.routing == RoutingSource::Recorded {
            return Err(mismatch(format!(
                "layer {layer} has no recorded routing (topk_ids, topk_weights); use --routing gate"
            )));
        }
        if served.routes_by_token_id && golden.token_ids.len() != rows.tokens {
            return Err(mismatch(format!(
                "layer {layer} routes by token id: expected {} input_ids, found {}",
                rows.tokens,
                golden.token_ids.len()
            )));
        }
    }
    let unrecorded = model.moe_layers.iter().map(|moe| moe.layer).find(|l| !golden.layers.contains_key(l));
    match unrecorded {
        Some(layer) if args.layers.is_empty() => Err(mismatch(format!(
            "MoE layer {layer} of the model is not in the file; name the layers to compare with --layers"
        ))),
        _ => Ok(()),
    }
}

/// The comparison of one layer.
struct LayerCheck<'a> {
    args: &'a VerifyArgs,
    dtype: DType,
    tolerance: f64,
    model: &'a GetModelResponse,
    layer: u32,
    rows: &'a GoldenLayer,
    token_ids: &'a [i32],
}

/// The answers for a layer, all batches together.
struct LayerAnswer {
    output: Vec<f32>,
    ids: Vec<i32>,
    weights: Vec<f32>,
}

type MoeClient = expertd_proto::v1::moe_client::MoeClient<expertd_client::transport::Channel>;

impl LayerCheck<'_> {
    async fn ask(&self, connection: &mut MoeClient) -> Result<LayerAnswer, CommandError> {
        let limit = self.model.limits.as_ref().map_or(u32::MAX, |limits| limits.max_tokens_per_request);
        let batch = self.args.batch.unwrap_or(self.rows.tokens).min(limit as usize).max(1);
        let mut answer = LayerAnswer { output: Vec::new(), ids: Vec::new(), weights: Vec::new() };
        let mut first = 0;
        while first < self.rows.tokens {
            let last = (first + batch).min(self.rows.tokens);
            let call = format!("Forward of layer {}, rows {first}..{last},", self.layer);
            let response = connection
                .forward(self.request(first, last))
                .await
                .map_err(|status| call_failed(call, &status))?
                .into_inner();
            let receipt = response.receipt.unwrap_or_default();
            // A short answer is padded with NaN, so that later rows are not shifted and the comparison fails.
            let mut output = rows::decode(&response.rows, self.dtype);
            output.resize((last - first) * self.rows.hidden, f32::NAN);
            answer.output.append(&mut output);
            answer.ids.append(&mut rows::decode_i32(&receipt.topk_ids));
            answer.weights.append(&mut rows::decode_f32(&receipt.topk_weights));
            first = last;
        }
        Ok(answer)
    }

    fn request(&self, first: usize, last: usize) -> ForwardRequest {
        let hidden = self.rows.hidden;
        let input = &self.rows.input[first * hidden..last * hidden];
        let recorded = self.rows.routing.as_ref().filter(|_| self.args.routing == RoutingSource::Recorded);
        ForwardRequest {
            model: self.args.model.clone(),
            layer: self.layer,
            tokens: u32::try_from(last - first).unwrap_or(u32::MAX),
            dtype: WireDType::try_from(self.dtype as i32).unwrap_or_default() as i32,
            payload: Some(Payload::Inline(rows::encode(input, self.dtype))),
            routing: recorded.map(|routing| routing.of_rows(first..last)),
            token_ids: self.token_ids.get(first..last).map(rows::encode_i32).unwrap_or_default(),
            return_routing: true,
            ..ForwardRequest::default()
        }
    }

    fn compare(&self, answer: &LayerAnswer) -> LayerReport {
        let ids = self.rows.routing.as_ref().map(|recorded| match self.args.routing {
            RoutingSource::Gate => IdsCheck::of_gate(recorded, &answer.ids, &answer.weights),
            RoutingSource::Recorded => IdsCheck::of_verbatim(recorded, &answer.ids, &answer.weights),
        });
        let excused = |row: usize| ids.as_ref().is_some_and(|ids| ids.excuses(row));
        let hidden = self.rows.hidden;
        let mut report = LayerReport {
            layer: self.layer,
            tokens: self.rows.tokens,
            largest_error: 0.0,
            largest_error_row: 0,
            rows_beyond_tolerance: 0,
            ids: None,
            ok: false,
        };
        for row in (0..self.rows.tokens).filter(|&row| !excused(row)) {
            let span = row * hidden..(row + 1) * hidden;
            let error = rows::relative_error(&answer.output[span.clone()], &self.rows.output[span]);
            if error > report.largest_error {
                (report.largest_error, report.largest_error_row) = (error, row);
            }
            report.rows_beyond_tolerance += usize::from(error > self.tolerance);
        }
        report.ok = report.rows_beyond_tolerance == 0 && ids.as_ref().is_none_or(IdsCheck::ok);
        report.ids = ids;
        report
    }
}

fn print(args: &VerifyArgs, report: &VerifyReport) {
    let routing = match args.routing {
        RoutingSource::Gate => "gate by the service",
        RoutingSource::Recorded => "recorded routing",
    };
    println!(
        "{} ({}), weight version {}: {} MoE layers, {routing}, {} rows, tolerance {:.0e}",
        report.model,
        report.family,
        report.weight_version,
        report.layers.len(),
        args.dtype,
        report.tolerance
    );
    println!(
        "{:>5}  {:>6}  {:>13}  {:>6}  {:>10}  result",
        "layer", "rows", "largest error", "at row", "ids"
    );
    for layer in &report.layers {
        let ids = layer.ids.as_ref().map_or("-".to_owned(), IdsCheck::summary);
        let result = if layer.ok { "ok" } else { "FAILED" };
        println!(
            "{:>5}  {:>6}  {:>13.2e}  {:>6}  {ids:>10}  {result}",
            layer.layer, layer.tokens, layer.largest_error, layer.largest_error_row
        );
        for mismatch in layer.ids.iter().flat_map(|ids| &ids.mismatches) {
            println!("       {mismatch}");
        }
        if layer.rows_beyond_tolerance > 0 {
            println!("       {} rows beyond the tolerance", layer.rows_beyond_tolerance);
        }
    }
    println!(
        "{}: largest relative L2 error of a row {:.2e}",
        if report.ok() { "verified" } else { "NOT VERIFIED" },
        report.largest_error()
    );
}
