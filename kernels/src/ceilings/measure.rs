//! Measurement of [`Ceilings`]: memory reads, tensor core products, stores to peers.
#![allow(unsafe_code, reason = "calls the kernels' C launchers")]

use std::ffi::{c_int, c_void};
use std::time::Duration;

use super::Ceilings;
use crate::device::{Buffer, Device, DeviceError, Stream};
use crate::event::Event;
use crate::launch::{LaunchError, check};

unsafe extern "C" {
    fn expertd_read_memory(
        from: *const c_void,
        bytes: u64,
        sink: *mut u32,
        sms: u32,
        stream: *mut c_void,
    ) -> c_int;
    fn expertd_push(to: *mut c_void, from: *const c_void, bytes: u64, sms: u32, stream: *mut c_void)
    -> c_int;
    fn expertd_multiply(rounds: u32, sink: *mut u32, sms: u32, stream: *mut c_void, flops: *mut f64)
    -> c_int;
}

/// Bytes read by one launch: far more than the caches hold.
const READ_BYTES: usize = 4 << 30;
/// Bytes sent to a peer by one launch.
const SENT_BYTES: usize = 1 << 30;
/// Rounds of products in one launch, which takes about 2 ms.
const ROUNDS: u32 = 1500;
/// Consecutive launches of products, which take about 0.4 s, so that clocks settle.
const SUSTAINED_LAUNCHES: u32 = 200;
/// Number of measurements whose median is a figure.
const REPEATS: usize = 7;

/// Why a measurement failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum CeilingError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error(
        "GPU {from} cannot access the memory of GPU {to}; all measured GPUs need peer access to the next one"
    )]
    NoPeerAccess { from: u32, to: u32 },
}

/// One measured GPU.
struct GpuBench {
    device: Device,
    stream: Stream,
    begin: Event,
    end: Event,
    sink: Buffer<u32>,
    sms: u32,
}

impl GpuBench {
    fn open(ordinal: u32) -> Result<GpuBench, DeviceError> {
        let device = Device::open(ordinal)?;
        Ok(GpuBench {
            stream: device.stream()?,
            begin: Event::new(&device)?,
            end: Event::new(&device)?,
            sink: Buffer::zeroed(&device, 1)?,
            sms: device.multiprocessors()?,
            device,
        })
    }

    /// Enqueues work between two events.
    fn start(&self, work: impl FnOnce() -> Result<(), LaunchError>) -> Result<(), CeilingError> {
        self.device.bind()?;
        self.begin.record(&self.stream)?;
        work()?;
        Ok(self.end.record(&self.stream)?)
    }

    /// Waits for the work; returns its duration.
    fn finish(&self) -> Result<Duration, CeilingError> {
        self.stream.synchronize()?;
        Ok(self.end.since(&self.begin)?)
    }

    fn read(&self, buffer: &Buffer<u8>) -> Result<(), LaunchError> {
        let (from, sink) = (buffer.address() as *const c_void, self.sink.address() as *mut u32);
        // SAFETY: the buffers are alive, on this device and of the given size; its context is current (`start`).
        let code = unsafe {
            expertd_read_memory(from, buffer.len() as u64, sink, self.sms, self.stream.raw().cast())
        };
        check("read_memory", code)
    }

    /// Enqueues products; returns their number of FLOPs.
    fn multiply(&self) -> Result<f64, LaunchError> {
        let mut flops = 0.0;
        let sink = self.sink.address() as *mut u32;
        // SAFETY: the buffer is alive and on this device, whose context is current (`start`).
        let code =
            unsafe { expertd_multiply(ROUNDS, sink, self.sms, self.stream.raw().cast(), &raw mut flops) };
        check("multiply", code).map(|()| flops)
    }

