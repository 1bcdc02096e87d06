//! Durations on the wire.

use std::time::Duration;

/// A duration that a service sent; `None` if it is negative or no valid protobuf duration. Unlike the conversion of `prost_types`,
/// this neither panics nor wraps for any value.
#[must_use]
pub fn received_duration(wire: &prost_types::Duration) -> Option<Duration> {
    let nanos = u32::try_from(wire.nanos).ok().filter(|nanos| *nanos < 1_000_000_000)?;
    Some(Duration::new(u64::try_from(wire.seconds).ok()?, nanos))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_has_a_result() {
        let received = |seconds, nanos| received_duration(&prost_types::Duration { seconds, nanos });
        assert_eq!(received(2, 5), Some(Duration::new(2, 5)));
        assert_eq!(received(i64::MAX, 999_999_999), Some(Duration::new(i64::MAX as u64, 999_999_999)));
        for (seconds, nanos) in
            [(i64::MIN, 0), (-1, 0), (0, -1), (0, i32::MIN), (i64::MIN, i32::MIN), (1, 1_000_000_000)]
        {
            assert_eq!(received(seconds, nanos), None, "{seconds} s {nanos} ns");
        }
    }
}
