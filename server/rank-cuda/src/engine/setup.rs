//! Set-up of a GPU rank: device, group, buffers; the weights are mapped.

#![allow(unsafe_code, reason = "pins the pages of the channel's staging")]

use std::io::BufReader;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use expertd_kernels::device::{Device, DeviceError, Pinned};
use expertd_kernels::layout::Shape;
use expertd_kernels::path::KernelPath;
use expertd_kernels::{experts, launch};
use nccl_sys::{Library, UniqueId};

use super::copies::Copies;
use super::counts::DeviceCounts;
use super::host_experts::{CopiedExperts, Copyable, HostExperts};
use super::layers::{Tables, any_fp8_products, widest};
use super::open::open;
use super::step::{Buffers, Sizes};
use super::tier::Tier;
use super::usage;
use super::weights::HeldWeights;
use super::weights_error::WeightsError;
use super::{CudaEngine, EngineParts, PinnedStaging};
use crate::experts::padded;
use crate::windows::{ID_BYTES, LsaWindows};
use crate::{self as gpu, RankGpu};
use expertd_ipc::RankChannel;
use expertd_ipc::control::{self, FailureKind, FromRank, RankSetup, ToRank};
use expertd_ipc::passing::FdReader;
use expertd_rank::{Failure, Joining, Loaded, setup_failure};

/// Longest time that ranks wait for each other while they join.
const JOIN_DEADLINE: Duration = Duration::from_secs(120);

/// Sets up this rank's GPU, joins the group, and loads.
pub(crate) fn load(mut joining: Joining<'_>) -> Result<Loaded, Failure> {
    let is_mixed = joining.setup.shape.is_mixed();
    let wire = is_mixed.then(|| joining.next_fd("the wire")).transpose()?;
    let (index, memory) = (joining.next_fd("the index of weights")?, joining.next_fd("the weights")?);
    let load_failure = |error: WeightsError| (FailureKind::Load, error.to_string());
    let weights = HeldWeights::open(joining.setup, index, memory).map_err(load_failure)?;
    let spec = weights.spec();
    joining.clock.end("index of weights");
    let of_cpus = is_mixed.then(|| HostExperts::map(&mut joining, spec)).transpose()?;
    let Joining { setup, channel, row_counts, socket, reader, clock, .. } = joining;
    clock.end("experts of CPU ranks");
    let gpu = RankGpu::of(setup.rank, &setup.gpus).map_err(setup_failure)?;
    let device = open(gpu.index).map_err(setup_failure)?;
    clock.end("device");
    gpu::check(spec, &setup.shape).map_err(setup_failure)?;
    let tables = weights.tables(is_mixed);
    let spec = &spec.clone();
    let mut layers = weights.map(&device, tables.as_ref()).map_err(load_failure)?;
    clock.end("weights");
    let copyable = of_cpus.map(|of_cpus| {
        let held = tables.as_ref().map_or(0, Tables::per_rank);
        Copyable::new(&device, setup, spec, (&layers.layers, held), of_cpus)
    });
    let copyable = copyable.transpose().map_err(setup_failure)?;
    let slots = copyable.as_ref().map_or(0, Copyable::slots);
    layers.add_slots(&device, slots).map_err(setup_failure)?;
    let physical = |tables: &Tables| (setup.shape.sources * tables.per_rank()) as usize;
    // The source of a mixed group has all experts in some steps.
    let physical = tables.as_ref().map_or(spec.max_experts(), physical);
    let physical = if is_mixed { physical.max(spec.max_experts()) + slots as usize } else { physical };
    let shape = gpu::kernel_shape(&setup.shape, physical);
    let kernels = KernelPath::chosen();
    if kernels == KernelPath::Portable {
        gpu::check_portable(spec, setup.fp8_products).map_err(setup_failure)?;
        // Copies of experts, which the router did not count, make more tiles.
        gpu::check_portable_sizes(&shape).map_err(setup_failure)?;
    }
    let took = launch::load_kernels().map_err(setup_failure)?;
    tracing::info!(%kernels, ?took, "kernels are loaded");
    experts::setup().map_err(setup_failure)?;
    clock.end("kernels");

    let windows = join(setup, &device, &shape, socket, reader)?;
    clock.end("windows");
    let host = pin(&device, channel)?;
    clock.end("pinned staging");
    let mut tier = wire.map(|wire| Tier::new(setup, &device, &shape, wire)).transpose()?;
    clock.end("wire");
    let counts = DeviceCounts::new(&device, row_counts.clone(), setup.rank).map_err(setup_failure)?;
    clock.end("row counts");
    let padding = shape.hidden as usize != setup.shape.hidden;
    let staged = channel.staging_addresses();
    let no_room = |error: DeviceError| {
        let message = format!("{error}; lower max-tokens-per-step, or the number of slots");
        setup_failure(format!("cannot allocate the buffers of {} slots: {message}", setup.shape.slots))
    };
    let sizes = Sizes {
        inter: padded(widest(spec)),
        slots: setup.shape.slots,
        padding,
        fp8_products: any_fp8_products(spec, setup.fp8_products),
    };
    let buffers = Buffers::new(&device, &shape, &sizes).map_err(no_room)?;
    let copies = if padding {
        None
    } else {
        Some(Copies::new(&device, &staged, super::poison().is_some()).map_err(no_room)?)
    };
    clock.end("buffers");
    if let Some((tier, copyable)) = tier.as_mut().zip(copyable) {
        let poison = super::poison().is_some();
        let copied =
            CopiedExperts::new(&device, setup, copyable, row_counts.clone(), poison).map_err(|error| {
                let way_out = "lower gpu-memory, or slot-memory, or set stream-rows to 0";
                setup_failure(format!("cannot allocate memory for experts of CPU ranks: {error}; {way_out}"))
            })?;
        tier.copied = Some(copied);
        clock.end("memory for experts of CPU ranks");
    }
    let weight_bytes = layers.weight_bytes;
    let name = device.name().map_err(setup_failure)?;
    let usage = device.uuid().ok().and_then(usage::reader);
    clock.end("usage");
    let describe = format!(
        "cuda, GPU {} ({name}){}{}{}",
        gpu.index,
        if kernels == KernelPath::Portable { ", portable kernels" } else { "" },
        if gpu.ranks == 1 { String::new() } else { format!(", shared by {} ranks", gpu.ranks) },
        match setup.shape.sources {
            1 if is_mixed => ", all rows; wire to CPU ranks",
            1 => "",
            _ => ", windows over NCCL",
        }
    );
    let parts = EngineParts { shape, windows, host, tier, counts, layers, buffers, copies };
    let mut engine = CudaEngine::new(setup, device, parts, &staged).map_err(setup_failure)?;
    clock.end("graphs");
    engine.start_copies();
    Ok(Loaded { engine: Box::new(engine), weight_bytes, device: describe, usage })
}

