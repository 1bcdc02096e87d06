//! The service's end of a session's memory.
//!
//! The client may write anything anywhere in its mapping at any time. The service therefore copies each request out once
//! and checks the copy; ids, weights and token ids likewise. Rows are copied or converted and never interpreted. A counter
//! or a cell of a ring that is impossible is an error, which ends the session. Nothing here waits for the client.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use expertd_shm::region::{PAGE, RegionError, SharedRegion, SharedSlice};
use expertd_shm::ring::{RingConsumer, RingError, RingProducer};
use expertd_shm::wait::Doorbell;

use crate::wire::{CompletionRecord, KIND_HOST, Opened, RegionLayout, RequestRecord, VERSION};

/// Why the memory of a session could not be made.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The region could not be made.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// A ring could not be made.
    #[error(transparent)]
    Ring(#[from] RingError),
}

/// Memory that the service made for one client.
#[derive(Debug)]
pub struct SessionMemory {
    region: Arc<SharedRegion>,
    layout: RegionLayout,
    calls: u32,
    rows: SharedSlice<u8>,
    service_bell: Doorbell,
    client_bell: Doorbell,
}

/// The service's ends of the rings; each has one owner at a time.
#[derive(Debug)]
pub struct ServiceRings {
    /// Requests from the client.
    pub requests: RingConsumer<RequestRecord>,
    /// Completions to the client.
    pub completions: RingProducer<CompletionRecord>,
}

