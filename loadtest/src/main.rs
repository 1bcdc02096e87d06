//! The load generator's command line.

use std::path::Path;
use std::process::ExitCode;

use clap::Parser as _;
use expertd_loadtest::args::Args;
use expertd_loadtest::report::Report;
use expertd_loadtest::table::table;

// The system's allocator returns the pages of large messages to the kernel; their page faults then cost more than the
// messages.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let args = Args::parse();
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if let Some(threads) = args.shape.threads {
        builder.worker_threads(threads.get());
    }
    let runtime = match builder.enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return usage(&format!("cannot start: {error}")),
    };
    match runtime.block_on(expertd_loadtest::run(&args)) {
        Ok(report) => match show(&args, &report) {
            Ok(()) if report.ok => ExitCode::SUCCESS,
            Ok(()) => ExitCode::FAILURE,
            Err(message) => usage(&message),
        },
        Err(error) => usage(&error.to_string()),
    }
}

fn show(args: &Args, report: &Report) -> Result<(), String> {
    let json = serde_json::to_string_pretty(report).map_err(|error| error.to_string())?;
    match args.output.json.as_deref() {
        Some(path) if path == Path::new("-") => print(&(json + "\n"))?,
        Some(path) => {
            print(&table(report))?;
            std::fs::write(path, json + "\n")
                .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        }
        None => print(&table(report))?,
    }
    Ok(())
}

/// Writes to standard output. A reader that closes the pipe early is not an error.
fn print(text: &str) -> Result<(), String> {
    use std::io::{ErrorKind, Write as _};
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(format!("cannot write the report: {error}"))
        }
        _ => Ok(()),
    }
}

fn usage(message: &str) -> ExitCode {
    eprintln!("expertd-loadtest: {message}");
    ExitCode::from(2)
}
