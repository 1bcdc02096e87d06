//! A reload: other weights are loaded while the present ones serve, and a generation that serves them replaces the
//! present one. Where memory has no room for both, the present generation and its weights go first, and requests wait.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use expertd_ipc::control::CheckpointSource;
use expertd_types::WeightVersion;
use tokio::sync::oneshot;

use super::Driver;
use crate::backend::ReloadReport;
use crate::cluster::{Fault, LoadFailure, Loading, LoadingMode, WeightSet};
use crate::steps::shared::ReloadMail;

/// A reload that is under way.
pub(super) struct Reload {
    stage: Stage,
    source: CheckpointSource,
    reply: oneshot::Sender<Result<ReloadReport, String>>,
    begun: Instant,
    load_time: Duration,
    /// When the last generation with the earlier weights ended.
    pause_begun: Option<Instant>,
}

enum Stage {
    /// Loaders pack the weights; a generation serves the earlier ones.
    Loading(Loading),
    /// The next generation loads the weights, after the earlier ones are freed.
    Replacing { version: WeightVersion, source: CheckpointSource },
    /// The next generation serves the new weights.
    Loaded(Arc<WeightSet>),
}

impl Reload {
    /// The weights that the next generation is to serve.
    pub(super) fn candidate(&self) -> Option<Arc<WeightSet>> {
        match &self.stage {
            Stage::Loading(_) | Stage::Replacing { .. } => None,
            Stage::Loaded(weights) => Some(Arc::clone(weights)),
        }
    }

    /// Version and source of the weights that the next generation is to load in the place of the earlier ones.
    pub(super) fn replacement(&self) -> Option<(WeightVersion, CheckpointSource)> {
        match &self.stage {
            Stage::Replacing { version, source } => Some((*version, source.clone())),
            Stage::Loading(_) | Stage::Loaded(_) => None,
        }
    }

    /// Collects the messages of loaders. Returns whether there are any to take in.
    pub(super) fn collect(&mut self) -> bool {
        match &mut self.stage {
            Stage::Loading(loading) => loading.collect(),
            Stage::Replacing { .. } | Stage::Loaded(_) => false,
        }
    }
}

impl Driver {
    /// Starts the loaders of a reload, or refuses it.
    pub(super) fn start_reload(&mut self, mail: ReloadMail) {
        let ReloadMail { source, checked_against, has_room, reply } = mail;
        let begun = Instant::now();
        let started = match (&self.weights, &self.reload) {
            (_, Some(_)) => Err("another reload is under way; wait for its end".to_owned()),
            (Some(present), None) if present.version != checked_against => Err(format!(
                "weight version {} has begun to serve while the reload was checked against version {}; try again",
                present.version.0, checked_against.0
            )),
            (None, _) => Err("weights are still being loaded; try again once they serve".to_owned()),
            (Some(present), None) => {
                let version = WeightVersion(present.version.0 + 1);
                if has_room {
                    let mode = LoadingMode::Beside;
                    Loading::start(&self.cluster, version, source.clone(), mode, &self.shared.bell)
                        .map(Stage::Loading)
                        .map_err(|error| format!("cannot start the loaders: {error}"))
                } else {
                    Ok(Stage::Replacing { version, source: source.clone() })
                }
            }
        };
        match started {
            Ok(stage) => {
                let is_replacing = matches!(stage, Stage::Replacing { .. });
                let load_time = Duration::ZERO;
                self.reload = Some(Reload { stage, source, reply, begun, load_time, pause_begun: None });
                if is_replacing {
                    self.replace_weights();
                }
            }
            Err(reason) => {
                tracing::warn!(reason, "the reload is refused");
                let _ = reply.send(Err(reason));
            }
        }
    }

