//! The experts of CPU ranks in host memory: where each one lies, and pinned pages from which copy engines read them.
//!
//! The memory is that of the CPU ranks, in their layout; there is no second copy on the host. A thread pins it in pieces after the rank is
//! ready, because pinning takes seconds for tens of gigabytes. Until an expert is pinned, its CPU rank computes its rows.

#![allow(unsafe_code, reason = "pins memory that other processes map, too")]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use expertd_compute::experts::cpu::CpuExpert;
use expertd_compute::linalg::{PackedForm, PackedMatrix};
use expertd_ipc::SealedMemory;
use expertd_ipc::control::RankSetup;
use expertd_kernels::device::{Device, Pinned};
use expertd_model::ModelSpec;
use expertd_rank::{Failure, Joining, setup_failure};
use expertd_rank_cpu::HeldExperts;
use expertd_shm::faults;
use expertd_types::{LayerId, Rank};

/// Bytes that are pinned at a time. Calls of the driver from other threads may wait for as long as that takes.
const PIECE: usize = 64 << 20;
const PAGE: usize = 4096;

/// An expert of a CPU rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HostExpert {
    /// Its number in the layer.
    pub(super) expert: u32,
    /// Number of its CPU rank's memory.
    pub(super) memory: usize,
    /// Offset of its first byte in that memory.
    pub(super) at: usize,
}

/// Where a matrix of an expert lies, in bytes from the expert's first one on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HostMatrix {
    pub(super) form: PackedForm,
    pub(super) elements_at: usize,
    /// Its scales apart from the elements, which follow these; `None` if there are none.
    pub(super) scales_at: Option<usize>,
}

impl HostMatrix {
    /// A matrix of the expert whose first byte is at address `first`, and the end of the matrix. `None` if it lies elsewhere.
    fn of(matrix: &PackedMatrix, first: usize) -> Option<(Self, usize)> {
        let part = |bytes: &[u8]| {
            let range = bytes.as_ptr_range();
            Some([range.start.addr().checked_sub(first)?, range.end.addr().checked_sub(first)?])
        };
        let [elements_at, end] = part(matrix.elements())?;
        let form = matrix.form();
        if matrix.scales().is_empty() {
            return Some((HostMatrix { form, elements_at, scales_at: None }, end));
        }
        let [scales_at, scales_end] = part(bytemuck::cast_slice(matrix.scales()))?;
        let of_matrix = HostMatrix { form, elements_at, scales_at: Some(scales_at) };
        (scales_at >= end).then_some((of_matrix, scales_end))
    }
}

/// The experts of a layer that CPU ranks own, all packed alike.
#[derive(Debug)]
pub(super) struct HostLayer {
    /// In the order of CPU ranks.
    pub(super) experts: Vec<HostExpert>,
    /// From an expert's first byte to its last one: gate and up, then down, in bytes.
    pub(super) bytes: usize,
    /// Gate and up, and down.
    pub(super) matrices: [HostMatrix; 2],
    /// `[experts]`: biases of gate `[inter]`, of up and of down `[hidden]`, without padding; empty if there are none.
    pub(super) biases: Vec<[Vec<f32>; 3]>,
}

/// A CPU rank's memory.
struct Memory {
    mapped: Arc<SealedMemory>,
    /// Bytes from the beginning that are pinned.
    pinned: Arc<AtomicUsize>,
}

/// The memory of all CPU ranks; none of it if one cannot be mapped for the device.
pub(in crate::engine) struct HostExperts {
    memories: Vec<Memory>,
    /// `[layers]`; `None` for layers without experts on CPU ranks, and those whose experts cannot be copied.
    layers: Vec<Option<HostLayer>>,
    stop: Arc<AtomicBool>,
    pinning: Option<JoinHandle<Vec<Pinned<'static>>>>,
}

