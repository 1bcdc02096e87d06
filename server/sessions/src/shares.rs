//! What owners hold of a thing that is limited, each and together.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use metrics::gauge;

/// A number of things, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Amount {
    pub(crate) count: usize,
    pub(crate) bytes: usize,
}

/// The amount that each owner holds.
#[derive(Debug)]
pub(crate) struct Shares<K> {
    held: Mutex<HashMap<K, Amount>>,
    /// The gauge of the bytes of all owners, if there is one.
    gauge: Option<&'static str>,
}

impl<K: Copy + Eq + Hash> Shares<K> {
    pub(crate) fn new(gauge: Option<&'static str>) -> Arc<Self> {
        Arc::new(Shares { held: Mutex::default(), gauge })
    }

    /// Takes one thing of `bytes` bytes for an owner. `check` gets what all owners hold and what this one holds.
    ///
    /// # Errors
    /// That of `check`.
    pub(crate) fn take(
        self: &Arc<Self>,
        owner: K,
        bytes: usize,
        check: impl FnOnce(Amount, Amount) -> Result<(), String>,
    ) -> Result<Share<K>, String> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let own = held.get(&owner).copied().unwrap_or_default();
        check(sum(&held), own)?;
        held.insert(owner, Amount { count: own.count + 1, bytes: own.bytes + bytes });
        self.show(&held);
        Ok(Share { shares: Arc::clone(self), owner, bytes })
    }

    fn show(&self, held: &HashMap<K, Amount>) {
        if let Some(name) = self.gauge {
            gauge!(name).set(sum(held).bytes as f64);
        }
    }
}

fn sum<K>(held: &HashMap<K, Amount>) -> Amount {
    let add =
        |sum: Amount, own: &Amount| Amount { count: sum.count + own.count, bytes: sum.bytes + own.bytes };
    held.values().fold(Amount::default(), add)
}

/// One thing of an owner, until it is dropped.
#[derive(Debug)]
pub(crate) struct Share<K: Copy + Eq + Hash> {
    shares: Arc<Shares<K>>,
    owner: K,
    bytes: usize,
}

impl<K: Copy + Eq + Hash> Drop for Share<K> {
    fn drop(&mut self) {
        let mut held = self.shares.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = held.get_mut(&self.owner) {
            *own = Amount { count: own.count - 1, bytes: own.bytes - self.bytes };
            if own.count == 0 {
                held.remove(&self.owner);
            }
        }
        self.shares.show(&held);
    }
}
