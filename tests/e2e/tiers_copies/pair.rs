//! A mixed group beside one rank with the same weights.

use std::time::{Duration, Instant};

use expertd_client::Client;
use expertd_model::synth::{self, SynthConfig};
use expertd_proto::v1::{DType, ForwardRequest};
use expertd_test_seed::TestRng;
use expertd_types::rows::{decode, encode, encode_i32};
use expertd_types::{ExpertPlacement, LayerId, LayerPlacement};
use rand::RngExt as _;
use rand::seq::SliceRandom as _;
use tempfile::TempDir;

use super::{FAMILY, PATIENCE};
use crate::balance::counts;
use crate::service::load::check_within;
use crate::service::{PATIENT, Service};
use crate::tiers::{TOLERANCE, write};

/// Sizes of the model that [`Pair`] serves.
const EXPERTS: usize = 16;
pub(super) const K: usize = 4;

/// A mixed group of a source and two CPU ranks, and one rank with the same weights.
pub(super) struct Pair {
    pub(super) mixed: (Client, Service),
    pub(super) alone: (Client, Service),
    hidden: usize,
    pub(super) rng: TestRng,
    /// The checkpoint and the placement.
    _folders: [TempDir; 2],
}

impl Pair {
    /// Expert 0 of each layer is on the source, the others are on CPU ranks in turn.
    pub(super) async fn start(device: &str, more: &[&str], environment: &[(&str, &str)]) -> Pair {
        Pair::of(&SynthConfig::new(FAMILY), device, more, environment).await
    }

    /// As [`start`](Pair::start), with weights of another family or format.
    pub(super) async fn of(
        like: &SynthConfig,
        device: &str,
        more: &[&str],
        environment: &[(&str, &str)],
    ) -> Pair {
        let folder = tempfile::tempdir().unwrap();
        let sizes = SynthConfig { experts: EXPERTS, top_k: K, ..like.clone() };
        synth::write(&sizes, folder.path()).unwrap();
        let of_rank =
            |rank: usize| (1..EXPERTS as u32).filter(|expert| *expert as usize % 2 + 1 == rank).collect();
        let placed = |layer| (LayerId(layer), LayerPlacement::new(vec![vec![0], of_rank(1), of_rank(2)]));
        let (placement, file) = write(&ExpertPlacement::new(3, (0..2).map(placed)));
        let flags = ["--device", device, "--placement", file.to_str().unwrap()];
        let flags = [&flags, &PATIENT[..], more].concat();
        let mixed = Service::start_checkpoint(folder.path(), 3, &flags, environment);
        let alone = Service::start_checkpoint(folder.path(), 1, &[], &[]);
        Pair {
            mixed: (Client::connect(&mixed.address).await.unwrap(), mixed),
            alone: (Client::connect(&alone.address).await.unwrap(), alone),
            hidden: sizes.hidden,
            rng: expertd_test_seed::rng(),
            _folders: [folder, placement],
        }
    }

    /// A request of `tokens` rows whose experts are among `of`.
    pub(super) fn request(&mut self, layer: u32, tokens: usize, of: &[i32]) -> ForwardRequest {
        let rng = &mut self.rng;
        let rows: Vec<f32> = (0..tokens * self.hidden).map(|_| rng.random_range(-1.0..1.0)).collect();
        let (mut ids, mut weights) = (Vec::new(), Vec::new());
        for _ in 0..tokens {
            let mut of = of.to_vec();
            of.shuffle(rng);
            ids.extend_from_slice(&of[..K]);
            weights.extend((0..K).map(|_| rng.random_range(0.1..1.0_f32)));
        }
        let rows = encode(&rows, expertd_types::DType::F32);
        ForwardRequest::inline(layer, tokens as u32, DType::DtypeF32, rows).with_routing(
            encode_i32(&ids),
            encode(&weights, expertd_types::DType::F32),
            K as u32,
        )
    }

    /// Calls both with `tokens` rows whose experts are among `of`, and compares. Returns the version of the table of slots.
    pub(super) async fn call(&mut self, layer: u32, tokens: usize, of: &[i32]) -> u64 {
        let request = self.request(layer, tokens, of);
        self.answered(request).await
    }

    /// As [`call`](Pair::call). Returns also the rows of this call as [`rows`](Pair::rows) counts them.
    pub(super) async fn counted_call(&mut self, layer: u32, tokens: usize, of: &[i32]) -> (u64, [u64; 2]) {
        let before = self.rows(layer).await;
        let version = self.call(layer, tokens, of).await;
        let after = self.rows(layer).await;
        (version, [0, 1].map(|side| after[side] - before[side]))
    }

    /// Calls with `tokens` rows until the counted rows of a call are `wanted`: a GPU pins the memory of CPU ranks in the background.
    pub(super) async fn call_until(
        &mut self,
        layer: u32,
        tokens: usize,
        wanted: impl Fn([u64; 2]) -> bool,
    ) -> [u64; 2] {
        let begun = Instant::now();
        loop {
            let (_, [of_source, of_others]) = self.counted_call(layer, tokens, &all()).await;
            if wanted([of_source, of_others]) {
                return [of_source, of_others];
            }
            let what = format!("layer {layer}: {of_source} rows at the source, {of_others} elsewhere");
            assert!(begun.elapsed() < PATIENCE, "{what}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Calls both at once with `tokens` rows for each of two layers.
    pub(super) async fn call_both_layers(&mut self, tokens: [usize; 2]) {
        let [first, second] = [0, 1].map(|layer| self.request(layer, tokens[layer as usize], &all()));
        tokio::join!(self.answered(first), self.answered(second));
    }

    async fn answered(&self, request: ForwardRequest) -> u64 {
        let (wanted, found) = tokio::join!(
            self.alone.0.forward(request.clone(), None),
            self.mixed.0.forward(request.clone(), None)
        );
        let (wanted, found) = (decode(&wanted.unwrap().rows, expertd_types::DType::F32), found.unwrap());
        check_within(TOLERANCE, &found, &wanted, &request);
        let receipt = found.receipt.unwrap();
        assert!(receipt.slot_versions.is_empty() || receipt.slot_versions.len() == receipt.steps.len());
        receipt.slot_versions.last().copied().unwrap_or(0)
    }

    /// Rows that the source has computed of experts that CPU ranks own, and that CPU ranks have computed.
    pub(super) async fn rows(&self, layer: u32) -> [u64; 2] {
        let counted = counts(&self.mixed.1, layer).await;
        [counted[0][1..].iter().sum(), counted[1..].iter().flatten().sum()]
    }
}

pub(super) fn all() -> Vec<i32> {
    (0..EXPERTS as i32).collect()
}
