//! Tests of traces against a receiver that speaks OTLP over gRPC.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::service::load::{Rows, check};
use crate::service::{PATIENT, Service, eventually, golden};
use expertd_client::Client;
use expertd_client::session::{SessionClient, SessionOptions};
use expertd_proto::v1::ForwardRequest;
use opentelemetry::Context;
use opentelemetry::trace::{
    FutureExt as _, SpanContext, SpanId, TraceContextExt as _, TraceFlags, TraceId, TraceState,
};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::Span;
use rustix::process::Signal;
use tonic::{Code, Request, Response, Status};

const FAMILY: &str = "qwen3_next";
/// Far more time than spans need to arrive.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a collector received.
#[derive(Clone, Default)]
struct Received {
    spans: Arc<Mutex<Vec<Span>>>,
    resources: Arc<Mutex<Vec<BTreeMap<String, Value>>>>,
    /// Whether it never answers.
    silent: bool,
}

#[tonic::async_trait]
impl TraceService for Received {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        if self.silent {
            std::future::pending::<()>().await;
        }
        for of_resource in request.into_inner().resource_spans {
            let resource = of_resource.resource.unwrap_or_default();
            self.resources.lock().unwrap().push(attributes(&resource.attributes));
            for of_scope in of_resource.scope_spans {
                self.spans.lock().unwrap().extend(of_scope.spans);
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Received {
    /// Serves on a free port and returns the endpoint.
    async fn serve(&self) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
        let server = tonic::transport::Server::builder().add_service(TraceServiceServer::new(self.clone()));
        tokio::spawn(server.serve_with_incoming(incoming));
        endpoint
    }

    fn named(&self, name: &str) -> Vec<Span> {
        self.spans.lock().unwrap().iter().filter(|span| span.name == name).cloned().collect()
    }

    fn children(&self, of: &Span, name: &str) -> Vec<Span> {
        self.named(name).into_iter().filter(|span| span.parent_span_id == of.span_id).collect()
    }
}

fn attributes(given: &[KeyValue]) -> BTreeMap<String, Value> {
    let value = |pair: &KeyValue| pair.value.as_ref().and_then(|value| value.value.clone()).unwrap();
    given.iter().map(|pair| (pair.key.clone(), value(pair))).collect()
}

fn integer(span: &Span, name: &str) -> i64 {
    match attributes(&span.attributes).get(name) {
        Some(Value::IntValue(value)) => *value,
        other => panic!("{name} of {} is {other:?}", span.name),
    }
}

fn float(span: &Span, name: &str) -> f64 {
    match attributes(&span.attributes).get(name) {
        Some(Value::DoubleValue(value)) => *value,
        other => panic!("{name} of {} is {other:?}", span.name),
    }
}

/// A caller's span, sampled or not.
fn caller(trace: u128, flags: TraceFlags) -> Context {
    let span =
        SpanContext::new(TraceId::from(trace), SpanId::from(0xabc), flags, false, TraceState::default());
    Context::new().with_remote_span_context(span)
}

/// The value of a sample in Prometheus' text format; 0 if there is none.
fn sample(service: &Service, name: &str) -> u64 {
    use std::io::{Read as _, Write as _};
    let address = service.metrics.trim_start_matches("http://").trim_end_matches("/metrics");
    let mut socket = std::net::TcpStream::connect(address).unwrap();
    socket.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    socket.read_to_string(&mut text).unwrap();
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.map_or(0, |value| value.parse().unwrap())
}

/// A request with `tokens` rows to the first layer, and its right answer.
fn request(tokens: usize) -> (ForwardRequest, Vec<f32>) {
    let mut rows = Rows::new(&golden(FAMILY), 7, 64);
    rows.draw_of(0, tokens)
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_spans_of_the_callers_trace() {
    let received = Received::default();
    let endpoint = received.serve().await;
    // A step that is lost with its generation has another span.
    let limits = ["--max-tokens-per-step", "8", "--max-tokens-per-request", "64"];
    let more = [&["--otlp-endpoint", &endpoint], &limits[..], &PATIENT].concat();
    let environment = [("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")];
    let mut service = Service::start_with(FAMILY, 2, &more, &environment);
    let client = Client::connect(&service.address).await.unwrap();

    // Twenty rows are three steps of at most eight.
    let (call, wanted) = request(20);
    let sampled = caller(0x11, TraceFlags::SAMPLED);
    let answer = client.forward(call.clone(), None).with_context(sampled.clone()).await.unwrap();
    check(&answer, &wanted, &call);
    assert!(answer.receipt.unwrap().timings.is_empty(), "the caller did not ask for timings");
    let asked = client.forward(call.clone().returning_timings(), None).await.unwrap();
    assert_eq!(asked.receipt.unwrap().timings.len(), 3);
    let unsampled = caller(0x22, TraceFlags::default());
    client.forward(call.clone(), None).with_context(unsampled).await.unwrap();
    let wrong = ForwardRequest { layer: 999, ..call.clone() };
    let status =
        client.forward(wrong, None).with_context(caller(0x33, TraceFlags::SAMPLED)).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
    let (sender, mut answers) =
        client.stream(1).with_context(caller(0x44, TraceFlags::SAMPLED)).await.unwrap();
    sender.send(1, call.clone(), None).await.unwrap();
    answers.next().await.unwrap().unwrap().1.unwrap();

    // A drain sends what is left.
    service.signal(Signal::TERM);
    assert_eq!(service.wait(PATIENCE).expect("a drain ends").code(), Some(0));
    let of_trace = |name: &str, trace: u128| -> Vec<Span> {
        let spans = received.named(name).into_iter();
        spans.filter(|span| span.trace_id == trace.to_be_bytes()).collect()
    };
    let forwards = of_trace("expertd.v1.Moe/Forward", 0x11);
    let [span] = &forwards[..] else { panic!("{forwards:?}") };
    assert_eq!(span.parent_span_id, 0xabc_u64.to_be_bytes());
    assert_eq!(integer(span, "expertd.tokens"), 20);
    assert_eq!(integer(span, "expertd.layer"), i64::from(call.layer));
    assert_eq!(integer(span, "rpc.grpc.status_code"), 0);
    let Some(Value::ArrayValue(ranks)) = attributes(&span.attributes).remove("expertd.tokens_per_rank")
    else {
        panic!("{span:?}")
    };
    let rank_tokens = ranks.values.iter().map(|value| match value.value {
        Some(Value::IntValue(tokens)) => tokens,
        _ => panic!("{ranks:?}"),
    });
    assert_eq!((ranks.values.len(), rank_tokens.sum::<i64>()), (2, 20));

    let (queues, steps) = (received.children(span, "queue"), received.children(span, "step"));
    assert_eq!((queues.len(), steps.len()), (1, 3));
    for child in queues.iter().chain(&steps) {
        assert_eq!(child.trace_id, span.trace_id);
        let (start, end) = (child.start_time_unix_nano, child.end_time_unix_nano);
        assert!(span.start_time_unix_nano <= start && start <= end && end <= span.end_time_unix_nano);
    }
    assert_eq!(steps.iter().map(|step| integer(step, "expertd.step_tokens")).sum::<i64>(), 20);
    assert!(steps.iter().all(|step| float(step, "expertd.phase.experts_seconds") > 0.0));

    assert_eq!(received.named("expertd.v1.Moe/Forward").len(), 3, "the one without a trace begins one");
    assert!(of_trace("expertd.v1.Moe/Forward", 0x22).is_empty(), "the caller did not sample it");
    let [failed] = &of_trace("expertd.v1.Moe/Forward", 0x33)[..] else {
        panic!("the failed call has a span")
    };
    assert_eq!(integer(failed, "rpc.grpc.status_code"), Code::NotFound as i64);
    let [streamed] = &of_trace("expertd.v1.Moe/ForwardStream", 0x44)[..] else {
        panic!("the stream has a span")
    };
    assert_eq!(received.children(streamed, "step").len(), 3);
    for resource in received.resources.lock().unwrap().iter() {
        assert_eq!(resource["service.name"], Value::StringValue("expertd".to_owned()));
        assert_eq!(resource["deployment.environment.name"], Value::StringValue("test".to_owned()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_of_sessions_are_spans() {
    let received = Received::default();
    let endpoint = received.serve().await;
    let folder = tempfile::tempdir().unwrap();
    let address = format!("unix:{}", folder.path().join("session.sock").display());
    let limits = ["--max-tokens-per-step", "8", "--max-tokens-per-request", "64"];
    let more =
        [&["--otlp-endpoint", &endpoint, "--session-listen", &address], &limits[..], &PATIENT].concat();
    let mut service = Service::start_with(FAMILY, 2, &more, &[]);
    let (call, wanted) = request(20);
    let wrong = ForwardRequest { layer: 999, ..call.clone() };
    let calls = tokio::task::spawn_blocking(move || {
        let session = SessionClient::open(&address, &SessionOptions::default()).unwrap();
        check(&session.forward(&call, PATIENCE).unwrap(), &wanted, &call);
        session.forward(&wrong, PATIENCE).unwrap_err();
    });
    calls.await.unwrap();
    service.signal(Signal::TERM);
    assert_eq!(service.wait(PATIENCE).expect("a drain ends").code(), Some(0));

    let mut spans = received.named("expertd session call");
    spans.sort_by_key(|span| span.start_time_unix_nano);
    let [span, failed] = &spans[..] else { panic!("{spans:?}") };
    assert!(span.parent_span_id.is_empty(), "it begins a trace");
    assert_eq!((integer(span, "expertd.tokens"), integer(span, "rpc.grpc.status_code")), (20, 0));
    assert_eq!(integer(span, "expertd.session"), 1);
    let (queues, steps) = (received.children(span, "queue"), received.children(span, "step"));
    assert_eq!((queues.len(), steps.len()), (1, 3));
    for child in queues.iter().chain(&steps) {
        let (start, end) = (child.start_time_unix_nano, child.end_time_unix_nano);
        assert!(span.start_time_unix_nano <= start && start <= end && end <= span.end_time_unix_nano);
    }
    assert_eq!(integer(failed, "rpc.grpc.status_code"), Code::NotFound as i64);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_is_gone_or_silent_delays_no_request() {
    let silent = Received { silent: true, ..Received::default() };
    let silent = silent.serve().await;
    let nothing = {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        format!("http://{}", free.local_addr().unwrap())
    };
    for endpoint in [silent, nothing] {
        // The address comes from OpenTelemetry's own variable.
        let environment = [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
            ("OTEL_BSP_MAX_QUEUE_SIZE", "2"),
            ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "500"),
        ];
        let service = Service::start_with(FAMILY, 1, &[], &environment);
        let client = Client::connect(&service.address).await.unwrap();
        for _ in 0..20 {
            let (call, wanted) = request(3);
            check(&client.forward(call.clone(), None).await.unwrap(), &wanted, &call);
        }
        let dropped = "expertd_trace_spans_dropped_total{reason=\"export\"}";
        eventually(PATIENCE, "spans are dropped and counted", || sample(&service, dropped) > 0);
    }
}
