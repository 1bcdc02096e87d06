//! The header of a safetensors file, checked before its contents are used.
//!
//! The `safetensors` crate decides whether a header is valid: it bounds the header's length before reading it and
//! checks that tensors are disjoint, cover the data exactly and have the size that shape and type imply. This module
//! turns a refusal into a message that names the tensor.

use safetensors::tensor::{Metadata, SafeTensorError};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// A valid header.
#[derive(Debug)]
pub(super) struct Header {
    /// Offset of the tensor data in the file, in bytes.
    pub(super) data_start: usize,
    metadata: Metadata,
}

/// The header's entry for one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// Byte range in the file.
    pub(super) range: std::ops::Range<usize>,
}

impl Header {
    /// Parses the header of a whole (mapped) file. Only the header's pages are read.
    pub(super) fn parse(file: &[u8]) -> Result<Self, String> {
        match SafeTensors::read_metadata(file) {
            Ok((length, metadata)) => Ok(Self { data_start: length + 8, metadata }),
            Err(error) => Err(explain(file, &error)),
        }
    }

    /// The entry of a tensor.
    pub(super) fn entry(&self, name: &str) -> Option<Entry> {
        let info = self.metadata.info(name)?;
        let (start, end) = info.data_offsets;
        Some(Entry {
            dtype: info.dtype,
            shape: info.shape.clone(),
            range: start + self.data_start..end + self.data_start,
        })
    }

    /// Names of all tensors.
    pub(super) fn names(&self) -> Vec<String> {
        self.metadata.offset_keys()
    }
}

/// Describes the defect of a file that the `safetensors` crate refuses.
fn explain(file: &[u8], error: &SafeTensorError) -> String {
    let Some(length) = file.first_chunk::<8>().map(|bytes| u64::from_le_bytes(*bytes)) else {
        return format!(
            "expected at least 8 bytes for the header's length, but the file has {} bytes",
            file.len()
        );
    };
    match error {
        SafeTensorError::HeaderTooLarge => {
            format!("its header's length is given as {length} bytes, which is more than a header may have")
        }
        SafeTensorError::InvalidHeaderLength => format!(
            "its header's length is given as {length} bytes, but only {} bytes follow: the file is truncated or not safetensors",
            file.len() - 8
        ),
        SafeTensorError::InvalidHeader(error) => format!("its header is not UTF-8 text: {error}"),
        SafeTensorError::InvalidHeaderDeserialization(error) => format!("its header does not parse: {error}"),
        SafeTensorError::ValidationOverflow => "the size of a tensor in bytes overflows".into(),
        other => {
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            let header = file.get(8..length.saturating_add(8)).unwrap_or_default();
            first_problem(header, file.len().saturating_sub(length.saturating_add(8)))
                .unwrap_or_else(|| other.to_string())
        }
    }
}

/// Finds the first tensor, in order of offsets, that is invalid.
fn first_problem(header: &[u8], data_length: usize) -> Option<String> {
    let Ok(Value::Object(map)) = serde_json::from_slice(header) else { return None };
    let mut tensors: Vec<(u64, u64, String, Option<u64>)> = Vec::new();
    for (name, info) in map.iter().filter(|(name, _)| *name != "__metadata__") {
        let offsets = info.get("data_offsets")?.as_array()?;
        let (start, end) = (offsets.first()?.as_u64()?, offsets.get(1)?.as_u64()?);
        tensors.push((start, end, name.clone(), size_from_shape(info)));
    }
    tensors.sort();
    let mut previous: (u64, &str) = (0, "the header");
    for (start, end, name, size) in &tensors {
        if end < start {
            return Some(format!(
                "tensor `{name}`: its end offset comes before its start offset: [{start}, {end}]"
            ));
        }
        if *start < previous.0 {
            return Some(format!(
                "tensor `{name}` starts at byte {start} and overlaps `{}`, which ends at {}",
                previous.1, previous.0
            ));
        }
        if *start > previous.0 {
            return Some(format!(
                "tensor `{name}` starts at byte {start}, but should start at {}, right after {}: there is a gap",
                previous.0, previous.1
            ));
        }
        if let Some(size) = size
            && *size != end - start
        {
            return Some(format!(
                "tensor `{name}`: its shape and type need {size} bytes, but its offsets [{start}, {end}] hold {}",
                end - start
            ));
        }
        if *end > data_length as u64 {
            return Some(format!(
                "tensor `{name}` ends at byte {end} of the data, but the file holds only {data_length}: it may be truncated"
            ));
        }
        previous = (*end, name);
    }
    (previous.0 < data_length as u64)
        .then(|| format!("{} bytes follow the last tensor, expected none", data_length as u64 - previous.0))
}

fn size_from_shape(info: &Value) -> Option<u64> {
    let dtype: Dtype = serde_json::from_value(info.get("dtype")?.clone()).ok()?;
    let mut bits = dtype.bitsize() as u64;
    for dimension in info.get("shape")?.as_array()? {
        bits = bits.checked_mul(dimension.as_u64()?)?;
    }
    Some(bits / 8)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    const GOOD: &str = concat!(
        r#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"#,
        r#""b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}}"#
    );

    #[test]
    fn a_good_header_gives_ranges_in_the_file() {
        let bytes = file(GOOD, 32);
        let header = Header::parse(&bytes).unwrap();
        let b = header.entry("b").unwrap();
        assert_eq!((b.dtype, b.shape), (Dtype::BF16, vec![4]));
        assert_eq!(b.range, bytes.len() - 8..bytes.len());
        assert!(header.entry("c").is_none());
    }

    #[track_caller]
    fn refused(bytes: &[u8], expected: &str) {
        let error = Header::parse(bytes).unwrap_err();
        assert!(error.contains(expected), "expected {expected:?} in {error:?}");
    }

    #[test]
    fn each_defect_is_named() {
        refused(&[1, 2, 3], "at least 8 bytes");
        refused(&file(GOOD, 30), "tensor `b` ends at byte 32 of the data, but the file holds only 30");
        refused(&file(GOOD, 33), "1 bytes follow the last tensor");
        refused(&file(GOOD, 32)[..40], "truncated or not safetensors");
        refused(&u64::MAX.to_le_bytes(), "more than a header may have");
        refused(&file("{\"a\"", 0), "does not parse");
        refused(&file(&GOOD.replace("[24,32]", "[20,28]"), 28), "`b` starts at byte 20 and overlaps `a`");
        refused(&file(&GOOD.replace("[24,32]", "[28,36]"), 36), "there is a gap");
        refused(&file(&GOOD.replace("[2,3]", "[2,4]"), 32), "tensor `a`: its shape and type need 32 bytes");
        refused(&file(&GOOD.replace("BF16", "BF15"), 32), "does not parse");
        refused(&file(&GOOD.replace("[2,3]", "[4294967296,4294967296,16]"), 32), "overflows");
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Header::parse(&bytes);
        }

        #[test]
        fn random_lengths_and_mutations_never_panic(
            at in 0usize..200, value in any::<u8>(), cut in 0usize..200, length in any::<u64>(), set in any::<bool>(),
        ) {
            let mut bytes = file(GOOD, 32);
            let n = bytes.len();
            bytes[at % n] = value;
            if set {
                bytes[..8].copy_from_slice(&length.to_le_bytes());
            }
            bytes.truncate(n - cut % n);
            if let Ok(header) = Header::parse(&bytes) {
                for name in header.names() {
                    let entry = header.entry(&name).unwrap();
                    prop_assert!(entry.range.end <= bytes.len());
                }
            }
        }
    }
}
