//! Uploads a rank's share of a checkpoint: several lanes take experts in turn, so that reading, copying and packing of different
//! experts overlap.

#![allow(unsafe_code, reason = "copies weights to device memory")]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use expertd_kernels::device::{Device, DeviceError, write_device};
use expertd_kernels::params::GateLayer;
use half::bf16;

use super::layers::{Layer, widest};
use super::weights_error::WeightsError;
use crate::experts::{CudaExperts, Filled, PackOn, Uploader, bf16_parts, padded, upload_bytes};
use expertd_model::{Checkpoint, GateTensors, ReadBuffer, ReadBytes};
use expertd_rank::Progress;
use expertd_rank::share::{ExpertShare, LoadProgress, ReadBuffers, weights};
use expertd_types::{ExpertId, LayerId};

/// Bytes of pinned memory that the lanes of a loader share, and of device memory while kernels pack.
const LANES_BYTES: usize = 512 << 20;
/// Largest number of lanes. Two keep the copies busy where the files are in memory; more readers help where they are not.
const LANES: usize = 4;

/// What uploads use.
pub(super) struct Upload<'a> {
    pub(super) device: &'a Device,
    /// Threads that read and pack.
    pub(super) pool: &'a rayon::ThreadPool,
    pub(super) pack_on: PackOn,
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) share: &'a ExpertShare,
}

/// An expert, or a layer's shared experts, and its place.
struct Job {
    layer: usize,
    experts: CudaExperts,
    place: usize,
    /// `None`: the shared experts.
    expert: Option<u32>,
}

impl Upload<'_> {
    /// Copies all weights to their places, and sets which layers have block scales. Returns the number of bytes read.
    pub(super) fn run(
        &self,
        layers: &mut [Option<Layer>],
        progress: &Progress,
    ) -> Result<ReadBytes, WeightsError> {
        let spec = self.checkpoint.spec();
        let report = |loaded, total| progress.set(loaded, total);
        let progress = Mutex::new(LoadProgress::start(self.share.bytes(spec), report));
        let jobs = jobs(layers);
        // `[layers][routed, shared]`: whether an expert without block scales was found.
        let by_row: Vec<[AtomicBool; 2]> = layers.iter().map(|_| Default::default()).collect();
        let (next, has_failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let buffers = ReadBuffers::new(self.checkpoint);
        let lane = || {
            self.device.bind()?;
            let mut buffer = buffers.take();
            let mut uploader =
                Uploader::new(self.device, self.pool, spec.hidden, widest(spec), self.pack_on)?;
            while !has_failed.load(Ordering::Relaxed)
                && let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed))
            {
                let filled = self.upload(&mut uploader, &mut buffer, job)?;
                if !filled.block_scales {
                    by_row[job.layer][usize::from(job.expert.is_none())].store(true, Ordering::Relaxed);
                }
                if let Some(moe) = &spec.layers[job.layer] {
                    let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
                    match (job.expert, &moe.shared) {
                        (Some(_), _) => progress.expert(&moe.experts),
                        (None, Some(shared)) => progress.shared(shared),
                        (None, None) => {}
                    }
                }
            }
            buffers.put_back(buffer);
            Ok(uploader.finish()?)
        };
        let lane = || lane().inspect_err(|_: &WeightsError| has_failed.store(true, Ordering::Relaxed));
        std::thread::scope(|scope| {
            let lanes: Vec<_> = (0..self.lanes(jobs.len())).map(|_| scope.spawn(lane)).collect();
            let gates = layers.iter().enumerate().try_for_each(|(index, layer)| match layer {
                Some(layer) => self.upload_gates(LayerId(index as u32), layer),
                None => Ok(()),
            });
            let gates = gates.inspect_err(|_| has_failed.store(true, Ordering::Relaxed));
            lanes.into_iter().map(join).fold(gates, Result::and)
        })?;
        for (layer, by_row) in layers.iter_mut().zip(by_row) {
            let [routed, shared] = by_row.map(AtomicBool::into_inner);
            let Some(layer) = layer else { continue };
            let shared_experts = layer.shared.as_mut().map(|shared| &mut shared.experts);
            for (experts, by_row) in [(layer.experts.as_mut(), routed), (shared_experts, shared)] {
                if let Some(experts) = experts.filter(|_| by_row) {
                    experts.set_block_scales(false);
                }
            }
        }
        Ok(buffers.total())
    }

    /// The number of lanes for `jobs` experts.
    fn lanes(&self, jobs: usize) -> usize {
        let spec = self.checkpoint.spec();
        let bytes = upload_bytes(spec.hidden, widest(spec));
        (LANES_BYTES / bytes.max(1)).min(self.pool.current_num_threads()).min(jobs).clamp(1, LANES)
    }

    /// Reads one expert to `buffer` and starts to upload it.
    fn upload(
        &self,
        uploader: &mut Uploader<'_>,
        buffer: &mut ReadBuffer,
        job: &Job,
    ) -> Result<Filled, WeightsError> {
        let layer = LayerId(job.layer as u32);
        let failed = |source| WeightsError::Upload { layer, source };
        match job.expert {
            Some(expert) => {
                let id = ExpertId(expert);
                let tensors = self.pool.install(|| self.checkpoint.read_expert(layer, id, buffer))?;
                uploader.load(&job.experts, job.place, &weights(&tensors)).map_err(failed)
            }
            None => match self.pool.install(|| self.checkpoint.read_shared(layer, buffer))? {
                Some(tensors) => {
                    uploader.load(&job.experts, job.place, &weights(&tensors.mlp)).map_err(failed)
                }
                None => Ok(Filled { block_scales: true }),
            },
        }
    }

    /// Copies the weights of a layer's gate, and of the gate of its shared experts.
    fn upload_gates(&self, id: LayerId, layer: &Layer) -> Result<(), WeightsError> {
        let hidden = self.checkpoint.spec().hidden;
        if let (Some(tensors), Some(shared)) = (self.checkpoint.shared(id)?, &layer.shared)
            && let Some(gate) = tensors.gate.filter(|_| shared.gate != 0)
        {
            let mut bits: Vec<u16> = gate.iter().map(|v| bf16::from_f32(*v).to_bits()).collect();
            bits.resize(padded(hidden), 0);
            write(shared.gate, &bits)?;
        }
        let tensors = self.checkpoint.gate(id)?;
        let (weight, low) = self.pool.install(|| bf16_parts(&tensors.weight, padded(hidden)));
        upload_gate(&layer.gate, &tensors, &weight, low.as_deref())?;
        Ok(())
    }
}

