//! Processor time: which cores a thread may use, what a process has used, and a process that uses as much.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The cores in an environment variable such as `0,1,2`, if it is set.
pub fn of(variable: &str) -> Option<CpuSet> {
    let mut cores = CpuSet::new();
    std::env::var(variable).ok()?.split(',').for_each(|core| cores.set(core.trim().parse().unwrap()));
    Some(cores)
}

/// Moves the calling thread to some cores; threads and processes that it starts inherit them.
pub fn move_to(cores: Option<&CpuSet>) {
    if let Some(cores) = cores {
        sched_setaffinity(None, cores).unwrap();
    }
}

/// Does `work` on some cores and moves the calling thread back.
pub fn on<T>(cores: Option<&CpuSet>, work: impl FnOnce() -> T) -> T {
    let before = sched_getaffinity(None).unwrap();
    move_to(cores);
    let result = work();
    sched_setaffinity(None, &before).unwrap();
    result
}

/// Processor time that a process has used so far.
pub fn used(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // The name, in brackets, may contain spaces. utime and stime are the 12th and 13th field after it.
    let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    // Linux shows ticks of 10 ms to user space, whatever the kernel counts in.
    Duration::from_millis(ticks * 10)
}

/// Environment variable that makes this test binary burn processor time: the share of one core.
const BURN: &str = "HOSTILE_BURN";

/// A process that does nothing but use processor time on some cores.
pub struct Burner(Child);

impl Burner {
    /// Uses `cores_used` cores' worth of processor time, spread over the cores of the set.
    pub fn start(cores: Option<&CpuSet>, cores_used: f64) -> Burner {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "cores::burns_processor_time", "--nocapture"]).stdout(Stdio::null());
        command.env(BURN, format!("{cores_used}"));
        Burner(on(cores, || command.spawn().unwrap()))
    }

    pub fn used(&self) -> Duration {
        used(self.0.id())
    }
}

impl Drop for Burner {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The process of [`Burner`]. Without the variable it only checks how processor time is counted.
#[test]
fn burns_processor_time() {
    let Some(share) = std::env::var(BURN).ok().map(|text| text.parse::<f64>().unwrap()) else {
        let before = used(std::process::id());
        let begun = Instant::now();
        while used(std::process::id()) < before + Duration::from_millis(50) {
            assert!(begun.elapsed() < Duration::from_secs(60), "a busy thread uses processor time");
        }
        assert!(Path::new("/proc/self/stat").exists());
        return;
    };
    let threads = std::thread::available_parallelism().unwrap().get();
    let share = (share / threads as f64).clamp(1e-3, 1.0);
    let burners: Vec<_> = (0..threads).map(|_| std::thread::spawn(move || burn(share))).collect();
    burners.into_iter().for_each(|burner| burner.join().unwrap());
}

/// Uses a share of a core, in pieces of 0.2 ms.
fn burn(share: f64) {
    let begun = Instant::now();
    loop {
        let piece = Instant::now();
        while piece.elapsed() < Duration::from_micros(200) {
            std::hint::spin_loop();
        }
        // The first number is the thread's time on a processor, in nanoseconds.
        let times = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
        let on_cpu = Duration::from_nanos(times.split(' ').next().unwrap().parse().unwrap());
        std::thread::sleep(on_cpu.div_f64(share).saturating_sub(begun.elapsed()));
    }
}
