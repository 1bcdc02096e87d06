//! Experts on the CPU: packed weights, and the grouped MLP over them.

mod grouped;
mod segments;
#[cfg(test)]
mod tests;
mod workspace;

pub use grouped::{forward, forward_one};
pub use workspace::{Workspace, WorkspaceSize};

use crate::linalg::{Level, PackError, PackedMatrix};
use expertd_model::ExpertWeights;

/// Why an expert cannot be packed.
#[derive(Debug, thiserror::Error)]
pub enum ExpertError {
    /// A matrix contradicts itself.
    #[error("the {projection} projection: {source}")]
    Matrix {
        /// Which one.
        projection: &'static str,
        /// What is wrong.
        source: PackError,
    },
    /// The down projection does not lead from the intermediate to the hidden features.
    #[error("the down projection should be [{hidden}, {intermediate}], but is [{rows}, {cols}]")]
    Down {
        /// Input features of the gate projection.
        hidden: usize,
        /// Output features of the gate projection.
        intermediate: usize,
        /// Rows found.
        rows: usize,
        /// Columns found.
        cols: usize,
    },
    /// A bias is not as long as its projection's output.
    #[error("the bias of the {projection} projection should have {expected} elements, but has {found}")]
    Bias {
        /// Which one.
        projection: &'static str,
        /// Output features.
        expected: usize,
        /// Elements found.
        found: usize,
    },
}

/// One expert, packed for the CPU.
#[derive(Debug)]
pub struct CpuExpert {
    gate_up: PackedMatrix,
    down: PackedMatrix,
    /// `[panels, P]`, laid out like the packed pair; empty if there are none.
    gate_up_bias: Vec<f32>,
    /// `[panels * P]`; empty if there are none.
    down_bias: Vec<f32>,
}

impl CpuExpert {
    /// Packs an expert for the level of this process. The weights keep their format.
    ///
    /// # Errors
    /// If the matrices contradict themselves or each other.
    pub fn pack(weights: &ExpertWeights<'_>) -> Result<Self, ExpertError> {
        Self::pack_for(Level::active(), weights)
    }

    /// Packs an expert for `level`.
    ///
    /// # Errors
    /// If the matrices contradict themselves or each other.
    pub fn pack_for(level: Level, weights: &ExpertWeights<'_>) -> Result<Self, ExpertError> {
        let (intermediate, hidden) = (weights.gate.rows, weights.gate.cols);
        let (rows, cols) = (weights.down.rows, weights.down.cols);
        if (rows, cols) != (hidden, intermediate) {
            return Err(ExpertError::Down { hidden, intermediate, rows, cols });
        }
        let matrix = |projection| move |source| ExpertError::Matrix { projection, source };
        let gate_up =
            PackedMatrix::pack_gated(level, &weights.gate, &weights.up).map_err(matrix("gate or up"))?;
        let down = PackedMatrix::pack_for(level, &weights.down).map_err(matrix("down"))?;
        let (mut gate_up_bias, mut down_bias) = (Vec::new(), Vec::new());
        if let Some(biases) = weights.biases {
            for (projection, bias, expected) in [
                ("gate", biases.gate, intermediate),
                ("up", biases.up, intermediate),
                ("down", biases.down, hidden),
            ] {
                if bias.len() != expected {
                    return Err(ExpertError::Bias { projection, expected, found: bias.len() });
                }
            }
            let (panel, half) = (level.panel(), level.panel() / 2);
            gate_up_bias = (0..gate_up.panels() * panel)
                .map(|i| {
                    let (column, feature) = (i % panel, i / panel * half + i % half);
                    let bias = if column < half { biases.gate } else { biases.up };
                    bias.get(feature).copied().unwrap_or(0.0)
                })
                .collect();
            down_bias = biases.down.to_vec();
            down_bias.resize(down.panels() * panel, 0.0);
        }
        Ok(CpuExpert { gate_up, down, gate_up_bias, down_bias })
    }

    /// Features of a row.
    #[must_use]
    pub fn hidden(&self) -> usize {
        self.gate_up.k()
    }

    /// Features between the projections.
    #[must_use]
    pub fn intermediate(&self) -> usize {
        self.down.k()
    }

    /// Bytes of memory that its weights take.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.gate_up.bytes()
            + self.down.bytes()
            + (self.gate_up_bias.len() + self.down_bias.len()) * size_of::<f32>()
    }

    fn level(&self) -> Level {
        self.gate_up.level()
    }
}
