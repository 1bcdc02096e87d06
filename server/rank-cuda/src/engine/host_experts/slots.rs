//! Copies of experts of CPU ranks on this GPU, which win over their owners and change between steps.
//!
//! [`SlotDriver`] decides which experts have copies; this module makes them and tells kernels. Kernels read one table of all steps, whose
//! entries change on the stream of steps, between the launches of two steps:
//!
//! * An entry that names a slot is written after the copy has ended ([`poll`](Slots::poll)), so every step that is launched later finds
//!   the expert there.
//! * An entry is cleared before the next step of the layer is launched ([`begin`](Slots::begin)), and a copy to its slot begins after all
//!   steps that were launched before have completed, second halves and counts included: the cache proposes it only then.
//!
//! So no kernel reads a slot while a copy writes it, and none waits for a copy.

#![allow(unsafe_code, reason = "copies and kernels work on memory that Rust only sees as addresses")]

use std::collections::VecDeque;
use std::sync::Arc;

use expertd_ipc::RowCounts;
use expertd_kernels::device::{Buffer, Device, DeviceError, Stream};
use expertd_kernels::event::{self, Event};
use expertd_kernels::experts::LayerWeights;
use expertd_kernels::params::{AWAY, MAX_EXPERTS};
use expertd_tier::slots::{LayerSlots, SlotDriver, SlotIndex, Upload};
use expertd_types::{ExpertId, LayerId, Sequence};

use super::memory::HostExperts;
use super::repack::{HostCopies, HostCopy, Staging};
use crate::engine::fault::CudaFault;
use crate::engine::layers::SlotTables;
use crate::experts::{CudaExperts, Panels, WeightSpace};

/// A copy that has begun.
struct Running {
    upload: Upload,
    ended: Event,
}

/// The slots of a layer.
struct SlotLayer {
    /// The places of copies.
    places: CudaExperts,
    copy: Arc<HostCopy>,
    /// `[experts]`: what kernels find in the table.
    known: Vec<Option<SlotIndex>>,
}

/// The slots of all layers.
pub(in crate::engine) struct Slots {
    driver: SlotDriver,
    layers: Vec<Option<SlotLayer>>,
    // Keeps the memory that `layers` names.
    _panels: Panels,
    /// `[layers]`.
    weights: Buffer<LayerWeights>,
    /// Slots of a layer.
    count: u32,
    copies: Stream,
    staging: Staging,
    running: VecDeque<Running>,
    spare_events: Vec<Event>,
    /// Bytes of copies since the last report.
    copied_bytes: u64,
    poison: bool,
}

impl Slots {
    /// Makes `count` slots for every layer that has experts on CPU ranks which can be copied. `experts` is the number of experts of each
    /// layer. Returns `None` for no slots.
    pub(super) fn new(
        device: &Device,
        copies: &HostCopies,
        experts: &[usize],
        row_counts: RowCounts,
        (count, poison): (usize, bool),
    ) -> Result<Option<Self>, DeviceError> {
        if count == 0 {
            return Ok(None);
        }
        let mut space = WeightSpace::counting();
        for copy in copies.iter().flatten() {
            let _ = copy.place(&mut space, count);
        }
        let panels = Panels::new(device, space.bytes() as usize / 2)?;
        let mut space = WeightSpace::at(panels.address());
        let mut layers = Vec::new();
        let mut shapes = Vec::new();
        for copy in copies {
            let layer = copy.as_ref().map(|copy| {
                let experts = experts[copy.layer()];
                shapes.push(LayerSlots {
                    layer: LayerId(copy.layer() as u32),
                    experts,
                    on_cpus: copy.experts().iter().map(|expert| ExpertId(expert.expert)).collect(),
                    slots: count,
                    expert_bytes: copy.bytes() as u64,
                });
                SlotLayer {
                    places: copy.place(&mut space, count),
                    copy: Arc::clone(copy),
                    known: vec![None; experts],
                }
            });
            layers.push(layer);
        }
        let weights = layers.iter().map(|layer| {
            layer.as_ref().map_or_else(LayerWeights::default, |layer: &SlotLayer| layer.places.weights())
        });
        let weights: Vec<LayerWeights> = weights.collect();
        let largest = copies.iter().flatten().map(|copy| copy.stride()).max().unwrap_or(0);
        Ok(Some(Slots {
            driver: SlotDriver::new(shapes, row_counts),
            layers,
            _panels: panels,
            weights: Buffer::from_slice(device, &weights)?,
            count: count as u32,
            copies: device.stream()?,
            staging: Staging::new(device, largest)?,
            running: VecDeque::new(),
            spare_events: Vec::new(),
            copied_bytes: 0,
            poison,
        }))
    }

    /// Slots of each layer.
    pub(in crate::engine) const fn count(&self) -> u32 {
        self.count
    }

    /// Address of the table of weights.
    pub(in crate::engine) fn weights(&self) -> u64 {
        self.weights.address()
    }