/// Pins the staging of the channel.
fn pin(device: &Device, channel: &RankChannel) -> Result<PinnedStaging, Failure> {
    let (pages, bytes) = channel.staging_pages();
    // SAFETY: the channel maps these pages as long as it lives, and it outlives the engine.
    let staging = unsafe { Pinned::register(device, pages, bytes) }.map_err(|error| {
        setup_failure(format!(
            "cannot pin {} MiB of staging: {error}; raise the limit of locked memory (ulimit -l), or lower \
             max-tokens-per-step",
            bytes >> 20
        ))
    })?;
    Ok(PinnedStaging { first: pages as usize, bytes, staging })
}

fn join(
    setup: &RankSetup,
    device: &Device,
    shape: &Shape,
    socket: &UnixStream,
    reader: &mut BufReader<FdReader>,
) -> Result<LsaWindows, Failure> {
    if shape.ranks == 1 {
        return LsaWindows::alone(device, shape, setup.shape.slots).map_err(setup_failure);
    }
    let own = device.ordinal();
    for &other in &setup.gpus {
        if !device.reaches_number(other.cast_signed()).map_err(setup_failure)? {
            return Err(setup_failure(format!(
                "GPU {own} has no peer access to GPU {other}, which several ranks need; choose GPUs that reach each other (--gpus, \
                 `nvidia-smi topo -m`), or use --ranks 1"
            )));
        }
    }
    let multiprocessors = device.multiprocessors().map_err(setup_failure)?;
    let library = Library::open(None).map_err(setup_failure)?;
    tracing::debug!(version = %library.version(), origin = library.origin(), "NCCL");
    if setup.rank.0 == 0 {
        let id = UniqueId::create(&library).map_err(setup_failure)?;
        let id = id.to_bytes().to_vec();
        let group = FromRank::GroupId { id, multiprocessors };
        control::send(socket, &group).map_err(setup_failure)?;
    }
    let id = receive_id(socket, reader, multiprocessors)?;
    LsaWindows::join(&library, &id, shape, setup.rank.0, setup.shape.slots, JOIN_DEADLINE)
        .map_err(setup_failure)
}

/// Receives the id that rank 0 made from the router. The ranks' GPUs must have equal numbers of multiprocessors, because each rank
/// computes the grids of an exchange from its own number, and the grids have to be equal.
fn receive_id(
    socket: &UnixStream,
    reader: &mut BufReader<FdReader>,
    multiprocessors: u32,
) -> Result<[u8; ID_BYTES], Failure> {
    socket.set_read_timeout(Some(JOIN_DEADLINE)).map_err(setup_failure)?;
    let message = control::receive::<ToRank>(reader)
        .map_err(|error| setup_failure(format!("no NCCL id came from rank 0 through the router: {error}")))?;
    socket.set_read_timeout(None).map_err(setup_failure)?;
    match message {
        Some(ToRank::GroupId { multiprocessors: of_rank_0, .. }) if of_rank_0 != multiprocessors => {
            Err(setup_failure(format!(
                "this rank's GPU has {multiprocessors} multiprocessors and rank 0's has {of_rank_0}; choose GPUs of one kind with \
                 CUDA_VISIBLE_DEVICES"
            )))
        }
        Some(ToRank::GroupId { id, .. }) => {
            let found = id.len();
            id.try_into()
                .map_err(|_| setup_failure(format!("the NCCL id has {found} bytes, expected {ID_BYTES}")))
        }
        other => Err(setup_failure(format!("expected the NCCL id from the router, found {other:?}"))),
    }
}
