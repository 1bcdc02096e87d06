//! `expertd.h` and the library agree on every struct and constant, and the header compiles as C and as C++.
#![allow(clippy::unwrap_used, missing_docs)]

use std::fmt::Write as _;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;

use expertd_c::{ExpertdCall, ExpertdNetwork, ExpertdPreparedCall, ExpertdReceipt};
use expertd_session::wire::RequestRecord;

fn size_of_field<S, F>(_: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

/// Assertions that the C struct has the size, and each field the place and size, of the Rust struct.
macro_rules! assert_layout {
    ($out:ident, $rust:ty as $c:literal: $($field:ident)*) => {
        writeln!($out, "SAME(sizeof({}), {});", $c, size_of::<$rust>()).unwrap();
        let ends = [$({
            let (at, bytes) = (offset_of!($rust, $field), size_of_field(|of: &$rust| &of.$field));
            let field = stringify!($field);
            writeln!($out, "SAME(offsetof({0}, {field}), {at}); SAME(sizeof((({0} *)0)->{field}), {bytes});", $c).unwrap();
            at + bytes
        }),*];
        assert_eq!(ends.last(), Some(&size_of::<$rust>()), "every field of {} is listed", $c);
    };
}

const CONSTANTS: [(&str, i32); 13] = [
    ("EXPERTD_EINVALID", -1),
    ("EXPERTD_EOPEN", -2),
    ("EXPERTD_EBUSY", -3),
    ("EXPERTD_ETIMEOUT", -4),
    ("EXPERTD_EENDED", -5),
    ("EXPERTD_BF16", 1),
    ("EXPERTD_F16", 2),
    ("EXPERTD_F32", 3),
    ("EXPERTD_GIVEN_ROUTING", RequestRecord::GIVEN_ROUTING as i32),
    ("EXPERTD_RETURN_ROUTING", RequestRecord::RETURN_ROUTING as i32),
    ("EXPERTD_TOKEN_IDS", RequestRecord::TOKEN_IDS as i32),
    ("EXPERTD_EXCLUDE_SHARED", RequestRecord::EXCLUDE_SHARED as i32),
    ("EXPERTD_EXPECT_WEIGHT_VERSION", RequestRecord::EXPECT_WEIGHT_VERSION as i32),
];

fn program() -> String {
    let mut out = String::from(
        "#include \"expertd.h\"\n#ifdef __cplusplus\n#define SAME(a, b) static_assert((a) == (b), #a)\n#else\n\
         #define SAME(a, b) _Static_assert((a) == (b), #a)\n#endif\n",
    );
    assert_layout!(out, ExpertdCall as "expertd_call":
        rows output ids weights token_ids weight_version timeout_us layer tokens dtype k flags reserved);
    assert_layout!(out, ExpertdReceipt as "expertd_receipt":
        generation weight_version first_step last_step steps ranks queue_ns step_ns phase_ns tokens_per_rank retry_after_ns);
    assert_layout!(out, ExpertdPreparedCall as "expertd_prepared_call":
        layer dtype max_rows flags rows output ids weights token_ids timeout_us weight_version k reserved);
    assert_layout!(out, ExpertdNetwork as "expertd_network":
        library ca cert key server_name token_file insecure reserved);
    for (name, value) in CONSTANTS {
        writeln!(out, "SAME({name}, {value});").unwrap();
    }
    out
}

#[test]
fn the_header_is_the_librarys() {
    let folder = tempfile::tempdir().unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    for (compiler, file, language) in [("cc", "header.c", "-std=c11"), ("c++", "header.cpp", "-std=c++17")] {
        let source = folder.path().join(file);
        std::fs::write(&source, program()).unwrap();
        let arguments = [language, "-Wall", "-Wextra", "-Wno-sign-compare", "-Werror", "-fsyntax-only", "-I"];
        match Command::new(compiler).args(arguments).arg(&include).arg(&source).output() {
            // A build of expertd needs no compiler of C++.
            Err(error) if compiler == "c++" && error.kind() == std::io::ErrorKind::NotFound => {
                println!("no C++ compiler: the header is not tried as C++");
            }
            compiled => {
                let compiled = compiled.unwrap();
                assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
            }
        }
    }
}