/// The experts of all layers, in the order of the checkpoint.
fn jobs(layers: &[Option<Layer>]) -> Vec<Job> {
    let mut jobs = Vec::new();
    for (index, layer) in layers.iter().enumerate() {
        let Some(layer) = layer else { continue };
        if let Some(experts) = layer.experts {
            let of = |(place, &expert)| Job { layer: index, experts, place, expert: Some(expert) };
            jobs.extend(layer.mine.iter().enumerate().map(of));
        }
        if let Some(shared) = &layer.shared {
            jobs.push(Job { layer: index, experts: shared.experts, place: 0, expert: None });
        }
    }
    jobs
}

fn join(lane: std::thread::ScopedJoinHandle<'_, Result<(), WeightsError>>) -> Result<(), WeightsError> {
    lane.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn upload_gate(
    places: &GateLayer,
    tensors: &GateTensors<'_>,
    weight: &[u16],
    low: Option<&[u16]>,
) -> Result<(), DeviceError> {
    write(places.weight, weight)?;
    if let Some(low) = low.filter(|_| places.weight_low != 0) {
        write(places.weight_low, low)?;
    }
    for (place, values) in
        [(places.logit_bias, &tensors.bias), (places.correction_bias, &tensors.correction_bias)]
    {
        if let Some(values) = values.as_ref().filter(|_| place != 0) {
            write(place, values)?;
        }
    }
    match tensors.token_table.as_ref().filter(|_| places.token_table != 0) {
        Some(table) => write(places.token_table, table),
        None => Ok(()),
    }
}

/// Copies a tensor to a place that [`place`](super::layers::place) took for it.
fn write<T: bytemuck::Pod>(place: u64, values: &[T]) -> Result<(), DeviceError> {
    // SAFETY: the place has the size of the tensor, which the specification determines, as the checkpoint checks; nothing else
    // accesses it.
    unsafe { write_device(place, bytemuck::cast_slice(values)) }
}
