//! The subcommands of the `expertd` binary.

#![forbid(unsafe_code)]

pub mod admin;
pub mod bench;
pub mod call;
pub mod ceilings;
pub mod client;
mod cores;
pub mod demo;
pub mod doctor;
pub mod drain;
pub mod golden;
pub mod inspect;
pub mod inventory;
pub mod loader;
pub mod rank;
pub mod rebalance;
pub mod reload;
pub mod serve;
pub mod size;
pub mod status;
pub mod synth;
pub mod verify;
mod weight_bytes;

use std::fmt::Display;
use std::future::Future;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use expertd_telemetry::{LogFormat, flush_logs, init_logs};

/// Runs the Mixture-of-Experts blocks of real checkpoints with expert parallelism, over gRPC.
///
/// A token is a row of hidden states, taken after a layer's norm and before the residual. Start with `expertd demo`.
#[derive(Parser, Debug)]
#[command(name = "expertd", version, propagate_version = true, max_term_width = 100)]
struct Cli {
    /// Filter of the log on standard error: a level, or directives such as info,expertd_core::steps=debug
    #[arg(
        long,
        global = true,
        env = "EXPERTD_LOG",
        default_value = "info",
        value_name = "FILTER",
        help_heading = "Logging"
    )]
    log: String,
    /// Format of log lines
    #[arg(
        long,
        global = true,
        env = "EXPERTD_LOG_FORMAT",
        default_value = "text",
        value_enum,
        help_heading = "Logging"
    )]
    log_format: LogFormat,
    #[command(subcommand)]
    command: Command,
}

/// Each subcommand's help text is the comment of its arguments; a comment on a variant here would replace it.
#[derive(Subcommand, Debug)]
enum Command {
    Demo(demo::DemoArgs),
    Serve(Box<serve::settings::ServeArgs>),
    Call(call::CallArgs),
    Verify(verify::VerifyArgs),
    Inspect(inspect::InspectArgs),
    Size(size::SizeArgs),
    Synth(synth::SynthArgs),
    Doctor(doctor::DoctorArgs),
    Bench(bench::BenchArgs),
    #[command(hide = true)]
    Ceilings(ceilings::CeilingsArgs),
    Status(status::StatusArgs),
    Drain(drain::DrainArgs),
    Reload(reload::ReloadArgs),
    Rebalance(rebalance::RebalanceArgs),
    /// Run one expert rank (internal; started by `serve`)
    #[command(hide = true)]
    Rank(rank::RankArgs),
    /// Pack the weights of one expert rank (internal; started by `serve`)
    #[command(hide = true)]
    Loader(loader::LoaderArgs),
    /// Print what this machine's GPUs and its NCCL can do (internal; started by `serve`)
    #[command(hide = true)]
    Inventory,
}

/// Runs the program and returns its exit status.
#[must_use]
pub fn main() -> ExitCode {
    let matches = Cli::command().get_matches();
    let cli = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(error) => error.exit(),
    };
    if let Err(error) = init_logs(&cli.log, cli.log_format) {
        eprintln!("expertd: {error}");
        return ExitCode::from(serve::exit::USAGE);
    }
    if !matches!(cli.command, Command::Serve(_) | Command::Rank(_) | Command::Loader(_) | Command::Demo(_)) {
        end_quietly_without_a_reader();
    }
    let of = |name| matches.subcommand_matches(name);
    let code = match cli.command {
        Command::Serve(args) => serve::run(&args, of("serve")),
        Command::Demo(args) => block_on("demo", demo::run(args)),
        Command::Call(args) => block_on("call", call::run(args)),
        Command::Verify(args) => block_on("verify", verify::run(args)),
        Command::Inspect(args) => inspect::run(&args),
        Command::Size(args) => size::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Bench(args) => block_on("bench", bench::run(args)),
        Command::Ceilings(args) => ceilings::run(&args),
        Command::Status(args) => block_on("status", status::run(args)),
        Command::Drain(args) => block_on("drain", drain::run(args)),
        Command::Reload(args) => block_on("reload", reload::run(args)),
        Command::Rebalance(args) => block_on("rebalance", rebalance::run(args)),
        Command::Rank(args) => rank::run(&args),
        Command::Loader(args) => loader::run(&args),
        Command::Inventory => inventory::run(),
    };
    flush_logs();
    code
}

/// Makes a closed output pipe (`expertd inspect … | head`) end the process without a panic report. Commands that must clean
/// up do not use it.
fn end_quietly_without_a_reader() {
    /// The exit status that shells show for a process that SIGPIPE ended.
    const BROKEN_PIPE: i32 = 128 + 13;
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let message = panic.payload().downcast_ref::<String>();
        if message.is_some_and(|text| text.starts_with("failed printing to stdout: Broken pipe")) {
            std::process::exit(BROKEN_PIPE);
        }
        report(panic);
    }));
}

/// Runs a client command; prints its error and maps it to exit status 1.
fn block_on<E: Display>(name: &str, command: impl Future<Output = Result<ExitCode, E>>) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("expertd {name}: cannot start the asynchronous runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    runtime.block_on(command).unwrap_or_else(|error| {
        eprintln!("expertd {name}: {error}");
        ExitCode::FAILURE
    })
}
