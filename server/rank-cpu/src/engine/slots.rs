//! Copies of experts of CPU ranks that the source computes in place of their owners, and that change between steps, as on a GPU:
//! [`SlotDriver`] decides which experts have copies, and a thread makes them while steps run. Here it serves tests and reading, because the
//! source could read these weights where they lie.
//!
//! A slot's memory belongs to the thread while it writes, and to the engine otherwise. A step that finds another expert in a slot than its
//! table names fails.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use expertd_compute::experts::cpu::CpuExpert;
use expertd_ipc::RowCounts;
use expertd_rank::StepFault;
use expertd_shm::faults;
use expertd_tier::slots::{LayerSlots, SlotDriver, Upload};
use expertd_types::{ExpertId, LayerId, Rank, Sequence};

use super::grouped::{StepExperts, computes};
use crate::weights::{NOT_HERE, RankLayer};

/// For tests: if this variable is set, each copy first overwrites its slot with NaN, and then gives steps time.
const POISON: &str = "EXPERTD_TIER_POISON";
const POISONED_FOR: Duration = Duration::from_millis(1);
/// For tests: of this number of copies one fails after it has overwritten its slot.
const FAIL: &str = "EXPERTD_TIER_FAIL_COPIES";

/// A slot's memory, and what it holds.
enum Slot {
    /// Nothing of use.
    Empty(CpuExpert),
    /// The thread writes the memory.
    Copying,
    /// A copy of this expert.
    Holds(ExpertId, CpuExpert),
}

/// A copy for the thread to make.
struct Copy {
    upload: Upload,
    memory: CpuExpert,
}

/// A copy that the thread has made, or failed to make.
struct Made {
    copy: Copy,
    is_whole: bool,
}

/// The slots of all layers.
pub(super) struct Slots {
    driver: SlotDriver,
    /// `[layers][slots]`.
    slots: Vec<Vec<Slot>>,
    /// `[layers]`: bytes of an expert.
    expert_bytes: Vec<u64>,
    // The thread ends when this is dropped.
    copies: Sender<Copy>,
    made: Receiver<Made>,
    /// Bytes of copies since the last report.
    copied_bytes: u64,
}

