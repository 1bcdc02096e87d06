//! What a GPU would hold: contents of slots, steps in flight, copies in progress.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use expertd_tier::slots::{LayerSlots, Policy, SlotCache, SlotIndex, Upload};
use expertd_types::{ExpertId, LayerId, Sequence};

use super::Seen;
use super::check::Budget;
use expertd_test_seed::Random;

/// Events of a schedule before its end.
const EVENTS: u64 = 300;
/// Most steps in flight.
const MOST_STEPS: usize = 5;
/// Steps of a layer at the end, which use the same experts.
const LAST_STEPS: u64 = 400;

/// What a slot holds: an expert of a set of weights; `None` if a copy has begun to write it, or none has.
pub type Content = Option<(ExpertId, u64)>;

/// A table that a step was launched with.
pub type Table = Vec<Option<SlotIndex>>;

/// A step in flight.
#[derive(Debug)]
pub struct Step {
    pub step: Sequence,
    pub layer: LayerId,
    pub table: Table,
}

#[derive(Debug)]
pub struct Machine {
    pub random: Random,
    pub layers: Vec<LayerSlots>,
    pub policy: Policy,
    pub cache: SlotCache,
    pub now: Duration,
    /// Number of the current weights.
    pub weights: u64,
    /// `[layers][slots]`.
    pub contents: Vec<Vec<Content>>,
    pub steps: Vec<Step>,
    /// Copies that may write their slot, with the weights that they copy.
    pub copies: Vec<(Upload, u64)>,
    /// Scores of all experts when the owner of a slot lost it; ends with the proposal of the upload.
    pub lost: BTreeMap<(LayerId, SlotIndex), Vec<Option<f32>>>,
    pub budget: Budget,
    pub trace: String,
    last_step: u64,
    /// First of the experts that are popular now.
    popular: usize,
}

impl Machine {
    pub fn new(seed: u64) -> Machine {
        let mut random = Random(seed);
        let layers: Vec<LayerSlots> = (0..random.between(1, 3))
            .map(|layer| {
                let experts = random.between(2, 24) as usize;
                let on_cpus: Vec<ExpertId> =
                    (0..experts as u32).filter(|_| random.chance(80)).map(ExpertId).collect();
                let slots = random.between(1, 8) as usize;
                LayerSlots {
                    layer: LayerId(2 * layer as u32),
                    experts,
                    on_cpus,
                    slots,
                    expert_bytes: random.between(50, 100),
                }
            })
            .collect();
        let bytes_per_second = match random.between(0, 9) {
            0 => 0,
            1..6 => random.between(1_000, 50_000),
            _ => 1 << 40,
        };
        let policy = Policy { max_uploads_per_step: random.between(1, 4) as usize, bytes_per_second };
        let cache = SlotCache::new(layers.clone(), policy);
        let burst = cache.burst();
        Machine {
            random,
            contents: layers.iter().map(|layer| vec![None; layer.slots]).collect(),
            cache,
            layers,
            policy,
            now: Duration::from_secs(5),
            weights: 1,
            steps: Vec::new(),
            copies: Vec::new(),
            lost: BTreeMap::new(),
            budget: Budget::new(burst, bytes_per_second),
            trace: String::new(),
            last_step: 0,
            popular: 0,
        }
    }

    pub fn run(&mut self, seen: &mut Seen) -> Result<(), String> {
        let layers: Vec<_> = self.layers.iter().map(|l| (l.experts, l.on_cpus.len(), l.slots)).collect();
        self.note(&format!("experts, on CPUs, slots {layers:?}; {:?}", self.policy));
        self.seed();
        for _ in 0..EVENTS {
            self.event(seen)?;
        }
        self.end(seen)
    }

    /// Half of the schedules begin with what is known of the use of experts.
    fn seed(&mut self) {
        for layer in 0..self.layers.len() {
            if self.random.chance(50) {
                let rows: Vec<u64> = self.draw_rows(layer).into_iter().map(u64::from).collect();
                self.note(&format!("rows known of layer {}: {rows:?}", self.layers[layer].layer));
                self.cache.seed(self.layers[layer].layer, &rows);
            }
        }
    }

    fn event(&mut self, seen: &mut Seen) -> Result<(), String> {
        let layer = self.random.below(self.layers.len());
        match self.random.between(0, 99) {
            0..35 if self.steps.len() < MOST_STEPS => self.launch(layer, seen),
            0..60 => self.step_ends(seen),
            60..85 => self.copy_ends(seen),
            85..95 => self.propose(layer, seen),
            95..97 => {
                self.popular = self.random.below(24);
                Ok(())
            }
            97 => self.reload(seen),
            _ => {
                self.now += Duration::from_millis(self.random.between(0, 40));
                Ok(())
            }
        }
    }

    /// A step begins with the present table.
    fn launch(&mut self, layer: usize, seen: &mut Seen) -> Result<(), String> {
        let id = self.layers[layer].layer;
        let table = self.cache.resident(id).to_vec();
        self.check_table(layer)?;
        self.last_step += 1;
        let step = Sequence(self.last_step);
        seen.steps_that_overlap_in_a_layer += u64::from(self.steps.iter().any(|other| other.layer == id));
        self.note(&format!("step {step} of layer {id} with {}", Named(&table)));
        self.cache.launched(id, step).map_err(|error| error.to_string())?;
        self.steps.push(Step { step, layer: id, table });
        Ok(())
    }

