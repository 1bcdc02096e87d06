//! Element types of arrays, with their names in Python's buffer protocol, DLPack and the proto.

use std::ffi::CStr;

use expertd_proto::v1::DType;
use pyo3::buffer::ElementType;

/// Type of an array's elements, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
    /// IEEE double precision.
    F64,
    /// Signed integer of 32 bits.
    I32,
    /// Signed integer of 64 bits.
    I64,
    /// Uninterpreted 16 bits: bf16 in libraries that have no such type.
    Bits16,
}

impl Element {
    /// Bytes of an element.
    pub(crate) const fn size(self) -> usize {
        match self {
            Element::Bf16 | Element::F16 | Element::Bits16 => 2,
            Element::F32 | Element::I32 => 4,
            Element::F64 | Element::I64 => 8,
        }
    }

    /// Name of the type in this package.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Element::Bf16 => "bf16",
            Element::F16 => "f16",
            Element::F32 => "f32",
            Element::F64 => "f64",
            Element::I32 => "i32",
            Element::I64 => "i64",
            Element::Bits16 => "u16",
        }
    }

    /// The format in the `struct` module; `None` if it has none.
    pub(crate) const fn format(self) -> Option<&'static CStr> {
        match self {
            Element::Bf16 => None,
            Element::F16 => Some(c"e"),
            Element::F32 => Some(c"f"),
            Element::F64 => Some(c"d"),
            Element::I32 => Some(c"i"),
            Element::I64 => Some(c"q"),
            Element::Bits16 => Some(c"H"),
        }
    }

    /// The type of a format of the `struct` module; `None` if this package does not support the type or its byte order.
    pub(crate) fn from_format(format: &CStr) -> Option<Element> {
        if matches!(format.to_bytes(), [b'>' | b'!', _]) {
            return None;
        }
        match ElementType::from_format(format) {
            ElementType::Float { bytes: 2 } => Some(Element::F16),
            ElementType::Float { bytes: 4 } => Some(Element::F32),
            ElementType::Float { bytes: 8 } => Some(Element::F64),
            ElementType::SignedInteger { bytes: 4 } => Some(Element::I32),
            ElementType::SignedInteger { bytes: 8 } => Some(Element::I64),
            ElementType::SignedInteger { bytes: 2 } | ElementType::UnsignedInteger { bytes: 2 } => {
                Some(Element::Bits16)
            }
            _ => None,
        }
    }

    /// DLPack's type code and bits.
    pub(crate) const fn dlpack(self) -> (u8, u8) {
        match self {
            Element::I32 => (0, 32),
            Element::I64 => (0, 64),
            Element::Bits16 => (1, 16),
            Element::F16 => (2, 16),
            Element::F32 => (2, 32),
            Element::F64 => (2, 64),
            Element::Bf16 => (4, 16),
        }
    }

    /// The type with DLPack's type code and bits.
    pub(crate) const fn from_dlpack(code: u8, bits: u8) -> Option<Element> {
        match (code, bits) {
            (0 | 1, 16) => Some(Element::Bits16),
            (0, 32) => Some(Element::I32),
            (0, 64) => Some(Element::I64),
            (2, 16) => Some(Element::F16),
            (2, 32) => Some(Element::F32),
            (2, 64) => Some(Element::F64),
            (4, 16) => Some(Element::Bf16),
            _ => None,
        }
    }

    /// The proto's type of token rows; `None` if rows cannot have this type.
    pub(crate) const fn row_type(self) -> Option<DType> {
        match self {
            Element::Bf16 => Some(DType::DtypeBf16),
            Element::F16 => Some(DType::DtypeF16),
            Element::F32 => Some(DType::DtypeF32),
            _ => None,
        }
    }

    /// The element type of rows whose `DType` in the proto is `dtype`.
    pub(crate) const fn from_row_type(dtype: DType) -> Option<Element> {
        match dtype {
            DType::DtypeBf16 => Some(Element::Bf16),
            DType::DtypeF16 => Some(Element::F16),
            DType::DtypeF32 => Some(Element::F32),
            DType::DtypeUnspecified => None,
        }
    }
}
