//! Tests of checkpoints that cannot be served: exit code 64 and a message that names the defect, before any port is
//! bound.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::Stdio;

use crate::service::{fixture, serve_command, serve_to_the_end};

const FAMILY: &str = "qwen3_moe";

/// A copy of the fixture that a test may modify.
fn copy() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(fixture(FAMILY)).unwrap().flatten() {
        std::fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    folder
}

/// Serves a broken checkpoint on a port that is in use. If the port were bound before the checkpoint is checked, the
/// exit code would be the one for an unavailable address.
fn refused(model: &Path, words: &[&str]) {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let all =
        ["--ranks", "2", "--listen", &address, "--admin-listen", &address, "--metrics-listen", &address];
    let (code, message) = serve_to_the_end(model, &all);
    assert_eq!(code, Some(64), "{message}");
    for word in words {
        assert!(message.contains(word), "expected {word:?} in: {message}");
    }
}

fn edit_config(folder: &Path, edit: impl FnOnce(&mut serde_json::Value)) {
    let path = folder.join("config.json");
    let mut config = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    edit(&mut config);
    std::fs::write(&path, config.to_string()).unwrap();
}

#[test]
fn no_folder_and_no_config() {
    refused(Path::new("/no/such/checkpoint"), &["/no/such/checkpoint"]);
    let folder = copy();
    std::fs::remove_file(folder.path().join("config.json")).unwrap();
    refused(folder.path(), &["config.json"]);
    let folder = copy();
    std::fs::write(folder.path().join("config.json"), "{ not json").unwrap();
    refused(folder.path(), &["config.json"]);
}

#[test]
fn no_weights_and_truncated_weights() {
    let folder = copy();
    std::fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    refused(folder.path(), &["safetensors"]);
    for keep in [0, 4, 100, 20_000] {
        let folder = copy();
        let path = folder.path().join("model.safetensors");
        let whole = std::fs::read(&path).unwrap();
        assert!(keep < whole.len());
        std::fs::write(&path, &whole[..keep]).unwrap();
        refused(folder.path(), &["model.safetensors"]);
    }
}

#[test]
fn corrupt_headers() {
    for length in [u64::MAX, 1 << 40, 7] {
        let folder = copy();
        let path = folder.path().join("model.safetensors");
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        std::fs::write(&path, bytes).unwrap();
        refused(folder.path(), &["model.safetensors"]);
    }
}

#[test]
fn shapes_that_contradict_the_config() {
    let folder = copy();
    edit_config(folder.path(), |config| {
        let width = config["moe_intermediate_size"].as_u64().unwrap();
        config["moe_intermediate_size"] = (width + 8).into();
    });
    refused(folder.path(), &["experts", "[48, 32]", "expected [56, 32]"]);
    let folder = copy();
    edit_config(folder.path(), |config| {
        let experts = config["num_local_experts"].as_u64().unwrap();
        config["num_local_experts"] = (experts + 1).into();
    });
    refused(folder.path(), &["layers."]);
}

#[test]
fn families_that_are_not_supported() {
    let folder = copy();
    edit_config(folder.path(), |config| config["model_type"] = "no_such_family".into());
    refused(folder.path(), &["no_such_family"]);
}

