//! Comparison of the kernels' parameter structs with the C headers, field by field.
//!
//! The headers are parsed and laid out by the C rules of 64-bit targets; names, offsets and sizes of all fields must equal
//! those of the Rust structs. The headers' own `static_assert`s check the sizes against the C++ compiler.

use crate::copies::PHYSICAL_BITS;
use crate::layout::WindowLayout;
use crate::params::{
    CombineParams, Completion, CopyInParams, CopyOutParams, DispatchParams, GateLayer, GateParams, Group,
    MAX_BLOCKS, MAX_CHUNKS, MAX_EXPERTS, MAX_RAISES, MAX_RANKS, MAX_TOP_K, PHASES, ROW_PLACE_BYTES, Raise,
    ScaleParams, Segment, SharedParams, SlotState, StepRequest, TierParams,
};

/// Name, offset and size of a field; offset and size are in bytes.
type Field = (String, usize, usize);

/// The size of the field that `_get` selects.
const fn size_of_field<S, F>(_get: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

/// Name, offset and size of the listed fields of a Rust struct.
macro_rules! fields {
    ($ty:ty: $($field:ident),* $(,)?) => {
        vec![$((
            stringify!($field).to_owned(),
            std::mem::offset_of!($ty, $field),
            size_of_field(|s: &$ty| &s.$field),
        )),*]
    };
}

/// A parsed header.
struct Header {
    text: String,
}

impl Header {
    fn new(text: &str) -> Header {
        let mut code = String::new();
        for line in text.lines() {
            code.push_str(line.split("//").next().unwrap_or_default());
            code.push('\n');
        }
        while let Some(start) = code.find("/*") {
            let end = start + code[start..].find("*/").expect("a comment ends") + 2;
            code.replace_range(start..end, " ");
        }
        Header { text: code }
    }

    /// Value of a length: a number, a `constexpr` or the last entry of `enum Phase`.
    fn length(&self, text: &str) -> usize {
        if let Ok(number) = text.parse() {
            return number;
        }
        if text == "kPhases" {
            let (_, rest) = self.text.split_once("enum Phase").expect("the phases are declared");
            let (phases, _) = rest.split_once("kPhases").expect("the number of phases comes last");
            return phases.matches(',').count();
        }
        let (_, rest) = self.text.split_once(&format!("{text} =")).expect("a constant is declared");
        rest.split(';').next().unwrap_or_default().trim().parse().expect("a constant is a number")
    }

    /// Fields, size and alignment of a struct.
    fn layout(&self, name: &str) -> (Vec<Field>, usize, usize) {
        let (_, rest) = self.text.split_once(&format!("struct {name} {{")).expect(name);
        let (body, _) = rest.split_once('}').expect("a struct ends");
        let (mut fields, mut end, mut align) = (Vec::new(), 0_usize, 1);
        for declaration in body.split(';').map(str::trim).filter(|declaration| !declaration.is_empty()) {
            let (declaration, count) = match declaration.split_once('[') {
                Some((declaration, length)) => (declaration, self.length(length.trim_end_matches(']'))),
                None => (declaration, 1),
            };
            let field = declaration.rsplit([' ', '*']).next().unwrap_or_default();
            let ty = declaration[..declaration.len() - field.len()].trim();
            let (size, field_align) = match ty {
                _ if ty.contains('*') => (8, 8),
                "uint64_t" => (8, 8),
                "uint32_t" | "int32_t" | "float" => (4, 4),
                _ => {
                    let (_, size, align) = self.layout(ty);
                    (size, align)
                }
            };
            let offset = end.next_multiple_of(field_align);
            fields.push((field.to_owned(), offset, size * count));
            end = offset + size * count;
            align = align.max(field_align);
        }
        (fields, end.next_multiple_of(align), align)
    }

    /// Panics unless the C struct `name` has exactly these fields and this size.
    fn assert_mirrors(&self, name: &str, fields: Vec<Field>, size: usize) {
        let (expected, expected_size, _) = self.layout(name);
        assert_eq!(fields, expected, "fields of {name}: Rust on the left, C on the right");
        assert_eq!(size, expected_size, "size of {name}");
    }
}

fn step_h() -> Header {
    Header::new(include_str!("step.h"))
}

macro_rules! assert_mirrors {
    ($header:expr, $name:literal, $ty:ident: $($field:ident),* $(,)?) => {
        $header.assert_mirrors($name, fields!($ty: $($field),*), size_of::<$ty>())
    };
}

#[test]
fn constants_equal_those_of_step_h() {
    let header = step_h();
    let constants = [
        ("kMaxRanks", MAX_RANKS),
        ("kMaxTopK", MAX_TOP_K),
        ("kMaxBlocks", MAX_BLOCKS),
        ("kMaxChunks", MAX_CHUNKS),
        ("kMaxExperts", MAX_EXPERTS),
        ("kPhysicalBits", PHYSICAL_BITS as usize),
        ("kMaxRaises", MAX_RAISES),
        ("kPhases", PHASES),
    ];
    for (name, value) in constants {
        assert_eq!(header.length(name), value, "{name}");
    }
    assert_eq!(header.layout("RowPlace").1, ROW_PLACE_BYTES);
}

#[test]
fn step_structs_mirror_step_h() {
    let h = step_h();
    assert_mirrors!(h, "SlotState", SlotState: sequence, error, tokens, layer, given_routing, received, out_dtype, step,
        ticket, epoch, exchange, begin_ns, end_ns, raises, direct, raise, announced,
        reserved);
    assert_mirrors!(h, "Raise", Raise: word, number, call);
    assert_mirrors!(h, "StepRequest", StepRequest: step, tokens, layer, given_routing, out_dtype, segments, raises, direct, reserved, raise);
    assert_mirrors!(h, "Segment", Segment: byte_offset, output_offset, first_row, rows, dtype,
        flags, memory, reserved);
    assert_mirrors!(h, "Completion", Completion: step, error, received, assignments, reserved, begin_ns, end_ns);
}

/// The C struct has the fields of [`WindowLayout`] inline.
#[test]
fn the_group_mirrors_step_h() {
    let mut fields = fields!(Group: windows, state, generation, deadline_ns, copies, rank, ranks, hidden, top_k, experts,
        max_tokens, delay_ns, chunk);
    let offsets = fields!(WindowLayout: dispatch_flags, combine_flags, meet_flags, written_flags, counts, ids, weights, rows, partials);
    let start = std::mem::offset_of!(Group, layout);
    fields.extend(offsets.into_iter().map(|(name, offset, size)| (name, start + offset, size)));
    step_h().assert_mirrors("Group", fields, size_of::<Group>());
}

#[test]
fn kernel_parameters_mirror_step_h() {
    let h = step_h();
    assert_mirrors!(h, "DispatchParams", DispatchParams: group, tokens, topk_ids, topk_weights, expert_offsets, row_index,
        row_weight, position, block_counts, fp8_rows, power_of_two_scales);
    assert_mirrors!(h, "CombineParams", CombineParams: group, expert_out, position, topk_ids, topk_weights, shared, places,
        out, experts_done, first_row, end_row, sums, sums_stride, sums_count, reserved);
    assert_mirrors!(h, "TierParams", TierParams: state, tokens, topk_ids, topk_weights, resident, local_ids, local_weights,
        sent_ids, sent_weights, sent_rows, sent, failed, generation, hidden, top_k, max_tokens, reserved);
    assert_mirrors!(h, "ScaleParams", ScaleParams: group, rows, expert_offsets, row_index, row_weight, out);
    assert_mirrors!(h, "GateLayer", GateLayer: weight, weight_low, logit_bias, correction_bias, token_table);
    assert_mirrors!(h, "GateParams", GateParams: state, layers, tokens, tokens_low, token_ids, places, topk_ids, topk_weights,
        hidden, experts, top_k, max_tokens, score_fn, choice, group_score, groups, groups_kept, normalise,
        epsilon, scale, jitter, vocab);
    assert_mirrors!(h, "CopyInParams", CopyInParams: state, request, segments, staged_rows, staged_ids, staged_weights,
        staged_token_ids, tokens, tokens_low, topk_ids, topk_weights, token_ids, places, staged_bytes, hidden, top_k, max_tokens,
        experts, max_segments, row_elements);
    assert_mirrors!(h, "CopyOutParams", CopyOutParams: group, out, topk_ids, topk_weights, places, assignments,
        staged_ids, staged_weights, completion, raised, expert_offsets, row_counts, row_counts_host, local_ids, hidden, top_k,
        max_tokens, first_expert, local_experts, count_stride, row_elements, reserved);
    assert_mirrors!(h, "SharedParams", SharedParams: state, tokens, gates, expert_offsets, row_index, row_weight, hidden,
        max_tokens);
}

#[cfg(feature = "cuda")]
#[test]
fn expert_parameters_mirror_experts_h() {
    use crate::experts::{ExpertsParams, LayerWeights, PackNarrowParams, PackParams};
    let h = Header::new(include_str!("experts.h"));
    assert_mirrors!(h, "ExpertdLayerWeights", LayerWeights: gate_up, down, gate_up_bias, down_bias, gate_up_scale,
        down_scale, block_scales);
    assert_mirrors!(h, "ExpertdExpertsParams", ExpertsParams: layers, layer, expert_offsets, row_index, row_weight, x, y,
        x_panels, h, x_scales, h_scales, state, error, x_stride, panel_rows, experts, hidden, inter, activation, alpha, limit,
        weight_on_input, blocks, tile_tokens, tile_rows, flags, format, x_format, power_of_two_scales, deadline_ns);
    assert_mirrors!(h, "ExpertdPackParams", PackParams: first, second, panels, expert_stride, experts, hidden, inter,
        kind);
    assert_mirrors!(h, "ExpertdPackNarrowParams", PackNarrowParams: first, second, first_scales, second_scales,
        first_zeros, second_zeros, row_scales_in, row_scales, units, hidden, inter, kind, format);
}
