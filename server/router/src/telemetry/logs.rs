//! Structured logs on standard error, as text for people or JSON for machines. Spans carry the ids of requests and steps.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One readable line per event.
    #[default]
    Text,
    /// One JSON object per event.
    Json,
}

/// Why logs could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The filter does not parse.
    #[error(
        "--log {filter:?}: {reason}; expected a level (error, warn, info, debug, trace) or directives such as `info,expertd::scheduler=debug`"
    )]
    Filter {
        /// The filter.
        filter: String,
        /// The parser's error.
        reason: String,
    },
    /// A subscriber is already installed.
    #[error("logs are already set up in this process")]
    Installed,
}

/// Sets up the logs of this process: `filter` is a level or a list of `tracing` directives.
///
/// # Errors
/// [`LogError`] if the filter does not parse or logs are already set up.
pub fn init_logs(filter: &str, format: LogFormat) -> Result<(), LogError> {
    let parsed = EnvFilter::try_new(filter)
        .map_err(|error| LogError::Filter { filter: filter.to_owned(), reason: error.to_string() })?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(parsed)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    match format {
        LogFormat::Text => builder.with_target(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    }
    .map_err(|_| LogError::Installed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_filter_says_what_is_expected() {
        let error = init_logs("expertd=loud", LogFormat::Text).expect_err("no such level");
        assert!(error.to_string().contains("expected a level"), "{error}");
    }
}
