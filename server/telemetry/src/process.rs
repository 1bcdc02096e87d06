//! Resident memory of a service's processes, from `/proc`.

use metrics::gauge;

use super::names;

/// Resident memory of one process, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResidentBytes {
    /// Private anonymous memory.
    pub anon: u64,
    /// Mapped files: the checkpoint, the binary.
    pub file: u64,
    /// Shared memory: windows, rings and staging.
    pub shmem: u64,
}

impl ResidentBytes {
    /// Everything except mapped files, whose pages the system can drop.
    #[must_use]
    pub const fn without_files(self) -> u64 {
        self.anon + self.shmem
    }

    /// Sets the gauges whose `process` label is `process`: `router` or a rank's number.
    pub fn record(self, process: &str) {
        for (kind, bytes) in [("anon", self.anon), ("file", self.file), ("shmem", self.shmem)] {
            gauge!(names::PROCESS_RESIDENT_BYTES, "process" => process.to_owned(), "kind" => kind)
                .set(bytes as f64);
        }
    }

    fn parse(status: &str) -> Option<ResidentBytes> {
        let field = |name: &str| -> Option<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            let kib: u64 = line.trim_start_matches(':').trim().strip_suffix("kB")?.trim().parse().ok()?;
            Some(kib * 1024)
        };
        Some(ResidentBytes { anon: field("RssAnon")?, file: field("RssFile")?, shmem: field("RssShmem")? })
    }
}

/// Resident memory of a process; `None` if the process is gone or the system does not report it.
#[must_use]
pub fn resident_bytes(pid: u32) -> Option<ResidentBytes> {
    ResidentBytes::parse(&std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_is_parsed_by_kind() {
        let text =
            "Name:\tx\nVmRSS:\t  9 kB\nRssAnon:\t    4 kB\nRssFile:\t    3 kB\nRssShmem:\t       2 kB\n";
        assert_eq!(ResidentBytes::parse(text), Some(ResidentBytes { anon: 4096, file: 3072, shmem: 2048 }));
        assert_eq!(ResidentBytes::parse("Name:\tx\n"), None);
    }

    #[test]
    fn this_process_has_memory() {
        assert!(resident_bytes(std::process::id()).is_some_and(|m| m.anon > 0));
    }
}
