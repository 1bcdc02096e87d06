//! What this machine's GPUs can do, for `expertd doctor`.

#![allow(unsafe_code, reason = "reads NCCL's window table")]

use std::sync::Arc;
use std::time::Duration;

use expertd_kernels::device::{Device, DeviceError, driver_version, reaches_device, read_device};
use nccl_sys::{Communicator, Library, SymmetricMemory, UniqueId, Version, Window};

use expertd_kernels::path::KernelPath;
use expertd_types::GpuPath;

use super::open::{facts_of, gpu_path};
use crate::gpus::ptx_refusal;
use crate::{
    CAPABILITY_NEEDED, CAPABILITY_WAY_OUT, Check, Inventory, NcclFacts, SHARING_NEEDED, SHARING_WAY_OUT,
};

const DRIVER_NEEDED: &str = "580 or newer (CUDA 13)";
const GROUP_NEEDED: &str = "GPUs with the same kernels and equal numbers of multiprocessors that reach each other, for 2 ranks and more";
const DEADLINE: Duration = Duration::from_secs(20);
/// Size of the window that is tried.
const TRIAL_BYTES: usize = 2 << 20;

/// Checks every requirement of GPU ranks.
pub(crate) fn probe() -> Vec<Check> {
    let mut checks = vec![driver()];
    let devices = match devices() {
        Ok(devices) => devices,
        Err(error) => {
            checks.push(Check::failed(
                "GPUs",
                error,
                "one per rank",
                "run where GPUs are, or use --device cpu",
            ));
            return checks;
        }
    };
    let needed = CAPABILITY_NEEDED;
    let path = gpu_path().unwrap_or_default();
    for (ordinal, device) in (0..).zip(&devices) {
        checks.push(match (facts_of(ordinal), device.memory()) {
            (Ok(facts), Ok((free, total))) => {
                let (major, minor) = facts.capability;
                let kernels = facts.kernels(path);
                let found = format!(
                    "{}, compute capability {major}.{minor}{}, {} of {} GiB free",
                    facts.name,
                    kernels.map_or_else(String::new, |kernels| format!(" ({kernels})")),
                    free >> 30,
                    total >> 30
                );
                Check::new(&format!("GPU {ordinal}"), kernels.is_some(), found, needed)
                    .way_out(CAPABILITY_WAY_OUT)
            }
            (facts, memory) => {
                let error = facts.err().or(memory.err());
                let error = error.map_or_else(|| "does not answer".to_owned(), |e| e.to_string());
                Check::failed(&format!("GPU {ordinal}"), error, needed, "look at nvidia-smi and dmesg")
            }
        });
    }
    checks.push(exports(&devices));
    let group = match inventory() {
        Ok(inventory) => {
            if devices.len() > 1 {
                checks.push(group_of(&inventory, path));
            }
            inventory.group(path)
        }
        Err(error) => {
            checks.push(Check::failed("group", error, GROUP_NEEDED, "look at nvidia-smi and dmesg"));
            return checks;
        }
    };
    let library = match Library::open(None) {
        Ok(library) => library,
        Err(error) => {
            checks.push(nccl_missing(group.len(), error.to_string()));
            let sharing = Check::failed("shared GPU", "no NCCL".to_owned(), SHARING_NEEDED, SHARING_WAY_OUT);
            checks.push(sharing.optional());
            return checks;
        }
    };
    let found = format!("{} from {}", library.version(), library.origin());
    checks.push(Check::new("NCCL", true, found, &format!("{} or newer", Version::OLDEST)));
    checks.push(window(&group, &library));
    checks.push(sharing(&nccl_facts(&library)));
    checks
}

/// The GPUs and the NCCL of this machine, without a context on any GPU.
pub(crate) fn inventory() -> Result<Inventory, String> {
    let cards = || -> Result<_, DeviceError> {
        let count = Device::count()?;
        let gpus = (0..count).map(facts_of).collect::<Result<_, _>>()?;
        let row = |from| (0..count).map(|to| reaches_device(from, to)).collect::<Result<_, _>>();
        Ok((gpus, (0..count).map(row).collect::<Result<_, _>>()?))
    };
    let (gpus, peers) = cards().map_err(|error| error.to_string())?;
    let nccl = Library::open(None).map(|library| nccl_facts(&library)).map_err(|error| error.to_string());
    Ok(Inventory { gpus, peers, nccl })
}

/// Checks that the kernels that measure speed limits run on these GPUs.
///
/// # Errors
/// The first GPU on which they do not.
pub(crate) fn check_ceilings(gpus: &[u32]) -> Result<(), String> {
    let count = Device::count().map_err(|error| error.to_string())?;
    for &gpu in gpus.iter().filter(|&&gpu| gpu < count) {
        let facts = facts_of(gpu).map_err(|error| error.to_string())?;
        if facts.kernels(GpuPath::Auto) != Some(KernelPath::Hopper) {
            return Err(format!(
                "speed limits are measured on compute capability 9.0 only, and GPU {gpu} ({}) has {}.{}",
                facts.name, facts.capability.0, facts.capability.1
            ));
        }
    }
    Ok(())
}

fn nccl_facts(library: &Library) -> NcclFacts {
    let Version { major, minor, patch } = library.version();
    NcclFacts { version: (major, minor, patch), origin: library.origin().to_owned() }
}

fn sharing(nccl: &NcclFacts) -> Check {
    Check::new("shared GPU", nccl.can_share(), nccl.to_string(), SHARING_NEEDED)
        .way_out(SHARING_WAY_OUT)
        .optional()
}