    /// A step ends, in any order. Most steps are counted; one that was cancelled is not.
    fn step_ends(&mut self, seen: &mut Seen) -> Result<(), String> {
        if self.steps.is_empty() {
            return Ok(());
        }
        let Step { step, layer, .. } = self.steps.remove(self.random.below(self.steps.len()));
        let index = self.layers.iter().position(|of| of.layer == layer).ok_or("no such layer")?;
        self.note(&format!("step {step} of layer {layer} ends"));
        self.cache.ended(step);
        self.now += Duration::from_micros(self.random.between(0, 3_000));
        if self.random.chance(90) {
            let rows = self.draw_rows(index);
            self.cache.observe(layer, &rows);
        }
        if self.random.chance(80) { self.propose(index, seen) } else { Ok(()) }
    }

    /// Rows of each expert: mostly of the popular ones.
    fn draw_rows(&mut self, layer: usize) -> Vec<u32> {
        let experts = self.layers[layer].experts;
        let mut rows = vec![0; experts];
        for _ in 0..self.random.between(0, 12) {
            let expert = match self.random.chance(80) {
                true => (self.popular + self.random.below(4)) % experts,
                false => self.random.below(experts),
            };
            rows[expert] += 1;
        }
        rows
    }

    /// The user asks for uploads and begins them.
    fn propose(&mut self, layer: usize, seen: &mut Seen) -> Result<(), String> {
        let id = self.layers[layer].layer;
        let before = self.cache.resident(id).to_vec();
        let uploads = self.cache.propose(id, self.now).to_vec();
        self.note_losses(layer, &before)?;
        for &upload in &uploads {
            self.note(&format!(
                "upload of expert {} of layer {} to slot {}, evicts {:?}",
                upload.expert, upload.layer, upload.slot.0, upload.evicts
            ));
            self.check_upload(layer, upload)?;
            self.budget.spend(self.now, self.layers[layer].expert_bytes)?;
            self.contents[layer][upload.slot.0 as usize] = None;
            self.copies.push((upload, self.weights));
            seen.uploads += 1;
            seen.evictions += u64::from(upload.evicts.is_some());
        }
        seen.uploads_that_waited_for_readers += self.lost.keys().filter(|(of, _)| *of == id).count() as u64;
        seen.proposals_that_bandwidth_limited +=
            u64::from(uploads.is_empty() && self.budget.is_short(self.now, 100));
        self.check_table(layer)
    }

    /// A copy ends, in any order: well, or without having written all of its slot.
    fn copy_ends(&mut self, seen: &mut Seen) -> Result<(), String> {
        if self.copies.is_empty() {
            return Ok(());
        }
        let (upload, weights) = self.copies.swap_remove(self.random.below(self.copies.len()));
        let layer = self.layers.iter().position(|of| of.layer == upload.layer).ok_or("no such layer")?;
        seen.uploads_that_ended_after_a_reload += u64::from(weights != self.weights);
        let fails = self.random.chance(15);
        self.note(&format!(
            "copy of expert {} of layer {} to slot {} {}",
            upload.expert,
            upload.layer,
            upload.slot.0,
            if fails { "fails" } else { "ends" }
        ));
        let told = if fails {
            seen.failed_uploads += 1;
            self.cache.failed(upload)
        } else {
            self.contents[layer][upload.slot.0 as usize] = Some((upload.expert, weights));
            self.cache.loaded(upload)
        };
        told.map_err(|error| error.to_string())?;
        if self.cache.loaded(upload).is_ok() || self.cache.failed(upload).is_ok() {
            return Err(format!("{upload:?} was reported twice without an error"));
        }
        self.check_report(layer, upload, !fails && weights == self.weights)
    }

    /// The weights are replaced. Steps of the earlier ones and copies are still in flight.
    fn reload(&mut self, seen: &mut Seen) -> Result<(), String> {
        seen.reloads += 1;
        self.weights += 1;
        self.lost.clear();
        self.note(&format!("weights {} are current", self.weights));
        self.cache.invalidate();
        (0..self.layers.len()).try_for_each(|layer| self.check_table(layer))
    }

    /// Ends steps and copies; then all slots must come to hold the experts that are used, if bandwidth allows any upload.
    fn end(&mut self, seen: &mut Seen) -> Result<(), String> {
        while !self.steps.is_empty() {
            self.step_ends(seen)?;
        }
        while !self.copies.is_empty() {
            self.copy_ends(seen)?;
        }
        if self.policy.bytes_per_second == 0 {
            return Ok(());
        }
        for layer in 0..self.layers.len() {
            let LayerSlots { layer: id, experts, slots, ref on_cpus, .. } = self.layers[layer];
            let used: Vec<ExpertId> = on_cpus.iter().copied().take(slots).collect();
            let mut rows = vec![0; experts];
            used.iter().for_each(|expert| rows[expert.index()] = 3);
            for _ in 0..LAST_STEPS {
                self.now += Duration::from_millis(20);
                self.cache.observe(id, &rows);
                self.propose(layer, seen)?;
                while !self.copies.is_empty() {
                    self.copy_ends(seen)?;
                }
            }
            let table = self.cache.resident(id);
            if let Some(absent) = used.iter().find(|expert| table[expert.index()].is_none()) {
                return Err(format!(
                    "expert {absent} of layer {id} has no slot after {LAST_STEPS} steps that used it"
                ));
            }
            seen.slots_with_the_most_used_experts_at_the_end += used.len() as u64;
        }
        Ok(())
    }

    fn note(&mut self, what: &str) {
        let at = self.now.as_micros();
        let _ = writeln!(self.trace, "{at:>9} us  {what}");
    }
}

/// Experts of a table with their slots.
struct Named<'a>(&'a Table);

impl std::fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let named = self.0.iter().enumerate().filter_map(|(expert, slot)| slot.map(|slot| (expert, slot.0)));
        f.debug_map().entries(named).finish()
    }
}
