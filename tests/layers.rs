//! The layers of code: a module imports only from layers below it (docs/architecture.md).

use std::fs;
use std::path::{Path, PathBuf};

/// From the top to the bottom.
const LAYERS: [&str; 13] = [
    "commands",
    "api",
    "scheduler",
    "cluster",
    "engine",
    "ep",
    "experts",
    "gate",
    "model",
    "shm",
    "linalg",
    "memory",
    "telemetry",
];

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("a folder of the sources").flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

/// Modules that a line names as `crate::NAME` or inside `crate::{…}`.
fn imports(line: &str) -> Vec<&str> {
    let mut names = Vec::new();
    for after in line.split("crate::").skip(1) {
        let list = after.strip_prefix('{').map_or(after, |inner| inner.split('}').next().unwrap_or(""));
        let parts: Vec<&str> = if after.starts_with('{') { list.split(',').collect() } else { vec![list] };
        for part in parts {
            let name = part.trim().split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or("");
            names.push(name);
        }
    }
    names
}

#[test]
fn a_lower_layer_never_imports_a_higher_one() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("server");
    let mut wrong = Vec::new();
    let mut checked = 0;
    for (depth, layer) in LAYERS.iter().enumerate() {
        let mut files = Vec::new();
        sources(&root.join(layer), &mut files);
        assert!(!files.is_empty(), "layer {layer} has no sources");
        for file in files {
            let text = fs::read_to_string(&file).expect("a source file");
            for (number, line) in (1..).zip(text.lines()) {
                if line.trim_start().starts_with("//") {
                    continue;
                }
                for name in imports(line) {
                    checked += 1;
                    if LAYERS[..depth].contains(&name) {
                        wrong.push(format!("{}:{number}: {layer} imports {name}", file.display()));
                    }
                }
            }
        }
    }
    assert!(checked > 100, "only {checked} imports were found: does this test still read them?");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_module_is_a_layer() {
    let lib =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("server/lib.rs")).expect("lib.rs");
    for line in lib.lines().filter_map(|l| l.strip_prefix("pub mod ")) {
        let name = line.trim_end_matches(';');
        assert!(name == "types" || LAYERS.contains(&name), "module {name} has no place among the layers");
    }
}
