//! Configuration of an EP group, which determines the sizes of its buffers.

use std::time::Duration;

use expertd_types::{Generation, Rank};

/// Largest number of ranks in a group on one host.
pub const MAX_RANKS: usize = 64;
/// Largest number of experts per token.
pub const MAX_TOP_K: usize = 32;
/// Largest number of slots.
pub const MAX_SLOTS: usize = 16;

/// Configuration of one rank of an EP group. All fields but `rank` must be the same on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EpConfig {
    /// Number of ranks in the group.
    pub ranks: usize,
    /// This rank.
    pub rank: Rank,
    /// Elements of a row.
    pub hidden: usize,
    /// Largest number of experts per token, over all layers.
    pub max_top_k: usize,
    /// Largest number of tokens that one rank contributes to a step.
    pub max_tokens_per_rank: usize,
    /// Number of slots: exchanges that may be in flight at once.
    pub slots: usize,
    /// Generation of the group.
    pub generation: Generation,
    /// Time limit of a wait for peers; when it passes, the group ends.
    pub wait_deadline: Duration,
    /// How long a wait polls flags before it sleeps; zero where ranks outnumber cores.
    pub spin: Duration,
    /// For tests: whether buffers are overwritten with 0xff bytes before each use.
    pub poison: bool,
}

/// An invalid field of [`EpConfig`], with the values that are valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum ConfigError {
    #[error("ranks is {0}, expected 1 to {MAX_RANKS}")]
    Ranks(usize),
    #[error("rank is {rank}, expected less than ranks, which is {ranks}")]
    Rank { rank: Rank, ranks: usize },
    #[error("hidden is 0, expected the number of elements of a token row")]
    Hidden,
    #[error("max_top_k is {0}, expected 1 to {MAX_TOP_K}")]
    TopK(usize),
    #[error("max_tokens_per_rank is {0}, expected 1 to 2^31 - 1")]
    Tokens(usize),
    #[error("slots is {0}, expected 2 to {MAX_SLOTS}: with one slot, copies cannot overlap compute")]
    Slots(usize),
    #[error("generation is {0}, expected less than 2^24: flags have 24 bits for it")]
    Generation(Generation),
    #[error("wait_deadline is zero, expected the time that the slowest peer may take for a step")]
    WaitDeadline,
    #[error(
        "windows for {ranks} ranks, {slots} slots, max_tokens_per_rank = {max_tokens_per_rank} and hidden = {hidden} \
         exceed the address space: lower max_tokens_per_rank"
    )]
    TooLarge { ranks: usize, slots: usize, max_tokens_per_rank: usize, hidden: usize },
}

impl EpConfig {
    /// Checks every field.
    ///
    /// # Errors
    /// The first invalid field.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if !(1..=MAX_RANKS).contains(&self.ranks) {
            return Err(ConfigError::Ranks(self.ranks));
        }
        if self.rank.index() >= self.ranks {
            return Err(ConfigError::Rank { rank: self.rank, ranks: self.ranks });
        }
        if self.hidden == 0 {
            return Err(ConfigError::Hidden);
        }
        if !(1..=MAX_TOP_K).contains(&self.max_top_k) {
            return Err(ConfigError::TopK(self.max_top_k));
        }
        if !(1..=i32::MAX as usize).contains(&self.max_tokens_per_rank) {
            return Err(ConfigError::Tokens(self.max_tokens_per_rank));
        }
        if !(2..=MAX_SLOTS).contains(&self.slots) {
            return Err(ConfigError::Slots(self.slots));
        }
        if self.generation.0 >> 24 != 0 {
            return Err(ConfigError::Generation(self.generation));
        }
        if self.wait_deadline.is_zero() {
            return Err(ConfigError::WaitDeadline);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_invalid_field_has_its_own_message() {
        let good = EpConfig {
            ranks: 3,
            rank: Rank(2),
            hidden: 8,
            max_top_k: 32,
            max_tokens_per_rank: 4,
            slots: 2,
            generation: Generation((1 << 24) - 1),
            wait_deadline: Duration::from_secs(1),
            spin: Duration::ZERO,
            poison: false,
        };
        assert_eq!(good.validate(), Ok(()));
        type MakeInvalid = fn(&mut EpConfig);
        let cases: [(MakeInvalid, &str); 12] = [
            (|c| c.ranks = 0, "ranks is 0"),
            (|c| c.ranks = 65, "ranks is 65"),
            (|c| c.rank = Rank(3), "rank is 3"),
            (|c| c.hidden = 0, "hidden is 0"),
            (|c| c.max_top_k = 0, "max_top_k is 0"),
            (|c| c.max_top_k = 33, "max_top_k is 33"),
            (|c| c.max_tokens_per_rank = 0, "max_tokens_per_rank is 0"),
            (|c| c.max_tokens_per_rank = 1 << 31, "max_tokens_per_rank is 2147483648"),
            (|c| c.slots = 1, "slots is 1"),
            (|c| c.slots = 17, "slots is 17"),
            (|c| c.generation = Generation(1 << 24), "generation is 16777216"),
            (|c| c.wait_deadline = Duration::ZERO, "wait_deadline is zero"),
        ];
        for (make_invalid, message) in cases {
            let mut config = good.clone();
            make_invalid(&mut config);
            let found = config.validate().expect_err(message).to_string();
            assert!(found.starts_with(message), "{found}");
        }
    }
}
