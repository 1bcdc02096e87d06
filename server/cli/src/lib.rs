//! The subcommands of the `expertd` binary.

#![forbid(unsafe_code)]

pub mod admin;
pub mod bench;
pub mod call;
pub mod ceilings;
mod child;
pub mod client;
mod cores;
pub mod demo;
pub mod doctor;
pub mod drain;
pub mod exit;
pub mod golden;
pub mod inspect;
pub mod inventory;
mod mps;
pub mod network_agent;
mod predict;
pub mod rank;
pub mod rebalance;
pub mod reload;
pub mod serve;
pub mod size;
pub mod status;
pub mod synth;
mod units;
pub mod verify;
mod weight_bytes;

use std::future::Future;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use self::exit::CommandError;
use expertd_telemetry::{LogFormat, flush_logs, init_logs, set_build};

/// Runs the Mixture-of-Experts blocks of real checkpoints with expert parallelism, over gRPC.
///
/// A token is a row of hidden states, taken after a layer's norm and before the residual. Start with `expertd demo`.
#[derive(Parser, Debug)]
#[command(name = "expertd", version = BUILD, propagate_version = true, max_term_width = 100)]
struct Cli {
    /// Filter of the log on standard error: a level, or directives such as info,expertd_core::steps=debug
    /// [default: info; warn for `demo` and `bench`]
    #[arg(long, global = true, env = "EXPERTD_LOG", value_name = "FILTER", help_heading = "Logging")]
    log: Option<String>,
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
    Loader(rank::RankArgs),
    /// Serve one network session (internal; started by `serve`)
    #[command(hide = true)]
    NetworkAgent(network_agent::AgentArgs),
    /// Print what this machine's GPUs and its NCCL can do (internal; started by `serve`)
    #[command(hide = true)]
    Inventory,
}

/// Version, commit and devices of this build.
const BUILD: &str = env!("EXPERTD_BUILD");
/// Its commit, or `unknown`.
const COMMIT: &str = env!("EXPERTD_BUILD_COMMIT");

/// Runs the program and returns its exit status.
#[must_use]
pub fn main() -> ExitCode {
    let parsed =
        Cli::command().try_get_matches().and_then(|matches| Ok((Cli::from_arg_matches(&matches)?, matches)));
    let (cli, matches) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => {
            let _ = error.print();
            if let Some(variable) = serve::variables::refused(&error, std::env::args().skip(1)) {
                eprintln!("\nThe value comes from the environment variable {variable}.");
            }
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(exit::USAGE));
        }
    };
    // An agent must start no thread before it has limited what its threads may open.
    if let Command::NetworkAgent(args) = &cli.command {
        return network_agent::run(args);
    }
    set_build(BUILD, COMMIT);
    // The tables of these commands share the terminal with the log.
    let default = if matches!(cli.command, Command::Demo(_) | Command::Bench(_)) { "warn" } else { "info" };
    if let Err(error) = init_logs(cli.log.as_deref().unwrap_or(default), cli.log_format) {
        eprintln!("expertd: {error}");
        return ExitCode::from(exit::USAGE);
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
        Command::Inspect(args) => exit("inspect", inspect::run(&args)),
        Command::Size(args) => exit("size", size::run(&args)),
        Command::Synth(args) => exit("synth", synth::run(&args)),
        Command::Doctor(args) => doctor::run(&args),
        Command::Bench(args) => block_on("bench", bench::run(args)),
        Command::Ceilings(args) => exit("ceilings", ceilings::run(&args)),
        Command::Status(args) => block_on("status", status::run(args)),
        Command::Drain(args) => block_on("drain", drain::run(args)),
        Command::Reload(args) => block_on("reload", reload::run(args)),
        Command::Rebalance(args) => block_on("rebalance", rebalance::run(args)),
        Command::Rank(args) => rank::run(&args),
        Command::Loader(args) => rank::pack_weights(&args),
        Command::NetworkAgent(args) => network_agent::run(&args),
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

/// Runs a command to its exit status.
fn block_on(name: &str, command: impl Future<Output = Result<ExitCode, CommandError>>) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let failed = |error| CommandError::failed(format!("cannot start the asynchronous runtime: {error}"));
    exit(name, runtime.map_err(failed).and_then(|runtime| runtime.block_on(command)))
}

/// The exit status of a command, whose error is printed.
fn exit(name: &str, result: Result<ExitCode, CommandError>) -> ExitCode {
    result.unwrap_or_else(|error| {
        eprintln!("expertd {name}: {error}");
        ExitCode::from(error.status())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_has_the_commit_and_the_devices() {
        let rest = BUILD.strip_prefix(concat!(env!("CARGO_PKG_VERSION"), " (")).unwrap_or_default();
        let (commit, devices) = rest.trim_end_matches(')').split_once(", ").unwrap_or_default();
        assert!(
            commit.trim_start_matches("commit ") == COMMIT
                && !COMMIT.is_empty()
                && devices == if cfg!(feature = "cuda") { "cuda" } else { "cpu" },
            "{BUILD}"
        );
    }

    /// Without a terminal, help is as wide as it may be on one.
    #[test]
    fn help_is_wrapped_and_grouped() {
        let mut command = Cli::command();
        command.build();
        for name in ["serve", "bench", "rebalance", "call"] {
            let help =
                command.find_subcommand_mut(name).map(|command| command.render_long_help().to_string());
            let help = help.unwrap_or_default();
            let longest = help.lines().map(|line| line.chars().count()).max().unwrap_or(0);
            assert!((60..=100).contains(&longest), "{name}: {longest} columns");
        }
        let help = command.find_subcommand_mut("serve").map(|command| command.render_help().to_string());
        let help = help.unwrap_or_default();
        for part in ["Model and weights:", "Listeners:", "Access:", "Limits:", "[DIR]"] {
            assert!(help.contains(part), "{part} is not in\n{help}");
        }
        assert!(!help.contains("[env: EXPERTD_RANKS"), "{help}");
    }
}
