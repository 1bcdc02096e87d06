//! The wire to the CPU ranks of a mixed group, pinned, and the second halves of steps, which follow once the sums of CPU ranks have come.

#![allow(
    unsafe_code,
    reason = "pins the pages of the wire, and kernels work on memory that Rust only sees as addresses"
)]

use std::os::fd::OwnedFd;
use std::time::Duration;

use expertd_kernels::device::{Buffer, Device, DeviceError, Mailbox, Pinned};
use expertd_kernels::layout::Shape;

use super::CudaEngine;
use super::copies::UnchangedRows;
use super::fault::CudaFault;
use super::graphs::{Half, Variant};
use super::host_experts::CopiedExperts;
use super::memories::ClientCopy;
use super::step::TierPlaces;
use expertd_ipc::StepDescriptor;
use expertd_ipc::control::RankSetup;
use expertd_rank::{Failure, setup_failure};
use expertd_tier::{SourceWire, TierShape};
use expertd_types::{Sequence, Slot};

/// The choices of a slot's step that kernels of this rank see, and the word of a step that failed before its rows were sent.
struct Divided {
    local_ids: Buffer<i32>,
    local_weights: Buffer<f32>,
    failed: Mailbox<u64>,
}

/// The wire of a mixed group, whose source this rank is.
pub(super) struct Tier {
    pinned: Pinned<'static>,
    // Dropped after its pages are no longer pinned.
    wire: SourceWire,
    slots: Vec<Divided>,
    generation: u64,
    /// Longest wait for CPU ranks.
    limit: Duration,
    /// `None` while the rank is set up.
    pub(super) copied: Option<CopiedExperts>,
}

/// The rest of a step whose first half is launched.
pub(super) struct Rest {
    step: StepDescriptor,
    variant: Variant,
    outward: Outward,
}

/// How copy engines carry a step's results.
pub(super) enum Outward {
    /// Not at all.
    None,
    /// From a buffer in which kernels have converted them: the staged bytes, and the rows of clients.
    Converted(usize, Vec<ClientCopy>),
    /// From where combine wrote them.
    Unchanged(Vec<ClientCopy>),
}

impl Rest {
    pub(super) fn new(step: &StepDescriptor, variant: Variant, outward: Outward) -> Self {
        Rest { step: *step, variant, outward }
    }
}

impl Tier {
    /// Joins the group whose wire is `wire`, and pins it.
    pub(super) fn new(
        setup: &RankSetup,
        device: &Device,
        shape: &Shape,
        wire: OwnedFd,
    ) -> Result<Self, Failure> {
        let sizes = TierShape::of(&setup.shape);
        if sizes.stride() != shape.hidden as usize {
            let (wire, kernels) = (sizes.stride(), shape.hidden);
            return Err(setup_failure(format!(
                "rows have {wire} elements on the wire and {kernels} in kernels"
            )));
        }
        let wire = SourceWire::join(sizes, setup.generation, wire).map_err(setup_failure)?;
        let (pages, bytes) = wire.pages();
        // SAFETY: the wire maps these pages as long as it lives, and is dropped after `pinned`.
        let pinned = unsafe { Pinned::register(device, pages, bytes) }.map_err(|error| {
            setup_failure(format!(
                "cannot pin the {} MiB of the wire to CPU ranks: {error}; raise the limit of locked memory (ulimit -l), or lower \
                 max-tokens-per-step",
                bytes >> 20
            ))
        })?;
        let choices = (shape.max_tokens * shape.top_k) as usize;
        let slot = |_| {
            Ok::<_, DeviceError>(Divided {
                local_ids: Buffer::zeroed(device, choices)?,
                local_weights: Buffer::zeroed(device, choices)?,
                failed: Mailbox::new(device, 0)?,
            })
        };
        let slots = wire.places().iter().map(slot).collect::<Result<_, _>>().map_err(setup_failure)?;
        Ok(Tier {
            pinned,
            wire,
            slots,
            generation: setup.generation.0,
            limit: setup.step_timeout,
            copied: None,
        })
    }

