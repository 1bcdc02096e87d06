//! `expertd doctor`: which ranks this machine can run, and what prevents others.

use std::fmt::Write as _;
use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use crate::cores::{available_cores, numa_nodes, usable};
use expertd_compute::linalg::SimdLevel;
use expertd_ipc::SealedWriter;
use expertd_ipc::control::DeviceKind;
use expertd_network::TRIED;
use expertd_rank::share::available_memory;
use expertd_rank_cuda::{self as gpu, Check};
use expertd_shm::SharedRegion;

use crate::mps;
use crate::network_agent::probe_in_child_process;
use crate::serve::kinds::Kinds;
use crate::units::bytes;

/// Smallest amount of available memory, in bytes, that the check accepts.
const MIN_MEMORY: u64 = 2 << 30;

/// Show which ranks this machine can run, what prevents others, and what to do about it
///
/// Exits with status 1 if ranks cannot run on the devices given by --device (cpu, cuda, or cuda,cpu), or, without it, on any device.
#[derive(Args, Clone, Debug)]
pub struct DoctorArgs {
    /// Device whose requirements decide the exit status, as in `serve`: cpu, cuda, or cuda,cpu
    #[arg(long)]
    pub device: Option<Kinds>,
    /// Print everything as JSON
    #[arg(long)]
    pub json: bool,
}

