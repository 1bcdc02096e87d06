//! Faults of single threads and of whole processes, caused from outside: through ptrace, signals and priorities, without
//! help of the service.

use std::io;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, setpriority_process};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::cores::Burner;
use crate::load::PATIENCE;
use crate::ptrace;

/// Longer than the watchdog needs to end the service after a loss.
pub const LONG: Duration = Duration::from_secs(9);
/// Shorter than a standstill that the watchdog reports.
const SHORT: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Stopped for a second, possibly while it holds a lock.
    Pause,
    /// Stopped until the service has ended, or for nine seconds.
    Stop,
    /// A thread waits in the kernel for as long, in a system call that nothing wakes.
    Block,
    /// A thread ends without unwinding; a process is killed.
    Kill,
    /// A process is killed, and its parent cannot reap it.
    Hold,
    /// Lowest priority on a core that another process keeps busy.
    Starve,
}

impl Fault {
    /// How long the fault lasts if the service does not end.
    pub fn time(self) -> Duration {
        if self == Fault::Pause { SHORT } else { LONG }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    Thread(i32),
    Process(u32),
}

/// A thread or process of the service.
#[derive(Clone, Debug)]
pub struct Victim {
    /// `router`, `rank 0` or `loader 0`; of a thread, also the thread's name.
    pub name: String,
    pub target: Target,
}

impl Victim {
    pub fn process(name: String, process: u32) -> Victim {
        Victim { name, target: Target::Process(process) }
    }

    /// The faults that can be caused to it.
    pub fn faults(&self) -> &'static [Fault] {
        match self.target {
            Target::Thread(_) => &[Fault::Pause, Fault::Stop, Fault::Block, Fault::Kill, Fault::Starve],
            // Its parent is this process, which reaps it.
            Target::Process(_) if self.name == "router" => {
                &[Fault::Pause, Fault::Stop, Fault::Kill, Fault::Starve]
            }
            Target::Process(_) => &[Fault::Pause, Fault::Stop, Fault::Kill, Fault::Hold, Fault::Starve],
        }
    }
}

/// Numbers of the threads of a process, with their names.
fn tasks(process: u32) -> Vec<(i32, String)> {
    // A process or thread may end meanwhile.
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten();
    tasks
        .filter_map(|task| {
            let path = task.ok()?.path();
            let name = std::fs::read_to_string(path.join("comm")).ok()?;
            Some((path.file_name()?.to_str()?.parse().ok()?, name.trim().to_owned()))
        })
        .collect()
}

/// The threads of a process.
pub fn threads(process: u32, of: &str) -> Vec<Victim> {
    let named = tasks(process).into_iter();
    named
        .map(|(thread, name)| Victim { name: format!("{of}: {name}"), target: Target::Thread(thread) })
        .collect()
}

/// A fault that lasts. Dropping it ends it.
pub enum Lasting {
    /// A traced and stopped thread.
    Stopped(i32),
    Blocked(ptrace::Blocked),
    /// A stopped process.
    StoppedProcess(u32),
    /// A process that this one must reap before its parent can.
    Held(u32),
    Starved {
        threads: Vec<(i32, CpuSet)>,
        _burner: Burner,
    },
    /// The victim has ended.
    Over,
}

impl Lasting {
    /// Lets a traced thread end with its process: otherwise the process never ends.
    pub fn let_end(&self) {
        if let Lasting::Stopped(thread) = self {
            ptrace::reap(*thread);
        }
    }
}

impl Drop for Lasting {
    fn drop(&mut self) {
        match self {
            Lasting::Stopped(thread) => ptrace::go_on(*thread),
            Lasting::Blocked(blocked) => blocked.end(),
            Lasting::StoppedProcess(process) => _ = signal(*process, Signal::CONT),
            Lasting::Held(process) => ptrace::reap(*process as i32),
            Lasting::Starved { threads, .. } => {
                for (thread, cores) in threads {
                    // It may have ended.
                    let _ = sched_setaffinity(Pid::from_raw(*thread), cores);
                    let _ = setpriority_process(Pid::from_raw(*thread), 0);
                }
            }
            Lasting::Over => {}
        }
    }
}

/// Sends a signal. Returns whether the process exists.
fn signal(process: u32, signal: Signal) -> bool {
    kill_process(Pid::from_raw(process as i32).unwrap(), signal).is_ok()
}

/// Causes a fault. `None`: the victim had ended, or is never where the fault can be caused.
///
/// # Errors
/// If this process may not trace the victim.
pub fn cause(victim: &Victim, fault: Fault) -> io::Result<Option<Lasting>> {
    match (victim.target, fault) {
        (Target::Thread(thread), Fault::Pause | Fault::Stop) => {
            Ok(ptrace::stop(thread)?.then_some(Lasting::Stopped(thread)))
        }
        (Target::Thread(thread), Fault::Block) => Ok(ptrace::block(thread, SHORT)?.map(Lasting::Blocked)),
        (Target::Thread(thread), Fault::Kill | Fault::Hold) => {
            Ok(ptrace::kill(thread, PATIENCE)?.then_some(Lasting::Over))
        }
        (Target::Thread(thread), Fault::Starve) => Ok(starve(&[thread])),
        (Target::Process(process), Fault::Pause | Fault::Stop | Fault::Block) => {
            Ok(signal(process, Signal::STOP).then_some(Lasting::StoppedProcess(process)))
        }
        (Target::Process(process), Fault::Kill) => Ok(signal(process, Signal::KILL).then_some(Lasting::Over)),
        (Target::Process(process), Fault::Hold) => match ptrace::seize(process as i32) {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
            held => {
                held?;
                signal(process, Signal::KILL);
                Ok(Some(Lasting::Held(process)))
            }
        },
        (Target::Process(process), Fault::Starve) => {
            let threads: Vec<_> = tasks(process).into_iter().map(|(thread, _)| thread).collect();
            Ok(starve(&threads))
        }
    }
}

fn starve(threads: &[i32]) -> Option<Lasting> {
    let usable = sched_getaffinity(None).unwrap();
    let mut core = CpuSet::new();
    core.set((0..CpuSet::MAX_CPU).find(|&core| usable.is_set(core)).unwrap());
    let _burner = Burner::start(Some(&core), 1.0);
    let starved = threads.iter().filter_map(|&thread| {
        let id = Pid::from_raw(thread);
        let before = sched_getaffinity(id).ok()?;
        sched_setaffinity(id, &core).ok()?;
        setpriority_process(id, 19).ok()?;
        Some((thread, before))
    });
    let threads: Vec<_> = starved.collect();
    (!threads.is_empty()).then_some(Lasting::Starved { threads, _burner })
}