    /// The slot of an expert in steps that are launched now.
    pub(super) fn slot_of(&self, layer: usize, expert: u32) -> Option<SlotIndex> {
        self.layers[layer].as_ref().and_then(|layer| layer.known[expert as usize])
    }

    /// Brings the table up to date on the stream of steps, and counts the step as a reader of the layer's slots. Called before its launch.
    /// Returns the table's version.
    pub(super) fn begin(
        &mut self,
        layer: usize,
        sequence: Sequence,
        tables: SlotTables,
        on: &Stream,
    ) -> Result<u64, CudaFault> {
        self.poll()?;
        let Some(of_layer) = self.layers.get_mut(layer).and_then(Option::as_mut) else { return Ok(0) };
        let id = LayerId(layer as u32);
        for (expert, (known, &slot)) in of_layer.known.iter_mut().zip(self.driver.resident(id)).enumerate() {
            if *known == slot {
                continue;
            }
            let entry = tables.resident + ((layer * MAX_EXPERTS + expert) * size_of::<u32>()) as u64;
            let index = slot.map_or(AWAY, |slot| tables.held + slot.0);
            // SAFETY: an entry of the table, which only kernels of this stream read.
            unsafe { event::fill_words(on, entry, index, 1)? };
            if let Some(slot) = slot {
                let local = layer * (tables.held + self.count) as usize + (tables.held + slot.0) as usize;
                let entry = tables.local_ids + (local * size_of::<u32>()) as u64;
                // SAFETY: as above.
                unsafe { event::fill_words(on, entry, expert as u32, 1)? };
            }
            *known = slot;
        }
        self.driver.launched(id, sequence).map_err(|error| CudaFault::Stuck(error.to_string()))?;
        Ok(self.driver.version(id))
    }

    /// A step has completed: its use of experts counts if `counts`, and copies begin. Returns the bytes of copies that began since the last
    /// call.
    pub(super) fn ended(
        &mut self,
        layer: usize,
        sequence: Sequence,
        counts: bool,
        host: &HostExperts,
    ) -> Result<u64, CudaFault> {
        self.driver.ended(sequence);
        self.poll()?;
        let Some(of_layer) = self.layers.get(layer).and_then(Option::as_ref) else { return Ok(0) };
        let id = LayerId(layer as u32);
        self.driver.observe(id, counts);
        // Before its experts are pinned, a layer has no copies.
        if of_layer.copy.is_pinned(host) {
            for upload in self.driver.propose(id) {
                self.upload(upload, host)?;
            }
        }
        Ok(std::mem::take(&mut self.copied_bytes))
    }

    /// Begins a copy.
    fn upload(&mut self, upload: Upload, host: &HostExperts) -> Result<(), CudaFault> {
        let Some(of_layer) = self.layers[upload.layer.index()].as_ref() else { return Ok(()) };
        let place = upload.slot.0 as usize;
        let Some(expert) = of_layer.copy.find(upload.expert.0) else {
            let problem =
                format!("expert {} of layer {} has no memory to copy from", upload.expert, upload.layer);
            return Err(CudaFault::Stuck(problem));
        };
        // SAFETY: no step that is in flight reads the slot, and none will before the copy is reported (`SlotDriver`). Staging is used by this
        // stream only, one copy after another.
        unsafe {
            if self.poison {
                self.staging.poison(&self.copies)?;
                of_layer.copy.poison(&of_layer.places, (place, 1), &self.copies)?;
            }
            of_layer.copy.bring(host, &[expert], &self.staging, &self.copies)?;
            of_layer.copy.unpack(&of_layer.places, place, &[expert], &self.staging, &self.copies)?;
        }
        let ended = self.spare_events.pop().map_or_else(|| Event::new(self.staging.device()), Ok)?;
        ended.record(&self.copies)?;
        self.copied_bytes += of_layer.copy.bytes() as u64;
        self.running.push_back(Running { upload, ended });
        Ok(())
    }

    /// Reports copies that have ended.
    fn poll(&mut self) -> Result<(), CudaFault> {
        while let Some(running) = self.running.front() {
            if !running.ended.has_passed()? {
                break;
            }
            let Some(Running { upload, ended }) = self.running.pop_front() else { break };
            self.spare_events.push(ended);
            self.driver.loaded(upload).map_err(|error| CudaFault::Stuck(error.to_string()))?;
        }
        Ok(())
    }

    /// Waits until no copy runs any more.
    pub(super) fn drain(&self) {
        let _ = self.copies.synchronize();
    }
}

/// Slots of each layer that fit `bytes`; no layer needs more than it has experts on CPU ranks, and kernels number `room` more experts at
/// most.
pub(super) fn count(copies: &HostCopies, bytes: u64, room: usize) -> usize {
    let (mut of_all, mut most) = (0, 0);
    for copy in copies.iter().flatten() {
        let mut space = WeightSpace::counting();
        let _ = copy.place(&mut space, 1);
        of_all += space.bytes();
        most = most.max(copy.experts().len());
    }
    let fit = bytes.checked_div(of_all).unwrap_or(0);
    usize::try_from(fit).unwrap_or(usize::MAX).min(most).min(room)
}
