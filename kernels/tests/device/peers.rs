//! Checks and times the exchange between processes, one per rank, with windows over NCCL. Ranks have a GPU each, or share some.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use expertd_kernels::device::{Device, fill_device, read_device};
use expertd_kernels::launch;
use expertd_kernels::layout::{Shape, WindowLayout};
use expertd_kernels::slot::{combine_blocks, dispatch_blocks};
use nccl_sys::{Communicator, Library, SymmetricMemory, UniqueId, Window};

use crate::exchange::{Member, SECOND, combines, cuts};
use crate::random::{Random, step};
use crate::timing::{SHAPES, capture, header, measure, row};
use crate::{Options, Outcome};

const PATIENCE: Duration = Duration::from_secs(60);

/// Starts one process per rank and waits for all of them. Returns the first failure.
pub fn parent(options: &Options) -> Outcome {
    let present = u64::from(Device::count()?);
    let ranks = options.number("ranks", present);
    let share = options.number("share", 0) != 0 && ranks > present;
    if ranks > present && !share {
        println!("skipped: this needs {ranks} GPUs, found {present}");
        return Ok(());
    }
    let folder = std::env::temp_dir().join(format!("expertd-peers-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let mut children = Vec::new();
    for rank in 0..ranks {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["peer", &format!("rank={rank}"), &format!("ranks={ranks}")]);
        command.arg(format!("folder={}", folder.display()));
        for key in ["share", "cases", "seed", "timing", "most", "large", "sweep"] {
            if let Some(value) = options.text(key) {
                command.arg(format!("{key}={value}"));
            }
        }
        // Multicast is off. Children load the modules before any kernel waits for a peer.
        command.env("NCCL_NVLS_ENABLE", "0").env("CUDA_MODULE_LOADING", "LAZY");
        if share {
            command.env("NCCL_MULTI_RANK_GPU_ENABLE", "1");
        }
        children.push((rank, command.spawn()?));
    }
    let mut failures = Vec::new();
    for (rank, mut child) in children {
        let status = child.wait()?;
        if !status.success() {
            failures.push(format!("rank {rank}: {status}"));
        }
    }
    fs::remove_dir_all(&folder)?;
    if failures.is_empty() { Ok(()) } else { Err(failures.join(", ").into()) }
}

fn wait_for(path: &Path) -> Outcome {
    let start = Instant::now();
    while !path.exists() {
        if start.elapsed() > PATIENCE {
            return Err(format!("{} did not appear in time", path.display()).into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Waits on the host until all ranks have called it with this name. Each name may be used once.
fn meet(folder: &Path, name: &str, rank: u32, ranks: u32) -> Outcome {
    fs::write(folder.join(format!("{name}-{rank}")), b"")?;
    for peer in 0..ranks {
        wait_for(&folder.join(format!("{name}-{peer}")))?;
    }
    Ok(())
}

pub fn child(options: &Options) -> Outcome {
    let (rank, ranks) = (options.number("rank", 0) as u32, options.number("ranks", 1) as u32);
    let folder = PathBuf::from(options.text("folder").expect("the parent names a folder"));
    let device = Device::open(rank % Device::count()?)?;
    launch::load_kernels()?;
    let nccl = Library::open(None)?;
    let id_file = folder.join("id");
    let id = if rank == 0 {
        let id = UniqueId::create(&nccl)?;
        fs::write(folder.join("id.part"), id.to_bytes())?;
        fs::rename(folder.join("id.part"), &id_file)?;
        id
    } else {
        wait_for(&id_file)?;
        let bytes: [u8; 128] = fs::read(&id_file)?.try_into().map_err(|_| "an id of another length")?;
        UniqueId::from_bytes(&bytes)?
    };
    let start = Instant::now();
    let communicator = Communicator::join(&nccl, &id, ranks, rank, PATIENCE)?;
    let joined = start.elapsed();
    // Large enough for the largest case below: T = 4096 with H = 7168.
    let largest = options.number("large", 0) != 0;
    let most_tokens = if largest { 4096 } else { 600 };
    let shape = Shape { ranks, max_tokens: most_tokens, hidden: 7168, top_k: 10, experts: 256 };
    let (_, bytes) = WindowLayout::new(&shape);
    let memory = SymmetricMemory::allocate(&nccl, bytes as usize)?;
    let own = memory.address();
    // SAFETY: NCCL's window handle points to a table of which this many bytes are read.
    let window = Window::register(communicator, memory, PATIENCE, |address, into| unsafe {
        read_device(address, into)
    })?;
    if rank == 0 {
        println!(
            "NCCL {} from {}, joined in {joined:?}, window of {} MiB, LSA call {}: peers {:x?}",
            nccl.version(),
            nccl.origin(),
            window.bytes() >> 20,
            nccl.has_lsa_pointer(),
            window.peers()
        );
    }
    if window.peers()[rank as usize] != own && rank == 0 {
        println!("own copy at {own:x}, through the window at {:x}", window.peers()[rank as usize]);
    }
    let outcome = exchanges(&device, &window, &folder, rank, ranks, options)
        .and_then(|()| times(&device, &window, &folder, rank, ranks, options));
    device.synchronize()?;
    outcome?;
    window.health()?;
    meet(&folder, "end", rank, ranks)?;
    window.finish(PATIENCE)?;
    for error in nccl_sys::take_drop_errors() {
        println!("rank {rank}: {error}");
    }
    Ok(())
}

fn reset(window: &Window, rank: u32, folder: &Path, name: &str) -> Outcome {
    meet(folder, &format!("{name}-before"), rank, window.peers().len() as u32)?;
    // SAFETY: this rank's own copy, which no rank writes because all of them have passed `meet`.
    unsafe { fill_device(window.peers()[rank as usize], 0, window.bytes())? };
    meet(folder, &format!("{name}-after"), rank, window.peers().len() as u32)
}

fn exchanges(
    device: &Device,
    window: &Window,
    folder: &Path,
    rank: u32,
    ranks: u32,
    options: &Options,
) -> Outcome {
    // Every rank draws the same random steps.
    let mut random = Random(options.number("seed", 31));
    // Each rank cuts its combine elsewhere.
    let mut of_rank = Random(options.number("seed", 31) + 1000 * u64::from(rank + 1));
    let cases = options.number("cases", 12);
    let stream = device.stream()?;
    for case in 0..cases {
        let shape = crate::exchange::shape(&mut random, ranks, 300);
        shape.check()?;
        reset(window, rank, folder, &format!("case{case}"))?;
        let mut member = Member::new(device, &shape, rank, window.peers(), case + 1)?;
        member.group.deadline_ns = 30 * SECOND;
        member.group.delay_ns = random.pick(&[0, 30_000]);
        member.group.chunk = random.pick(&[0, 1, 4]);
        for index in 0..3 {
            let steps = step(&mut random, &shape);
            let dtype = random.pick(&[1, 2, 3]);
            meet(folder, &format!("load{case}-{index}"), rank, ranks)?;
            member.load(&shape, &steps[rank as usize], dtype, true)?;
            meet(folder, &format!("go{case}-{index}"), rank, ranks)?;
            let blocks =
                (dispatch_blocks(&shape, shape.max_tokens, 64), combine_blocks(&shape, shape.max_tokens, 64));
            let cuts = cuts(&mut of_rank, shape.max_tokens);
            // SAFETY: all addresses are of live buffers and of the window.
            unsafe {
                launch::meet(&[member.group], 1, stream.raw())?;
                launch::dispatch(&[member.buffers.dispatch(member.group)], blocks.0, stream.raw())?;
                launch::scale(&[member.buffers.scale(member.group)], 64, stream.raw())?;
                for part in combines(member.buffers.combine(member.group, 0), &cuts) {
                    launch::combine(&[part], blocks.1, stream.raw())?;
                }
            }
            stream.synchronize()?;
            member
                .verify(&shape, &steps, dtype, true)
                .map_err(|error| format!("case {case}, step {index}, {shape:?}, cut at {cuts:?}: {error}"))?;
        }
    }
    if rank == 0 {
        println!("peers: {} exchanges of {ranks} processes are bitwise right", cases * 3);
    }
    Ok(())
}

fn times(
    device: &Device,
    window: &Window,
    folder: &Path,
    rank: u32,
    ranks: u32,
    options: &Options,
) -> Outcome {
    if options.number("timing", 1) == 0 {
        return Ok(());
    }
    let most = options.number("most", 128) as u32;
    let stream = device.stream()?;
    if rank == 0 {
        header();
    }
    let mut all = vec![1_u32, 8, 32, 128, 512];
    if options.number("large", 0) != 0 {
        all.extend([2048, 4096]);
    }
    for (hidden, experts, top_k) in SHAPES {
        for &tokens in &all {
            let shape = Shape { ranks, max_tokens: tokens, hidden, top_k, experts };
            // The engine's choice first, then others: blocks of dispatch, blocks of combine, chunk.
            let own = (dispatch_blocks(&shape, tokens, most), combine_blocks(&shape, tokens, most), 0);
            let mut choices = vec![own];
            if options.number("sweep", 0) != 0 {
                let (d, c, _) = own;
                choices.extend([(d.div_ceil(2), c.div_ceil(2), 0), (d * 2, c * 2, 0)]);
                choices.extend([(100, 100, 0), (d, c, 4), (d, c, 8), (d, c, 30)]);
            }
            for (i, (d, c, chunk)) in choices.into_iter().enumerate() {
                let blocks = (d.clamp(2, 128), c.min(128));
                reset(window, rank, folder, &format!("time{hidden}-{tokens}-{i}"))?;
                let mut member = Member::new(device, &shape, rank, window.peers(), 1)?;
                member.group.chunk = chunk;
                let timed =
                    capture(device, &stream, &shape, std::slice::from_ref(&member), tokens, blocks, 3)?;
                meet(folder, &format!("timed{hidden}-{tokens}-{i}"), rank, ranks)?;
                let result = measure(&stream, &timed, &member, tokens)?;
                if rank == 0 {
                    row(&shape, tokens, blocks, chunk, result);
                }
            }
        }
    }
    Ok(())
}
