//! Values of settings: defaults, bounds, and errors that name the setting.

use std::time::Duration;

use super::PlanError;
use crate::serve::settings::{SettingSource, SettingsError};

/// The longest time that a setting may state, in milliseconds: a day.
const MAX_MILLIS: u64 = 24 * 3_600_000;

/// The error for an invalid value.
pub(super) fn value(name: &'static str, problem: impl Into<String>) -> PlanError {
    PlanError::Settings(SettingsError::Value { name, problem: problem.into() })
}

/// Returns the setting's value; sets it to `default`, with `why` as its source, if it was not given.
pub(super) fn derive<T: Clone>(
    setting: &mut (Option<T>, SettingSource),
    default: T,
    why: impl Into<String>,
) -> T {
    setting
        .0
        .get_or_insert_with(|| {
            setting.1 = SettingSource::Default(why.into());
            default
        })
        .clone()
}

/// Checks that a value is from `low` to `high`.
pub(super) fn within<T: PartialOrd + std::fmt::Display>(
    name: &'static str,
    found: T,
    low: T,
    high: T,
) -> Result<T, PlanError> {
    if found < low || found > high {
        return Err(value(name, format!("is {found}, must be {low} to {high}")));
    }
    Ok(found)
}

/// The duration that a setting in milliseconds states, from 1 ms to a day.
pub(super) fn millis(
    name: &'static str,
    setting: &(Option<u64>, SettingSource),
) -> Result<Duration, PlanError> {
    Ok(Duration::from_millis(within(name, setting.0.unwrap_or(0), 1, MAX_MILLIS)?))
}
