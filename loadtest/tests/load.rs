//! Tests of the load generator against a fake service: every injected fault is found, and a correct service passes.

#![allow(clippy::unwrap_used, missing_docs, unreachable_pub)]

mod fake;
mod scale;

use clap::Parser as _;
use expertd_loadtest::args::Args;
use expertd_loadtest::report::Report;
use expertd_loadtest::table;
use expertd_types::{DType, rows};
use fake::{Fake, Fault, HIDDEN};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

const UNARY: &[&str] = &["--connections", "2", "--outstanding", "3"];
const STREAM: &[&str] = &["--mode", "stream", "--connections", "2", "--streams", "2", "--outstanding", "4"];

/// Runs 600 requests with all answers checked, unless `more` overrides this.
async fn load(address: &str, more: &[&str]) -> Report {
    let mut line = vec!["loadtest", "--address", address, "--quiet", "--no-echo", "--warm-up", "0"];
    let defaults = [("--requests", "600"), ("--check", "1"), ("--tokens", "uniform:2-9")];
    for (flag, value) in defaults {
        if !more.contains(&flag) {
            line.extend([flag, value]);
        }
    }
    line.extend(more);
    let args = Args::try_parse_from(line).unwrap();
    let report = expertd_loadtest::run(&args).await.unwrap();
    println!("{}", table::table(&report));
    report
}

