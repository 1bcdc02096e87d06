//! The real binary as a child process, with helpers for tests.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

pub mod load;

/// Time limit until a service is ready, far longer than it needs.
const READY: Duration = Duration::from_secs(300);

/// Folder of a family's fixture, or of `../quantised/NAME`: checkpoint and golden.safetensors.
pub fn fixture(family: &str) -> PathBuf {
    match family.strip_prefix("../") {
        Some(other) => expertd_test_fixtures::fixture(other),
        None => expertd_test_fixtures::fixture(&format!("golden/{family}")),
    }
}

/// The golden file of a family.
pub fn golden(family: &str) -> PathBuf {
    fixture(family).join("golden.safetensors")
}

/// Every family with a fixture.
pub fn families() -> Vec<String> {
    let folders = expertd_test_fixtures::all("golden").into_iter();
    let families = folders.map(|folder| folder.file_name().unwrap().to_str().unwrap().to_owned());
    let families: Vec<String> = families.collect();
    assert!(families.len() >= 4, "fixtures are missing: {families:?}");
    families
}

/// Flags of a service that takes no rank for dead because the machine gives it no processor time for a while. Tests use them which say that
/// no generation ended.
pub const PATIENT: [&str; 2] = ["--liveness-timeout-ms", "30000"];

/// `flags` and [`PATIENT`], unless they say how long ranks may be silent.
pub fn with_patience<'a>(flags: &[&'a str]) -> Vec<&'a str> {
    let patient: &[&str] = if flags.contains(&PATIENT[0]) { &[] } else { &PATIENT };
    [flags, patient].concat()
}

/// A ready `expertd serve` on free ports.
pub struct Service {
    child: Child,
    /// Address of the public API.
    pub address: String,
    /// Address of the Admin service.
    pub admin: String,
    /// Address of the Prometheus endpoint.
    pub metrics: String,
}

/// The program under test: `EXPERTD_BINARY`, otherwise the one that cargo built for this test.
pub fn program() -> PathBuf {
    std::env::var_os("EXPERTD_BINARY").map_or_else(
        || {
            let test = std::env::current_exe().unwrap();
            let target = test.ancestors().nth(2).unwrap();
            target.join("expertd")
        },
        PathBuf::from,
    )
}

/// The GPU of each rank in tests on GPUs: `EXPERTD_TEST_GPUS`, such as `0,0,0,0`, which scripts/gpu_checks.py sets. `None`: each rank
/// has a GPU of its own.
pub fn test_gpus() -> Option<Vec<u32>> {
    let list = std::env::var("EXPERTD_TEST_GPUS").ok()?;
    Some(list.split(',').map(|gpu| gpu.parse().expect("EXPERTD_TEST_GPUS lists numbers of GPUs")).collect())
}

/// The part of `all` that this process tests: `EXPERTD_TEST_PART`, such as `2/4` for the second quarter, otherwise all of them.
pub fn part<T>(all: Vec<T>) -> Vec<T> {
    let Ok(part) = std::env::var("EXPERTD_TEST_PART") else { return all };
    let (number, of) = part.split_once('/').expect("EXPERTD_TEST_PART is like 2/4");
    let [number, of] = [number, of].map(|text| text.parse::<usize>().expect("EXPERTD_TEST_PART is like 2/4"));
    assert!((1..=of).contains(&number), "EXPERTD_TEST_PART is {part}");
    let [first, end] = [number - 1, number].map(|parts| all.len() * parts / of);
    all.into_iter().take(end).skip(first).collect()
}

/// The flags with which `ranks` ranks use the GPUs of [`test_gpus`] in turn.
fn gpu_flags(ranks: u32) -> Vec<String> {
    let Some(gpus) = test_gpus() else { return Vec::new() };
    let of_ranks: Vec<u32> = gpus.iter().copied().cycle().take(ranks as usize).collect();
    let list: Vec<String> = of_ranks.iter().map(u32::to_string).collect();
    let mut flags = vec!["--gpus".to_owned(), list.join(",")];
    if of_ranks.iter().enumerate().any(|(at, gpu)| of_ranks[..at].contains(gpu)) {
        flags.push("--share-gpu".to_owned());
    }
    flags
}

/// The command line that serves a checkpoint on free ports, on CPU ranks unless `more` says otherwise.
pub fn serve_command(model: &Path, more: &[&str]) -> Command {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let socket = std::env::temp_dir().join(format!("expertd-test-{}-{number}.sock", std::process::id()));
    let admin = format!("unix:{}", socket.display());
    let mut command = Command::new(program());
    command.arg("serve").arg("--model").arg(model);
    for (flag, value) in [
        ("--device", "cpu"),
        ("--listen", "127.0.0.1:0"),
        ("--admin-listen", admin.as_str()),
        ("--metrics-listen", "127.0.0.1:0"),
    ] {
        if !more.contains(&flag) {
            command.args([flag, value]);
        }
    }
    command.args(more).stdin(Stdio::null()).stdout(Stdio::piped());
    // The user's own settings must not change the test; the place of NCCL is no setting.
    let is_setting = |name: &str| name.starts_with("EXPERTD_") && name != "EXPERTD_NCCL";
    for (name, _) in std::env::vars().filter(|(name, _)| is_setting(name)) {
        command.env_remove(name);
    }
    command.env("EXPERTD_LOG", "error");
    command
}

impl Service {
    /// Serves a family's fixture and waits until it is ready.
    pub fn start(family: &str, ranks: u32, more: &[&str]) -> Service {
        Service::start_with(family, ranks, more, &[])
    }

