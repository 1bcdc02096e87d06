//! The experts of CPU ranks that come to this GPU: for a step of many rows, or to slots in which they stay.

mod memory;
mod repack;
mod slots;
mod stream;

use expertd_ipc::control::RankSetup;
use expertd_ipc::{RowCounts, StepDescriptor};
use expertd_kernels::device::{Device, DeviceError, Stream};
use expertd_kernels::params::MAX_EXPERTS;
use expertd_model::ModelSpec;
use expertd_types::Sequence;

pub(super) use self::memory::HostExperts;
use self::repack::{HostCopies, HostCopy};
pub(super) use self::slots::Slots;
use self::stream::Streaming;
pub(super) use self::stream::{Chunk, StreamedStep};
use super::fault::CudaFault;
use super::layers::{Layer, SlotTables};

/// What is known of the experts of CPU ranks before the memory of steps is allocated.
pub(super) struct Copyable {
    host: HostExperts,
    copies: HostCopies,
    /// Slots of each layer.
    slots: usize,
    /// `[layers]`: number of experts.
    experts: Vec<usize>,
}

impl Copyable {
    /// Finds the experts that kernels can rewrite. `held`: the most experts of a layer that this rank holds.
    pub(super) fn new(
        device: &Device,
        setup: &RankSetup,
        spec: &ModelSpec,
        (layers, held): (&[Option<Layer>], u32),
        mut host: HostExperts,
    ) -> Result<Self, DeviceError> {
        let copies = HostCopy::all(device, spec, layers, &mut host)?;
        let experts: Vec<usize> =
            layers.iter().map(|layer| layer.as_ref().map_or(0, |layer| layer.spec.experts.count)).collect();
        let most = experts.iter().copied().max().unwrap_or(0).max(held as usize);
        let slots = slots::count(&copies, setup.slot_bytes, MAX_EXPERTS.saturating_sub(most));
        let left_out =
            layers.iter().flatten().filter(|layer| !layer.is_whole && copies[layer.index].is_none()).count();
        if left_out > 0 {
            tracing::warn!(
                layers = left_out,
                "experts of CPU ranks are not copied to the GPU in these layers, because no kernel rewrites their format, or because \
                 they are packed in several ways; CPU ranks compute all of their rows"
            );
        }
        Ok(Copyable { host, copies, slots, experts })
    }

    /// Slots of each layer.
    pub(super) const fn slots(&self) -> u32 {
        self.slots as u32
    }
}

/// The experts of CPU ranks that come to this GPU.
pub(super) struct CopiedExperts {
    streaming: Option<Streaming>,
    slots: Option<Slots>,
    /// `[slots of steps]`: the steps for which experts come here.
    steps: Vec<Option<StreamedStep>>,
    // Dropped last: its pages stay pinned while copies may run.
    host: HostExperts,
}

impl CopiedExperts {
    /// Allocates what copies need.
    pub(super) fn new(
        device: &Device,
        setup: &RankSetup,
        copyable: Copyable,
        row_counts: RowCounts,
        poison: bool,
    ) -> Result<Self, DeviceError> {
        let Copyable { host, copies, slots, experts } = copyable;
        let slots_of_steps = setup.shape.slots as usize;
        Ok(CopiedExperts {
            streaming: Streaming::new(device, &copies, slots_of_steps, (setup.stream_rows, poison))?,
            slots: Slots::new(device, &copies, &experts, row_counts, (slots, poison))?,
            steps: vec![None; slots_of_steps],
            host,
        })
    }

    /// Begins to pin the memory of CPU ranks, if anything is ever copied.
    pub(super) fn start(&mut self, device: &Device) {
        if self.streaming.is_some() || self.slots.is_some() {
            self.host.pin(device);
        }
    }

    /// The slots.
    pub(super) const fn slots(&self) -> Option<&Slots> {
        self.slots.as_ref()
    }

    /// The last step of a slot of steps, if experts come here for it.
    pub(super) fn step(&self, slot: usize) -> Option<&StreamedStep> {
        self.steps[slot].as_ref()
    }

    /// Prepares a step of a layer that has experts on CPU ranks, before its launch. Returns whether all experts come here, the bytes that
    /// are copied for it, and the version of the table of slots.
    pub(super) fn begin(
        &mut self,
        step: &StepDescriptor,
        layer: &Layer,
        tables: SlotTables,
        on: &Stream,
    ) -> Result<(bool, u64, u64), CudaFault> {
        let version = match &mut self.slots {
            Some(slots) => slots.begin(layer.index, Sequence(step.sequence), tables, on)?,
            None => 0,
        };
        let slot = step.slot as usize;
        self.steps[slot] = match &mut self.streaming {
            Some(streaming) if streaming.is_pinned(layer.index, &self.host) => {
                let of_step = (slot, step.tokens as usize, step.top_k as usize);
                streaming.begin(layer, of_step, self.slots.as_ref(), on)?
            }
            _ => None,
        };
        let Some((streaming, step)) = self.streaming.as_ref().zip(self.steps[slot].as_ref()) else {
            return Ok((false, 0, version));
        };
        Ok((step.is_whole, streaming.bytes(step), version))
    }

    /// The products of this rank for a divided step are enqueued on `on`.
    pub(super) fn computed(&self, step: &StreamedStep, on: &Stream) -> Result<(), CudaFault> {
        self.streaming.as_ref().map_or(Ok(()), |streaming| Ok(streaming.computed(step, on)?))
    }

    /// Looks what of the step of a slot has ended, if it is divided; `have_sums_come`: whether CPU ranks have.
    pub(super) fn look(&mut self, slot: usize, have_sums_come: bool) -> Result<(), CudaFault> {
        if let Some((streaming, step)) = self.streaming.as_mut().zip(self.steps[slot].as_mut()) {
            streaming.look(step, have_sums_come)?;
        }
        Ok(())
    }

    /// Enqueues the copies of a step; see [`Streaming::enqueue`].
    ///
    /// # Safety
    /// Work that was enqueued for earlier steps is on `on`, and `compute` enqueues its work there.
    #[allow(unsafe_code, reason = "passes the caller's promise on")]
    pub(super) unsafe fn enqueue(
        &self,
        step: &StreamedStep,
        on: &Stream,
        compute: impl FnMut(Chunk) -> Result<(), CudaFault>,
    ) -> Result<(), CudaFault> {
        let Some(streaming) = self.streaming.as_ref() else { return Ok(()) };
        // SAFETY: the caller's promise.
        unsafe { streaming.enqueue(step, &self.host, on, compute) }
    }

    /// A step of a layer has completed, the last one of its slot of steps. Returns the bytes of copies to slots that have begun since the
    /// last call.
    pub(super) fn ended(
        &mut self,
        layer: usize,
        sequence: Sequence,
        slot_of_steps: usize,
    ) -> Result<u64, CudaFault> {
        let counts = self.steps[slot_of_steps].as_ref().is_none_or(|step| step.counts_for_slots);
        self.slots.as_mut().map_or(Ok(0), |slots| slots.ended(layer, sequence, counts, &self.host))
    }

    /// Waits until no copy runs any more.
    pub(super) fn drain(&self) {
        self.streaming.iter().for_each(Streaming::drain);
        self.slots.iter().for_each(Slots::drain);
    }
}
