//! A simulation of the ring through which the experts' kernel for few rows reads weights (`src/experts_few_roles.cuh`).
//!
//! A stream brings chunks to the slots of its ring in order. Consumers take the stream's items in turn; an item is one or more chunks. A
//! consumer waits for a chunk by the parity of its slot's barrier, which tells only the last two fills of a slot apart, and copies
//! complete in any order. So the number of chunks that are under way at once is limited (`FewRing::MOST_AHEAD`).

use std::collections::VecDeque;

use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

/// Warps that multiply the items of a stream: `FEW_CONSUMERS / FEW_STREAMS`.
const CONSUMERS: usize = 4;

/// The formula of `FewRing::MOST_AHEAD`.
const fn most_ahead(slots: usize, chunks: usize) -> usize {
    slots - (CONSUMERS - 1) * chunks - 1
}

/// Whether a wait for the phase with this parity ends. `phase` counts the phases that are complete.
const fn has_passed(phase: usize, parity: usize) -> bool {
    phase % 2 != parity
}

struct Ring {
    /// Most chunks under way.
    ahead: usize,
    /// Complete phases of each slot's barriers.
    full: Vec<usize>,
    empty: Vec<usize>,
    /// Number of chunks that were issued.
    issued: usize,
    under_way: Vec<usize>,
    is_complete: Vec<bool>,
}

impl Ring {
    fn new(slots: usize, ahead: usize, chunks: usize) -> Self {
        let (full, empty) = (vec![0; slots], vec![0; slots]);
        Ring { ahead, full, empty, issued: 0, under_way: Vec::new(), is_complete: vec![false; chunks] }
    }

    /// What the stream does for its next chunk; returns whether it need not wait.
    fn issue(&mut self) -> bool {
        let (slots, at) = (self.full.len(), self.issued);
        let waits = at >= self.is_complete.len()
            || !has_passed(self.empty[at % slots], (at / slots + 1) % 2)
            || at
                .checked_sub(self.ahead)
                .is_some_and(|before| !has_passed(self.full[before % slots], before / slots % 2));
        if !waits {
            self.under_way.push(at);
            self.issued += 1;
        }
        !waits
    }

    /// A copy completes: mostly the newest, which is the hardest case.
    fn complete(&mut self, random: &mut SmallRng) -> bool {
        let Some(newest) = self.under_way.len().checked_sub(1) else { return false };
        let one = if random.random_ratio(9, 10) { newest } else { random.random_range(0..=newest) };
        let chunk = self.under_way.remove(one);
        let slots = self.full.len();
        self.full[chunk % slots] += 1;
        self.is_complete[chunk] = true;
        true
    }

    /// What a consumer does for a chunk; returns whether it need not wait.
    ///
    /// # Errors
    /// If it goes on before the chunk is there.
    fn consume(&mut self, chunk: usize) -> Result<bool, String> {
        let slots = self.full.len();
        if !has_passed(self.full[chunk % slots], chunk / slots % 2) {
            return Ok(false);
        }
        if !self.is_complete[chunk] {
            return Err(format!("chunk {chunk} was taken before it was there"));
        }
        self.empty[chunk % slots] += 1;
        Ok(true)
    }
}

/// Streams 300 items of at most `most` chunks.
fn stream(slots: usize, most: usize, ahead: usize, seed: u64) -> Result<(), String> {
    let mut random = SmallRng::seed_from_u64(seed);
    let mut wanted = vec![VecDeque::new(); CONSUMERS];
    let mut chunks = 0;
    for item in 0..300 {
        let end = chunks + random.random_range(1..=most);
        wanted[item % CONSUMERS].extend(chunks..end);
        chunks = end;
    }
    let mut ring = Ring::new(slots, ahead, chunks);
    while wanted.iter().any(|left| !left.is_empty()) {
        let mut goes_on = false;
        for _ in 0..slots {
            goes_on |= ring.issue();
        }
        goes_on |= ring.complete(&mut random);
        for left in &mut wanted {
            if let Some(&chunk) = left.front()
                && ring.consume(chunk)?
            {
                left.pop_front();
                goes_on = true;
            }
        }
        if !goes_on {
            return Err("everybody waits".to_owned());
        }
    }
    Ok(())
}

#[test]
fn every_chunk_is_taken_once_it_is_there() {
    for chunks in 1..=4 {
        for slots in (CONSUMERS - 1) * chunks + 2..=32 {
            for seed in 0..20 {
                let streamed = stream(slots, chunks, most_ahead(slots, chunks), seed);
                assert_eq!(streamed, Ok(()), "{slots} slots, items of {chunks} chunks, seed {seed}");
            }
        }
    }
}

#[test]
fn one_chunk_more_under_way_is_one_too_many() {
    for (slots, chunks) in [(23, 4), (22, 2), (16, 4)] {
        let ahead = most_ahead(slots, chunks) + 1;
        assert!(
            (0..200).any(|seed| stream(slots, chunks, ahead, seed).is_err()),
            "{slots} slots, items of {chunks} chunks"
        );
    }
}

#[test]
fn the_formula_is_the_kernels() {
    let plan = include_str!("../src/experts_few_plan.cuh");
    for line in [
        "MOST_AHEAD = SLOTS - (FEW_CONSUMERS / FEW_STREAMS - 1) * CHUNKS - 1;",
        "FEW_CONSUMERS = 8;",
        "FEW_STREAMS = 2;",
    ] {
        assert!(plan.contains(line), "{line} is not in experts_few_plan.cuh");
    }
}
