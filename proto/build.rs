//! Compiles the protos with protox, in pure Rust, so that the build needs no protoc.

use std::error::Error;
use std::path::PathBuf;

use prost::Message as _;

const PROTOS: [&str; 2] = ["expertd/v1/moe.proto", "expertd/v1/admin.proto"];

/// Messages that commands print as JSON.
const SHOWN: [&str; 9] = [
    "GetStatusResponse",
    "GpuUsage",
    "Imbalance",
    "RankStatus",
    "ReloadStatus",
    "SessionStatus",
    "StepTiming",
    "TierRows",
    "TierStatus",
];

fn main() -> Result<(), Box<dyn Error>> {
    for proto in PROTOS {
        println!("cargo:rerun-if-changed={proto}");
    }
    let descriptors = protox::compile(PROTOS, ["."])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("expertd_descriptor.bin"), descriptors.encode_to_vec())?;
    let mut builder = tonic_prost_build::configure().bytes(".expertd");
    for message in SHOWN {
        builder = builder.type_attribute(
            format!(".expertd.v1.{message}"),
            "#[cfg_attr(feature = \"serde\", derive(serde::Serialize))]",
        );
    }
    builder.compile_fds(descriptors)?;
    Ok(())
}
