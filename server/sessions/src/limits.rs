//! How many sessions there may be, and how much memory they may hold.

use std::sync::Arc;

use expertd_telemetry::names;

use crate::shares::{Share, Shares};

/// Largest number of clients that are connected and have not opened a session.
pub const MAX_OPENING: usize = 16;

/// How many sessions there may be and how much memory they may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionLimits {
    /// Sessions that are open at once.
    pub sessions: usize,
    /// Mapped bytes of all sessions, counted once for the router and once for each rank.
    pub bytes: usize,
    /// Processes that map a session: the router and its ranks.
    pub mappings: usize,
    /// Whether several users may open sessions. Each of them has three quarters of the sessions and bytes at most.
    pub several_users: bool,
}

impl SessionLimits {
    /// The part of a limit that one user may have.
    pub(crate) const fn of_user(&self, limit: usize) -> usize {
        if self.several_users { limit - limit / 4 } else { limit }
    }

    /// Largest number of memories that the service holds: one for each open session, one for each client that opens a session,
    /// and, for ended sessions whose calls or ranks still use the memory, as many as there may be open sessions.
    pub const fn memories(&self) -> usize {
        2 * self.sessions + MAX_OPENING
    }
}

/// Mapped bytes that a session holds against the limit until the pages of its memory are freed.
pub(crate) type RegionCharge = Share<u32>;

/// The memories of all sessions by user, and their mapped bytes.
#[derive(Clone, Debug)]
pub(crate) struct RegionCharges(Arc<Shares<u32>>);

impl Default for RegionCharges {
    fn default() -> Self {
        RegionCharges(Shares::new(Some(names::SESSION_BYTES)))
    }
}

impl RegionCharges {
    /// Charges a region of `bytes` bytes to a user.
    ///
    /// # Errors
    /// The error message for the client.
    pub(crate) fn charge(
        &self,
        limits: &SessionLimits,
        user: u32,
        bytes: usize,
    ) -> Result<RegionCharge, String> {
        let wanted = bytes.saturating_mul(limits.mappings);
        self.0.take(user, wanted, |all, own| {
            for (held, whose, bytes_limit, memories) in [
                (all, "other", limits.bytes, limits.memories()),
                (own, "its user's other", limits.of_user(limits.bytes), limits.of_user(limits.memories())),
            ] {
                if held.count >= memories {
                    return Err(format!(
                        "{} memories of {whose} sessions are held, most of them of sessions that have ended and whose calls are under \
                         way; at most {memories} may be held; try later",
                        held.count
                    ));
                }
                if held.bytes.checked_add(wanted).is_none_or(|sum| sum > bytes_limit) {
                    return Err(format!(
                        "a session of {bytes} bytes, mapped by {} processes, exceeds {bytes_limit} bytes beside {} bytes of {whose} \
                         sessions; ask for fewer bytes of rows or raise max-session-bytes, which is {}",
                        limits.mappings, held.bytes, limits.bytes
                    ));
                }
            }
            Ok(())
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::shares::Amount;

    #[test]
    fn memories_are_limited_in_number_and_bytes() {
        let limits = SessionLimits { sessions: 2, bytes: 1000, mappings: 4, several_users: true };
        let charges = RegionCharges::default();
        // One user of several may have three quarters of each.
        let error = charges.charge(&limits, 1, 200).unwrap_err();
        assert!(error.contains("exceeds 750 bytes beside 0 bytes of its user's other"), "{error}");
        let large = charges.charge(&limits, 1, 187).unwrap();
        let error = charges.charge(&limits, 2, 100).unwrap_err();
        assert!(error.contains("exceeds 1000 bytes beside 748 bytes of other sessions"), "{error}");
        drop(large);
        let own: Vec<_> = (0..15).map(|_| charges.charge(&limits, 1, 1).unwrap()).collect();
        let error = charges.charge(&limits, 1, 1).unwrap_err();
        assert!(error.contains("15 memories of its user's other sessions are held"), "{error}");
        let others: Vec<_> = (0..5).map(|_| charges.charge(&limits, 2, 1).unwrap()).collect();
        let error = charges.charge(&limits, 3, 1).unwrap_err();
        assert!(error.contains("20 memories of other sessions are held"), "{error}");
        drop(own);
        assert!(charges.charge(&limits, 1, 1).is_ok());
        drop(others);
        let all = charges.0.take(4, 0, |all, _| Err(format!("{all:?}"))).unwrap_err();
        assert_eq!(all, format!("{:?}", Amount::default()));
    }
}