    /// The places of a slot, as addresses of the device.
    pub(super) fn places(&self, slot: usize) -> TierPlaces {
        let (divided, places) = (&self.slots[slot], &self.wire.places()[slot]);
        let device = |offset: usize| self.pinned.address() + offset as u64;
        let between = places.sums.get(1).map_or(0, |second| second - places.sums[0]);
        TierPlaces {
            local_ids: divided.local_ids.address(),
            local_weights: divided.local_weights.address(),
            sent_ids: device(places.ids),
            sent_weights: device(places.weights),
            sent_rows: device(places.rows),
            sent: device(places.sent),
            failed: divided.failed.address(),
            generation: expertd_tier::word(expertd_types::Generation(self.generation), Sequence(0)),
            sums: device(places.sums[0]),
            sums_stride: (between / size_of::<f32>()) as u64,
            sums_count: places.sums.len() as u32,
        }
    }

    /// Tells CPU ranks that a step needs none of them.
    pub(super) fn spare(&mut self, step: &StepDescriptor) {
        self.wire.spare(Slot(step.slot), Sequence(step.sequence));
    }

    /// Begins a step of a slot, before its first half is launched.
    pub(super) fn begin(&mut self, slot: usize) {
        self.wire.begin(Slot(slot as u32));
    }

    /// Whether the second half of a step may follow: the sums of all CPU ranks have come, or the step has failed and does not wait for
    /// them. `waited`: time since the step became the oldest one; the router's time limit of a step starts then as well.
    fn is_ready(&self, rest: &Rest, waited: Duration) -> Result<bool, CudaFault> {
        let (slot, sequence) = (Slot(rest.step.slot), Sequence(rest.step.sequence));
        let stuck = |error: expertd_tier::WireError| CudaFault::Stuck(error.to_string());
        if self.wire.arrived(slot, sequence).map_err(stuck)? {
            return Ok(true);
        }
        if self.slots[slot.index()].failed.first_word() == sequence.0 {
            return Ok(true);
        }
        match waited > self.limit {
            true => Err(stuck(self.wire.missing(slot, sequence, waited))),
            false => Ok(false),
        }
    }
}

impl CudaEngine {
    /// Launches the second halves of steps whose sums have come, oldest first.
    pub(super) fn launch_rests(&mut self) -> Result<(), CudaFault> {
        let mut launched = 0;
        for (place, running) in self.running.iter().enumerate() {
            let Some((rest, tier)) = running.rest.as_ref().zip(self.tier.as_mut()) else { continue };
            let waited = if place == 0 { self.watch.waited() } else { Duration::ZERO };
            let is_ready = tier.is_ready(rest, waited)?;
            if let Some(copied) = &mut tier.copied {
                copied.look(rest.step.slot as usize, is_ready)?;
            }
            if !is_ready {
                break;
            }
            self.launch_rest(rest)?;
            launched += 1;
        }
        let waiting = self.running.iter_mut().filter(|running| running.rest.is_some());
        waiting.take(launched).for_each(|running| running.rest = None);
        Ok(())
    }

    fn launch_rest(&self, rest: &Rest) -> Result<(), CudaFault> {
        let Rest { step, variant, outward, .. } = rest;
        let slot = step.slot as usize;
        let layer = self.layers.layers.get(step.layer as usize).and_then(Option::as_ref);
        let layer =
            layer.ok_or_else(|| CudaFault::Stuck(format!("layer {} has no MoE block", step.layer)))?;
        self.launch_kernels(step, layer, *variant, Half::Second, None)?;
        match (outward, self.copies_of(*variant)) {
            (Outward::Converted(bytes, clients), Some(copies)) => {
                copies.outward(slot, *bytes, clients, &self.stream)?;
            }
            (Outward::Unchanged(of_rows), Some(copies)) => {
                let buffers = &self.buffers.slots[slot].kernels;
                let row_bytes = self.hidden * 2;
                let rows =
                    UnchangedRows { copies: of_rows, row_bytes, tokens: &buffers.tokens, out: &buffers.out };
                copies.outward_unchanged(slot, &rows, None, &self.stream)?;
            }
            _ => {}
        }
        Ok(())
    }
}
