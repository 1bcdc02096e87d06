//! Resource use of the load: processor time of this process and of the machine, and memory of watched processes.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Serialize;

/// Clock ticks per second in /proc, the same on every Linux architecture that Rust runs on.
const TICKS: f64 = 100.0;

/// Processor time used so far.
#[derive(Clone, Copy, Debug)]
pub struct CpuTime {
    when: Instant,
    own_seconds: f64,
    /// A watched process, and the time of it and its descendants.
    watched: Option<(u32, f64)>,
    machine: Option<(f64, f64)>,
}

/// Processor use over an interval.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CpuUse {
    /// Number of cores of the machine.
    pub cores: usize,
    /// Mean number of cores that the load generator kept busy.
    pub load_generator_cores: f64,
    /// The same of a watched process and its descendants.
    pub watched_cores: Option<f64>,
    /// Share of all cores' time that was not idle, if /proc/stat states it.
    pub machine_busy_share: Option<f64>,
}

impl CpuTime {
    /// Reads the processor times, also those of a watched process and its descendants.
    #[must_use]
    pub fn now(watched: Option<u32>) -> CpuTime {
        let of = |process: &str| {
            let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok();
            stat.as_deref().and_then(own_seconds).unwrap_or(0.0)
        };
        let machine = std::fs::read_to_string("/proc/stat").ok().as_deref().and_then(busy_and_total);
        let all = |pid: u32| (pid, family(pid).iter().map(|one| of(&one.to_string())).sum());
        CpuTime { when: Instant::now(), own_seconds: of("self"), watched: watched.map(all), machine }
    }

    /// Processor use since `self` was read.
    #[must_use]
    pub fn since(&self) -> CpuUse {
        let now = CpuTime::now(self.watched.map(|(pid, _)| pid));
        let elapsed = (now.when - self.when).as_secs_f64().max(1e-9);
        let machine = now.machine.zip(self.machine).map(|(now, then)| (now.0 - then.0, now.1 - then.1));
        CpuUse {
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            load_generator_cores: (now.own_seconds - self.own_seconds) / elapsed,
            watched_cores: now.watched.zip(self.watched).map(|(now, then)| (now.1 - then.1) / elapsed),
            machine_busy_share: machine.filter(|(_, total)| *total > 0.0).map(|(busy, total)| busy / total),
        }
    }
}

/// User plus system time in `/proc/PID/stat`, in seconds. The process name before them may contain blanks and
/// parentheses.
fn own_seconds(stat: &str) -> Option<f64> {
    let fields = stat.rsplit_once(')')?.1.split_whitespace().collect::<Vec<_>>();
    let ticks = |index: usize| fields.get(index)?.parse::<f64>().ok();
    Some((ticks(11)? + ticks(12)?) / TICKS)
}

/// MemoryTraffic and total ticks in the first line of `/proc/stat`.
fn busy_and_total(stat: &str) -> Option<(f64, f64)> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    // User time already includes guest time.
    let ticks = line.split_whitespace().take(8).map(|field| field.parse::<f64>().unwrap_or(0.0));
    let ticks = ticks.collect::<Vec<_>>();
    let total: f64 = ticks.iter().sum();
    let idle = ticks.get(3)? + ticks.get(4)?;
    Some((total - idle, total))
}

/// Memory of one process during the load.
#[derive(Clone, Debug, Serialize)]
pub struct Memory {
    /// Process id.
    pub pid: u32,
    /// The first words of its command line.
    pub command: String,
    /// Mean of the minute before the last one, or of the second third of a load that is shorter than three minutes. Without samples from
    /// then, the sample before.
    pub early: MemorySample,
    /// Mean of the last minute or third.
    pub last: MemorySample,
    /// Largest sampled RssAnon + RssShmem, in bytes.
    pub peak_bytes: u64,
}

/// Memory of a process at one time, or from that time on.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct MemorySample {
    /// Time from the start of the load, in seconds.
    pub seconds: f64,
    /// RssAnon + RssShmem, in bytes.
    pub bytes: u64,
    /// The part of `bytes` that is RssShmem: windows, rings, staging.
    pub shared_bytes: u64,
}

impl Memory {
    /// Growth from `early` to `last`, as a fraction.
    #[must_use]
    pub fn growth(&self) -> f64 {
        self.last.bytes as f64 / self.early.bytes.max(1) as f64 - 1.0
    }

    /// `None` without samples.
    fn new(pid: u32, command: String, samples: &[MemorySample]) -> Option<Memory> {
        let end = samples.last()?.seconds;
        let window = (end / 3.0).min(60.0);
        let (last_from, early_from) = (end - window, end - 2.0 * window);
        let mean = |seconds: f64, is_within: &dyn Fn(f64) -> bool| {
            let samples: Vec<_> = samples.iter().filter(|sample| is_within(sample.seconds)).collect();
            let mean = |bytes: fn(&MemorySample) -> u64| {
                let sum: u64 = samples.iter().map(|sample| bytes(sample)).sum();
                sum.checked_div(samples.len() as u64)
            };
            let (bytes, shared_bytes) = (mean(|sample| sample.bytes)?, mean(|sample| sample.shared_bytes)?);
            Some(MemorySample { seconds, bytes, shared_bytes })
        };
        let last = mean(last_from, &|at| at >= last_from)?;
        // On a busy machine samples come late, and none may be within the window. A process that started late has no earlier one.
        let before = || samples.iter().rfind(|sample| sample.seconds < last_from).copied();
        let early = mean(early_from, &|at| (early_from..=last_from).contains(&at));
        let early = early.or_else(before).unwrap_or(last);
        let peak_bytes = samples.iter().map(|sample| sample.bytes).max()?;
        Some(Memory { pid, command, early, last, peak_bytes })
    }
}

