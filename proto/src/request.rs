//! Builders of requests.

use bytes::Bytes;

use crate::v1::{DType, ForwardRequest, Routing, SharedExperts, forward_request};

impl ForwardRequest {
    /// A request for `tokens` rows in `rows` through `layer`, routed by the service's gate.
    #[must_use]
    pub fn inline(layer: u32, tokens: u32, dtype: DType, rows: Bytes) -> ForwardRequest {
        ForwardRequest {
            layer,
            tokens,
            dtype: dtype.into(),
            payload: Some(forward_request::Payload::Inline(rows)),
            ..ForwardRequest::default()
        }
    }

    /// Sets the name of the model.
    #[must_use]
    pub fn with_model(mut self, model: impl Into<String>) -> ForwardRequest {
        self.model = model.into();
        self
    }

    /// Sets the routing: ids int32 and weights float32, little-endian, `[tokens, k]`.
    #[must_use]
    pub fn with_routing(mut self, topk_ids: Bytes, topk_weights: Bytes, k: u32) -> ForwardRequest {
        self.routing = Some(Routing { topk_ids, topk_weights, k });
        self
    }

    /// Sets the token ids, int32 little-endian `[tokens]`.
    #[must_use]
    pub fn with_token_ids(mut self, token_ids: Bytes) -> ForwardRequest {
        self.token_ids = token_ids;
        self
    }

    /// Leaves shared experts out of the output.
    #[must_use]
    pub fn without_shared_experts(mut self) -> ForwardRequest {
        self.shared_experts = SharedExperts::Exclude.into();
        self
    }

    /// Lets the request fail unless this version of the weights is loaded.
    #[must_use]
    pub fn expecting_weight_version(mut self, version: u64) -> ForwardRequest {
        self.expected_weight_version = Some(version);
        self
    }

    /// Lets the request fail unless weights with this fingerprint are loaded.
    #[must_use]
    pub fn expecting_weights(mut self, fingerprint: &str) -> ForwardRequest {
        fingerprint.clone_into(&mut self.expected_weight_fingerprint);
        self
    }

    /// Requests ids and weights in the receipt.
    #[must_use]
    pub fn returning_routing(mut self) -> ForwardRequest {
        self.return_routing = true;
        self
    }

    /// Requests phase timings in the receipt.
    #[must_use]
    pub fn returning_timings(mut self) -> ForwardRequest {
        self.return_timings = true;
        self
    }
}
