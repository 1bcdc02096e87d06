//! The service's description of its model.

use expertd_proto::v1;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::element::Element;

/// A loaded model in a list.
#[pyclass(frozen, get_all, module = "expertd")]
#[derive(Clone, Debug)]
pub(crate) struct ModelSummary {
    name: String,
    family: String,
    weight_version: u64,
    weight_fingerprint: String,
}

/// One decoder layer with an MoE block.
#[pyclass(frozen, get_all, module = "expertd")]
#[derive(Clone, Debug)]
pub(crate) struct MoeLayer {
    layer: u32,
    num_experts: u32,
    top_k: u32,
    expert_width: u32,
    shared_width: u32,
    gate: String,
    gate_json: String,
    routes_by_token_id: bool,
    max_k: u32,
}

/// Limits of the service.
#[pyclass(frozen, get_all, module = "expertd")]
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    max_tokens_per_request: u32,
    max_tokens_per_step: u32,
    max_tokens_per_rank: u32,
    max_message_bytes: u64,
    max_streams_per_connection: u32,
    max_connections: u32,
    max_bytes_in_flight: u64,
    max_requests_per_stream: u32,
}

/// An expert rank and the experts that it owns: `(layer, first, count)` for each layer.
#[pyclass(frozen, get_all, module = "expertd")]
#[derive(Clone, Debug)]
pub(crate) struct RankPlacement {
    rank: u32,
    device: String,
    experts: Vec<(u32, u32, u32)>,
}

/// Dimensions, layers, limits, placement and versions of a model.
#[pyclass(frozen, module = "expertd")]
#[derive(Clone, Debug)]
pub(crate) struct Model {
    #[pyo3(get)]
    name: String,
    #[pyo3(get)]
    family: String,
    #[pyo3(get)]
    weight_version: u64,
    #[pyo3(get)]
    weight_fingerprint: String,
    #[pyo3(get)]
    generation: u64,
    #[pyo3(get)]
    hidden: u32,
    #[pyo3(get)]
    num_layers: u32,
    #[pyo3(get)]
    limits: Limits,
    moe_layers: Vec<MoeLayer>,
    dtypes: Vec<&'static str>,
    weight_formats: Vec<String>,
    placement: Vec<RankPlacement>,
}

macro_rules! debug_repr {
    ($($class:ident),*) => { $(
        #[pymethods]
        impl $class {
            fn __repr__(&self) -> String {
                format!("{self:?}")
            }
        }
    )* };
}
debug_repr!(ModelSummary, MoeLayer, Limits, RankPlacement);

#[pymethods]
impl Model {
    #[getter]
    fn moe_layers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.moe_layers.iter().cloned())
    }

    #[getter]
    fn dtypes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.dtypes)
    }

    #[getter]
    fn weight_formats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.weight_formats)
    }

    #[getter]
    fn placement<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.placement.iter().cloned())
    }

    fn __repr__(&self) -> String {
        format!(
            "Model(name={:?}, family={:?}, hidden={}, moe_layers={}, weight_version={})",
            self.name,
            self.family,
            self.hidden,
            self.moe_layers.len(),
            self.weight_version
        )
    }
}

impl From<v1::ModelSummary> for ModelSummary {
    fn from(m: v1::ModelSummary) -> ModelSummary {
        ModelSummary {
            name: m.name,
            family: m.family,
            weight_version: m.weight_version,
            weight_fingerprint: m.weight_fingerprint,
        }
    }
}

impl From<Model> for ModelSummary {
    fn from(m: Model) -> ModelSummary {
        ModelSummary {
            name: m.name,
            family: m.family,
            weight_version: m.weight_version,
            weight_fingerprint: m.weight_fingerprint,
        }
    }
}

impl From<v1::MoeLayer> for MoeLayer {
    fn from(l: v1::MoeLayer) -> MoeLayer {
        MoeLayer {
            layer: l.layer,
            num_experts: l.num_experts,
            top_k: l.top_k,
            expert_width: l.expert_width,
            shared_width: l.shared_width,
            gate: l.gate,
            gate_json: l.gate_json,
            routes_by_token_id: l.routes_by_token_id,
            max_k: l.max_k,
        }
    }
}

impl From<v1::Limits> for Limits {
    fn from(l: v1::Limits) -> Limits {
        Limits {
            max_tokens_per_request: l.max_tokens_per_request,
            max_tokens_per_step: l.max_tokens_per_step,
            max_tokens_per_rank: l.max_tokens_per_rank,
            max_message_bytes: l.max_message_bytes,
            max_streams_per_connection: l.max_streams_per_connection,
            max_connections: l.max_connections,
            max_bytes_in_flight: l.max_bytes_in_flight,
            max_requests_per_stream: l.max_requests_per_stream,
        }
    }
}

impl From<v1::RankPlacement> for RankPlacement {
    fn from(p: v1::RankPlacement) -> RankPlacement {
        let experts = p.experts.into_iter().map(|e| (e.layer, e.first, e.count)).collect();
        RankPlacement { rank: p.rank, device: p.device, experts }
    }
}

impl From<v1::GetModelResponse> for Model {
    fn from(m: v1::GetModelResponse) -> Model {
        Model {
            dtypes: m.dtypes().filter_map(Element::from_row_type).map(Element::name).collect(),
            name: m.name,
            family: m.family,
            weight_version: m.weight_version,
            weight_fingerprint: m.weight_fingerprint,
            generation: m.generation,
            hidden: m.hidden,
            num_layers: m.num_layers,
            limits: m.limits.unwrap_or_default().into(),
            moe_layers: m.moe_layers.into_iter().map(MoeLayer::from).collect(),
            weight_formats: m.weight_formats,
            placement: m.placement.into_iter().map(RankPlacement::from).collect(),
        }
    }
}
