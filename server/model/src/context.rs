//! Values of the whole model, bounds and vectors: what the resolution of every part of a checkpoint uses.

use super::ModelError;
use super::config::Config;
use super::family::Family;
use super::plan::VectorRef;
use super::quant::Quantization;
use super::store::Store;
use crate::Activation;

/// Bounds of the values in a config, so that no field makes a loop or an allocation unreasonably large.
pub(super) const MAX_LAYERS: usize = 4096;
pub(super) const MAX_EXPERTS: usize = 65536;

/// Values that hold for the whole model.
pub(super) struct Context<'a> {
    pub(super) config: &'a Config,
    pub(super) family: &'static Family,
    pub(super) quantization: Quantization,
    pub(super) hidden: usize,
    pub(super) num_experts: usize,
    pub(super) width: usize,
    pub(super) activation: Activation,
}

/// Finds a vector whose shape is one of `shapes`.
pub(super) fn vector(
    store: &mut Store,
    name: &str,
    shapes: &[&[usize]],
    reason: &str,
) -> Result<VectorRef, ModelError> {
    let id = store.find_floats(name, reason)?;
    if !shapes.iter().any(|shape| store.info(id).shape == **shape) {
        store.expect_shape(id, shapes[0], reason)?;
    }
    Ok(VectorRef { tensor: id, first: 0, stride: 1, len: shapes[0].iter().product() })
}