    /// Takes in the messages of the loaders of a reload.
    pub(super) fn hear_reload(&mut self) {
        let Some(reload) = &mut self.reload else { return };
        let Stage::Loading(loading) = &mut reload.stage else { return };
        let has_news = loading.collect();
        match loading.poll() {
            Ok(None) if !has_news => {}
            Ok(None) => {
                let sum = loading.views().fold((0, 0), |(loaded, total), view| {
                    (loaded + view.loaded_bytes, total + view.total_bytes)
                });
                self.show_reload(Some(sum));
            }
            Ok(Some(weights)) => {
                reload.load_time = reload.begun.elapsed();
                reload.stage = Stage::Loaded(Arc::new(weights));
                self.step_loop.replace_group();
            }
            Err(failure) if failure.lacks_room => {
                tracing::info!(reason = failure.message, "there is no room for two sets of weights");
                let (version, source) = (loading.version(), reload.source.clone());
                reload.stage = Stage::Replacing { version, source };
                self.replace_weights();
            }
            Err(failure) => {
                let reason = failure.message;
                tracing::error!(reason, "the new weights could not be loaded; the present ones go on");
                self.refuse_reload(&reason);
            }
        }
    }

    /// Ends the present generation, so that the next one loads its weights in the place of the present ones.
    fn replace_weights(&mut self) {
        tracing::warn!(
            "the present weights are dropped before the new ones are loaded; requests wait meanwhile"
        );
        self.step_loop.replace_group();
    }

    /// Gives weights that were loaded in the place of earlier ones to the reload that waits for them; returns other ones.
    pub(super) fn offer_to_reload(&mut self, weights: WeightSet) -> Option<Arc<WeightSet>> {
        let weights = Arc::new(weights);
        let waits = |reload: &&mut Reload| matches!(&reload.stage, Stage::Replacing { version, .. } if *version == weights.version);
        let Some(reload) = self.reload.as_mut().filter(waits) else { return Some(weights) };
        reload.load_time = reload.begun.elapsed();
        reload.stage = Stage::Loaded(weights);
        None
    }

    /// Weights could not be loaded in the place of earlier ones: gives up the reload, so that these are loaded again. Whether
    /// there was such a reload.
    pub(super) fn give_up_replacement(&mut self, failure: &LoadFailure) -> bool {
        if self.reload.as_ref().and_then(Reload::replacement).is_none() {
            return false;
        }
        let reason = &failure.message;
        tracing::error!(reason, "the new weights could not be loaded; the earlier ones are loaded again");
        self.refuse_reload(reason);
        true
    }

    /// Notes the end of a generation: a pause begins if the next one is to serve new weights.
    pub(super) fn note_pause(&mut self) {
        let switches = |reload: &&mut Reload| reload.candidate().is_some() || reload.replacement().is_some();
        if let Some(reload) = self.reload.as_mut().filter(switches) {
            reload.pause_begun.get_or_insert_with(Instant::now);
        }
    }

    /// A generation serves; the reload has ended if it serves the new weights.
    pub(super) fn end_reload(&mut self, weights: &WeightSet) {
        let serves = |reload: &mut Reload| {
            reload.candidate().is_some_and(|candidate| candidate.version == weights.version)
        };
        let Some(reload) = self.reload.take_if(serves) else { return };
        self.show_reload(None);
        let report = ReloadReport {
            weight_version: weights.version,
            weight_fingerprint: weights.source.fingerprint,
            load_time: reload.load_time,
            pause: reload.pause_begun.map_or(Duration::ZERO, |begun| begun.elapsed()),
        };
        tracing::info!(
            version = report.weight_version.0,
            fingerprint = %report.weight_fingerprint,
            load_seconds = report.load_time.as_secs_f64(),
            pause_seconds = report.pause.as_secs_f64(),
            "new weights serve"
        );
        let _ = reload.reply.send(Ok(report));
    }

    /// A generation has ended by a fault. One that was formed for the new weights and never served them takes the reload
    /// with it: the next one serves the earlier weights.
    pub(super) fn give_up_reload(&mut self, fault: &Fault) {
        let Some(candidate) = self.reload.as_ref().and_then(Reload::candidate) else { return };
        let was_for_it = self.group_weights.as_ref().is_some_and(|group| group.version == candidate.version);
        if was_for_it {
            tracing::error!(%fault, "no generation serves the new weights; the earlier ones go on");
            self.refuse_reload(&format!("the generation with the new weights ended: {fault}"));
        }
    }

    fn refuse_reload(&mut self, reason: &str) {
        if let Some(reload) = self.reload.take() {
            self.show_reload(None);
            let _ = reload.reply.send(Err(reason.to_owned()));
        }
    }

    fn show_reload(&self, progress: Option<(u64, u64)>) {
        self.shared.status.lock().unwrap_or_else(PoisonError::into_inner).reload = progress;
    }
}
