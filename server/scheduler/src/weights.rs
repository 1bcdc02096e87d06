//! The life of weights as a state machine: loaded, served, replaced by others, dropped and loaded again.
//!
//! A set of weights lies in memory that no rank owns. Two sets are known at most: the one that serves, or served last, and the new one
//! of a reload. The driver asks what a generation needs, tells what loaders and generations do, and frees the sets that
//! [`take_unneeded`](Weights::take_unneeded) names. `docs/step-loop.md` has the states and the invariants.

use std::time::Duration;

use expertd_types::WeightVersion;

use crate::Time;

/// A reload that is asked for.
#[derive(Debug)]
pub struct Ask<S, T> {
    /// Where the new weights come from.
    pub source: S,
    /// The version that served when the reload was checked.
    pub checked_against: WeightVersion,
    /// Whether memory has room for the new weights beside the present ones, as far as that is known.
    pub has_room: bool,
    /// Receiver of the reload's result.
    pub ticket: T,
}

/// Why loaders brought no weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadFailure {
    /// Description for operators.
    pub message: String,
    /// Whether the only cause is that the weights do not fit beside those that are in memory.
    pub lacks_room: bool,
    /// Whether the loaders could not even be started.
    pub is_setup: bool,
}

/// The weights that the next generation needs.
#[derive(Debug)]
pub(crate) enum Need<S> {
    /// Weights are to be loaded first, once unneeded sets are freed.
    Load(WeightVersion, S),
    /// It serves this set.
    Serve(WeightVersion),
}

/// The first action of a reload.
#[derive(Debug)]
pub(crate) enum Begin<S> {
    /// Loading of the new weights beside the present ones.
    Beside(WeightVersion, S),
    /// The end of the present generation, so that the next one drops its weights.
    Drop,
}

/// The next action once a set is whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loaded {
    /// The generation that waits for it serves it.
    Serve(WeightVersion),
    /// The present generation is to be replaced.
    Replace,
}

/// The next action after a set could not be loaded.
#[derive(Debug)]
pub(crate) enum NotLoaded<T> {
    /// The generation that waits for it ends by a fault.
    Fault,
    /// The reload has failed; the present weights go on.
    GoOn(T),
    /// The reload has failed; the generation that waits needs the earlier weights.
    Again(T),
    /// The present generation is to be replaced by one that drops its weights first.
    DropFirst,
}

/// A reload has ended: its weights serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reloaded {
    /// Number of the weights.
    pub version: WeightVersion,
    /// From the start of the reload until the weights were packed.
    pub load_time: Duration,
    /// From the end of the last generation with the earlier weights until the first one with these served.
    pub pause: Duration,
}

/// How much of a set is in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    /// Nothing.
    Absent,
    /// Loaders pack it.
    Loading,
    /// All of it: generations can serve it.
    Whole,
}

#[derive(Debug)]
struct Set<S> {
    version: WeightVersion,
    source: S,
    memory: Memory,
}

#[derive(Debug)]
struct Reload<S, T> {
    new: Set<S>,
    ticket: T,
    begun: Time,
    load_time: Duration,
    /// When the last generation with the earlier weights ended.
    pause_begun: Option<Time>,
}

/// The weights that serve and those of a reload. `S` is the source of a set of weights, `T` the receiver of a reload's result.
#[derive(Debug)]
pub(crate) struct Weights<S, T> {
    /// The weights that served last, or are to serve first.
    served: Set<S>,
    reload: Option<Reload<S, T>>,
    /// The set that the ranks of the present generation have.
    formed: Option<WeightVersion>,
    /// Whole sets that no later generation serves.
    unneeded: Vec<WeightVersion>,
}

impl<S: Clone, T> Weights<S, T> {
    pub(crate) const fn new(version: WeightVersion, source: S) -> Self {
        let served = Set { version, source, memory: Memory::Absent };
        Weights { served, reload: None, formed: None, unneeded: Vec::new() }
    }

    /// Where the weights come from that served last.
    pub(crate) const fn source(&self) -> &S {
        &self.served.source
    }

    /// Begins a reload.
    ///
    /// # Errors
    /// The receiver of the result, and why the reload is refused.
    pub(crate) fn ask(&mut self, ask: Ask<S, T>, now: Time) -> Result<Begin<S>, (T, String)> {
        let Ask { source, checked_against, has_room, ticket } = ask;
        let present = self.served.version;
        let refusal = if self.reload.is_some() {
            "another reload is under way; wait for its end".to_owned()
        } else if self.served.memory != Memory::Whole {
            "weights are still being loaded; try again once they serve".to_owned()
        } else if !self.unneeded.is_empty() {
            "ranks that are being ended still have the weights of an earlier reload; try again".to_owned()
        } else if present != checked_against {
            format!(
                "weight version {} has begun to serve while the reload was checked against version {}; try again",
                present.0, checked_against.0
            )
        } else {
            let (version, memory) = (WeightVersion(present.0 + 1), Memory::Absent);
            let mut new = Set { version, source: source.clone(), memory };
            if has_room {
                new.memory = Memory::Loading;
            }
            let load_time = Duration::ZERO;
            self.reload = Some(Reload { new, ticket, begun: now, load_time, pause_begun: None });
            return Ok(if has_room { Begin::Beside(version, source) } else { Begin::Drop });
        };
        Err((ticket, refusal))
    }