#[test]
fn bad_settings() {
    let long_name = "x".repeat(100_000);
    for (flags, word) in [
        (&["--ranks", "0"][..], "ranks"),
        (&["--ranks", "9"], "ranks"),
        (&["--gpus", "0,GPU-1"], "gpus: `GPU-1` in `0,GPU-1` is not the number of a GPU"),
        (&["--gpus", "0"], "gpus: is given, but device is cpu"),
        (&["--gpus", "0", "--ranks", "2", "--device", "cuda"], "gpus: has 1 entries"),
        (&["--gpus", "0,0", "--device", "cuda"], "gpus: names GPU 0 more than once"),
        (&["--max-tokens-per-step", "0"], "max"),
        (&["--cores", "4095"], "contains core 4095"),
        (&["--admin-listen", "127.0.0.1:0"], "--admin-token-file"),
        (&["--listen", "0.0.0.0:0"], "--insecure"),
        (&["--metrics-listen", "0.0.0.0:0"], "--token-file"),
        (&["--tls-cert", "/no/such/cert.pem"], "--tls-key"),
        (&["--tls-cert", "/no/such/cert.pem", "--tls-key", "/no/such/key.pem"], "/no/such/cert.pem"),
        (&["--token-file", "/no/such/tokens"], "/no/such/tokens"),
        (&["--listen", "127.0.0.1:0,here"], "\"here\" is not an address"),
        (&["--config", "/no/such/file.toml"], "/no/such/file.toml"),
        (&["--max-bytes-in-flight", "18446744073709551615"], "max-bytes-in-flight: is 18446744073709551615"),
        (&["--model-name", &long_name], "model-name: has 100000 bytes"),
    ] {
        let (code, message) = serve_to_the_end(&fixture(FAMILY), flags);
        assert!(matches!(code, Some(2 | 64)), "{flags:?}: {code:?} {message}");
        assert!(message.contains(word), "{message}");
    }
}

/// A value longer than a format width can be is printed like any other.
#[test]
fn long_values_are_printed() {
    let name = "x".repeat(100_000);
    let mut command =
        serve_command(&fixture(FAMILY), &["--print-config", "--model-name", "m", "--otlp-endpoint", &name]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{:?}", output.status);
    assert!(String::from_utf8(output.stdout).unwrap().contains(&name));
}

/// Without what a setting's source is, lines of `--print-config`.
fn printed_config(words: &[&str]) -> Vec<String> {
    let output = serve_command(&fixture(FAMILY), words).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| line.split("  #").next().unwrap().trim_end().to_owned()).collect()
}

#[test]
fn the_printed_config_is_a_file_that_gives_the_same_settings() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("expertd.toml");
    let given =
        ["--ranks", "2", "--model-name", "a \"name\" # here", "--on-fault", "fail", "--max-sessions", "3"];
    // The command of tests gives some addresses; the file gives the rest.
    let addresses =
        ["--listen", "127.0.0.1:1", "--admin-listen", "unix:/a", "--metrics-listen", "127.0.0.1:2"];
    let lines = printed_config(&[&["--print-config"], &given[..], &addresses[..]].concat());
    for part in [
        "ranks                      = 2",
        "max_sessions               = 3",
        "on_fault                   = \"fail\"",
    ] {
        assert!(lines.iter().any(|line| line == part), "{part:?} is not in {lines:#?}");
    }
    assert!(lines.iter().any(|line| line == "# placement is not set"), "{lines:#?}");
    // The model and the addresses come by flags again.
    std::fs::write(&file, lines.join("\n")).unwrap();
    let again =
        printed_config(&[&["--print-config", "--config", file.to_str().unwrap()], &addresses[..]].concat());
    assert_eq!(lines, again);
}

