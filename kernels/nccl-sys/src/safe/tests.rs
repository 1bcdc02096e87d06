use std::env;
use std::path::Path;

use super::*;
use crate::result::Version;
use crate::sys;

#[test]
fn the_error_of_a_missing_library_names_the_path_and_the_way_out() {
    let error = Library::open(Some(Path::new("/nowhere/libnccl.so.2"))).expect_err("there is no such file");
    let text = error.to_string();
    for part in ["/nowhere/libnccl.so.2 (as configured)", "EXPERTD_NCCL", "2.28.0 or newer"] {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

#[test]
fn a_library_that_is_not_nccl_is_refused() {
    let error = Library::open(Some(Path::new("libc.so.6"))).expect_err("libc is no NCCL");
    assert!(matches!(error, Error::Symbol { symbol: "ncclGetVersion", .. }), "{error}");
}

#[test]
fn an_id_of_zeros_is_refused() {
    assert!(UniqueId::from_bytes(&[0; sys::UNIQUE_ID_BYTES]).is_err());
    let mut bytes = [0; sys::UNIQUE_ID_BYTES];
    bytes[127] = 0xfe;
    let id = UniqueId::from_bytes(&bytes).expect("one byte is set");
    assert_eq!(id.to_bytes(), bytes);
}

/// Needs a real library, named by EXPERTD_NCCL.
#[test]
fn a_real_library_has_every_symbol() {
    if env::var_os(LIBRARY_VARIABLE).is_none() {
        eprintln!("skipped: EXPERTD_NCCL is not set");
        return;
    }
    let library = Library::open(None).expect("EXPERTD_NCCL names an NCCL library");
    assert!(library.version() >= Version::OLDEST);
}
