//! Random numbers (splitmix64) and random steps. Ranks with the same seed draw the same steps.

use expertd_kernels::layout::Shape;
use half::bf16;

pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1_u64 << 24) as f32
    }

    /// A number with a roughly normal distribution.
    pub fn normal(&mut self) -> f32 {
        (0..4).map(|_| self.unit()).sum::<f32>() * 1.732 - 3.464
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

/// Distribution of the experts that a step's tokens choose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Routing {
    Uniform,
    /// Experts with lower ids are much more frequent.
    Skewed,
    /// All tokens choose the same experts.
    Same,
}

/// One rank's part of a step.
#[derive(Clone)]
pub struct RankStep {
    pub tokens: usize,
    pub rows: Vec<u16>,
    pub ids: Vec<i32>,
    pub weights: Vec<f32>,
}

pub fn rows(random: &mut Random, count: usize) -> Vec<u16> {
    (0..count).map(|_| bf16::from_f32(random.normal()).to_bits()).collect()
}

pub fn choices(random: &mut Random, shape: &Shape, routing: Routing, tokens: usize) -> Vec<i32> {
    let (e, k) = (u64::from(shape.experts), shape.top_k as usize);
    let mut ids = Vec::with_capacity(tokens * k);
    let first = random.below(e);
    for _ in 0..tokens {
        let start = ids.len();
        while ids.len() < start + k {
            let id = match routing {
                Routing::Uniform => random.below(e),
                Routing::Skewed => random.below(e).min(random.below(e)).min(random.below(e)),
                Routing::Same => (first + (ids.len() - start) as u64) % e,
            } as i32;
            if !ids[start..].contains(&id) {
                ids.push(id);
            }
        }
    }
    ids
}

/// A random step, with a different number of tokens on each rank.
pub fn step(random: &mut Random, shape: &Shape) -> Vec<RankStep> {
    let routing = random.pick(&[Routing::Uniform, Routing::Uniform, Routing::Skewed, Routing::Same]);
    let kind = random.below(5);
    (0..shape.ranks)
        .map(|rank| {
            let most = u64::from(shape.max_tokens);
            let tokens = match kind {
                0 => most,
                1 => random.below(most.min(9) + 1),
                2 if rank != 0 => 0,
                3 if rank == 0 => 0,
                _ => random.below(most + 1),
            } as usize;
            let (k, h) = (shape.top_k as usize, shape.hidden as usize);
            let mut rows = rows(random, tokens * h);
            let mut weights: Vec<f32> = (0..tokens * k).map(|_| random.unit() * 2.0 - 0.5).collect();
            // Weight zero leaves an expert out, also of a row that is not finite.
            for (row, weights) in rows.chunks_exact_mut(h).zip(weights.chunks_exact_mut(k)) {
                match random.below(8) {
                    0 => weights[random.below(k as u64) as usize] = 0.0,
                    1 => {
                        row[random.below(h as u64) as usize] =
                            random.pick(&[bf16::INFINITY, bf16::NAN, bf16::MAX]).to_bits();
                        weights.fill(0.0);
                    }
                    _ => {}
                }
            }
            RankStep { tokens, rows, ids: choices(random, shape, routing, tokens), weights }
        })
        .collect()
}
