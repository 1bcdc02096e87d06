//! Identifiers and element types.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            /// The value as an index.
            #[must_use]
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(
    /// Number of a process of the EP group, which is bound to one device; `0..ranks`.
    Rank(u32)
);
id!(
    /// Index of a decoder layer, as in the checkpoint's tensor names.
    LayerId(u32)
);
id!(
    /// Global index of an expert within its layer.
    ExpertId(u32)
);
id!(
    /// Number of a set of step buffers, including its routing handle.
    Slot(u32)
);
id!(
    /// Number of a memory that clients share with the ranks, from 1 on; never reused within a service. 0 means staging.
    MemoryId(u32)
);
id!(
    /// Number of a life of the EP group, which ends with any fault. Fits 24 bits.
    Generation(u64)
);
id!(
    /// Number of an exchange within a generation, which flags carry. Fits 40 bits and starts at 1.
    Sequence(u64)
);
id!(
    /// Number of a step, unique over the life of the service.
    StepId(u64)
);
id!(
    /// Number of a loaded set of weights; counts from 1 within one process. Services are compared by
    /// [`WeightFingerprint`](crate::WeightFingerprint).
    WeightVersion(u64)
);

/// Element type of token rows on the wire and in staging, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[repr(u32)]
pub enum DType {
    /// bfloat16
    Bf16 = 1,
    /// IEEE half precision
    F16 = 2,
    /// IEEE single precision
    F32 = 3,
}

impl DType {
    /// All element types.
    pub const ALL: [DType; 3] = [DType::Bf16, DType::F16, DType::F32];

    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            DType::Bf16 | DType::F16 => 2,
            DType::F32 => 4,
        }
    }

    /// The inverse of `self as u32`.
    #[must_use]
    pub const fn from_code(code: u32) -> Option<DType> {
        match code {
            1 => Some(DType::Bf16),
            2 => Some(DType::F16),
            3 => Some(DType::F32),
            _ => None,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::F32 => "f32",
        })
    }
}
