//! Generations of the EP group: their weights are loaded, their ranks started, and steps form until a fault.

use std::sync::Arc;

use expertd_ipc::control::CheckpointSource;
use expertd_scheduler::GroupFault;
use expertd_types::{Generation, WeightVersion};

use super::Driver;
use super::reload::Reload;
use crate::cluster::{Fault, FaultKind, Group, Loading, LoadingMode};
use expertd_telemetry::names;

impl Driver {
    /// Takes in what loaders have said; the ranks of the generation that waits for them start once the weights are packed.
    pub(super) fn hear_loaders(&mut self) {
        let Some((generation, loading)) = &mut self.loading else { return };
        let generation = *generation;
        let has_news = loading.collect();
        match loading.poll() {
            Ok(None) if has_news => self.show_ranks(),
            Ok(None) => {}
            Ok(Some(weights)) => {
                self.loading = None;
                if let Some(weights) = self.offer_to_reload(weights) {
                    self.weights = Some(weights);
                }
                self.start_ranks(generation);
            }
            Err(failure) => {
                self.end_loading();
                if self.give_up_replacement(&failure) {
                    self.form_group(generation);
                } else {
                    self.fault(generation, &failure.into());
                }
            }
        }
    }

    pub(super) fn begin_serving(&mut self, generation: Generation) {
        let Some(weights) = self.group_weights.clone() else { return };
        let version = weights.version;
        let (before, now) = (self.shared.fingerprint(), weights.source.fingerprint);
        self.shared.set_weights(version, &weights.source);
        if before != now {
            metrics::gauge!(names::WEIGHTS, "fingerprint" => before.to_string()).set(0.0);
        }
        metrics::gauge!(names::WEIGHTS, "fingerprint" => now.to_string()).set(1.0);
        self.weights = Some(Arc::clone(&weights));
        self.served = (version, weights.source.clone());
        self.end_reload(&weights);
        self.shared.set_generation(generation);
        metrics::gauge!(names::GENERATION).set(generation.0 as f64);
        metrics::gauge!(names::WEIGHT_VERSION).set(version.0 as f64);
        self.memories.begin_generation(generation, version);
        self.begin_steps();
    }

    /// Lets steps form once the ranks have attached the memories that calls cannot do without.
    pub(super) fn begin_steps(&mut self) {
        if let Some((generation, version)) = self.memories.take_ready() {
            self.shared.note_steps(false);
            self.step_loop.group_ready(generation, version, self.now());
        }
    }

    pub(super) fn fault(&mut self, generation: Generation, fault: &Fault) {
        tracing::error!(generation = generation.0, reason = fault.kind.label(), %fault, "generation ended");
        metrics::counter!(names::GENERATION_ENDS_TOTAL, "reason" => fault.kind.label()).increment(1);
        self.serves_no_more("the EP group is re-forming");
        self.give_up_reload(fault);
        // Calls whose words were raised must not be computed again: their clients have gone on.
        while let Some(done) = self.group.as_mut().and_then(Group::take_raised) {
            self.collect(done);
        }
        let fault = GroupFault { is_load: fault.kind == FaultKind::Load, message: fault.to_string() };
        self.step_loop.group_ended(generation, &fault, self.now());
    }

    pub(super) fn form_group(&mut self, generation: Generation) {
        tracing::info!(generation = generation.0, ranks = self.cluster.shape.ranks, "forming a generation");
        if let Some((version, source)) = self.reload.as_ref().and_then(Reload::replacement) {
            // The present weights make room. No generation runs that could serve them.
            self.group_weights = None;
            let freeing = self.weights.take().map(|weights| weights.free(&self.shared.bell));
            let mode = freeing.map_or(LoadingMode::Alone, LoadingMode::After);
            self.load(generation, version, source, mode);
            return;
        }
        if self.weights.is_some() || self.reload.as_ref().and_then(Reload::candidate).is_some() {
            self.start_ranks(generation);
            return;
        }
        let (version, source) = self.served.clone();
        self.load(generation, version, source, LoadingMode::Alone);
    }

    /// Ends the loaders of the weights that a generation waits for, if there are any.
    pub(super) fn end_loading(&mut self) {
        if let Some((_, loading)) = self.loading.take() {
            self.ended_loaders = Some(loading.end(&self.shared.bell).and(self.ended_loaders.take()));
        }
    }

    /// Loads the weights that a generation waits for, once the memory of earlier loaders is free.
    fn load(
        &mut self,
        generation: Generation,
        version: WeightVersion,
        source: CheckpointSource,
        mode: LoadingMode,
    ) {
        let mode = match (mode, self.ended_loaders.take()) {
            (LoadingMode::Alone, Some(ended)) => LoadingMode::After(ended),
            (LoadingMode::After(freeing), ended) => LoadingMode::After(freeing.and(ended)),
            (mode, _) => mode,
        };
        match Loading::start(&self.cluster, version, source, mode, &self.shared.bell) {
            Ok(loading) => {
                self.loading = Some((generation, loading));
                self.show_ranks();
            }
            Err(error) => {
                let message = format!("cannot start the loaders: {error}");
                self.fault(generation, &Fault { kind: FaultKind::Setup, message });
            }
        }
    }

    fn start_ranks(&mut self, generation: Generation) {
        let candidate = self.reload.as_ref().and_then(Reload::candidate);
        let Some(weights) = candidate.or_else(|| self.weights.clone()) else { return };
        self.group_weights = Some(Arc::clone(&weights));
        match Group::form(&self.cluster, generation, &weights, &self.shared.bell, &self.shared.row_counts) {
            Ok(group) => {
                self.group = Some(group);
                self.show_ranks();
            }
            Err(error) => {
                self.fault(generation, &Fault { kind: FaultKind::Setup, message: error.to_string() });
            }
        }
    }
}
