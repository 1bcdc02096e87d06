//! Invariants of the life of weights.

use expertd_scheduler::{ReloadFailure, Reloaded};
use expertd_types::{Generation, WeightVersion};

use super::check::ensure;
use super::ranks::Source;
use super::world::World;

impl World {
    fn is_whole(&self, version: WeightVersion) -> bool {
        self.sets.iter().any(|(set, _)| *set == version)
    }

    /// Whether weights are those that served last, or the new ones of a reload without an answer.
    fn may_serve(&self, version: WeightVersion, source: Source) -> bool {
        let is_new = version.0 == self.served.0.0 + 1 && !self.reloads[source.0].is_answered;
        (version, source) == self.served || is_new
    }

    /// Checks that loaders find memory: one set lies beside them at most, and none where a reload must drop the present one first.
    pub(super) fn check_load(
        &mut self,
        version: WeightVersion,
        source: Source,
        beside: bool,
    ) -> Result<(), String> {
        ensure!(self.loaders.is_none(), "version {version} is loaded while loaders run");
        ensure!(self.may_serve(version, source), "version {version} from {source:?} is loaded");
        let reload = &self.reloads[source.0];
        if beside {
            ensure!(self.sets == [self.served], "version {version} is loaded beside {:?}", self.sets);
            ensure!(reload.has_room, "version {version} is loaded beside others, which has no room");
            return Ok(());
        }
        ensure!(self.sets.is_empty(), "version {version} is loaded alone, beside {:?}", self.sets);
        ensure!(self.ranks.is_none(), "version {version} is loaded alone while ranks run");
        ensure!(self.told.group.is_some(), "version {version} is loaded for no generation");
        let must_drop = source == self.served.1 || !reload.has_room || reload.lacked_room;
        ensure!(must_drop, "the present weights were dropped, though there was room");
        self.seen.reloads_that_dropped_first += u64::from(source != self.served.1);
        Ok(())
    }

    /// Checks that ranks start with whole weights: the new ones if there are any, else those that served last.
    pub(super) fn check_ranks(&self, generation: Generation, version: WeightVersion) -> Result<(), String> {
        ensure!(self.told.group == Some(generation), "ranks start for generation {generation}");
        ensure!(self.ranks.is_none(), "generation {generation} starts while ranks run");
        let set = self.sets.iter().find(|(set, _)| *set == version);
        let Some((_, source)) = set else {
            return Err(format!("generation {generation} starts with version {version}, which is not whole"));
        };
        ensure!(
            self.may_serve(version, *source),
            "generation {generation} starts with version {version} from {source:?}; {:?} served last",
            self.served
        );
        let newest = self.sets.iter().map(|(set, _)| *set).max();
        ensure!(
            newest == Some(version),
            "generation {generation} starts with version {version}, not {newest:?}"
        );
        ensure!(self.endangered.is_empty(), "sessions go on beside ranks that were not reaped");
        Ok(())
    }

    /// Checks that weights are freed that no rank has, and the present ones only for others that have no room beside them.
    pub(super) fn check_free(&self, version: WeightVersion) -> Result<(), String> {
        ensure!(self.is_whole(version), "version {version} is freed, which is not whole");
        let has_ranks = self.ranks.as_ref().is_some_and(|ranks| ranks.version == version);
        ensure!(!has_ranks, "version {version} is freed while ranks have it");
        let drops = |reload: &super::world::Reload| {
            reload.is_known && !reload.is_answered && (!reload.has_room || reload.lacked_room)
        };
        let is_present = version == self.served.0;
        ensure!(
            !is_present || self.reloads.iter().any(drops),
            "version {version} is freed, which is to serve"
        );
        Ok(())
    }

