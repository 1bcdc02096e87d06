//! Ranks and loaders as processes.

use std::time::{Duration, Instant};

use expertd_ipc::apart::drop_apart;
use expertd_ipc::control::CheckpointSource;
use expertd_scheduler::{AttachAnswer, Fault, LoadFailure, Ranks, Step, Time};
use expertd_shm::ObservedTime;
use expertd_types::{Generation, MemoryId, Rank, StepId, WeightVersion};

use super::Processes;
use crate::cluster::{Group, Loading, setup_fault};
use expertd_telemetry::names;

impl Ranks for Processes {
    fn load(
        &mut self,
        version: WeightVersion,
        source: &CheckpointSource,
        beside: bool,
    ) -> Result<(), LoadFailure> {
        let awaited = if beside { None } else { Some(std::mem::take(&mut self.freeing)) };
        let loading = Loading::start(&self.cluster, version, source.clone(), awaited, &self.shared.bell)?;
        self.loading = Some(loading);
        if !beside {
            self.show_ranks();
        }
        Ok(())
    }

    fn poll_loaders(&mut self) -> Option<Result<(), LoadFailure>> {
        let loading = self.loading.as_mut()?;
        let has_news = loading.collect();
        match loading.poll() {
            Ok(None) if !has_news => None,
            Ok(None) if loading.is_in_background() => {
                let sum = loading.views().fold((0, 0), |(loaded, total), view| {
                    (loaded + view.loaded_bytes, total + view.total_bytes)
                });
                self.show_reload(Some(sum));
                None
            }
            Ok(None) => {
                self.show_ranks();
                None
            }
            Ok(Some(set)) => {
                self.loading = None;
                self.sets.push(set);
                Some(Ok(()))
            }
            Err(failure) => {
                if let Some(loading) = self.loading.take() {
                    self.freeing.add(loading.end(&self.shared.bell));
                    self.show_ranks();
                }
                Some(Err(failure))
            }
        }
    }

    fn free(&mut self, version: WeightVersion) {
        while let Some(at) = self.sets.iter().position(|set| set.version == version) {
            let set = self.sets.swap_remove(at);
            self.freeing.add(set.free(&self.shared.bell));
        }
    }

    fn note_drop(&mut self, lacks_room: Option<&str>) {
        if let Some(reason) = lacks_room {
            tracing::info!(reason, "there is no room for two sets of weights");
        }
        tracing::warn!(
            "the present weights are dropped before the new ones are loaded; requests wait meanwhile"
        );
    }

    fn note_forming(&mut self, generation: Generation) {
        tracing::info!(generation = generation.0, ranks = self.cluster.shape.ranks, "forming a generation");
    }

    fn form(&mut self, generation: Generation, version: WeightVersion) -> Result<(), Fault> {
        let set = self.sets.iter().find(|set| set.version == version);
        let set = set.ok_or_else(|| setup_fault(format!("weight version {version} is not in memory")))?;
        let (cluster, shared) = (&self.cluster, &self.shared);
        Group::form(&mut self.group, cluster, generation, set, &shared.bell, &shared.row_counts)?;
        self.show_ranks();
        Ok(())
    }

    fn poll(&mut self) -> Result<bool, Fault> {
        let Some(group) = &mut self.group else { return Ok(false) };
        let was_started = group.is_started();
        let news = group.poll();
        let is_started = group.is_started();
        if group.take_usage_change() || !was_started && news == Ok(true) {
            self.show_ranks();
        }
        news.map(|_| is_started && !was_started)
    }

    fn experts_ended(&mut self) -> Option<StepId> {
        self.group.as_ref()?.experts_ended()
    }

    fn launch(&mut self, step: &Step) -> Result<(), Fault> {
        self.stage(step)
    }

    fn collect(&mut self) -> Option<(StepId, Time)> {
        let done = self.group.as_mut()?.take_done()?;
        self.keep_rows(done)
    }

    fn collect_told(&mut self) -> Option<(StepId, Time)> {
        if let Some(done) = self.group.as_mut()?.take_raised() {
            return self.keep_rows(done);
        }
        drop_apart(self.group.take());
        self.launched.clear();
        self.shared.note_steps(false);
        None
    }

    fn note_fault(&mut self, generation: Generation, fault: &Fault) {
        tracing::error!(generation = generation.0, reason = fault.kind.label(), %fault, "generation ended");
        metrics::counter!(names::GENERATION_ENDS_TOTAL, "reason" => fault.kind.label()).increment(1);
    }

    fn end(&mut self) {
        if let Some(group) = &mut self.group {
            group.end(&self.shared.bell);
        }
        self.shared.note_steps(false);
        self.show_ranks();
    }

    fn poll_end(&mut self) -> Option<Vec<u32>> {
        match &self.group {
            Some(group) => group.left(),
            None => Some(Vec::new()),
        }
    }

    fn note_ready(&mut self, generation: Generation, version: WeightVersion, source: &CheckpointSource) {
        let (before, now) = (self.shared.fingerprint(), source.fingerprint);
        self.shared.set_weights(version, source);
        if before != now {
            metrics::gauge!(names::WEIGHTS, "fingerprint" => before.to_string()).set(0.0);
        }
        metrics::gauge!(names::WEIGHTS, "fingerprint" => now.to_string()).set(1.0);
        self.shared.set_generation(generation);
        metrics::gauge!(names::GENERATION).set(generation.0 as f64);
        metrics::gauge!(names::WEIGHT_VERSION).set(version.0 as f64);
    }

    fn note_steps(&mut self) {
        self.shared.note_steps(false);
    }

    fn attach(&mut self, memory: MemoryId) {
        self.order_time = ObservedTime::start(Instant::now());
        if let (Some(group), Some(client)) = (&self.group, self.clients.get(&memory)) {
            let (kind, fds) = client.parts();
            group.attach(memory, kind, &fds);
        }
    }

    fn detach(&mut self, memory: MemoryId) {
        self.order_time = ObservedTime::start(Instant::now());
        if let Some(group) = &self.group {
            group.detach(memory);
        }
    }

    fn take_attach_answer(&mut self) -> Option<(Rank, MemoryId, AttachAnswer)> {
        self.group.as_mut()?.take_attach_answer()
    }

    fn late_order(&mut self) -> Option<Duration> {
        // A step may be under way before the order, and orders are carried out as steps are.
        let limit = 2 * self.cluster.step_timeout;
        (self.order_time.look(Instant::now()) > limit).then_some(limit)
    }
}
