//! Experts on the CPU: packed weights and the grouped MLP.

mod grouped;
mod segments;
#[cfg(test)]
mod tests;
mod workspace;

pub use grouped::{forward, forward_one};
pub use workspace::{Workspace, WorkspaceSize};

use crate::linalg::{PackError, PackedMatrix, SimdLevel};
use expertd_model::ExpertWeights;

/// An error that prevents an expert from being packed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum ExpertError {
    #[error("the {projection} projection: {source}")]
    Matrix { projection: &'static str, source: PackError },
    /// The shape of the down projection does not match the gate projection.
    #[error("the down projection should be [{hidden}, {intermediate}], but is [{rows}, {cols}]")]
    Down { hidden: usize, intermediate: usize, rows: usize, cols: usize },
    #[error("the bias of the {projection} projection should have {expected} elements, but has {found}")]
    Bias { projection: &'static str, expected: usize, found: usize },
}

/// The parts of a [`CpuExpert`].
#[derive(Debug)]
pub struct ExpertParts {
    /// The gate and up projections, packed as one matrix.
    pub gate_up: PackedMatrix,
    /// The down projection.
    pub down: PackedMatrix,
    /// Packed biases of gate and up; empty if there are none.
    pub gate_up_bias: Vec<f32>,
    /// Packed biases of down; empty if there are none.
    pub down_bias: Vec<f32>,
}

/// One expert, packed for the CPU.
#[derive(Debug)]
pub struct CpuExpert {
    gate_up: PackedMatrix,
    down: PackedMatrix,
    /// `[panels, P]`, laid out like the packed pair; empty if the expert has no biases.
    gate_up_bias: Vec<f32>,
    /// `[panels * P]`; empty if the expert has no biases.
    down_bias: Vec<f32>,
}

impl CpuExpert {
    /// Packs an expert for the active level. The weights keep their format.
    ///
    /// # Errors
    /// If a matrix is inconsistent or the shapes do not match.
    pub fn pack(weights: &ExpertWeights<'_>) -> Result<Self, ExpertError> {
        Self::pack_for(SimdLevel::active(), weights)
    }

    /// Packs an expert for `level`.
    ///
    /// # Errors
    /// If a matrix is inconsistent or the shapes do not match.
    pub fn pack_for(level: SimdLevel, weights: &ExpertWeights<'_>) -> Result<Self, ExpertError> {
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
            let (panel, half) = (level.panel_width(), level.panel_width() / 2);
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

    /// An expert of matrices that are packed already, for example [in shared memory](PackedMatrix::in_memory).
    ///
    /// # Errors
    /// If the parts do not belong together.
    pub fn from_parts(parts: ExpertParts) -> Result<Self, ExpertError> {
        let ExpertParts { gate_up, down, gate_up_bias, down_bias } = parts;
        let (hidden, intermediate) = (gate_up.k(), gate_up.n() / 2);
        let (rows, cols) = (down.n(), down.k());
        if (rows, cols) != (hidden, intermediate) || !gate_up.is_gated() || down.is_gated() {
            return Err(ExpertError::Down { hidden, intermediate, rows, cols });
        }
        let panel = gate_up.level().panel_width();
        for (projection, bias, matrix) in [("gate", &gate_up_bias, &gate_up), ("down", &down_bias, &down)] {
            let (expected, found) = (matrix.panels() * panel, bias.len());
            if found != 0 && found != expected {
                return Err(ExpertError::Bias { projection, expected, found });
            }
        }
        Ok(CpuExpert { gate_up, down, gate_up_bias, down_bias })
    }

    /// Memory for a copy of this expert or of one that is [alike](Self::is_like), which is resident.
    #[must_use]
    pub fn blank(&self) -> CpuExpert {
        CpuExpert {
            gate_up: self.gate_up.blank(),
            down: self.down.blank(),
            gate_up_bias: vec![0.0; self.gate_up_bias.len()],
            down_bias: vec![0.0; self.down_bias.len()],
        }
    }

    /// Whether the experts differ in nothing but their numbers, so that one may be copied to the memory of the other.
    #[must_use]
    pub fn is_like(&self, other: &CpuExpert) -> bool {
        let form = |expert: &CpuExpert| {
            (expert.matrices().map(PackedMatrix::form), expert.biases().map(<[f32]>::len))
        };
        form(self) == form(other)
    }

    /// Overwrites a [blank](Self::blank) expert or an earlier copy with another expert.
    ///
    /// # Panics
    /// If it is not [alike](Self::is_like), or this expert lies in shared memory.
    pub fn copy_from(&mut self, other: &CpuExpert) {
        self.gate_up.copy_from(&other.gate_up);
        self.down.copy_from(&other.down);
        self.gate_up_bias.copy_from_slice(&other.gate_up_bias);
        self.down_bias.copy_from_slice(&other.down_bias);
    }

    /// Overwrites the weights with bytes of 0xff and the biases with NaN, for tests.
    ///
    /// # Panics
    /// If this expert lies in shared memory.
    pub fn poison(&mut self) {
        self.gate_up.poison();
        self.down.poison();
        self.gate_up_bias.fill(f32::NAN);
        self.down_bias.fill(f32::NAN);
    }

    /// The packed gate and up projections, and the packed down projection.
    pub const fn matrices(&self) -> [&PackedMatrix; 2] {
        [&self.gate_up, &self.down]
    }

    /// Packed biases of gate and up, and of down; empty if the expert has none.
    pub fn biases(&self) -> [&[f32]; 2] {
        [&self.gate_up_bias, &self.down_bias]
    }

    /// Length of an input and output row.
    pub fn hidden(&self) -> usize {
        self.gate_up.k()
    }

    /// Number of features between the projections.
    pub fn intermediate(&self) -> usize {
        self.down.k()
    }

    /// Size of the packed weights, in bytes.
    pub fn bytes(&self) -> usize {
        self.gate_up.bytes()
            + self.down.bytes()
            + (self.gate_up_bias.len() + self.down_bias.len()) * size_of::<f32>()
    }

    fn level(&self) -> SimdLevel {
        self.gate_up.level()
    }
}