    /// Checks that versions never go back, and that a version is what was loaded as such.
    pub(super) fn check_ready(
        &self,
        generation: Generation,
        version: WeightVersion,
        source: Source,
    ) -> Result<(), String> {
        let ranks = self.ranks.as_ref().map(|ranks| (ranks.generation, ranks.version));
        ensure!(ranks == Some((generation, version)), "the ranks have {ranks:?}, not version {version}");
        ensure!(self.sets.contains(&(version, source)), "version {version} is not from {source:?}");
        ensure!(version >= self.served.0, "version {version} serves after {}", self.served.0);
        Ok(())
    }

    /// Checks that the end of a reload is true, and the only one.
    pub(super) fn check_reload_end(
        &mut self,
        ticket: usize,
        end: &Result<Reloaded, ReloadFailure>,
    ) -> Result<(), String> {
        let reload = self.reloads[ticket].clone();
        ensure!(!reload.is_answered, "reload {ticket} is answered twice");
        let source = Source(ticket);
        let others = self.reloads.iter().enumerate();
        let mut waiting =
            others.filter(|(other, reload)| *other != ticket && reload.is_known && !reload.is_answered);
        let is_served = self.served.1 == source;
        ensure!(end.is_ok() == is_served, "reload {ticket} ends with {end:?}; {:?} serves", self.served);
        match end {
            Ok(reloaded) => {
                ensure!(
                    reloaded.version == self.served.0,
                    "reload {ticket} says version {}",
                    reloaded.version
                );
                self.seen.reloads += 1;
            }
            Err(ReloadFailure::Refused(reason)) => {
                let is_whole = self.is_whole(self.served.0);
                let is_true = waiting.next().is_some()
                    || !is_whole
                    || self.is_ending() && self.sets != [self.served]
                    || reload.checked_against != self.served.0.0
                    || self.load_failed == Some((source, true));
                ensure!(is_true, "reload {ticket} is refused without cause: {reason}");
                self.seen.reloads_refused += 1;
            }
            Err(ReloadFailure::GoOn(_)) => {
                ensure!(self.load_failed == Some((source, true)), "no loaders of reload {ticket} failed");
                ensure!(self.sets == [self.served], "the weights that go on are {:?}", self.sets);
                self.seen.reloads_that_could_not_load += 1;
            }
            Err(ReloadFailure::Again(_)) => {
                ensure!(self.load_failed == Some((source, false)), "no loaders of reload {ticket} failed");
                self.seen.loaded_again += 1;
            }
            Err(ReloadFailure::NotServed(_)) => {
                let version = self.ranks.as_ref().map(|ranks| ranks.version).or(self.failed_to_form);
                let new = version.map(|version| (version, source));
                ensure!(
                    self.heard_fault && new.is_some_and(|new| self.sets.contains(&new)),
                    "no generation with the weights of reload {ticket} has ended"
                );
                self.seen.new_weights_never_served += 1;
            }
        }
        Ok(())
    }

    /// Checks that a generation that is being formed waits for loaders or ranks, and that a reload has its end once its weights serve.
    pub(super) fn check_waiting_generation(&self) -> Result<(), String> {
        let loads = self.loaders.as_ref().is_some_and(|loaders| !loaders.beside);
        if let Some(generation) = self.told.group {
            ensure!(loads || self.ranks.is_some(), "generation {generation} waits for nothing");
        } else {
            ensure!(!loads && self.ranks.is_none(), "loaders or ranks run for no generation");
        }
        ensure!(
            self.reloads[self.served.1.0].is_answered,
            "the weights of reload {} serve, and it has no end",
            self.served.1.0
        );
        let of = |source: &Source| *source == self.served.1 || !self.reloads[source.0].is_answered;
        let loading = self.loaders.iter().map(|loaders| loaders.source);
        // Ranks that are being ended still map theirs.
        let ending = self.ranks.as_ref().filter(|_| self.is_ending()).map(|ranks| ranks.version);
        let sets = self.sets.iter().filter(|(version, _)| Some(*version) != ending);
        let mut unneeded = sets.map(|(_, source)| *source).chain(loading).filter(|s| !of(s));
        ensure!(unneeded.next().is_none(), "weights that nothing needs are in memory: {:?}", self.sets);
        Ok(())
    }
}