#[tokio::test(flavor = "multi_thread")]
async fn a_correct_service_passes_in_every_mode() {
    let address = fake::serve(Fault::None).await;
    for mode in [UNARY, STREAM] {
        for more in [
            &["--dtype", "bf16"][..],
            &["--dtype", "f16", "--routing", "zipf:1.2"],
            &["--dtype", "f32", "--layers", "3", "--tokens", "list:1,64"],
            &["--rate", "3000"],
        ] {
            let report = load(&address, &[mode, more].concat()).await;
            assert!(report.ok, "{mode:?} {more:?}: {:?}", report.notes);
            assert_eq!((report.requests, report.wrong, report.lost), (600, 0, 0));
            // The checkers' queue may be full; no other cause leaves samples unchecked.
            assert_eq!(report.checks.again + report.checks.unchecked, 600);
            assert!(report.checks.again >= 250, "{:?}", report.checks);
            assert!(report.tokens >= 600 && report.latency.count == 600);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn decode_reports_whole_model_steps_and_every_layer() {
    let mode = [&["--mode", "decode"][..], UNARY].concat();
    let address = fake::serve(Fault::None).await;
    let report = load(&address, &mode).await;
    let decode = report.decode.as_ref().unwrap();
    // Six batches of two layers each: the last walk of each may have no end.
    assert!((294..=300).contains(&decode.model_step.count), "{decode:?}");
    assert_eq!((decode.failed, decode.in_calls.count), (0, decode.model_step.count));
    assert!(decode.in_calls.mean_seconds <= decode.model_step.mean_seconds);
    assert_eq!(decode.layers.keys().collect::<Vec<_>>(), [&1, &3]);
    assert_eq!(decode.layers.values().map(|calls| calls.count).sum::<u64>(), report.requests);
    // A batch has the same rows in both layers.
    let walked = 2.0 * decode.sequence_tokens_per_second * report.elapsed_seconds;
    let without_end = report.tokens as f64 - walked;
    assert!((-0.5..=6.0 * 9.0 + 0.5).contains(&without_end), "{walked} of {} rows", report.tokens);
    assert!(load(&address, UNARY).await.decode.is_none());

    // Answers that are asked for again would take part of the failures.
    let address = fake::serve(Fault::Unavailable(50)).await;
    let report = load(&address, &[&mode[..], &["--check", "0"]].concat()).await;
    let decode = report.decode.as_ref().unwrap();
    assert_eq!(report.statuses["Unavailable"].count, 12);
    assert!((6..=12).contains(&decode.failed), "{decode:?}");
    // A model step that fails in its first layer leaves a request for another.
    assert!((294..=306).contains(&(decode.model_step.count + decode.failed)), "{decode:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn unix_sockets_echo_and_json_work() {
    let folder = tempfile::tempdir().unwrap();
    let address = fake::serve_unix(&folder.path().join("service.sock")).await;
    let line = ["loadtest", "--address", &address, "--quiet", "--warm-up", "0.1", "--duration", "0.5"];
    let args = Args::try_parse_from(line).unwrap();
    let report = expertd_loadtest::run(&args).await.unwrap();
    assert!(report.ok, "{:?}", report.notes);
    let one = report.echo.one_outstanding.as_ref().unwrap();
    assert!(one.echo.count > 10 && one.service.count > 10 && one.echo.p50_seconds > 0.0);
    assert!(report.echo.same_load.unwrap().requests_per_second > 0.0);
    let json: serde_json::Value = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
    assert_eq!(json["settings"]["model"], "fake");
    assert_eq!(json["wrong"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_answers_are_found() {
    for mode in [UNARY, STREAM] {
        for fault in [Fault::WrongRow(50), Fault::Shuffled(50), Fault::Short(50), Fault::OtherRouting(50)] {
            let address = fake::serve(fault).await;
            let report = load(&address, mode).await;
            assert!(report.wrong > 0 && !report.ok, "{mode:?} {fault:?}");
            assert!(!report.notes.is_empty());
            assert_eq!(report.lost, 0, "{mode:?} {fault:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unanswered_requests_are_lost_and_counted_once() {
    // Longer than the machine pauses, so that an answer is never late.
    let run = async |mode: &[&str]| {
        let address = fake::serve(Fault::Silent(100)).await;
        let report = load(&address, &[mode, &["--give-up", "15", "--check", "0"]].concat()).await;
        assert_eq!((report.lost, report.requests), (6, 594), "{mode:?}");
        assert!(!report.ok);
    };
    tokio::join!(run(UNARY), run(STREAM));
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_in_flight_at_a_regular_end_of_stream_are_lost() {
    let address = fake::serve(Fault::EndOfStream(20)).await;
    let report = load(&address, &[STREAM, &["--check", "0", "--requests", "100"]].concat()).await;
    assert!(report.lost > 0 && !report.ok);
    assert_eq!(report.requests + report.lost, 100, "each request is either answered or lost");
}

#[tokio::test(flavor = "multi_thread")]
async fn statuses_are_counted_by_code_and_retried_on_demand() {
    for mode in [UNARY, STREAM] {
        let address = fake::serve(Fault::Unavailable(10)).await;
        let report = load(&address, &[mode, &["--check", "0"]].concat()).await;
        assert_eq!(report.statuses["Unavailable"].count, 60, "{mode:?}");
        assert_eq!((report.requests, report.retries), (540, 0));
        assert!(report.ok, "load may explain UNAVAILABLE");

        let address = fake::serve(Fault::Unavailable(10)).await;
        let report = load(&address, &[mode, &["--check", "0", "--retry", "8"]].concat()).await;
        assert_eq!(report.requests, 600, "{mode:?}");
        assert_eq!(report.retries, report.statuses["Unavailable"].count);

        let address = fake::serve(Fault::Internal(10)).await;
        let report = load(&address, &[mode, &["--check", "0"]].concat()).await;
        assert_eq!(report.statuses["Internal"].count, 60, "{mode:?}");
        assert!(!report.ok, "load never explains INTERNAL");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn open_loop_latency_includes_waiting_for_a_slow_service() {
    // With 20 ms per answer and 400 arrivals per second, about 8 requests are always in flight, and none waits for
    // another.
    let address = fake::serve(Fault::Slow(std::time::Duration::from_millis(20))).await;
    for mode in [UNARY, STREAM] {
        let more = [mode, &["--rate", "400", "--requests", "200", "--check", "0"]].concat();
        let report = load(&address, &more).await;
        assert_eq!((report.requests, report.not_sent), (200, 0), "{mode:?}");
        assert!(report.latency.min_seconds >= 0.02, "{mode:?}: {:?}", report.latency);
        // With at most two outstanding requests most arrivals are not sent, and the report counts them.
        let report = load(&address, &[&more[..], &["--max-outstanding", "2"]].concat()).await;
        assert!(report.not_sent > 0, "{mode:?}");
        assert_eq!(report.requests + report.not_sent, 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn recorded_answers_are_compared() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("golden.safetensors");
    let input = (0..13 * HIDDEN).map(|index| (index as f32 * 0.7).sin()).collect::<Vec<_>>();
    let right = input.chunks(HIDDEN).flat_map(|row| {
        let (ids, weights) = Fake::gate(row);
        Fake::output(3, row, &ids, &weights)
    });
    let mut output = right.collect::<Vec<_>>();
    let write = |output: &[f32]| {
        let (input, output) = (rows::encode(&input, DType::F32), rows::encode(output, DType::F32));
        let view = |bytes| TensorView::new(Dtype::F32, vec![13, HIDDEN], bytes).unwrap();
        let tensors = [("layers.3.input", view(&input)), ("layers.3.output", view(&output))];
        std::fs::write(&path, safetensors::serialize(tensors, None).unwrap()).unwrap();
    };
    let address = fake::serve(Fault::None).await;
    let golden = path.to_str().unwrap();
    write(&output);
    let report = load(&address, &["--check-golden", golden]).await;
    assert!(report.ok && report.checks.known > 200 && report.checks.again > 200, "{:?}", report.checks);
    // One recorded row has an answer that the service does not reproduce.
    output[5 * HIDDEN] += 0.5;
    write(&output);
    let report = load(&address, &["--check-golden", golden]).await;
    assert!(!report.ok && report.wrong > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn unfit_arguments_are_named() {
    let address = fake::serve(Fault::None).await;
    let run = async |more: &[&str]| {
        let line = [&["loadtest", "--address", &address, "--quiet"], more].concat();
        let error = expertd_loadtest::run(&Args::try_parse_from(line).unwrap()).await.unwrap_err();
        error.to_string()
    };
    let message = run(&["--layers", "2"]).await;
    assert!(message.contains("layer 2") && message.contains("1, 3"), "{message}");
    let message = run(&["--check-golden", "/no/such/file"]).await;
    assert!(message.contains("/no/such/file"), "{message}");
}

/// Runs the binary and returns its exit status and standard output.
async fn binary(more: &[&str]) -> (Option<i32>, String) {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_expertd-loadtest"));
    command.args(["--quiet", "--no-echo", "--warm-up", "0", "--requests", "200", "--check", "1"]).args(more);
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_exit_status_reports_the_result() {
    let sound = fake::serve(Fault::None).await;
    let (code, table) = binary(&["--address", &sound]).await;
    assert_eq!(code, Some(0), "{table}");
    assert!(table.contains("requests/s") && table.ends_with("ok\n"), "{table}");

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.json");
    let wrong = fake::serve(Fault::WrongRow(20)).await;
    let (code, table) = binary(&["--address", &wrong, "--json", file.to_str().unwrap()]).await;
    assert_eq!(code, Some(1), "{table}");
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert!(report["wrong"].as_u64().unwrap() > 0);
    assert_eq!(report["ok"], false);

    assert_eq!(binary(&["--address", "127.0.0.1:1"]).await.0, Some(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn growth_of_a_watched_process_fails_the_run() {
    let address = fake::serve(Fault::None).await;
    let pid = std::process::id().to_string();
    let hog = tokio::spawn(async {
        let mut kept = Vec::new();
        loop {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            kept.push(vec![1_u8; 8 << 20]);
        }
    });
    let timed = ["--requests", "1000000", "--duration", "3", "--check", "0", "--watch-memory", &pid];
    let report = load(&address, &[&timed[..], &["--max-memory-growth", "0.02"]].concat()).await;
    let own = report.memory.first().unwrap();
    assert!(own.pid.to_string() == pid && own.growth() > 0.02 && !report.ok, "{own:?}");
    let timed = ["--requests", "10", "--check", "0", "--watch-memory", &pid];
    let report = load(&address, &[&timed[..], &["--max-memory-bytes", "1000000"]].concat()).await;
    hog.abort();
    assert!(!report.ok && report.notes.iter().any(|note| note.contains("more than 1000000")), "{report:?}");
}
