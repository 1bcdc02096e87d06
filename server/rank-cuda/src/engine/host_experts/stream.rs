//! Steps of many rows: copy engines bring some or all experts of CPU ranks to this GPU, which computes their rows
//! ([`StreamedExperts`]).
//!
//! Experts come in chunks. The stream of copies fills one of two staging buffers with a chunk as CPU ranks have it. The stream of steps
//! waits for that, rewrites the chunk to panels, and multiplies it with its rows, while the next chunk is copied. Two events per buffer say
//! when it is full and when it is free. No kernel waits for a copy: streams do.
//!
//! The host decides before it launches a step, by the step's number of rows, because it does not know the routing then. Experts of which
//! this GPU has a copy already are not copied.

#![allow(unsafe_code, reason = "copies and kernels work on memory that Rust only sees as addresses")]

use std::sync::Arc;

use expertd_kernels::device::{Buffer, Device, DeviceError, Stream};
use expertd_kernels::event::{self, Event};
use expertd_kernels::experts::LayerWeights;
use expertd_kernels::params::{AWAY, MAX_EXPERTS};
use expertd_tier::{Last, ShareBalance, StreamedExperts, counts_for_slots, next_chunk, pays, touched_share};

use super::memory::HostExperts;
use super::repack::{HostCopies, HostCopy, Staging};
use super::slots::Slots;
use crate::engine::fault::CudaFault;
use crate::engine::layers::Layer;
use crate::experts::{CudaExperts, HostBuffer, Panels, WeightSpace};

/// Bytes of experts from which copies run at the full rate of the link.
const CHUNK_BYTES: usize = 32 << 20;
/// Largest number of experts of a chunk.
const MOST_EXPERTS: usize = 64;
/// Staging buffers.
const BUFFERS: usize = 2;

/// A staging buffer.
struct StagingBuffer {
    staging: Staging,
    full: Event,
    free: Event,
}

/// How the experts of CPU ranks of a layer come to the GPU.
struct StreamedLayer {
    copy: Arc<HostCopy>,
    /// Experts of a chunk.
    chunk: usize,
    /// The places of a chunk's experts.
    panels: CudaExperts,
}

/// What a slot of steps needs.
struct StepSlot {
    /// Tables, `[MAX_EXPERTS]` each: indices of experts, and back.
    host: HostBuffer,
    device: Buffer<u32>,
    /// The products with the last copied experts.
    computed: Event,
}

/// What steps need for which experts come to this GPU.
pub(in crate::engine) struct Streaming {
    copies: Stream,
    buffers: Vec<StagingBuffer>,
    // Keeps the memory that `layers` names.
    _panels: Panels,
    /// `[layers]`.
    layers: Vec<Option<StreamedLayer>>,
    /// `[layers]`.
    weights: Buffer<LayerWeights>,
    /// `[slots of steps]`.
    step_slots: Vec<StepSlot>,
    /// Least number of rows of a step for which all experts come.
    rows: usize,
    balance: ShareBalance,
    poison: bool,
}

/// A step for which experts come to this GPU. Its kernels number experts so: those that this rank holds, the slots, the copied ones.
#[derive(Clone, Debug)]
pub(in crate::engine) struct StreamedStep {
    layer: usize,
    /// Slot of steps.
    slot: usize,
    rows: usize,
    /// Whether it is known what of the step ended last.
    is_balanced: bool,
    /// Whether CPU ranks compute none of its rows.
    pub(in crate::engine) is_whole: bool,
    /// Whether its rows say which experts slots should hold.
    pub(super) counts_for_slots: bool,
    /// Experts that this rank holds.
    pub(in crate::engine) held: u32,
    /// Slots that are read.
    pub(in crate::engine) slots: u32,
    /// Those that are copied, as the layer's [`HostCopy`] numbers them.
    copied: Vec<usize>,
    /// As `TierParams::resident`, but for this layer alone: kernels add the layer's offset.
    pub(in crate::engine) resident: u64,
    /// As `CopyOutParams::local_ids`, in the same way.
    pub(in crate::engine) local_ids: u64,
}

impl StreamedStep {
    /// Number of experts of the step.
    pub(in crate::engine) fn count(&self) -> u32 {
        self.held + self.slots + self.copied.len() as u32
    }
}

/// Consecutive experts that were copied.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct Chunk {
    /// Number of its first expert among the experts of the step.
    pub(in crate::engine) first: u32,
    /// Number of experts.
    pub(in crate::engine) count: u32,
    /// Address of the table of weights.
    pub(in crate::engine) weights: u64,
}

