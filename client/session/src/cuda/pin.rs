//! Calls that only certain weights may compute.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::client::error::other_weights;
use crate::client::{Receipt, SessionError, check_weights};
use crate::cuda::control::Counts;

/// The fingerprint of the weights that a client expects. The calls of a CUDA session name no fingerprint, and a graph replays what it captured
/// after a reload as well. So a lane's counts tell how often its calls moved to other weights, and its last receipt to which. More moves than one
/// between two checks hide the weights between.
#[derive(Debug)]
pub struct WeightPin {
    fingerprint: String,
    /// A weight version with this fingerprint; 0 before the first one is known. Another placement of the same weights has another version.
    version: AtomicU64,
}

impl WeightPin {
    /// The weights with this fingerprint.
    #[must_use]
    pub const fn new(fingerprint: String) -> Self {
        WeightPin { fingerprint, version: AtomicU64::new(0) }
    }

    /// Checks a lane's calls since the last check. `checked` is the number of moves that the last check found; `last` returns the
    /// receipt of the last call and is called only if its weight version is new.
    ///
    /// # Errors
    /// FAILED_PRECONDITION with both fingerprints if other weights computed the last call, or if the calls moved
    /// more than once; the error of `last`.
    pub fn check(
        &self,
        checked: u32,
        now: &Counts,
        last: impl FnOnce() -> Result<Option<Receipt>, SessionError>,
    ) -> Result<(), SessionError> {
        let version = now.weight_version;
        let moves = now.moves.wrapping_sub(checked);
        if moves > 1 {
            let (expected, calls) = (&self.fingerprint, "calls since the last check");
            return Err(other_weights(format!(
                "weights with fingerprint {expected} are expected, and {calls} moved to other weights {moves} times, so that some may have been \
                 computed by others; check more often than weights are loaded"
            )));
        }
        if version == 0 || version == self.version.load(Ordering::Relaxed) {
            return Ok(());
        }
        // `None`: a later call has failed meanwhile.
        let Some(receipt) = last()? else { return Ok(()) };
        check_weights(&self.fingerprint, &receipt.weight_fingerprint)?;
        self.version.store(receipt.weight_version, Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use bytemuck::Zeroable as _;

    use super::*;
    use crate::wire::CompletionRecord;

    fn receipt(version: u64, fingerprint: &str) -> Receipt {
        let record = CompletionRecord { weight_version: version, ..CompletionRecord::zeroed() };
        Receipt::from(&record.with_text(fingerprint))
    }

    fn counts(weight_version: u64, moves: u32) -> Counts {
        Counts { calls: 9, failures: 0, weight_version, moves }
    }

    #[test]
    fn other_weights_are_an_error_and_another_placement_of_the_same_is_not() {
        let pin = WeightPin::new("sampled:01".to_owned());
        let check = |version, fingerprint| {
            pin.check(0, &counts(version, 1), || Ok(Some(receipt(version, fingerprint))))
        };
        let unread = || -> Result<Option<Receipt>, SessionError> { panic!("the version is known") };
        pin.check(0, &counts(0, 0), unread).unwrap();
        check(3, "sampled:01").unwrap();
        pin.check(0, &counts(3, 0), unread).unwrap();
        check(4, "sampled:01").unwrap();
        for _ in 0..2 {
            let error = check(5, "sampled:02").unwrap_err();
            assert!(matches!(&error, SessionError::Status { code: 9, .. }), "{error}");
            assert!(error.to_string().contains("sampled:01 are expected, sampled:02 are loaded"), "{error}");
        }
        pin.check(0, &counts(5, 1), || Ok(None)).unwrap();
        check(6, "sampled:01").unwrap();
    }

    #[test]
    fn other_weights_between_two_checks_are_found_after_the_way_back() {
        let pin = WeightPin::new("sampled:01".to_owned());
        pin.check(0, &counts(3, 0), || Ok(Some(receipt(3, "sampled:01")))).unwrap();
        let error = pin.check(0, &counts(5, 2), || Ok(Some(receipt(5, "sampled:01")))).unwrap_err();
        assert!(matches!(&error, SessionError::Status { code: 9, .. }), "{error}");
        assert!(error.to_string().contains("moved to other weights 2 times"), "{error}");
        // Two moves, each before a check.
        pin.check(1, &counts(5, 2), || Ok(Some(receipt(5, "sampled:01")))).unwrap();
    }
}