impl HostExperts {
    /// Maps what loaders have packed for the CPU ranks, whose descriptors are the next ones.
    pub(in crate::engine) fn map(joining: &mut Joining<'_>, spec: &ModelSpec) -> Result<Self, Failure> {
        let RankSetup { shape, fingerprint, .. } = joining.setup;
        let group = (shape.ranks as usize, shape.sources as usize);
        // What ranks compute from is mapped privately and serves only to find the experts; the same offsets of the shared mappings are
        // pinned.
        let (mut held, mut mapped) = (Vec::new(), Vec::new());
        for rank in shape.sources..shape.ranks {
            let fd = joining.next_fd("the weights of CPU ranks")?;
            mapped.push(SealedMemory::map_for_device(&fd));
            held.push(HeldExperts::map(fd, Rank(rank), group, fingerprint).map_err(setup_failure)?);
        }
        let layers = (0..spec.layers.len() as u32).map(|layer| HostLayer::of(&held, LayerId(layer)));
        let layers = layers.collect();
        let memory = |mapped| Memory { mapped, pinned: Arc::default() };
        let memories = mapped.into_iter().map(|mapped| mapped.map(memory)).collect::<Result<Vec<_>, _>>();
        let memories = memories.unwrap_or_else(|error| {
            tracing::warn!(
                %error,
                "the memory of CPU ranks cannot be mapped for the GPU, which needs Linux 6.7 or newer: no expert is copied there"
            );
            Vec::new()
        });
        Ok(HostExperts { memories, layers, stop: Arc::default(), pinning: None })
    }

    /// Takes out what is known of a layer's experts.
    pub(super) fn take(&mut self, layer: usize) -> Option<HostLayer> {
        self.layers.get_mut(layer).and_then(Option::take)
    }

    /// Begins to pin the memory in the background.
    pub(in crate::engine) fn pin(&mut self, device: &Device) {
        let memories: Vec<_> = self
            .memories
            .iter()
            .map(|memory| (Arc::clone(&memory.mapped), Arc::clone(&memory.pinned)))
            .collect();
        let (device, stop) = (device.clone(), Arc::clone(&self.stop));
        let thread = std::thread::Builder::new().name("pin-experts".into());
        match thread.spawn(move || pin_all(&device, &memories, &stop)) {
            Ok(pinning) => self.pinning = Some(pinning),
            Err(error) => {
                tracing::warn!(%error, "no thread pins the experts of CPU ranks: none is copied to the GPU")
            }
        }
    }

    /// Whether a layer's experts are pinned.
    pub(super) fn is_pinned(&self, layer: &HostLayer) -> bool {
        layer.experts.iter().all(|expert| {
            let memory = self.memories.get(expert.memory);
            memory.is_some_and(|memory| memory.pinned.load(Ordering::Acquire) >= expert.at + layer.bytes)
        })
    }

    /// The parts of `count` bytes from an expert's first one on that one copy may read: their addresses, and their ranges. Each lies in one
    /// pinned piece.
    pub(super) fn pieces(
        &self,
        expert: &HostExpert,
        count: usize,
    ) -> impl Iterator<Item = (*const u8, Range<usize>)> {
        let bytes: &[u8] = (*self.memories[expert.memory].mapped).as_ref();
        let (base, first, end) = (bytes.as_ptr(), expert.at, expert.at + count);
        assert!(end <= bytes.len(), "experts lie in the memory of their rank");
        split(first..end)
            .map(move |part| (base.wrapping_add(part.start), part.start - first..part.end - first))
    }
}

impl Drop for HostExperts {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Pages are unpinned before they are unmapped.
        if let Some(pinning) = self.pinning.take() {
            drop(pinning.join());
        }
    }
}

/// A range of bytes, cut at the ends of pieces.
fn split(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let mut next = range.start;
    std::iter::from_fn(move || {
        let part = next..range.end.min((next / PIECE + 1) * PIECE);
        next = part.end;
        (!part.is_empty()).then_some(part)
    })
}