impl Slots {
    /// Makes as many slots for every layer that has experts on CPU ranks as fit `bytes`, and starts the thread; `None` if none fits.
    /// `layers`: the layers with the experts of all ranks. `on_cpus`: for each of them the experts that CPU ranks compute.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(super) fn new(
        layers: &Arc<Vec<Option<RankLayer>>>,
        on_cpus: &[Vec<ExpertId>],
        row_counts: RowCounts,
        bytes: u64,
    ) -> std::io::Result<Option<Self>> {
        // `[layers]`: an expert like those that are copied.
        let like: Vec<Option<&CpuExpert>> =
            layers.iter().zip(on_cpus).map(|(layer, on_cpus)| alike(layer.as_ref()?, on_cpus)).collect();
        let expert_bytes: Vec<u64> =
            like.iter().map(|like| like.map_or(0, |expert| expert.bytes() as u64)).collect();
        let fit = bytes.checked_div(expert_bytes.iter().sum()).unwrap_or(0);
        let fit = usize::try_from(fit).unwrap_or(usize::MAX);
        if fit == 0 {
            return Ok(None);
        }
        let (mut shapes, mut slots) = (Vec::new(), Vec::new());
        for (layer, on_cpus) in on_cpus.iter().enumerate() {
            let Some(like) = like[layer] else {
                slots.push(Vec::new());
                continue;
            };
            let count = fit.min(on_cpus.len());
            slots.push((0..count).map(|_| Slot::Empty(like.blank())).collect());
            shapes.push(LayerSlots {
                layer: LayerId(layer as u32),
                experts: layers[layer].as_ref().map_or(0, |layer| layer.local.len()),
                on_cpus: on_cpus.clone(),
                slots: count,
                expert_bytes: expert_bytes[layer],
            });
        }
        let ((copies, to_make), (finished, made)) = (mpsc::channel(), mpsc::channel());
        let from = Arc::clone(layers);
        let thread = std::thread::Builder::new().name("copy-experts".into());
        thread.spawn(move || copy_experts(&from, &to_make, &finished))?;
        let driver = SlotDriver::new(shapes, row_counts);
        Ok(Some(Slots { driver, slots, expert_bytes, copies, made, copied_bytes: 0 }))
    }

    /// Counts a step as a reader of the layer's slots, and adds the experts in them to those that the source computes. Returns the version
    /// of their table.
    pub(super) fn begin<'a>(
        &'a mut self,
        layer: usize,
        sequence: Sequence,
        experts: &mut StepExperts<'a>,
    ) -> Result<u64, StepFault> {
        self.poll()?;
        let id = LayerId(layer as u32);
        self.driver.launched(id, sequence).map_err(StepFault::engine)?;
        for (expert, slot) in (0..).map(ExpertId).zip(self.driver.resident(id)) {
            let Some(slot) = slot else { continue };
            match &self.slots[layer][slot.0 as usize] {
                Slot::Holds(held, copy) if *held == expert => experts.add(expert, copy),
                _ => {
                    return Err(StepFault::engine(format!(
                        "the table of layer {id} names slot {} for expert {expert}, which it does not hold",
                        slot.0
                    )));
                }
            }
        }
        Ok(self.driver.version(id))
    }

    /// A step has completed: its use of experts counts if it `counts`, and copies begin. Returns the bytes of copies that began since the
    /// last call.
    pub(super) fn ended(&mut self, layer: usize, sequence: Sequence, counts: bool) -> Result<u64, StepFault> {
        self.driver.ended(sequence);
        self.poll()?;
        let id = LayerId(layer as u32);
        self.driver.observe(id, counts);
        for upload in self.driver.propose(id) {
            let slot = &mut self.slots[layer][upload.slot.0 as usize];
            let (Slot::Empty(memory) | Slot::Holds(_, memory)) = std::mem::replace(slot, Slot::Copying)
            else {
                return Err(StepFault::engine(format!(
                    "two copies of layer {id} have slot {}",
                    upload.slot.0
                )));
            };
            self.copied_bytes += self.expert_bytes[layer];
            let ended = |_| StepFault::engine("the thread that copies experts has ended");
            self.copies.send(Copy { upload, memory }).map_err(ended)?;
        }
        Ok(std::mem::take(&mut self.copied_bytes))
    }

    /// Reports copies that have ended.
    fn poll(&mut self) -> Result<(), StepFault> {
        while let Ok(Made { copy: Copy { upload, memory }, is_whole }) = self.made.try_recv() {
            let slot = &mut self.slots[upload.layer.index()][upload.slot.0 as usize];
            let told = if is_whole {
                *slot = Slot::Holds(upload.expert, memory);
                self.driver.loaded(upload)
            } else {
                *slot = Slot::Empty(memory);
                self.driver.failed(upload)
            };
            told.map_err(StepFault::engine)?;
        }
        Ok(())
    }
}

/// One of the experts `on_cpus` of a layer that has all experts; `None` if there are none, or if they are not packed alike.
fn alike<'a>(layer: &'a RankLayer, on_cpus: &[ExpertId]) -> Option<&'a CpuExpert> {
    let mut experts = on_cpus.iter().map(|id| layer.expert(*id));
    let first = experts.next()?;
    experts.all(|expert| expert.is_like(first)).then_some(first)
}

/// `[layers]`: the experts that ranks beside `source` compute, rank by rank.
pub(super) fn on_cpus(layers: &[Option<RankLayer>], source: Rank) -> Vec<Vec<ExpertId>> {
    let of = |layer: &RankLayer| {
        let experts = (0..layer.local.len() as u32).map(ExpertId);
        let mut others: Vec<ExpertId> =
            experts.filter(|id| !computes(&layer.owners, source, id.0 as i32)).collect();
        others.sort_by_key(|id| layer.owners.of(*id).and_then(|owners| owners.first().copied()));
        others
    };
    layers.iter().map(|layer| layer.as_ref().map(of).unwrap_or_default()).collect()
}

/// Makes copies until there can be no more.
fn copy_experts(layers: &[Option<RankLayer>], to_make: &Receiver<Copy>, made: &Sender<Made>) {
    let poison = faults::setting(POISON).is_some();
    let fail = faults::setting(FAIL).and_then(|text| text.parse::<u64>().ok());
    for (number, mut copy) in (1_u64..).zip(to_make) {
        let Upload { layer, expert, .. } = copy.upload;
        if poison {
            copy.memory.poison();
            std::thread::sleep(POISONED_FOR);
        }
        let from = layers.get(layer.index()).and_then(Option::as_ref).and_then(|layer| {
            let at = *layer.local.get(expert.index()).filter(|at| **at != NOT_HERE)?;
            layer.experts.get(at as usize)
        });
        let from = from.filter(|_| fail.is_none_or(|every| !number.is_multiple_of(every)));
        if let Some(from) = from {
            copy.memory.copy_from(from);
        }
        if made.send(Made { copy, is_whole: from.is_some() }).is_err() {
            return;
        }
    }
}
