//! Environment variables: those that no part of the project reads, and values of variables that the command line's parser refuses.

use clap::error::{ContextKind, ContextValue, ErrorKind};

use super::settings::Given;

const PREFIX: &str = "EXPERTD_";

/// Variables beside the settings: of every command, of clients, of the Python package, of builds and tests.
const OTHERS: &[&str] = &[
    "EXPERTD_ADDRESS",
    "EXPERTD_ANY_VERSION",
    "EXPERTD_BINARY",
    "EXPERTD_CHECK_WEIGHTS",
    "EXPERTD_COMMIT",
    "EXPERTD_CONFIG",
    "EXPERTD_CPU",
    "EXPERTD_FEATURES",
    "EXPERTD_GOLDEN",
    "EXPERTD_INJECT_FAULTS",
    "EXPERTD_LOG",
    "EXPERTD_LOG_FORMAT",
    "EXPERTD_NCCL",
    "EXPERTD_SESSION",
];

/// Beginnings of the names of variables that belong together.
const FAMILIES: &[&str] = &[
    "EXPERTD_CHAOS_",
    "EXPERTD_CLIENT_",
    "EXPERTD_CUDA_",
    "EXPERTD_NVCC_",
    "EXPERTD_RELOAD_",
    "EXPERTD_REPLACE_",
    "EXPERTD_SIMULATION_",
    "EXPERTD_SOAK_",
    "EXPERTD_SYNTH_",
    "EXPERTD_TEST_",
    "EXPERTD_VLLM_",
];

/// What to say about a variable that `serve` does not know; `None` if it is known, or one of those that Kubernetes makes for a service
/// named `expertd`.
pub(crate) fn unknown(name: &str) -> Option<String> {
    let known = || Given::VARIABLES.iter().chain(OTHERS);
    let of_kubernetes = name.contains("_SERVICE_") || name.contains("_PORT_") || name.ends_with("_PORT");
    let is_known =
        known().any(|known| known == &name) || FAMILIES.iter().any(|family| name.starts_with(family));
    if !name.starts_with(PREFIX) || is_known || of_kubernetes {
        return None;
    }
    let is_near = |known: &&&str| known.starts_with(name) || name.starts_with(**known);
    let near = known().filter(is_near).min_by_key(|known| known.len().abs_diff(name.len()));
    let hint = near.map_or_else(
        || "`expertd serve --help` lists the settings".to_owned(),
        |near| format!("did you mean {near}?"),
    );
    Some(format!("the environment variable {name} is no setting and is ignored; {hint}"))
}

/// The environment variable whose value the parser refused, if the flag that its error names is not on the command line.
pub(crate) fn refused(error: &clap::Error, mut arguments: impl Iterator<Item = String>) -> Option<String> {
    if !matches!(error.kind(), ErrorKind::ValueValidation | ErrorKind::InvalidValue) {
        return None;
    }
    let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg) else { return None };
    let flag = argument.split([' ', '=', '[']).next()?;
    let is_given = |argument: String| argument == flag || argument.starts_with(&format!("{flag}="));
    if arguments.any(is_given) {
        return None;
    }
    Some(format!("{PREFIX}{}", flag.trim_start_matches('-').replace('-', "_").to_uppercase()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use clap::{Command, arg, value_parser};

    use super::*;

    #[test]
    fn misspelt_variables_are_named_with_what_was_meant() {
        assert!(
            unknown("EXPERTD_RANK")
                .unwrap()
                .contains("EXPERTD_RANK is no setting and is ignored; did you mean EXPERTD_RANKS?")
        );
        assert!(unknown("EXPERTD_MAX_SESSIONSS").unwrap().contains("did you mean EXPERTD_MAX_SESSIONS?"));
        assert!(unknown("EXPERTD_COLOUR").unwrap().contains("--help"));
        for known in [
            "EXPERTD_RANKS",
            "EXPERTD_LOG",
            "EXPERTD_TEST_SEED",
            "EXPERTD_SERVICE_HOST",
            "EXPERTD_PORT",
            "PATH",
        ] {
            assert_eq!(unknown(known), None, "{known}");
        }
    }

    #[test]
    fn a_refused_value_is_blamed_on_its_variable_unless_the_flag_is_given() {
        let command =
            || Command::new("expertd").arg(arg!(--"max-ranks" <N>).value_parser(value_parser!(u32)));
        let error = command().try_get_matches_from(["expertd", "--max-ranks", "abc"]).unwrap_err();
        let words =
            |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>().into_iter();
        assert_eq!(refused(&error, words(&["serve"])).as_deref(), Some("EXPERTD_MAX_RANKS"));
        assert_eq!(refused(&error, words(&["--max-ranks", "abc"])), None);
        assert_eq!(refused(&error, words(&["--max-ranks=abc"])), None);
        let other = command().try_get_matches_from(["expertd", "--min"]).unwrap_err();
        assert_eq!(refused(&other, words(&[])), None);
    }
}
