//! Seeds: valid inputs of every target, made by the code that writes them in earnest.

use bytemuck::Zeroable as _;
use expertd_ipc::control::{FromRank, ToRank};
use expertd_ipc::{Completion, Segment};
use expertd_model::synth::{self, SynthConfig, SynthFormat};
use expertd_network::wire::Head;
use expertd_proto::v1::{DType, ForwardRequest, NetworkSessionRequest, OpenNetworkSession};
use expertd_session::cuda::wire::{ControlLayout, KIND_CUDA, OpenCuda, PreparedCall, Ring, RoutingLayout};
use expertd_session::wire::{
    CompletionRecord, FrameHeader, KIND_HOST, Open, RegionLayout, RequestRecord, VERSION, frame as kind,
};
use prost::Message as _;

/// A seed of a target.
#[derive(Clone, Debug)]
pub struct Seed {
    /// Name of the target.
    pub target: &'static str,
    /// The input.
    pub data: Vec<u8>,
}

/// All seeds.
///
/// # Panics
/// If a checkpoint cannot be written to a temporary directory.
#[must_use]
pub fn all() -> Vec<Seed> {
    let mut seeds = Vec::new();
    let mut add = |target, data| seeds.push(Seed { target, data });
    for (config, file) in checkpoints() {
        add("header", file.clone());
        add("checkpoint", [&config[..], &[0, 0], &file[..]].concat());
    }
    add("index", br#"{"metadata": {"total_size": 8}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#.to_vec());
    let mut control =
        serde_json::to_vec(&FromRank::Ready { weight_bytes: 1, device: "a".to_owned() }).expect("JSON");
    control.push(b'\n');
    control.extend(serde_json::to_vec(&ToRank::Start).expect("JSON"));
    control.push(b'\n');
    add("control", control);
    add("ring", ring());
    segments().into_iter().for_each(|table| add("segments", table));
    add("session", session());
    for requests in session_requests() {
        add("records", records(&requests));
    }
    add("doorbells", doorbells());
    add("cuda-session", cuda_session());
    for request in requests() {
        add("request", request.encode_to_vec());
        add("connection", connection(&request.encode_to_vec()));
    }
    add("network-messages", network_messages());
    add("network-control", network_control());
    add("network-handshake", network_handshake());
    for text in [
        "250m",
        "99999999H",
        "127.0.0.1:50051",
        "[::1]:0",
        "unix:/run/expertd.sock",
        "# clients\nalice 0123456789abcdef0\nbob fedcba98765432100\n",
    ] {
        add("texts", text.as_bytes().to_vec());
    }
    seeds
}

/// `config.json` and weights of a small checkpoint of each family, and of each format.
fn checkpoints() -> Vec<(Vec<u8>, Vec<u8>)> {
    let formats = [
        ("olmoe", SynthFormat::F32),
        ("mixtral", SynthFormat::F16),
        ("deepseek_v3", SynthFormat::Fp8),
        ("llama4_text", SynthFormat::Fp8),
        ("gpt_oss", SynthFormat::Mxfp4),
        ("qwen3_moe", SynthFormat::Mxfp8),
        ("mixtral", SynthFormat::Nvfp4),
        ("deepseek_v3", SynthFormat::Int4),
        ("qwen2_moe", SynthFormat::Int4Gptq),
        ("qwen3_moe", SynthFormat::Int4Awq),
    ];
    let families = synth::families().into_iter().map(|family| (family, SynthFormat::Bf16));
    families
        .chain(formats)
        .filter_map(|(family, format)| {
            let directory = tempfile::tempdir().expect("a temporary directory");
            // The files are smaller than the largest input of a fuzzer, 16 KiB, where the format has no larger blocks.
            let plain =
                [SynthFormat::Bf16, SynthFormat::F16, SynthFormat::F32, SynthFormat::Fp8, SynthFormat::Nvfp4];
            let side = if plain.contains(&format) { 16 } else { 32 };
            let config = SynthConfig {
                hidden: side,
                width: side,
                experts: 4,
                top_k: 2,
                layers: 1,
                format,
                ..SynthConfig::new(family)
            };
            // Some families have no bf16 weights.
            synth::write(&config, directory.path()).ok()?;
            let read = |name| std::fs::read(directory.path().join(name)).expect("the file was written");
            Some((read("config.json"), read("model.safetensors")))
        })
        .collect()
}

/// Two records in a ring of completions, and an empty ring of descriptors.
fn ring() -> Vec<u8> {
    let mut words = vec![2, 0];
    for stamp in 1..=2_u64 {
        words.extend(std::iter::repeat_n(stamp, size_of::<Completion>() / 8));
        words.push(stamp);
    }
    words.iter().flat_map(|word: &u64| word.to_le_bytes()).collect()
}

/// A request with its rows, its completion with output and routing, and a request whose rows were written one-sidedly.
fn network_messages() -> Vec<u8> {
    let request = RequestRecord {
        call: 7,
        rows: 64,
        output: 128,
        ids: 256,
        weights: 320,
        tokens: 3,
        k: 2,
        dtype: DType::DtypeBf16 as u32,
        flags: RequestRecord::RETURN_ROUTING,
        ..RequestRecord::zeroed()
    };
    let completion = CompletionRecord { call: 7, ..CompletionRecord::zeroed() };
    let message = |end: u8, kind: u32, record: &[u8], bytes: usize| {
        let head = Head { kind, inline_bytes: bytes as u32 };
        let message = [bytemuck::bytes_of(&head), record, &vec![1; bytes]].concat();
        [&(message.len() as u16).to_le_bytes()[..], &[end], &message].concat()
    };
    // Three rows of four elements in bf16; ids and weights of two experts each.
    let plain = RequestRecord { flags: RequestRecord::GIVEN_ROUTING, ..request };
    [
        message(0, 1, bytemuck::bytes_of(&request), 24),
        message(1, 2, bytemuck::bytes_of(&completion), 24 + 48),
        message(0, 1, bytemuck::bytes_of(&plain), 24 + 48),
        message(0, 1, bytemuck::bytes_of(&RequestRecord { call: 8, ..request }), 0),
    ]
    .concat()
}

/// What an agent tells the router: how it can be reached, and why it has ended.
fn network_control() -> Vec<u8> {
    let frame = |kind: u32, payload: &[u8]| {
        [bytemuck::bytes_of(&FrameHeader { kind, bytes: payload.len() as u32 }), payload].concat()
    };
    let head: Vec<u8> = [1_u64 << 40, 3, 64 | 7 << 32].iter().flat_map(|word| word.to_le_bytes()).collect();
    [frame(2, &[&head[..], b"metadata"].concat()), frame(3, b"the client has ended the session")].concat()
}

/// A client that asks for a session.
fn network_handshake() -> Vec<u8> {
    let open = OpenNetworkSession {
        version: expertd_network::wire::VERSION,
        metadata: vec![1; 300].into(),
        rows_address: 1 << 40,
        rows_bytes: 1 << 20,
        calls: 64,
    };
    NetworkSessionRequest { open: Some(open) }.encode_to_vec()
}

/// Tables with two segments of f32 and bf16 rows of four elements, the second one in memory 7: a valid one, and one for each way
/// in which the second segment is refused.
fn segments() -> Vec<Vec<u8>> {
    let staged = Segment { rows: 2, dtype: DType::DtypeF32 as u32, ..Segment::zeroed() };
    let second = Segment {
        byte_offset: 64,
        output_offset: 128,
        first_row: 2,
        rows: 3,
        dtype: DType::DtypeBf16 as u32,
        flags: 1,
        memory: 7,
        ..staged
    };
    let refused = [
        Segment { dtype: 99, ..second },
        Segment { rows: 4, ..second },
        Segment { memory: 8, ..second },
        Segment { byte_offset: 4096, ..second },
        Segment { memory: Segment::STAGING, byte_offset: 4096, ..second },
        Segment { byte_offset: 65, ..second },
        Segment { output_offset: 66, ..second },
    ];
    let table = |second: Segment| [&[5, 3, 0xff, 0][..], bytemuck::bytes_of(&[staged, second])].concat();
    [second].into_iter().chain(refused).map(table).collect()
}

/// A client that asks for the model and opens a session.
fn session() -> Vec<u8> {
    let frame = |kind: u32, payload: &[u8]| {
        [bytemuck::bytes_of(&FrameHeader { kind, bytes: payload.len() as u32 }), payload].concat()
    };
    let open = Open { version: VERSION, kind: KIND_HOST, rows_bytes: 4096, calls: 4, reserved: 0 };
    let get_model = frame(kind::GET_MODEL, &[]);
    [get_model.clone(), frame(kind::OPEN, bytemuck::bytes_of(&open)), get_model].concat()
}

/// Requests of sessions: with the gate's routing, with given routing and with token ids; and pairs of which the first stays in
/// flight and the second is refused.
fn session_requests() -> Vec<Vec<RequestRecord>> {
    let plain = RequestRecord {
        call: 1,
        output: 1024,
        layer: 1,
        tokens: 2,
        dtype: DType::DtypeF32 as u32,
        ..RequestRecord::zeroed()
    };
    let (ids, weights, flags) = (2048, 2112, RequestRecord::GIVEN_ROUTING | RequestRecord::RETURN_ROUTING);
    let given = RequestRecord { call: 2, rows: 3072, output: 3136, ids, weights, flags, ..plain };
    let (token_ids, flags) = (2176, RequestRecord::TOKEN_IDS | RequestRecord::EXPECT_WEIGHT_VERSION);
    let by_token = RequestRecord {
        call: 3,
        rows: 4096,
        output: 4160,
        token_ids,
        flags,
        weight_version: 7,
        layer: 2,
        ..plain
    };
    let stays = RequestRecord { tokens: 1, ..plain };
    let refused = [
        RequestRecord { call: 2, rows: 1024, output: 2048, ..stays },
        RequestRecord { call: 2, rows: 2048, output: 0, ..stays },
        RequestRecord { rows: 2048, output: 3072, ..stays },
        RequestRecord { call: 2, rows: 2048, output: 2048, ..stays },
        RequestRecord { call: 2, rows: 2049, output: 3072, ..stays },
        RequestRecord { call: 2, rows: 8192, output: 3072, ..stays },
        RequestRecord { call: 2, rows: 2048, output: 3072, layer: 9, ..stays },
        RequestRecord { call: 2, rows: 2048, output: 3072, dtype: 99, ..stays },
    ];
    let mut all = vec![vec![plain, given, by_token]];
    all.extend(refused.map(|second| vec![stays, second]));
    all
}

/// The memory of a session with calls in its ring of requests.
fn records(requests: &[RequestRecord]) -> Vec<u8> {
    let calls = 4;
    let layout = RegionLayout::new(calls, 8192).expect("a small layout");
    let mut memory = vec![0; layout.rows + 8192];
    let mut put = |at: usize, bytes: &[u8]| memory[at..at + bytes.len()].copy_from_slice(bytes);
    let start = layout.requests.offset();
    put(start, &(requests.len() as u64).to_le_bytes());
    for (number, record) in requests.iter().enumerate() {
        let cell = start + 128 + number * (size_of::<RequestRecord>() + 8);
        put(cell, bytemuck::bytes_of(record));
        put(cell + size_of::<RequestRecord>(), &(number as u64 + 1).to_le_bytes());
    }
    put(layout.rows + 2048, bytemuck::cast_slice(&[0_i32, 5, 2, 1]));
    put(layout.rows + 2112, bytemuck::cast_slice(&[1.0_f32, 0.5, 0.25, 0.0]));
    put(layout.rows + 2176, bytemuck::cast_slice(&[3_i32, 9]));
    memory
}

/// Calls with the gate's routing, with the client's own, and with token ids.
fn prepared() -> [PreparedCall; 3] {
    let plain = PreparedCall {
        layer: 1,
        dtype: DType::DtypeF32 as u32,
        max_rows: 4,
        output: 1024,
        ..PreparedCall::zeroed()
    };
    let routed = RequestRecord::GIVEN_ROUTING | RequestRecord::RETURN_ROUTING;
    let tokens = RequestRecord::TOKEN_IDS | RequestRecord::EXPECT_WEIGHT_VERSION;
    [
        plain,
        PreparedCall { flags: routed, k: 2, rows: 2048, ..plain },
        PreparedCall { layer: 2, flags: tokens, weight_version: 7, ..plain },
    ]
}

/// Two doorbells with routing areas of 512 bytes, prepared calls, and what a client writes to the control region in each round.
fn doorbells() -> Vec<u8> {
    let (doorbells, routing_bytes) = (2, 512);
    let layout = ControlLayout::new(doorbells, routing_bytes).expect("a small layout");
    let calls = prepared();
    let mut data = vec![doorbells as u8 - 1, (routing_bytes / 4) as u8, calls.len() as u8];
    data.extend_from_slice(bytemuck::cast_slice(&calls));
    for (first, second) in [((0, 2), (1, 2)), ((2, 3), (1, 4)), ((0, 1), (2, 4))] {
        let mut region = vec![0; layout.bytes];
        let mut put = |at: usize, bytes: &[u8]| region[at..at + bytes.len()].copy_from_slice(bytes);
        for (doorbell, (prepared, rows)) in [first, second].into_iter().enumerate() {
            let ring = Ring { prepared, rows };
            put(layout.doorbells + doorbell * 64, &ring.to_word().to_le_bytes());
            let area = layout.routing + doorbell * layout.routing_bytes;
            let PreparedCall { flags, k, .. } = calls[prepared as usize];
            let carried = RoutingLayout::new(flags, rows, k);
            if carried.routing_bytes > 0 {
                put(area, bytemuck::cast_slice(&[0_i32, 5, 2, 1, -1, -1, 3, 4][..rows as usize * 2]));
                put(area + carried.weights, bytemuck::cast_slice(&[0.5_f32; 8][..rows as usize * 2]));
            }
            if carried.token_bytes > 0 {
                put(area + carried.token_ids, bytemuck::cast_slice(&[3_i32, 9, 1, 0][..rows as usize]));
            }
        }
        data.extend(region);
    }
    data
}

/// An OPEN record, then the frames that prepare calls and ask for the model.
fn cuda_session() -> Vec<u8> {
    let open = OpenCuda {
        version: VERSION,
        kind: KIND_CUDA,
        memory_bytes: 64 << 10,
        doorbells: 2,
        routing_bytes: 512,
        device: [1; 16],
    };
    let frame = |kind: u32, payload: &[u8]| {
        [bytemuck::bytes_of(&FrameHeader { kind, bytes: payload.len() as u32 }), payload].concat()
    };
    let prepare = frame(kind::PREPARE, bytemuck::cast_slice(&prepared()));
    [bytemuck::bytes_of(&open).to_vec(), prepare.clone(), frame(kind::GET_MODEL, &[]), prepare].concat()
}

/// Requests of the model of `expertd_core::fuzzing`.
fn requests() -> Vec<ForwardRequest> {
    let rows = |tokens: usize| bytes::Bytes::from(vec![1; tokens * 16]);
    let request =
        |layer, tokens: usize| ForwardRequest::inline(layer, tokens as u32, DType::DtypeF32, rows(tokens));
    let words =
        |values: &[i32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>().into();
    let weights =
        [1.0_f32, 0.5, 0.25, 0.0].iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>().into();
    vec![
        request(1, 2),
        request(1, 1500),
        request(1, 2).with_routing(words(&[0, 5, -1, -1]), weights, 2).returning_routing(),
        request(2, 2).with_token_ids(words(&[3, 9])).with_model("fuzz").expecting_weight_version(7),
    ]
}

/// A message with its prefix.
fn framed(message: &[u8]) -> Vec<u8> {
    let length = message.len() as u32;
    [&[0][..], &length.to_be_bytes(), message].concat()
}

/// A connection with one call of `Forward`: preface, SETTINGS, HEADERS, DATA.
fn connection(message: &[u8]) -> Vec<u8> {
    let frame = |kind: u8, flags: u8, stream: u32, payload: &[u8]| {
        let length = (payload.len() as u32).to_be_bytes();
        [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
    };
    let literal = |name: &str, value: &str| {
        [&[0, name.len() as u8][..], name.as_bytes(), &[value.len() as u8], value.as_bytes()].concat()
    };
    // HPACK: indexed `:method: POST` and `:scheme: http`, then literals.
    let headers = [
        &[0x83, 0x86][..],
        &literal(":path", "/expertd.v1.Moe/Forward"),
        &literal(":authority", "localhost"),
        &literal("content-type", "application/grpc"),
        &literal("te", "trailers"),
        &literal("grpc-timeout", "1S"),
    ]
    .concat();
    let body = framed(message);
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend(frame(4, 0, 0, &[]));
    bytes.extend(frame(1, 4, 1, &headers));
    let pieces = body.chunks(16 << 10).count();
    for (at, piece) in body.chunks(16 << 10).enumerate() {
        bytes.extend(frame(0, u8::from(at + 1 == pieces), 1, piece));
    }
    bytes
}
