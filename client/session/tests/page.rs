//! `docs/sessions.md` and the code have the same bytes, and a change of them needs another version.
#![allow(clippy::unwrap_used, missing_docs)]

use std::mem::offset_of;
use std::sync::LazyLock;

use expertd_session::cuda::control::ControlMemory;
use expertd_session::cuda::wire as cuda;
use expertd_session::wire::{
    ALIGN, CompletionRecord, FrameHeader, KIND_HOST, MAX_CALLS, Open, Opened, RegionLayout, RequestRecord,
    VERSION, frame,
};

/// The page, with each paragraph in one line.
static PAGE: LazyLock<String> = LazyLock::new(|| {
    let mut page = String::new();
    for line in include_str!("../../../docs/sessions.md").lines() {
        let begins = line.is_empty() || ["|", "* ", "#", "```"].iter().any(|mark| line.starts_with(mark));
        page.push(if begins || page.ends_with("\n\n") { '\n' } else { ' ' });
        page.push_str(line.trim_start());
        if line.is_empty() {
            page.push('\n');
        }
    }
    page
});

/// A field: its name, offset and size in bytes.
type Field = (&'static str, usize, usize);

/// A record's name, size in bytes, and fields in order.
struct Record {
    name: &'static str,
    bytes: usize,
    fields: Vec<Field>,
}

fn size_of_field<S, F>(_: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

macro_rules! record {
    ($record:ty: $($field:ident)*) => {
        Record {
            name: stringify!($record),
            bytes: size_of::<$record>(),
            fields: vec![$((
                stringify!($field),
                offset_of!($record, $field),
                size_of_field(|record: &$record| &record.$field),
            )),*],
        }
    };
}

/// Records that the page describes in a table of offsets, behind these words.
fn tables() -> Vec<(&'static str, Record)> {
    vec![
        (
            "OPENED has 88 bytes",
            record!(Opened: version kind session region_bytes requests_offset completions_offset service_bell_offset
                client_bell_offset rows_offset rows_bytes calls spin_us hidden reserved),
        ),
        (
            "A request has 88 bytes",
            record!(RequestRecord: call rows output ids weights token_ids weight_version timeout_us layer tokens dtype k flags
                reserved),
        ),
        (
            "A completion has 408 bytes",
            record!(CompletionRecord: call code message_len retry_after_ns generation weight_version first_step last_step steps
                ranks queue_ns step_ns phase_ns tokens_per_rank message),
        ),
        (
            "OPENED has 64 bytes",
            record!(cuda::OpenedCuda: version kind session region_bytes doorbells_offset routing_offset statuses_offset
                doorbells hidden routing_bytes reserved),
        ),
        (
            "A prepared call has 56 bytes",
            record!(cuda::PreparedCall: layer dtype max_rows flags rows output timeout_us weight_version k reserved),
        ),
    ]
}

/// Records that the page describes in a sentence: the fields begin behind these words.
fn sentences() -> Vec<(&'static str, Record)> {
    vec![
        ("Every frame is a header, ", record!(FrameHeader: kind bytes)),
        ("| 1 OPEN | client | ", record!(Open: version kind rows_bytes calls reserved)),
        (
            "| 1 OPEN | client | 40 bytes: ",
            record!(cuda::OpenCuda: version kind memory_bytes doorbells routing_bytes device),
        ),
        ("| 9 PREPARED | service | ", record!(cuda::PrepareReply: first count)),
        (
            "The status of a doorbell has 848 bytes: ",
            record!(cuda::StatusRecord: stamp calls failures moves moved_to),
        ),
    ]
}

/// Checks that `text` names the record's fields from field `next` on, which begin at `offset`, with their sizes; returns the number
/// of the next field and its offset. Fields look like `name` u64, `name` (u32), `name` u64 × 7, `name` 16 bytes, or zero u32.
fn check_fields(record: &Record, text: &str, mut next: usize, mut offset: usize) -> (usize, usize) {
    let mut rest = text;
    while next < record.fields.len() {
        let (name, at, bytes) = record.fields[next];
        let word = match name {
            "reserved" => "zero ".to_owned(),
            _ => format!("`{name}` "),
        };
        let Some(found) = rest.find(&word) else { break };
        rest = &rest[found + word.len()..];
        let described = describe(rest);
        assert_eq!((at, bytes), (offset, described), "{}.{name}: code, page", record.name);
        (next, offset) = (next + 1, offset + bytes);
    }
    (next, offset)
}

/// The bytes of a type at the beginning of `text`.
fn describe(text: &str) -> usize {
    let mut words = text.split([' ', ',', ';', ':', '|', ')']).map(|word| word.trim_start_matches('('));
    let first = words.next().unwrap();
    let one = match first {
        "u32" => 4,
        "u64" => 8,
        number if words.next() == Some("bytes") => return number.parse().unwrap(),
        // `zero` and names may stand in prose.
        other => panic!("`{other}` is no type"),
    };
    match (words.next(), words.next()) {
        (Some("×"), Some(times)) => one * times.parse::<usize>().unwrap(),
        _ => one,
    }
}

fn behind(words: &str) -> &'static str {
    let at = PAGE.find(words).unwrap_or_else(|| panic!("the page lacks `{words}`"));
    &PAGE[at + words.len()..]
}

#[test]
fn the_page_has_every_field_at_its_offset() {
    for (words, record) in tables() {
        assert!(words.ends_with(&format!("{} bytes", record.bytes)), "{words}: {} bytes", record.bytes);
        let (mut next, mut offset) = (0, 0);
        let rows = behind(words).lines().skip_while(|line| !line.starts_with("| 0 |"));
        for row in rows.take_while(|line| line.starts_with('|')) {
            let cells: Vec<&str> = row.trim_matches('|').split('|').collect();
            assert_eq!(cells[0].trim().parse(), Ok(offset), "{}: {row}", record.name);
            let before = next;
            (next, offset) = check_fields(&record, cells[1], next, offset);
            assert!(next > before, "{}: no field in {row}", record.name);
        }
        assert_eq!((next, offset), (record.fields.len(), record.bytes), "{}: fields, bytes", record.name);
    }
}

#[test]
fn the_page_has_every_field_of_short_records() {
    for (words, record) in sentences() {
        let line = behind(words).lines().next().unwrap();
        let (fields, bytes) = check_fields(&record, line, 0, 0);
        assert_eq!(fields, record.fields.len(), "{}: {line}", record.name);
        // A status ends with two completions.
        let rest = if record.name.ends_with("StatusRecord") { 2 * size_of::<CompletionRecord>() } else { 0 };
        assert_eq!(bytes + rest, record.bytes, "{}", record.name);
    }
}

const FRAMES: [(&str, u32); 9] = [
    ("1 OPEN", frame::OPEN),
    ("2 OPENED", frame::OPENED),
    ("3 REFUSED", frame::REFUSED),
    ("4 GET_MODEL", frame::GET_MODEL),
    ("5 MODEL", frame::MODEL),
    ("6 ENDED", frame::ENDED),
    ("7 OPENED", frame::OPENED_CUDA),
    ("8 PREPARE", frame::PREPARE),
    ("9 PREPARED", frame::PREPARED),
];

const FLAGS: [(&str, u32); 5] = [
    ("1 ids and weights are given", RequestRecord::GIVEN_ROUTING),
    ("2 return them", RequestRecord::RETURN_ROUTING),
    ("4 token ids", RequestRecord::TOKEN_IDS),
    ("8 without shared experts", RequestRecord::EXCLUDE_SHARED),
    ("16 expect `weight_version`", RequestRecord::EXPECT_WEIGHT_VERSION),
];

#[test]
fn the_page_has_kinds_flags_and_limits() {
    for (words, number) in FRAMES.into_iter().chain(FLAGS) {
        let (told, name) = words.split_once(' ').unwrap();
        assert_eq!(told, number.to_string());
        assert!(PAGE.contains(words), "the page lacks `{told} {name}`");
    }
    for words in [
        format!("## Protocol, version {VERSION}"),
        format!("`version` is {VERSION} and `kind` is {KIND_HOST}"),
        format!("`kind` u32 = {}", cuda::KIND_CUDA),
        format!("`calls`, 1 to {MAX_CALLS}"),
        format!("multiples of {ALIGN}"),
        format!(
            "1 to {} doorbells are allowed, and {} prepared calls",
            cuda::MAX_DOORBELLS,
            cuda::MAX_PREPARED
        ),
        format!("1 to {} records of {} bytes", cuda::MAX_PREPARE_FRAME / 56, size_of::<cuda::PreparedCall>()),
        format!("number of rows, 1 to {}", cuda::MAX_ROWS),
        format!("is {} × *d* bytes later; everything else", cuda::STATUS_STRIDE),
        format!("A completion word is {} if", cuda::DONE),
        format!("complete, {} if the call failed, and {} if", cuda::FAILED, cuda::RELEASED),
    ] {
        assert!(PAGE.contains(&words), "the page lacks `{words}`");
    }
}

/// Places of a doorbell and of the number of its last call, which the page gives in sentences.
fn places_of_a_doorbell() -> [usize; 2] {
    let control = ControlMemory::create(2, 100).unwrap();
    let opened = control.opened(1, 8);
    assert_eq!(control.doorbell_offset(1) - control.doorbell_offset(0), 64);
    assert_eq!(control.routing_offset(1) - control.routing_offset(0), opened.routing_bytes as usize);
    [control.doorbell_offset(0), control.number_offset(0)].map(|at| at - opened.doorbells_offset as usize)
}

/// A digest of every number that client and service must agree on.
fn digest() -> u64 {
    let mut text = String::new();
    for (_, record) in tables().into_iter().chain(sentences()) {
        text += &format!("{} {} {:?}\n", record.name, record.bytes, record.fields);
    }
    text += &format!("{FRAMES:?} {FLAGS:?} {:?}\n", places_of_a_doorbell());
    text += &format!(
        "{KIND_HOST} {} {ALIGN} {:?} {:?} {}\n",
        cuda::KIND_CUDA,
        [cuda::PENDING, cuda::DONE, cuda::FAILED, cuda::RELEASED],
        [cuda::MAX_PREPARED, cuda::MAX_ROWS as usize],
        cuda::Ring { prepared: 3, rows: 5 }.to_word(),
    );
    let region = RegionLayout::new(64, 1 << 20).unwrap();
    text += &format!("{region:?} {:?}\n", cuda::ControlLayout::new(4, 1025).unwrap());
    text += &format!("{:?}\n", cuda::RoutingLayout::new(RequestRecord::FLAGS, 5, 4));
    // FNV-1a: the same on every machine and with every compiler.
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |digest, byte| (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[test]
fn other_bytes_are_another_version() {
    assert_eq!(places_of_a_doorbell(), [0, 8], "the page gives these places in sentences");
    assert!(PAGE.contains("The u64 that is 8 bytes after the doorbell"));
    assert_eq!(
        (VERSION, digest()),
        (4, 0xbb67_f8c9_b3fd_1f7d),
        "the bytes of the protocol have changed: raise VERSION, describe them in docs/sessions.md, and pin both here"
    );
}