/// Checks the machine and prints the results; exit status 0 if ranks can run.
#[must_use]
pub fn run(args: &DoctorArgs) -> ExitCode {
    let (cpu, mut cuda) = (cpu_checks(), gpu::probe());
    cuda.push(mps::check());
    cuda.push(locked_memory(rustix::process::getrlimit(rustix::process::Resource::Memlock).current));
    let network = [network_check()];
    let can_run = |checks: &[Check]| checks.iter().all(|check| check.ok || check.optional);
    let (cpu_runs, cuda_runs) = (can_run(&cpu), can_run(&cuda));
    if args.json {
        let list = |checks: &[Check]| {
            let entry = |check: &Check| {
                json!({
                    "name": check.name, "found": check.found, "needed": check.needed, "ok": check.ok,
                    "optional": check.optional, "way_out": check.way_out,
                })
            };
            checks.iter().map(entry).collect::<Vec<_>>()
        };
        println!(
            "{}",
            json!({
                "cpu": { "ok": cpu_runs, "gates": list(&cpu) },
                "cuda": { "ok": cuda_runs, "gates": list(&cuda) },
                "network": { "ok": can_run(&network), "gates": list(&network) },
            })
        );
    } else {
        print!("{}", section("ranks on the CPU (--device cpu)", &cpu, cpu_runs));
        print!("{}", section("ranks on GPUs (--device cuda)", &cuda, cuda_runs));
        print!("{}", section("network sessions (--network-listen)", &network, can_run(&network)));
    }
    let ok = match args.device {
        Some(Kinds { first: DeviceKind::Cuda, is_mixed }) => cuda_runs && (cpu_runs || !is_mixed),
        Some(Kinds { first: DeviceKind::Cpu, .. }) => cpu_runs,
        None => cpu_runs || cuda_runs,
    };
    if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn section(title: &str, checks: &[Check], can_run: bool) -> String {
    let width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    let mut text = format!("{title}: {}\n", if can_run { "can run" } else { "cannot run" });
    for check in checks {
        let mark = match (check.ok, check.optional) {
            (true, _) => "ok  ",
            (false, true) => "hint",
            (false, false) => "NO  ",
        };
        let _ = writeln!(text, "  {mark} {:width$}  {}", check.name, check.found);
        if !check.ok {
            let _ = writeln!(text, "       {:width$}  needed: {}", "", check.needed);
            if !check.way_out.is_empty() {
                let _ = writeln!(text, "       {:width$}  way out: {}", "", check.way_out);
            }
        }
    }
    text
}

fn cpu_checks() -> Vec<Check> {
    let cores = available_cores();
    let (nodes, usable) = (numa_nodes(&cores).len(), usable(&cores));
    let level = SimdLevel::active();
    let memory = available_memory();
    let memfd = SharedRegion::create("expertd-doctor", 4096).and_then(|region| region.populate(0, 4096));
    let (pages, pages_ok) = huge_pages();
    vec![
        Check::new("instructions", level != SimdLevel::Portable, level.to_string(), "AVX2 with FMA and F16C, or AVX-512")
            .way_out("kernels run several times slower without them; check EXPERTD_CPU and the machine type")
            .optional(),
        Check::new(
            "cores",
            !cores.is_empty(),
            format!("{} on {nodes} NUMA node(s); the default is one rank per node", cores.len()),
            "one or more per rank",
        ),
        Check::new(
            "quota",
            usable == cores.len(),
            format!("enough for {usable} of {} cores at all times", cores.len()),
            "all cores that this process sees",
        )
        .way_out("give the container whole cores (Kubernetes: static CPU manager policy); until then ranks start fewer threads")
        .optional(),
        Check::new(
            "memory",
            memory.is_none_or(|bytes| bytes >= MIN_MEMORY),
            memory.map_or_else(
                || "unknown".to_owned(),
                |bytes| format!("{:.1} GiB available", bytes as f64 / f64::from(1 << 30)),
            ),
            "room for the checkpoint's MoE weights, windows and staging; `expertd inspect` and `serve` print their sizes",
        )
        .way_out("serve a smaller model, or use a machine with more memory")
        .optional(),
        Check::new(
            "memfd",
            memfd.is_ok(),
            memfd.map_or_else(|error| error.to_string(), |()| "can be created, sealed and mapped".to_owned()),
            "anonymous shared memory",
        )
        .way_out("allow memfd_create in the container's seccomp profile, and give it memory"),
        Check::new("huge pages", pages_ok, pages, "Linux 6.1 or newer, which may place weights in huge pages")
            .way_out("use a newer kernel; /sys/kernel/mm/transparent_hugepage/shmem_enabled must not be `deny`; it saves TLB misses")
            .optional(),
    ]
}

/// The check of a limit on locked memory in bytes, which GPU ranks need; `None`: unlimited.
fn locked_memory(limit: Option<u64>) -> Check {
    let found =
        limit.map_or_else(|| "unlimited".to_owned(), |limit| format!("{} may be locked", bytes(limit)));
    Check::new("locked", limit.is_none(), found, "unlimited: staging, sessions, and the wire to CPU ranks are pinned")
        .way_out("raise it (ulimit -l unlimited; LimitMEMLOCK=infinity in a systemd unit) if ranks say that they cannot pin memory")
        .optional()
}

/// What sessions of clients on other hosts need.
fn network_check() -> Check {
    let needed = format!("NIXL {}, of which only its UCX plugin is used", TRIED.join(" or "));
    match probe_in_child_process(None) {
        Ok(found) => Check::new("NIXL", true, found, &needed),
        Err(error) => {
            let (found, way_out) = error.split_once("; ").unwrap_or((&error, ""));
            Check::failed("NIXL", found.to_owned(), &needed, way_out)
        }
    }
}

/// Tries to place sealed memory in huge pages; returns what was found and whether it succeeded.
fn huge_pages() -> (String, bool) {
    let tried = SealedWriter::create("expertd-doctor").and_then(|mut memory| {
        memory.write_at(0, &vec![0; 4 << 20])?;
        Ok(memory.huge_bytes() > 0)
    });
    match tried {
        Ok(true) => ("weights of CPU ranks can lie in them".to_owned(), true),
        Ok(false) => ("the kernel refuses them for sealed memory".to_owned(), false),
        Err(error) => (error.to_string(), false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_check_says_what_is_needed_and_the_way_out() {
        let checks = [
            Check::new("cores", true, "8".into(), "1"),
            Check::failed("driver", "none".into(), "580", "install it"),
            Check::failed("pages", "never".into(), "advise", "echo").optional(),
        ];
        let text = section("ranks", &checks, false);
        for part in
            ["cannot run", "ok   cores", "NO   driver", "needed: 580", "way out: install it", "hint pages"]
        {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        assert!(!text.contains("needed: 1\n"), "a check that is met has no advice:\n{text}");
    }

    #[test]
    fn a_limit_on_locked_memory_is_a_hint() {
        assert!(locked_memory(None).ok);
        let limited = locked_memory(Some(8 << 20));
        assert!(!limited.ok && limited.optional && limited.found.contains("8.0 MiB"), "{limited:?}");
    }

    #[test]
    fn this_machine_runs_cpu_ranks() {
        assert!(cpu_checks().iter().all(|check| check.ok || check.optional), "{:?}", cpu_checks());
    }
}
