//! What a rank's device reports about itself.

/// Memory and utilisation of a rank's GPU, as the driver reports them for all processes on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceUsage {
    /// Memory in use, in bytes.
    pub memory_used_bytes: u64,
    /// Size of the memory, in bytes.
    pub memory_total_bytes: u64,
    /// Percentage of the driver's last sample period, at most a second, in which a kernel ran. `None` if the driver does
    /// not report it.
    pub utilization_percent: Option<u8>,
}

/// Number of words of [`DeviceUsage::to_words`].
pub const USAGE_WORDS: usize = 3;

impl DeviceUsage {
    /// The usage as words for memory that is shared and begins as zeros.
    #[must_use]
    pub fn to_words(self) -> [u64; USAGE_WORDS] {
        let percent = self.utilization_percent.map_or(0, |percent| u64::from(percent) + 1);
        [self.memory_used_bytes, percent, self.memory_total_bytes]
    }

    /// The usage of [`to_words`](Self::to_words); `None` for zeroed memory.
    #[must_use]
    pub fn from_words([used, percent, total]: [u64; USAGE_WORDS]) -> Option<Self> {
        (total > 0).then(|| DeviceUsage {
            memory_used_bytes: used,
            memory_total_bytes: total,
            utilization_percent: percent.checked_sub(1).and_then(|percent| u8::try_from(percent).ok()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_give_the_same_usage() {
        for utilization_percent in [None, Some(0), Some(100)] {
            let usage = DeviceUsage { memory_used_bytes: 7, memory_total_bytes: 9, utilization_percent };
            assert_eq!(DeviceUsage::from_words(usage.to_words()), Some(usage));
        }
        assert_eq!(DeviceUsage::from_words([0; USAGE_WORDS]), None);
    }
}