#[test]
fn a_folder_needs_no_flag() {
    let program = env!("CARGO_BIN_EXE_expertd");
    let folder = fixture(FAMILY);
    for command in ["inspect", "size"] {
        let run = |words: &[&str]| {
            let output = std::process::Command::new(program).arg(command).args(words).output().unwrap();
            assert!(output.status.success(), "{command} {words:?}: {output:?}");
            let text = String::from_utf8(output.stdout).unwrap();
            // The memory that is available changes.
            text.lines().filter(|line| !line.contains("available")).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(
            run(&[folder.to_str().unwrap()]),
            run(&["--model", folder.to_str().unwrap()]),
            "{command}"
        );
    }
    let mut serve = std::process::Command::new(program);
    serve.args(["serve", folder.to_str().unwrap(), "--print-config", "--admin-listen", "unix:/a"]);
    let output = serve.output().unwrap();
    assert!(
        output.status.success() && String::from_utf8_lossy(&output.stdout).contains(folder.to_str().unwrap())
    );
}

/// What is refused is said instead of a plan that would not be carried out.
#[test]
fn no_plan_is_printed_for_credentials_that_cannot_be_used() {
    for flags in [
        &["--tls-cert", "/no/such/cert.pem"][..],
        &["--listen", "0.0.0.0:0"],
        &["--token-file", "/no/such/tokens"],
    ] {
        let output = serve_command(&fixture(FAMILY), flags).output().unwrap();
        assert_eq!(output.status.code(), Some(64), "{flags:?}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "", "{flags:?}");
    }
}

#[test]
fn a_misspelt_variable_is_told_and_a_bad_value_is_blamed_on_its_variable() {
    let with = |name: &str, value: &str| {
        let mut command =
            serve_command(&fixture(FAMILY), &["--log", "warn", "--tls-cert", "/no/such/cert.pem"]);
        let output = command.env(name, value).stderr(std::process::Stdio::piped()).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (_, told) = with("EXPERTD_RANK", "2");
    assert!(
        told.contains("EXPERTD_RANK is no setting") && told.contains("did you mean EXPERTD_RANKS?"),
        "{told}"
    );
    let (code, told) = with("EXPERTD_RANKS", "abc");
    assert!(code == Some(2) && told.contains("the environment variable EXPERTD_RANKS"), "{told}");
}

/// A newcomer sees what was given, what was chosen, and last how to call the service. The rest is in --print-config.
#[test]
fn the_summary_names_what_was_given_and_ends_with_a_command_that_works() {
    let mut child = serve_command(&fixture(FAMILY), &["--ranks", "2", "--slots", "3"]).spawn().unwrap();
    let mut lines = Vec::new();
    let mut output = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    while !lines.last().is_some_and(|line: &String| line.starts_with(" watch it")) {
        lines.push(output.next().unwrap_or_else(|| panic!("the output ended: {lines:#?}")));
    }
    let given = lines.iter().filter(|line| line.ends_with("# flag")).count();
    let at = |start: &str| lines.iter().position(|line| line.starts_with(start)).unwrap();
    assert_eq!(at("# "), given, "given settings come first, and no others: {lines:#?}");
    assert!(lines[given].contains("--print-config"), "{lines:#?}");
    assert!(lines.iter().any(|line| line.starts_with("slots ")), "{lines:#?}");
    assert!(lines.len() < given + 20, "{lines:#?}");
    let wide = lines[given..at("ready: ")].iter().find(|line| line.chars().count() > 100);
    assert_eq!(wide, None, "the plan fits a terminal of 100 columns");
    let (plan, ready, call) = (at("    model  "), at("ready: "), at("  call it  expertd "));
    assert!(given < plan && plan < ready && ready < call, "{lines:#?}");
    assert!(lines[call + 1].contains("http://127.0.0.1:"), "{lines:#?}");
    let words = lines[call].trim_start_matches("  call it  expertd ").split(' ');
    let called = std::process::Command::new(env!("CARGO_BIN_EXE_expertd")).args(words).output().unwrap();
    assert!(called.status.success(), "{called:?}");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn weights_that_exceed_their_limit_are_refused_at_the_start() {
    let (code, message) = serve_to_the_end(&fixture(FAMILY), &["--max-weight-bytes", "1000"]);
    assert_eq!(code, Some(64), "{message}");
    assert!(message.contains("max-weight-bytes: is 1000, but the packed weights take"), "{message}");
}

#[test]
fn an_address_that_is_taken_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for flags in [["--listen", &address], ["--metrics-listen", &address]] {
        let output = serve_command(&fixture(FAMILY), &flags).stderr(Stdio::piped()).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(69), "{message}");
        assert!(message.contains(&address), "{message}");
        assert!(!message.contains("generation"), "no rank starts before every address is bound: {message}");
        assert!(output.stdout.is_empty(), "the plan of a service that cannot start is not shown: {output:?}");
    }
}

/// Its answers are larger than what clients of gRPC take by default.
#[test]
fn the_demo_takes_many_tokens() {
    let mut demo = std::process::Command::new(env!("CARGO_BIN_EXE_expertd"));
    demo.args([
        "demo",
        "--tokens",
        "4200",
        "--layers",
        "1",
        "--experts",
        "2",
        "--top-k",
        "1",
        "--width",
        "32",
    ]);
    let output = demo.output().unwrap();
    assert!(output.status.success(), "{output:?}");
}