    fn push(&self, to: &Buffer<u8>, from: &Buffer<u8>) -> Result<(), LaunchError> {
        let (to, bytes) = (to.address() as *mut c_void, from.len().min(to.len()) as u64);
        // SAFETY: the buffers are alive and at least that large; this device may store to the peer's (`Device::map_peer`).
        let code = unsafe {
            expertd_push(to, from.address() as *const c_void, bytes, self.sms, self.stream.raw().cast())
        };
        check("push", code)
    }
}

/// Measures these GPUs together in about a second, during which nothing else should use them.
pub fn measure(gpus: &[u32]) -> Result<Ceilings, CeilingError> {
    let benches = gpus.iter().map(|&gpu| GpuBench::open(gpu)).collect::<Result<Vec<_>, _>>()?;
    let mut slowest = Ceilings {
        memory_bytes_per_second: f64::INFINITY,
        tensor_burst_flops: f64::INFINITY,
        tensor_sustained_flops: f64::INFINITY,
        link_bytes_per_second: links(&benches)?,
    };
    for bench in &benches {
        slowest.memory_bytes_per_second = slowest.memory_bytes_per_second.min(memory(bench)?);
        let (burst, sustained) = tensor(bench)?;
        slowest.tensor_burst_flops = slowest.tensor_burst_flops.min(burst);
        slowest.tensor_sustained_flops = slowest.tensor_sustained_flops.min(sustained);
    }
    Ok(slowest)
}

fn memory(bench: &GpuBench) -> Result<f64, CeilingError> {
    let buffer = Buffer::<u8>::zeroed(&bench.device, READ_BYTES)?;
    let time = median(|| {
        bench.start(|| bench.read(&buffer))?;
        bench.finish()
    })?;
    Ok(READ_BYTES as f64 / time.as_secs_f64())
}

/// FLOP per second in a burst, and sustained.
fn tensor(bench: &GpuBench) -> Result<(f64, f64), CeilingError> {
    let mut flops = 0.0;
    let burst = median(|| {
        bench.start(|| bench.multiply().map(|made| flops = made))?;
        bench.finish()
    })?;
    bench.start(|| (0..SUSTAINED_LAUNCHES).try_for_each(|_| bench.multiply().map(drop)))?;
    let sustained = bench.finish()?;
    Ok((flops / burst.as_secs_f64(), flops * f64::from(SUSTAINED_LAUNCHES) / sustained.as_secs_f64()))
}

/// Bytes per second that each GPU stores to the next one while all GPUs do so.
fn links(benches: &[GpuBench]) -> Result<Option<f64>, CeilingError> {
    if benches.len() < 2 {
        return Ok(None);
    }
    let next = |at: usize| (at + 1) % benches.len();
    let mut buffers = Vec::with_capacity(benches.len());
    for (at, bench) in benches.iter().enumerate() {
        if !bench.device.map_peer(&benches[next(at)].device)? {
            let gpu = |at: usize| benches[at].device.ordinal();
            return Err(CeilingError::NoPeerAccess { from: gpu(at), to: gpu(next(at)) });
        }
        let buffer = || Buffer::<u8>::zeroed(&bench.device, SENT_BYTES);
        buffers.push((buffer()?, buffer()?));
    }
    let time = median(|| {
        for (at, bench) in benches.iter().enumerate() {
            bench.start(|| bench.push(&buffers[next(at)].1, &buffers[at].0))?;
        }
        let times = benches.iter().map(GpuBench::finish).collect::<Result<Vec<_>, _>>()?;
        Ok(times.into_iter().max().unwrap_or_default())
    })?;
    Ok(Some(SENT_BYTES as f64 / time.as_secs_f64()))
}

/// The median of several measurements, after one warm-up.
fn median(mut once: impl FnMut() -> Result<Duration, CeilingError>) -> Result<Duration, CeilingError> {
    once()?;
    let mut times = (0..REPEATS).map(|_| once()).collect::<Result<Vec<_>, _>>()?;
    times.sort_unstable();
    Ok(times[REPEATS / 2])
}
