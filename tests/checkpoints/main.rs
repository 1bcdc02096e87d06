//! Tests of checkpoints of all families and formats: reading, refusing, synthesising, and the outputs of their blocks.

#![allow(clippy::unwrap_used, reason = "tests")]

mod broken_checkpoints;
mod common;
mod family_names;
mod fp8_beside_transformers;
mod golden_block;
mod layers;
mod layouts;
mod packed_layouts;
mod synth;
mod tool_declarations;
mod verify;
