//! libFuzzer's entry point for the targets of one group; see `expertd_fuzz::TARGETS`.
#![no_main]

use std::sync::LazyLock;

use expertd_fuzz::{Target, selected};

static SELECTED: LazyLock<&Target> = LazyLock::new(selected);

libfuzzer_sys::fuzz_target!(|data: &[u8]| (SELECTED.run)(data));