/// Samples a process and its descendants now, once a second until `stop` fires, and then once more. The process itself comes first.
pub async fn watch(pid: u32, start: Instant, mut stop: tokio::sync::oneshot::Receiver<()>) -> Vec<Memory> {
    let mut seen: Vec<(u32, String, Vec<MemorySample>)> = Vec::new();
    let mut sample = || {
        let seconds = start.elapsed().as_secs_f64();
        for pid in family(pid) {
            let Some((private, shared_bytes)) = resident_bytes(pid) else { continue };
            let sample = MemorySample { seconds, bytes: private + shared_bytes, shared_bytes };
            match seen.iter_mut().find(|(of, ..)| *of == pid) {
                Some((.., samples)) => samples.push(sample),
                None => seen.push((pid, command(pid), vec![sample])),
            }
        }
    };
    sample();
    while tokio::time::timeout(Duration::from_secs(1), &mut stop).await.is_err() {
        sample();
    }
    sample();
    let seen = seen.into_iter();
    seen.filter_map(|(pid, command, samples)| Memory::new(pid, command, &samples)).collect()
}

/// The process `pid` and its descendants.
fn family(pid: u32) -> Vec<u32> {
    let mut parents: BTreeMap<u32, u32> = BTreeMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(child) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse().ok());
        if let Some(parent) = parent {
            parents.insert(child, parent);
        }
    }
    let mut family = vec![pid];
    let mut index = 0;
    while let Some(&member) = family.get(index) {
        family.extend(parents.iter().filter(|&(_, &parent)| parent == member).map(|(&child, _)| child));
        index += 1;
    }
    family
}

/// RssAnon and RssShmem, in bytes.
fn resident_bytes(pid: u32) -> Option<(u64, u64)> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let kib = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    };
    Some((kib("RssAnon:")? * 1024, kib("RssShmem:")? * 1024))
}

fn command(pid: u32) -> String {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words = line.split(|&byte| byte == 0).take(4).map(String::from_utf8_lossy);
    words.collect::<Vec<_>>().join(" ").trim().to_owned()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn processor_times_are_parsed_for_any_process_name() {
        let stat = "42 (a ) b) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20 0 1 0 0";
        assert_eq!(own_seconds(stat), Some(3.0));
        assert_eq!(busy_and_total("cpu  10 0 10 70 10 0 0 0 5 5\ncpu0 1"), Some((20.0, 100.0)));
        assert_eq!(busy_and_total("nonsense"), None);
    }

    #[test]
    fn growth_is_that_from_minute_to_minute_or_from_third_to_third() {
        let means = |length: u32| {
            let sample = |second: u32| MemorySample {
                seconds: f64::from(second),
                bytes: 100 + u64::from(second),
                shared_bytes: 0,
            };
            let samples: Vec<_> = (0..=length).map(sample).collect();
            let memory = Memory::new(1, String::new(), &samples).unwrap();
            assert_eq!(memory.peak_bytes, 100 + u64::from(length));
            ((memory.early.seconds, memory.early.bytes), (memory.last.seconds, memory.last.bytes))
        };
        assert_eq!(means(300), ((180.0, 310), (240.0, 370)));
        assert_eq!(means(60), ((20.0, 130), (40.0, 150)));
        assert!(Memory::new(1, String::new(), &[]).is_none());
    }

    #[test]
    fn growth_is_seen_although_samples_come_late() {
        let growth = |samples: &[(f64, u64)]| {
            let sample = |&(seconds, bytes): &(f64, u64)| MemorySample { seconds, bytes, shared_bytes: 0 };
            let samples: Vec<_> = samples.iter().map(sample).collect();
            Memory::new(1, String::new(), &samples).unwrap().growth()
        };
        assert_eq!(growth(&[(0.0, 100), (1.4, 190), (2.0, 210)]), 1.0);
        assert_eq!(growth(&[(0.0, 100), (0.1, 200), (2.0, 300)]), 0.5);
        assert_eq!(growth(&[(2.0, 300)]), 0.0);
        // No end of a load is lost to rounding.
        for thousandths in 1..3000 {
            assert_eq!(growth(&[(0.0, 100), (f64::from(thousandths) / 1000.0, 300)]), 2.0);
        }
    }

    #[tokio::test]
    async fn a_load_that_ends_at_once_has_samples() {
        let (stop, stopped) = tokio::sync::oneshot::channel();
        drop(stop);
        let seen = watch(std::process::id(), Instant::now(), stopped).await;
        assert!(seen.first().is_some_and(|own| own.pid == std::process::id() && own.peak_bytes > 100_000));
    }

    #[test]
    fn this_process_has_memory_and_a_name() {
        let pid = std::process::id();
        assert!(family(pid).contains(&pid));
        assert!(resident_bytes(pid).is_some_and(|(private, _)| private > 100_000));
        assert!(!command(pid).is_empty());
    }
}
