//! Network sessions through the C ABI.

use std::process::Command;

use super::{FAMILY, library, open, start};
use crate::sessions::{compile_c, libraries};

#[test]
#[ignore = "needs NIXL: EXPERTD_NIXL names its folder"]
fn the_example_prints_the_same_through_both_kinds_of_session() {
    let folder = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", folder.path().join("session.sock").display());
    let service = start(FAMILY, 2, &["--session-listen", &socket]);
    let layer = open(&service).model().moe_layers[0].layer.to_string();
    let program = folder.path().join("forward");
    compile_c("forward.c", &program, &[]);
    let run = |address: &str, nixl: &std::path::Path| {
        Command::new(&program)
            .args([address, &layer, "5"])
            .env("LD_LIBRARY_PATH", libraries())
            .env("EXPERTD_NIXL", nixl)
            .output()
            .unwrap()
    };
    let library = library();
    let [host, network] = [&socket, &service.address].map(|address| {
        let ended = run(address, &library);
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        String::from_utf8_lossy(&ended.stdout).into_owned()
    });
    assert!(host.starts_with("generation ") && host == network, "{host}, {network}");
    let refused = run(&service.address, folder.path());
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && text.contains("pip install"), "{text}");
}