fn driver() -> Check {
    match driver_version() {
        Ok((major, minor)) => {
            let found = format!("supports CUDA {major}.{minor}; kernels by nvcc {}", expertd_kernels::NVCC);
            if major >= 13
                && needs_ptx()
                && let Some(refusal) = ptx_refusal(expertd_kernels::NVCC, (major, minor))
            {
                return Check::failed("driver", found, "as new as nvcc, for PTX", &refusal);
            }
            Check::new("driver", major >= 13, found, DRIVER_NEEDED).way_out("install a newer NVIDIA driver")
        }
        Err(error) => Check::failed(
            "driver",
            error.to_string(),
            DRIVER_NEEDED,
            "install NVIDIA's driver, or start the container with GPUs (--gpus all)",
        ),
    }
}

/// Whether the driver has to compile kernels for every GPU: ranks on others run with an older driver, too.
fn needs_ptx() -> bool {
    let path = gpu_path().unwrap_or_default();
    let count = Device::count().unwrap_or(0);
    count > 0 && (0..count).all(|gpu| facts_of(gpu).is_ok_and(|facts| facts.needs_ptx(path)))
}

fn devices() -> Result<Vec<Device>, String> {
    let open = || (0..Device::count()?).map(Device::open).collect::<Result<Vec<_>, DeviceError>>();
    let devices = open().map_err(|error| error.to_string())?;
    if devices.is_empty() { Err("none".to_owned()) } else { Ok(devices) }
}

fn exports(devices: &[Device]) -> Check {
    let cannot: Vec<String> = (0..)
        .zip(devices)
        .filter(|(_, device)| !device.exports_memory().unwrap_or(false))
        .map(|(gpu, _): (u32, _)| gpu.to_string())
        .collect();
    let found =
        if cannot.is_empty() { "every GPU can".to_owned() } else { format!("not GPU {}", cannot.join(", ")) };
    Check::new(
        "export",
        cannot.is_empty(),
        found,
        "export memory as descriptors, for weights that outlive ranks",
    )
    .way_out("virtual GPUs and WSL may not do that; use --device cpu")
}

/// Which GPUs can have the ranks of one service. One rank runs in any case.
fn group_of(inventory: &Inventory, path: GpuPath) -> Check {
    let runs = |gpu: &u32| inventory.gpus[*gpu as usize].kernels(path).is_some();
    let all: Vec<u32> = (0..inventory.gpus.len() as u32).filter(runs).collect();
    let group = inventory.group(path);
    let list = group.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    let found = match inventory.apart(&all, path) {
        Some(why) => format!("GPUs {list}; {why}"),
        None => format!("all {} GPUs that kernels run on", all.len()),
    };
    Check::new("group", group.len() == all.len(), found, GROUP_NEEDED)
        .way_out("ranks use these GPUs unless --gpus lists others; other services can use the rest (`nvidia-smi topo -m`)")
        .optional()
}

/// `ranks` is the number of ranks that a service has by default.
fn nccl_missing(ranks: usize, error: String) -> Check {
    let way_out = "install libnccl2, or point EXPERTD_NCCL at libnccl.so.2; one rank needs none";
    let check =
        Check::failed("NCCL", error, &format!("{} or newer for 2 ranks and more", Version::OLDEST), way_out);
    if ranks > 1 { check } else { check.optional() }
}

/// Registers a window between the first two GPUs of the group, as ranks do. One rank registers none: NCCL has no peer to map for it, and may
/// then return a handle that is no device window.
fn window(group: &[u32], library: &Arc<Library>) -> Check {
    let needed = "symmetric memory for 2 ranks and more";
    let &[first, second, ..] = group else {
        return Check::new("window", true, "not tried, because one rank needs none".to_owned(), needed);
    };
    match try_window([first, second], library) {
        Ok(bytes) => {
            let found = format!("{} KiB registered by GPU {first} and GPU {second}", bytes >> 10);
            Check::new("window", true, found, needed)
        }
        Err(error) => Check::failed(
            "window",
            error.to_string(),
            needed,
            "leave NCCL_CUMEM_ENABLE and NCCL_WIN_ENABLE unset; see NCCL_DEBUG=INFO",
        )
        .optional(),
    }
}

/// Size in bytes of the window that two ranks register in the probe, each on a thread of its own.
fn try_window(gpus: [u32; 2], library: &Arc<Library>) -> Result<usize, nccl_sys::Error> {
    let id = UniqueId::create(library)?.to_bytes();
    let join = |rank: u32| -> Result<usize, nccl_sys::Error> {
        let argument = |error: DeviceError| nccl_sys::Error::Argument(error.to_string());
        let device = Device::open(gpus[rank as usize]).map_err(argument)?;
        device.bind().map_err(argument)?;
        let communicator = Communicator::join(library, &UniqueId::from_bytes(&id)?, 2, rank, DEADLINE)?;
        let memory = SymmetricMemory::allocate(library, TRIAL_BYTES)?;
        // SAFETY: NCCL asks for the head of a table that its window handle points to.
        let window =
            Window::register(communicator, memory, DEADLINE, |at, into| unsafe { read_device(at, into) })?;
        let bytes = window.bytes();
        window.finish(DEADLINE)?;
        Ok(bytes)
    };
    let gone = || nccl_sys::Error::Argument("a thread of the trial ended early".to_owned());
    std::thread::scope(|scope| {
        let other = scope.spawn(|| join(1));
        let first = join(0);
        other.join().map_err(|_| gone())??;
        first
    })
}