impl SessionMemory {
    /// Makes the memory for `calls` calls in flight, a power of two, and `rows_bytes` bytes of rows, rounded up to pages.
    /// All pages are resident afterwards.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn create(calls: u32, rows_bytes: usize) -> Result<(Self, ServiceRings), MemoryError> {
        let rows_bytes = rows_bytes.checked_next_multiple_of(PAGE);
        let rows_bytes = rows_bytes.ok_or(RegionError::TooLarge { offset: 0, bytes: usize::MAX })?;
        let layout = RegionLayout::new(calls, rows_bytes)?;
        let region = SharedRegion::create("expertd-session", layout.bytes)?;
        region.avoid_huge_pages();
        region.populate(0, layout.bytes)?;
        let rings = ServiceRings {
            requests: RingConsumer::new(layout.requests.memory(&region)?)?,
            completions: RingProducer::new(layout.completions.memory(&region)?)?,
        };
        let bell = |offset| Ok::<_, RegionError>(Doorbell::new(region.slice(offset, 1)?));
        let memory = SessionMemory {
            rows: region.slice(layout.rows, layout.rows_bytes)?,
            service_bell: bell(layout.service_bell)?,
            client_bell: bell(layout.client_bell)?,
            region,
            layout,
            calls,
        };
        Ok((memory, rings))
    }

    /// The description of the memory for the client.
    #[must_use]
    pub const fn opened(&self, session: u64, spin_us: u32, hidden: u32) -> Opened {
        let layout = &self.layout;
        Opened {
            version: VERSION,
            kind: KIND_HOST,
            session,
            region_bytes: layout.bytes as u64,
            requests_offset: layout.requests.offset() as u64,
            completions_offset: layout.completions.offset() as u64,
            service_bell_offset: layout.service_bell as u64,
            client_bell_offset: layout.client_bell as u64,
            rows_offset: layout.rows as u64,
            rows_bytes: layout.rows_bytes as u64,
            calls: self.calls,
            spin_us,
            hidden,
            reserved: 0,
        }
    }

    /// The region, whose descriptor the client and the ranks receive.
    #[must_use]
    pub const fn region(&self) -> &Arc<SharedRegion> {
        &self.region
    }

    /// The row area. Its bytes may change at any time.
    #[must_use]
    pub const fn rows(&self) -> &SharedSlice<u8> {
        &self.rows
    }

    /// Offset of the row area in the region, in bytes.
    #[must_use]
    pub const fn rows_offset(&self) -> usize {
        self.layout.rows
    }

    /// Largest number of calls in flight.
    #[must_use]
    pub const fn calls(&self) -> u32 {
        self.calls
    }

    /// The doorbell that the client rings.
    #[must_use]
    pub const fn service_bell(&self) -> &Doorbell {
        &self.service_bell
    }

    /// The doorbell that the client waits on.
    #[must_use]
    pub const fn client_bell(&self) -> &Doorbell {
        &self.client_bell
    }

    /// Copies `words` 32-bit words at `offset` of the row area, each once.
    ///
    /// # Errors
    /// If they exceed the row area or `offset` is not a multiple of four.
    pub fn copy_words(&self, offset: usize, words: usize) -> Result<Vec<u8>, RegionError> {
        let slice = self.words(offset, words)?;
        let mut copy = Vec::with_capacity(words * 4);
        for word in slice.atomics() {
            copy.extend_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        Ok(copy)
    }

    /// Writes 32-bit words at `offset` of the row area.
    ///
    /// # Errors
    /// If they exceed the row area or `offset` is not a multiple of four.
    pub fn write_words(&self, offset: usize, bytes: &[u8]) -> Result<(), RegionError> {
        let (words, _) = bytes.as_chunks::<4>();
        let slice = self.words(offset, words.len())?;
        for (to, word) in slice.atomics().iter().zip(words) {
            to.store(u32::from_ne_bytes(*word), Ordering::Relaxed);
        }
        Ok(())
    }

    fn words(&self, offset: usize, words: usize) -> Result<SharedSlice<u32>, RegionError> {
        let bytes = words.saturating_mul(4);
        if offset.checked_add(bytes).is_none_or(|end| end > self.layout.rows_bytes) {
            return Err(RegionError::OutOfBounds { offset, bytes, len: self.layout.rows_bytes });
        }
        self.region.slice(self.layout.rows + offset, words)
    }
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable as _;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn words_are_copied_within_the_row_area_only() {
        let (memory, _) = SessionMemory::create(4, 5000).unwrap();
        assert_eq!(memory.rows().len(), 8192);
        let bytes: Vec<u8> = (0..64).collect();
        memory.write_words(128, &bytes).unwrap();
        assert_eq!(memory.copy_words(128, 16).unwrap(), bytes);
        assert!(memory.copy_words(8192, 1).is_err());
        assert!(memory.copy_words(usize::MAX - 3, 4).is_err());
        assert!(memory.copy_words(2, 1).is_err());
        assert!(memory.write_words(8190, &bytes).is_err());
    }

    proptest! {
        /// A client may write any bytes into the control part of its memory. The service then takes no more records than a ring
        /// holds, each as a copy, and ends with an error or an empty ring.
        #[test]
        fn random_bytes_in_the_rings_are_errors_or_records(
            writes in prop::collection::vec((any::<prop::sample::Index>(), any::<u64>()), 0..200),
            pushed in prop_oneof![Just(0_u64), 0_u64..9, any::<u64>()],
        ) {
            let (memory, mut rings) = SessionMemory::create(4, 4096).unwrap();
            let control = memory.region().slice::<u64>(0, memory.layout.rows / 8).unwrap();
            for (at, word) in writes {
                control.atomics()[at.index(control.len())].store(word, Ordering::Relaxed);
            }
            control.atomics()[0].store(pushed, Ordering::Relaxed);
            let mut taken = 0;
            while let Ok(Some(record)) = rings.requests.try_pop() {
                let _ = memory.copy_words(record.ids as usize, record.tokens as usize);
                taken += 1;
                prop_assert!(taken <= 4);
            }
            for call in 0..9 {
                let record = CompletionRecord { call, ..CompletionRecord::zeroed() };
                match rings.completions.try_push(&record) {
                    Ok(true) => {}
                    Ok(false) | Err(_) => break,
                }
            }
        }
    }
}