    /// The loaders of a reload could not be started: it never began. Returns the receiver of its result.
    pub(crate) fn cancel(&mut self) -> Option<T> {
        self.reload.take().map(|reload| reload.ticket)
    }

    /// The weights that the generation being formed needs. No ranks run.
    pub(crate) fn form(&mut self) -> Need<S> {
        let served = &mut self.served;
        let set = match &mut self.reload {
            Some(Reload { new, .. }) if new.memory == Memory::Whole => new,
            Some(Reload { new, .. }) if new.memory == Memory::Absent => {
                // Memory has no room for both, and no generation runs that could serve the present ones.
                if std::mem::replace(&mut served.memory, Memory::Absent) == Memory::Whole {
                    self.unneeded.push(served.version);
                }
                new
            }
            _ => served,
        };
        if set.memory == Memory::Whole {
            self.formed = Some(set.version);
            return Need::Serve(set.version);
        }
        set.memory = Memory::Loading;
        Need::Load(set.version, set.source.clone())
    }

    /// Loaders have packed a set.
    pub(crate) fn loaded(&mut self, now: Time) -> Loaded {
        let is_beside = self.served.memory == Memory::Whole;
        let set = match &mut self.reload {
            Some(reload) if reload.new.memory == Memory::Loading => {
                reload.load_time = now.since(reload.begun);
                &mut reload.new
            }
            _ => &mut self.served,
        };
        set.memory = Memory::Whole;
        if is_beside {
            return Loaded::Replace;
        }
        self.formed = Some(set.version);
        Loaded::Serve(set.version)
    }

    /// Loaders have failed, and are gone.
    pub(crate) fn not_loaded(&mut self, lacks_room: bool) -> NotLoaded<T> {
        let Some(reload) = self.reload.as_mut().filter(|reload| reload.new.memory == Memory::Loading) else {
            self.served.memory = Memory::Absent;
            return NotLoaded::Fault;
        };
        let is_beside = self.served.memory == Memory::Whole;
        if is_beside && lacks_room {
            reload.new.memory = Memory::Absent;
            return NotLoaded::DropFirst;
        }
        match self.reload.take() {
            Some(reload) if is_beside => NotLoaded::GoOn(reload.ticket),
            Some(reload) => NotLoaded::Again(reload.ticket),
            None => NotLoaded::Fault,
        }
    }

    /// A generation that has these weights serves. Returns the result of the reload that brought them, and its receiver.
    pub(crate) fn serves(&mut self, version: WeightVersion, now: Time) -> Option<(T, Reloaded)> {
        let Reload { new, ticket, load_time, pause_begun, .. } =
            self.reload.take_if(|reload| reload.new.version == version)?;
        let earlier = std::mem::replace(&mut self.served, new);
        if earlier.memory == Memory::Whole {
            self.unneeded.push(earlier.version);
        }
        let pause = pause_begun.map_or(Duration::ZERO, |begun| now.since(begun));
        Some((ticket, Reloaded { version, load_time, pause }))
    }

    /// The present generation has a fault. One that was formed for new weights and never served them takes the reload with it:
    /// the next one serves the earlier weights. Returns the receiver of the reload's result.
    pub(crate) fn fault(&mut self) -> Option<T> {
        let formed = self.formed?;
        let Reload { new, ticket, .. } = self.reload.take_if(|reload| reload.new.version == formed)?;
        self.unneeded.push(new.version);
        Some(ticket)
    }

    /// The ranks of a generation are gone. A pause begins if the next one is to serve new weights.
    pub(crate) fn group_ended(&mut self, now: Time) {
        self.formed = None;
        if let Some(reload) = self.reload.as_mut().filter(|reload| reload.new.memory != Memory::Loading) {
            reload.pause_begun.get_or_insert(now);
        }
    }

    /// Takes a set that is to be freed: no later generation serves it, and no rank has it.
    pub(crate) fn take_unneeded(&mut self) -> Option<WeightVersion> {
        let at = self.unneeded.iter().position(|version| Some(*version) != self.formed)?;
        Some(self.unneeded.swap_remove(at))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