    /// As `start`, with environment variables.
    pub fn start_with(family: &str, ranks: u32, more: &[&str], environment: &[(&str, &str)]) -> Service {
        Service::start_checkpoint(&fixture(family), ranks, more, environment)
    }

    /// Serves any checkpoint and waits until it is ready.
    pub fn start_checkpoint(
        model: &Path,
        ranks: u32,
        more: &[&str],
        environment: &[(&str, &str)],
    ) -> Service {
        Service::try_start(model, ranks, more, environment).unwrap_or_else(|problem| panic!("{problem}"))
    }

    /// Serves any checkpoint and waits until it is ready.
    ///
    /// # Errors
    ///
    /// What happened instead, if the service ended or was not ready in time.
    pub fn try_start(
        model: &Path,
        ranks: u32,
        more: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<Service, String> {
        // A mixed group has one source rank.
        let is_mixed = more.iter().any(|flag| ["cpu,cpu", "cuda,cpu"].contains(flag));
        let on_gpus = match is_mixed {
            true if more.contains(&"cuda,cpu") => 1,
            false if more.contains(&"cuda") => ranks,
            _ => 0,
        };
        let of_gpus = if on_gpus > 0 { gpu_flags(on_gpus) } else { Vec::new() };
        let of_gpus: Vec<&str> = of_gpus.iter().map(String::as_str).collect();
        let ranks = if is_mixed { format!("1,{}", ranks - 1) } else { ranks.to_string() };
        let flags = [&["--ranks", &ranks], more, &of_gpus].concat();
        let mut command = serve_command(model, &flags);
        let mut child = command.envs(environment.iter().copied()).spawn().unwrap();
        let (lines, received) = mpsc::channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        // Read to the end, so that the service never waits for a full pipe.
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let _ = lines.send(line);
            }
        });
        let mut service =
            Service { child, address: String::new(), admin: String::new(), metrics: String::new() };
        let begun = Instant::now();
        let mut seen = Vec::new();
        while service.address.is_empty() {
            let left = READY.saturating_sub(begun.elapsed());
            match received.recv_timeout(left) {
                Ok(line) => {
                    if let Some(rest) = line.strip_prefix("ready: ") {
                        service.address = after(rest, "listening on ");
                        service.admin = after(rest, "admin on ");
                        service.metrics = after(rest, "metrics on ");
                    }
                    seen.push(line);
                }
                Err(error) => {
                    let status = service.child.try_wait();
                    return Err(format!(
                        "{model:?}, {flags:?}: no ready line ({error}), status {status:?}: {seen:#?}"
                    ));
                }
            }
        }
        Ok(service)
    }

    /// The router's process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The rank processes, by rank.
    pub fn ranks(&self) -> Vec<u32> {
        ranks_of(self.pid())
    }

    /// Sends a signal to the router.
    pub fn signal(&self, signal: Signal) {
        send(self.pid(), signal);
    }

    /// Waits for the end of the router.
    pub fn wait(&mut self, limit: Duration) -> Option<ExitStatus> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return Some(status);
            }
            if begun.elapsed() > limit {
                return None;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // The ranks die with the router, even stopped ones, which a separate test checks.
        let ranks = self.ranks();
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(socket) = self.admin.strip_prefix("unix:") {
            let _ = std::fs::remove_file(socket);
        }
        for rank in ranks {
            let _ = kill_process(Pid::from_raw(rank as i32).unwrap(), Signal::KILL);
        }
    }
}

/// The rank processes of a router, by rank.
pub fn ranks_of(router: u32) -> Vec<u32> {
    of_command(router, "rank")
}

/// The loader processes of a router, by rank.
pub fn loaders_of(router: u32) -> Vec<u32> {
    of_command(router, "loader")
}

/// The processes that check a checkpoint for a reload of this router.
pub fn checks_of(router: u32) -> Vec<u32> {
    let is_check = |pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|&byte| byte == 0).any(|word| word == b"inspect")
    };
    children(router).into_iter().filter(is_check).collect()
}

fn of_command(router: u32, command: &str) -> Vec<u32> {
    let mut ranks = children(router)
        .into_iter()
        .filter_map(|pid| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
            let words = line.split(|&byte| byte == 0).map(String::from_utf8_lossy).collect::<Vec<_>>();
            if words.get(1)? != command {
                return None;
            }
            let at = words.iter().position(|word| word == "--rank")?;
            Some((words.get(at + 1)?.parse::<u32>().ok()?, pid))
        })
        .collect::<Vec<_>>();
    ranks.sort_unstable();
    ranks.into_iter().map(|(_, pid)| pid).collect()
}

/// The word after `prefix`.
fn after(text: &str, prefix: &str) -> String {
    let rest = text.split_once(prefix).map_or("", |(_, rest)| rest);
    rest.split([',', ' ']).next().unwrap_or_default().to_owned()
}

/// Sends a signal to a process of this test.
pub fn send(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

/// Whether a process runs (or is stopped). One that has ended and waits to be reaped does not.
pub fn alive(pid: u32) -> bool {
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X'])),
        Err(_) => false,
    }
}

/// Direct children of a process.
pub fn children(parent: u32) -> Vec<u32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let fields = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
        fields.split(' ').nth(1) == Some(&parent.to_string())
    })
    .collect()
}

/// Waits until `condition` holds.
pub fn eventually(limit: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < limit, "did not happen within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Runs `expertd serve` to its end and returns its exit code and standard error.
pub fn serve_to_the_end(model: &Path, more: &[&str]) -> (Option<i32>, String) {
    let output = serve_command(model, more).stderr(Stdio::piped()).output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}
