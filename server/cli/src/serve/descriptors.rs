//! The limit on file descriptors: raised as far as the system allows, with some kept for the next generation of ranks.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Upper limit of what is requested, more than any service needs.
const MOST: u64 = 1 << 20;
/// Number of descriptors for the service itself: files of the checkpoint, memory shared with ranks of two generations, logs, listeners.
const OWN: u64 = 256;
/// Number of descriptors for each rank of two generations.
const PER_RANK: u64 = 32;
/// Number of descriptors for connections to Admin and to the metrics endpoint.
const OPERATORS: u64 = 128;
/// Least number of connections; with fewer, the service does not start.
const FEWEST: u64 = 16;

/// Raises the limit on open files as far as possible. Returns the number of TCP connections for which it leaves
/// room, at most `wanted`.
///
/// # Errors
/// If there are too few for the service itself.
pub(super) fn connections(wanted: usize, unix: usize, ranks: usize) -> Result<usize, String> {
    let limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.unwrap_or(MOST).min(MOST);
    let mut allowed = limit.current.unwrap_or(MOST);
    if allowed < most {
        let raised = Rlimit { current: Some(most), maximum: limit.maximum };
        match setrlimit(Resource::Nofile, raised) {
            Ok(()) => allowed = most,
            Err(error) => tracing::warn!(%error, allowed, "the limit on open files cannot be raised"),
        }
    }
    room(allowed, wanted, unix, ranks)
}

fn room(allowed: u64, wanted: usize, unix: usize, ranks: usize) -> Result<usize, String> {
    let reserve = OWN + OPERATORS + 2 * PER_RANK * ranks as u64 + unix as u64;
    let free = allowed.saturating_sub(reserve);
    if free < FEWEST {
        return Err(format!(
            "the limit on open files is {allowed}, and {ranks} ranks need {reserve} and some for connections; raise it \
             (ulimit -n, LimitNOFILE= in systemd) to {} or more",
            reserve + wanted as u64
        ));
    }
    let free = usize::try_from(free).unwrap_or(usize::MAX);
    let connections = wanted.min(free);
    if connections < wanted {
        tracing::warn!(
            allowed,
            connections,
            wanted,
            "the limit on open files leaves room for fewer connections than max-connections"
        );
    }
    Ok(connections)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn connections_leave_the_reserve_alone() {
        assert_eq!(room(1 << 20, 1024, 256, 2).unwrap(), 1024);
        let few = room(1024, 1024, 256, 2).unwrap();
        assert_eq!(few as u64, 1024 - OWN - OPERATORS - 4 * PER_RANK - 256);
        let error = room(256, 1024, 256, 2).unwrap_err();
        assert!(error.contains("ulimit -n"), "{error}");
    }
}
