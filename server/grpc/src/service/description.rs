//! The encoded description of the model, which GetModel and sessions send.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use prost::Message as _;

use super::convert;
use expertd_core::backend::ModelInfo;

/// The description of the model as a message, encoded once for each [`ModelInfo`] and shared by its answers: with a placement of
/// single experts it has hundreds of kilobytes.
#[derive(Default)]
pub struct ModelDescription {
    latest: Mutex<Option<(Arc<ModelInfo>, Bytes)>>,
}

impl ModelDescription {
    /// The encoded `GetModelResponse` of `model`.
    pub fn encoded(&self, model: &Arc<ModelInfo>) -> Bytes {
        // Held while encoding, so that calls that come together encode once.
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        match &*latest {
            Some((of, bytes)) if Arc::ptr_eq(of, model) => bytes.clone(),
            _ => {
                let bytes = Bytes::from(convert::model(model).encode_to_vec());
                *latest = Some((Arc::clone(model), bytes.clone()));
                bytes
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use expertd_proto::v1::GetModelResponse;
    use expertd_types::{Coverage, Generation, LayerId, LayerRange, Rank, WeightFingerprint, WeightVersion};

    use super::*;
    use expertd_core::backend::{Limits, RankPlacement};

    fn model(generation: u64) -> ModelInfo {
        ModelInfo {
            name: "m".to_owned(),
            family: "f".to_owned(),
            weight_version: WeightVersion(1),
            weight_fingerprint: WeightFingerprint { coverage: Coverage::Sampled, digest: [0; 16] },
            generation: Generation(generation),
            hidden: 8,
            num_layers: 1,
            held: LayerRange { first: LayerId(0), last: LayerId(0) },
            layers: BTreeMap::new(),
            weight_formats: Vec::new(),
            limits: Limits {
                max_tokens_per_request: 1,
                max_tokens_per_step: 1,
                max_tokens_per_rank: 1,
                max_message_bytes: 1,
                max_streams_per_connection: 1,
                max_requests_per_stream: 1,
                max_connections: 1,
                max_bytes_in_flight: 1,
            },
            sources: 0,
            placement: Vec::new(),
        }
    }

    #[test]
    fn the_answer_to_no_tokens_counts_the_ranks_that_get_rows() {
        let rank = |rank| RankPlacement { rank: Rank(rank), device: "cpu".into(), experts: Vec::new() };
        let mixed = ModelInfo { sources: 1, placement: (0..3).map(rank).collect(), ..model(1) };
        let receipt = super::super::convert::empty_response(&mixed).receipt;
        assert_eq!(receipt.map(|receipt| receipt.tokens_per_rank), Some(vec![0]));
    }

    #[test]
    fn a_description_is_encoded_once_and_again_after_a_change() {
        let description = ModelDescription::default();
        let first = Arc::new(model(1));
        let encoded = description.encoded(&first);
        assert_eq!(description.encoded(&first).as_ptr(), encoded.as_ptr(), "calls share the bytes");
        let next = description.encoded(&Arc::new(model(2)));
        assert_eq!(GetModelResponse::decode(next).map(|model| model.generation), Ok(2));
        assert_eq!(GetModelResponse::decode(encoded).map(|model| model.generation), Ok(1));
    }
}
