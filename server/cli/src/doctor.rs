//! `expertd doctor`: what this machine can do, and why not more.

use std::fmt::Write as _;
use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use expertd_compute::linalg::Level;
use expertd_ipc::SharedRegion;
use expertd_ipc::control::DeviceKind;
use expertd_rank_cuda::{self as gpu, Gate};
use expertd_router::cluster::{available_cores, numa_nodes, usable};

/// Memory below which little can be served.
const LITTLE_MEMORY: u64 = 2 << 30;

/// Show what this machine can do, why not more, and what to do about it
///
/// Exit status 1 if ranks cannot run on the device asked for (by default: neither on GPUs nor on the CPU).
#[derive(Args, Clone, Debug)]
pub struct DoctorArgs {
    /// Only what this device needs decides about the exit status
    #[arg(long, value_enum)]
    pub device: Option<DeviceKind>,
    /// Print everything as JSON
    #[arg(long)]
    pub json: bool,
}

/// Looks, prints, and gives the exit status.
#[must_use]
pub fn run(args: &DoctorArgs) -> ExitCode {
    let (cpu, cuda) = (cpu_gates(), gpu::probe());
    let open = |gates: &[Gate]| gates.iter().all(|gate| gate.ok || gate.optional);
    let (cpu_open, cuda_open) = (open(&cpu), open(&cuda));
    if args.json {
        let list = |gates: &[Gate]| {
            let one = |g: &Gate| {
                json!({
                    "name": g.name, "found": g.found, "needed": g.needed, "ok": g.ok, "optional": g.optional,
                    "way_out": g.way_out,
                })
            };
            gates.iter().map(one).collect::<Vec<_>>()
        };
        println!(
            "{}",
            json!({
                "cpu": { "ok": cpu_open, "gates": list(&cpu) },
                "cuda": { "ok": cuda_open, "gates": list(&cuda) },
            })
        );
    } else {
        print!("{}", section("ranks on the CPU (--device cpu)", &cpu, cpu_open));
        print!("{}", section("ranks on GPUs (--device cuda)", &cuda, cuda_open));
    }
    let ok = match args.device {
        Some(DeviceKind::Cpu) => cpu_open,
        Some(DeviceKind::Cuda) => cuda_open,
        None => cpu_open || cuda_open,
    };
    if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn section(title: &str, gates: &[Gate], open: bool) -> String {
    let width = gates.iter().map(|gate| gate.name.len()).max().unwrap_or(0);
    let mut text = format!("{title}: {}\n", if open { "can run" } else { "cannot run" });
    for gate in gates {
        let mark = match (gate.ok, gate.optional) {
            (true, _) => "ok  ",
            (false, true) => "hint",
            (false, false) => "NO  ",
        };
        let _ = writeln!(text, "  {mark} {:width$}  {}", gate.name, gate.found);
        if !gate.ok {
            let _ = writeln!(text, "       {:width$}  needed: {}", "", gate.needed);
            if !gate.way_out.is_empty() {
                let _ = writeln!(text, "       {:width$}  way out: {}", "", gate.way_out);
            }
        }
    }
    text
}

fn cpu_gates() -> Vec<Gate> {
    let cores = available_cores();
    let (nodes, usable) = (numa_nodes(&cores).len(), usable(&cores));
    let level = Level::active();
    let memory = memory_bytes();
    let memfd = SharedRegion::create("expertd-doctor", 4096).and_then(|region| region.populate(0, 4096));
    let (pages, pages_ok) = huge_pages();
    vec![
        Gate::of("instructions", level != Level::Portable, level.to_string(), "AVX2 with FMA and F16C, or AVX-512")
            .way_out("kernels run without them, several times slower; look at EXPERTD_CPU and the machine type")
            .only_a_hint(),
        Gate::of(
            "cores",
            !cores.is_empty(),
            format!("{} on {nodes} NUMA node(s): the default is that many ranks", cores.len()),
            "one or more per rank",
        ),
        Gate::of(
            "quota",
            usable == cores.len(),
            format!("{usable} of {} cores all the time", cores.len()),
            "all cores that this process sees",
        )
        .way_out("give the container whole cores (Kubernetes: static CPU manager policy); ranks have fewer threads meanwhile")
        .only_a_hint(),
        Gate::of(
            "memory",
            memory.is_none_or(|bytes| bytes >= LITTLE_MEMORY),
            memory.map_or_else(
                || "not known".to_owned(),
                |bytes| format!("{:.1} GiB available", bytes as f64 / f64::from(1 << 30)),
            ),
            "the checkpoint's MoE weights once, windows and staging; `expertd inspect` and `serve` print them",
        )
        .way_out("fewer layers or a smaller model, or a machine with more memory")
        .only_a_hint(),
        Gate::of(
            "memfd",
            memfd.is_ok(),
            memfd.map_or_else(|error| error.to_string(), |()| "can be made, sealed and mapped".to_owned()),
            "anonymous shared memory",
        )
        .way_out("allow memfd_create in the container's seccomp profile, and give it memory"),
        Gate::of("huge pages", pages_ok, pages, "advise, within_size or always for shared memory")
            .way_out("echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled; saves some TLB misses only")
            .only_a_hint(),
    ]
}

/// Memory that can still be had, by the machine and by the control group.
fn memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let machine = line.split_whitespace().next()?.parse::<u64>().ok()? * 1024;
    let read =
        |name: &str| std::fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?.trim().parse().ok();
    let group =
        read("memory.max").map(|limit: u64| limit.saturating_sub(read("memory.current").unwrap_or(0)));
    Some(group.map_or(machine, |group| group.min(machine)))
}

/// How shared memory uses huge pages, and whether it can.
fn huge_pages() -> (String, bool) {
    match std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled") {
        Ok(text) => {
            let mode = text.split('[').nth(1).and_then(|rest| rest.split(']').next()).unwrap_or("unknown");
            (format!("shared memory: {mode}"), matches!(mode, "always" | "within_size" | "advise" | "force"))
        }
        Err(_) => ("the kernel does not tell".to_owned(), false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_gate_says_what_is_needed_and_the_way_out() {
        let gates = [
            Gate::of("cores", true, "8".into(), "1"),
            Gate::failed("driver", "none".into(), "580", "install it"),
            Gate::failed("pages", "never".into(), "advise", "echo").only_a_hint(),
        ];
        let text = section("ranks", &gates, false);
        for part in
            ["cannot run", "ok   cores", "NO   driver", "needed: 580", "way out: install it", "hint pages"]
        {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        assert!(!text.contains("needed: 1\n"), "an open gate needs no advice:\n{text}");
    }

    #[test]
    fn this_machine_runs_cpu_ranks() {
        assert!(cpu_gates().iter().all(|gate| gate.ok || gate.optional), "{:?}", cpu_gates());
    }
}
