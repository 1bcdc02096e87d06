//! A reload: other weights are loaded while the present ones serve, and a generation that serves them replaces the
//! present one.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use expertd_types::WeightVersion;
use tokio::sync::oneshot;

use super::driver::Driver;
use super::service::ReloadMail;
use crate::backend::ReloadReport;
use crate::cluster::{Fault, Loading, WeightHolder, WeightSet};

/// A reload that is under way.
pub(super) struct Reload {
    stage: Stage,
    reply: oneshot::Sender<Result<ReloadReport, String>>,
    begun: Instant,
    load_time: Duration,
    /// When the last generation with the earlier weights ended.
    pause_begun: Option<Instant>,
}

enum Stage {
    /// Loaders pack the weights; a generation serves the earlier ones.
    Loading(Loading),
    /// The next generation serves the new weights.
    Loaded(Arc<WeightSet>),
}

impl Reload {
    /// The weights that the next generation is to serve.
    pub(super) fn candidate(&self) -> Option<Arc<WeightSet>> {
        match &self.stage {
            Stage::Loading(_) => None,
            Stage::Loaded(weights) => Some(Arc::clone(weights)),
        }
    }

    /// Collects what loaders have said; whether there is anything to take in.
    pub(super) fn collect(&mut self) -> bool {
        match &mut self.stage {
            Stage::Loading(loading) => loading.collect(),
            Stage::Loaded(_) => false,
        }
    }
}

impl Driver {
    /// Starts the loaders of a reload, or refuses it.
    pub(super) fn start_reload(&mut self, mail: ReloadMail) {
        let ReloadMail { source, reply } = mail;
        let begun = Instant::now();
        let started = match (&self.weights, &self.reload) {
            (None, _) => {
                Err("the first weights are still being loaded; try again once they serve".to_owned())
            }
            (_, Some(_)) => Err("another reload is under way; wait for its end".to_owned()),
            (Some(present), None) => {
                let version = WeightVersion(present.version.0 + 1);
                match self.cluster.weights {
                    WeightHolder::Router => {
                        Loading::start(&self.cluster, version, source, true, &self.shared.bell)
                            .map(Stage::Loading)
                            .map_err(|error| format!("cannot start the loaders: {error}"))
                    }
                    WeightHolder::Ranks => {
                        Ok(Stage::Loaded(Arc::new(WeightSet::loaded_by_ranks(version, source))))
                    }
                }
            }
        };
        match started {
            Ok(stage) => {
                let is_loaded = matches!(stage, Stage::Loaded(_));
                let load_time = Duration::ZERO;
                self.reload = Some(Reload { stage, reply, begun, load_time, pause_begun: None });
                if is_loaded {
                    self.step_loop.replace_group();
                }
            }
            Err(reason) => {
                let _ = reply.send(Err(reason));
            }
        }
    }

    /// Takes in what the loaders of a reload have said.
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
            Err(fault) => {
                tracing::error!(%fault, "the new weights could not be loaded; the present ones go on");
                self.refuse_reload(&fault.message);
            }
        }
    }

    /// Notes the end of a generation: a pause begins if the next one is to serve new weights.
    pub(super) fn note_pause(&mut self) {
        if let Some(reload) = self.reload.as_mut().filter(|reload| reload.candidate().is_some()) {
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