impl Streaming {
    /// Makes the buffers for the experts of `copies`, which all come for steps of at least `rows` rows. `slots`: slots of steps. Returns
    /// `None` if no layer has experts that can be copied.
    pub(super) fn new(
        device: &Device,
        copies: &HostCopies,
        slots: usize,
        (rows, poison): (usize, bool),
    ) -> Result<Option<Self>, DeviceError> {
        let of_layers = || copies.iter().flatten();
        let chunk_of = |copy: &HostCopy| CHUNK_BYTES.div_ceil(copy.bytes().max(1)).clamp(1, MOST_EXPERTS);
        let staged = of_layers().map(|copy| chunk_of(copy) * copy.stride()).max().unwrap_or(0);
        if staged == 0 || rows == usize::MAX {
            return Ok(None);
        }
        let bytes = of_layers().map(|copy| {
            let mut space = WeightSpace::counting();
            let _ = copy.place(&mut space, chunk_of(copy));
            space.bytes() as usize
        });
        let panels = Panels::new(device, bytes.max().unwrap_or(0) / 2)?;
        let streamed = copies.iter().map(|copy| {
            copy.as_ref().map(|copy| StreamedLayer {
                copy: Arc::clone(copy),
                chunk: chunk_of(copy),
                panels: copy.place(&mut WeightSpace::at(panels.address()), chunk_of(copy)),
            })
        });
        let layers: Vec<_> = streamed.collect();
        let weights = layers
            .iter()
            .map(|layer| layer.as_ref().map_or_else(LayerWeights::default, |layer| layer.panels.weights()));
        let weights: Vec<_> = weights.collect();
        let buffer = || {
            Ok::<_, DeviceError>(StagingBuffer {
                staging: Staging::new(device, staged)?,
                full: Event::new(device)?,
                free: Event::new(device)?,
            })
        };
        let slot = || {
            Ok::<_, DeviceError>(StepSlot {
                host: HostBuffer::new(device, 2 * MAX_EXPERTS * size_of::<u32>())?,
                device: Buffer::zeroed(device, 2 * MAX_EXPERTS)?,
                computed: Event::new(device)?,
            })
        };
        Ok(Some(Streaming {
            copies: device.stream()?,
            buffers: (0..BUFFERS).map(|_| buffer()).collect::<Result<_, _>>()?,
            weights: Buffer::from_slice(device, &weights)?,
            step_slots: (0..slots).map(|_| slot()).collect::<Result<_, _>>()?,
            _panels: panels,
            layers,
            rows,
            balance: ShareBalance::new(rows, copies.len()),
            poison,
        }))
    }

    /// Whether experts of the layer can come here.
    pub(super) fn is_pinned(&self, layer: usize, host: &HostExperts) -> bool {
        let layer = self.layers.get(layer).and_then(Option::as_ref);
        layer.is_some_and(|layer| layer.copy.is_pinned(host))
    }

    /// Decides what a step copies, and sends its tables on the stream of steps. `None`: the step copies nothing.
    pub(super) fn begin(
        &mut self,
        layer: &Layer,
        (slot_of_steps, rows, top_k): (usize, usize, usize),
        slots: Option<&Slots>,
        on: &Stream,
    ) -> Result<Option<StreamedStep>, CudaFault> {
        let Some(streamed) = self.layers[layer.index].as_ref() else { return Ok(None) };
        let touched = touched_share(rows, top_k, layer.spec.experts.count);
        let share = self.balance.share(layer.index, rows, touched);
        if share == 0.0 {
            return Ok(None);
        }
        let held = layer.mine.len();
        // With too many slots, their experts are copied once more.
        let slots = slots
            .filter(|slots| held + slots.count() as usize + streamed.copy.experts().len() <= MAX_EXPERTS);
        let of_slots = slots.map_or(0, |slots| slots.count() as usize);
        let slot_of = |expert: u32| slots.and_then(|slots| slots.slot_of(layer.index, expert));
        let elsewhere = streamed.copy.experts().iter().filter(|expert| slot_of(expert.expert).is_none());
        let chosen = StreamedExperts::new(share, elsewhere.count());
        if rows < self.rows && !pays(rows, chosen.count(), streamed.copy.bytes()) {
            self.balance.skipped(layer.index, rows);
            return Ok(None);
        }
        let step_slot = &mut self.step_slots[slot_of_steps];
        // SAFETY: the step that used the slot before has completed, and so has the copy of its tables.
        let both: &mut [u32] = unsafe { step_slot.host.as_mut_slice(2 * MAX_EXPERTS) };
        let (resident, local_ids) = both.split_at_mut(MAX_EXPERTS);
        resident.fill(AWAY);
        local_ids.fill(0);
        let mut set = |local: usize, expert: u32| {
            resident[expert as usize] = local as u32;
            local_ids[local] = expert;
        };
        layer.mine.iter().enumerate().for_each(|(local, &expert)| set(local, expert));
        let (mut copied, mut place) = (Vec::new(), 0);
        for (index, expert) in streamed.copy.experts().iter().enumerate() {
            if let Some(slot) = slot_of(expert.expert) {
                set(held + slot.0 as usize, expert.expert);
                continue;
            }
            if chosen.has(place) {
                set(held + of_slots + copied.len(), expert.expert);
                copied.push(index);
            }
            place += 1;
        }
        let (from, bytes) = (both.as_ptr().cast(), size_of_val(both));
        // SAFETY: the device's tables of the slot, which only kernels of its last step have read.
        unsafe { event::copy_to_device(on, step_slot.device.address(), from, bytes)? };
        let count = held + of_slots + copied.len();
        let at = |first: usize, stride: usize| {
            let (table, offset) =
                (step_slot.device.address() + (first * 4) as u64, (layer.index * stride * 4) as u64);
            table.wrapping_sub(offset)
        };
        Ok(Some(StreamedStep {
            layer: layer.index,
            slot: slot_of_steps,
            rows,
            is_balanced: false,
            is_whole: copied.len() == place,
            counts_for_slots: counts_for_slots(rows, self.rows),
            held: held as u32,
            slots: of_slots as u32,
            copied,
            resident: at(0, MAX_EXPERTS),
            local_ids: at(MAX_EXPERTS, count),
        }))
    }

