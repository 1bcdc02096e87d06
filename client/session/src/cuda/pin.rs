//! Calls that only certain weights may compute.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::client::{Receipt, SessionError, check_weights};

/// The fingerprint of the weights that a client expects. The calls of a CUDA session name no fingerprint, and a graph replays what it captured
/// after a reload as well. So the receipts tell: once the last call of a lane was computed by the expected weights, those before it were,
/// because a service that has moved to other weights does not move back within a step.
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

    /// Checks the last ended call of a lane. `version` is the version of the weights that computed it, 0 if it failed; `last`
    /// returns its receipt and is called only if the version is new.
    ///
    /// # Errors
    /// FAILED_PRECONDITION with both fingerprints if other weights computed it; the error of `last`.
    pub fn check(
        &self,
        version: u64,
        last: impl FnOnce() -> Result<Option<Receipt>, SessionError>,
    ) -> Result<(), SessionError> {
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

    #[test]
    fn other_weights_are_an_error_and_another_placement_of_the_same_is_not() {
        let receipt = |version: u64, fingerprint: &str| {
            let record = CompletionRecord { weight_version: version, ..CompletionRecord::zeroed() };
            Receipt::from(&record.with_text(fingerprint))
        };
        let pin = WeightPin::new("sampled:01".to_owned());
        let check = |version, fingerprint| pin.check(version, || Ok(Some(receipt(version, fingerprint))));
        let unread = || -> Result<Option<Receipt>, SessionError> { panic!("the version is known") };
        pin.check(0, unread).unwrap();
        check(3, "sampled:01").unwrap();
        pin.check(3, unread).unwrap();
        check(4, "sampled:01").unwrap();
        for _ in 0..2 {
            let error = check(5, "sampled:02").unwrap_err();
            assert!(matches!(&error, SessionError::Status { code: 9, .. }), "{error}");
            assert!(error.to_string().contains("sampled:01 are expected, sampled:02 are loaded"), "{error}");
        }
        pin.check(5, || Ok(None)).unwrap();
        check(6, "sampled:01").unwrap();
    }
}