fn pin_all(
    device: &Device,
    memories: &[(Arc<SealedMemory>, Arc<AtomicUsize>)],
    stop: &AtomicBool,
) -> Vec<Pinned<'static>> {
    let (begun, mut pins, mut bytes) = (Instant::now(), Vec::new(), 0);
    for (memory, pinned) in memories {
        let all: &[u8] = (**memory).as_ref();
        for part in split(0..all.len()) {
            if stop.load(Ordering::Relaxed) {
                return pins;
            }
            let whole = part.len().next_multiple_of(PAGE);
            let pin = if faults::setting(REFUSE_PINS).is_some() {
                Err(format!("{REFUSE_PINS} is set"))
            } else {
                // SAFETY: the memory maps whole pages as long as it lives, and `HostExperts`, which holds it, drops the pins first. It
                // is sealed.
                unsafe { Pinned::register_source(device, all[part.start..].as_ptr(), whole) }
                    .map_err(|error| error.to_string())
            };
            match pin {
                Ok(pin) => pins.push(pin),
                Err(error) => {
                    tracing::warn!(
                        error,
                        pinned_bytes = bytes,
                        "the memory of CPU ranks cannot be pinned; raise the limit of locked memory (ulimit -l). Until then CPU ranks \
                         compute the experts that lie behind the pinned bytes in all steps"
                    );
                    return pins;
                }
            }
            bytes += part.len();
            pinned.store(part.end, Ordering::Release);
        }
    }
    tracing::info!(bytes, took = ?begun.elapsed(), "the experts of CPU ranks are pinned");
    pins
}

/// For tests: if this variable is set, nothing is pinned.
const REFUSE_PINS: &str = "EXPERTD_TIER_REFUSE_PINS";

impl HostLayer {
    fn of(held: &[HeldExperts], layer: LayerId) -> Option<HostLayer> {
        let mut all: Option<HostLayer> = None;
        for (memory, held) in held.iter().enumerate() {
            let base = (**held.memory()).as_ref().as_ptr().addr();
            for (number, expert) in held.experts(layer) {
                let first = expert.matrices()[0].elements().as_ptr().addr();
                let [gate_up, down] = expert.matrices().map(|matrix| HostMatrix::of(matrix, first));
                let (matrices, bytes) = ([gate_up?.0, down?.0], down?.1);
                let all = all.get_or_insert_with(|| HostLayer {
                    experts: Vec::new(),
                    bytes,
                    matrices,
                    biases: Vec::new(),
                });
                // A copy of several experts is repacked at once, so that all must look alike.
                if (all.bytes, all.matrices) != (bytes, matrices) {
                    return None;
                }
                all.experts.push(HostExpert { expert: number, memory, at: first - base });
                if !expert.biases()[0].is_empty() {
                    all.biases.push(plain_biases(expert));
                }
            }
        }
        all.filter(|all| all.biases.is_empty() || all.biases.len() == all.experts.len())
    }
}

/// The biases of gate, up and down in the order of features.
fn plain_biases(expert: &CpuExpert) -> [Vec<f32>; 3] {
    let [gate_up, down] = expert.biases();
    let (width, form) = (expert.matrices()[0].level().panel_width(), expert.matrices()[0].form());
    let (half, inter) = (width / 2, form.n / 2);
    let of = |first: usize| (0..inter).map(|f| gate_up[f / half * width + first + f % half]).collect();
    [of(0), of(half), down[..expert.hidden()].to_vec()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_stay_within_pinned_pieces() {
        let parts = |range| split(range).map(|part| [part.start, part.end]).collect::<Vec<_>>();
        assert_eq!(parts(5..9), [[5, 9]]);
        assert_eq!(parts(PIECE - 1..PIECE), [[PIECE - 1, PIECE]]);
        let of_three = [[PIECE - 1, PIECE], [PIECE, 2 * PIECE], [2 * PIECE, 2 * PIECE + 3]];
        assert_eq!(parts(PIECE - 1..2 * PIECE + 3), of_three);
        assert!(parts(7..7).is_empty());
    }
}