    /// Bytes that a step copies.
    pub(super) fn bytes(&self, step: &StreamedStep) -> u64 {
        let copy = self.layers[step.layer].as_ref();
        copy.map_or(0, |layer| (layer.copy.bytes() * step.copied.len()) as u64)
    }

    /// Copies the experts of a step in chunks, and calls `compute` for each one after the launches that rewrite it on `on`.
    ///
    /// # Safety
    /// Work that was enqueued for earlier steps is on `on`, and `compute` enqueues its work there.
    pub(super) unsafe fn enqueue(
        &self,
        step: &StreamedStep,
        host: &HostExperts,
        on: &Stream,
        mut compute: impl FnMut(Chunk) -> Result<(), CudaFault>,
    ) -> Result<(), CudaFault> {
        let Some(StreamedLayer { copy, chunk, panels }) = self.layers[step.layer].as_ref() else {
            return Ok(());
        };
        let mut first = step.held + step.slots;
        let (mut left, mut index) = (&step.copied[..], 0);
        while !left.is_empty() {
            let (experts, rest) = left.split_at(next_chunk(left.len(), *chunk));
            left = rest;
            let StagingBuffer { staging, full, free } = &self.buffers[index % BUFFERS];
            index += 1;
            // The chunk that used this buffer before is rewritten.
            free.wait_event(&self.copies)?;
            // SAFETY: nothing else uses the buffer between `free` and `full`, and the layer is pinned until this engine has drained its
            // streams. All work with the panels is on the stream of steps.
            unsafe {
                if self.poison {
                    staging.poison(&self.copies)?;
                }
                copy.bring(host, experts, staging, &self.copies)?;
                full.record(&self.copies)?;
                full.wait_event(on)?;
                if self.poison {
                    copy.poison(panels, (0, panels.count()), on)?;
                }
                copy.unpack(panels, 0, experts, staging, on)?;
            }
            free.record(on)?;
            let count = experts.len() as u32;
            compute(Chunk { first, count, weights: self.weights.address() })?;
            first += count;
        }
        Ok(())
    }

    /// The products of this rank for a divided step are enqueued on `on`.
    pub(super) fn computed(&self, step: &StreamedStep, on: &Stream) -> Result<(), DeviceError> {
        self.step_slots[step.slot].computed.record(on)
    }

    /// Looks what of a divided step has ended; `have_sums_come`: whether CPU ranks have.
    pub(super) fn look(&mut self, step: &mut StreamedStep, have_sums_come: bool) -> Result<(), DeviceError> {
        if step.is_balanced {
            return Ok(());
        }
        let computed = self.step_slots[step.slot].computed.has_passed()?;
        step.is_balanced = computed || have_sums_come;
        if let Some(last) = Last::of(have_sums_come, computed) {
            self.balance.ended(step.layer, step.rows, last);
        }
        Ok(())
    }

    /// Waits until no copy runs any more.
    pub(super) fn drain(&self) {
        let _ = self.copies.synchronize();
    }
}
