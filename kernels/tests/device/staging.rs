//! A whole step from pinned host memory and back, captured once and replayed with other sizes, types and routing.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::atomic::{AtomicU64, Ordering};

use expertd_kernels::device::{Buffer, Device, Pinned};
use expertd_kernels::launch;
use expertd_kernels::layout::Shape;
use expertd_kernels::params::{Completion, CopyInParams, CopyOutParams, DeviceFault, StepRequest};
use expertd_kernels::slot::{combine_blocks, dispatch_blocks};
use half::{bf16, f16};

use crate::exchange::{Loopback, expect, most_blocks};
use crate::random::{Random, step};
use crate::{Options, Outcome};

/// Page-aligned host memory that the device can reach, standing in for a shared-memory mapping.
struct Staging {
    host: *mut u8,
    layout: Layout,
    pinned: Option<Pinned<'static>>,
}

impl Staging {
    fn new(device: &Device, bytes: usize) -> Result<Staging, Box<dyn std::error::Error>> {
        let layout = Layout::from_size_align(bytes.next_multiple_of(4096), 4096)?;
        // SAFETY: the size is not zero.
        let host = unsafe { alloc_zeroed(layout) };
        // SAFETY: that allocation; it is freed after the registration ends.
        let pinned = unsafe { Pinned::register(device, host, layout.size())? };
        Ok(Staging { host, layout, pinned: Some(pinned) })
    }

    fn address(&self) -> u64 {
        self.pinned.as_ref().expect("pinned until dropped").address()
    }

    fn write(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.layout.size());
        // SAFETY: within the allocation; no step runs.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.host, bytes.len()) };
    }

    fn read(&self, bytes: usize) -> Vec<u8> {
        assert!(bytes <= self.layout.size());
        // SAFETY: within the allocation; no step runs.
        unsafe { std::slice::from_raw_parts(self.host, bytes) }.to_vec()
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        self.pinned = None;
        // SAFETY: allocated with this layout, and no longer registered.
        unsafe { dealloc(self.host, self.layout) };
    }
}

struct Stages {
    request: Staging,
    rows_in: Staging,
    ids: Staging,
    weights: Staging,
    rows_out: Staging,
    ids_out: Staging,
    weights_out: Staging,
    completion: Staging,
}

fn bytes_of<T: Copy>(values: &[T]) -> Vec<u8> {
    // SAFETY: plain integers and floats.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) }.to_vec()
}

pub fn check(options: &Options) -> Outcome {
    let device = Device::open(0)?;
    let mut random = Random(options.number("seed", 21));
    let cases = options.number("cases", 6);
    let mut steps_run = 0;
    for case in 0..cases {
        let ranks = random.pick(&[1, 2, 4]);
        let hidden = random.pick(&[64, 2048, 2880]);
        let shape = Shape { ranks, max_tokens: 1 + random.below(200) as u32, hidden, top_k: 4, experts: 30 };
        let group = Loopback::new(&device, shape, 0)?;
        let (tokens, h, k) = (shape.max_tokens as usize, shape.hidden as usize, shape.top_k as usize);
        let stages: Vec<Stages> = (0..ranks)
            .map(|_| {
                Ok(Stages {
                    request: Staging::new(&device, size_of::<StepRequest>())?,
                    rows_in: Staging::new(&device, tokens * h * 4)?,
                    ids: Staging::new(&device, tokens * k * 4)?,
                    weights: Staging::new(&device, tokens * k * 4)?,
                    rows_out: Staging::new(&device, tokens * h * 4)?,
                    ids_out: Staging::new(&device, tokens * k * 4)?,
                    weights_out: Staging::new(&device, tokens * k * 4)?,
                    completion: Staging::new(&device, size_of::<Completion>())?,
                })
            })
            .collect::<Result<_, Box<dyn std::error::Error>>>()?;
        let token_ids = Buffer::<i32>::zeroed(&device, tokens)?;
        let (mut ins, mut outs) = (Vec::new(), Vec::new());
        for (member, stage) in group.members.iter().zip(&stages) {
            let b = &member.buffers;
            ins.push(CopyInParams {
                state: b.state.address(),
                request: stage.request.address(),
                staged_rows: stage.rows_in.address(),
                staged_ids: stage.ids.address(),
                staged_weights: stage.weights.address(),
                staged_token_ids: 0,
                tokens: b.tokens.address(),
                topk_ids: b.topk_ids.address(),
                topk_weights: b.topk_weights.address(),
                token_ids: token_ids.address(),
                hidden: shape.hidden,
                top_k: shape.top_k,
                max_tokens: shape.max_tokens,
                experts: shape.experts,
            });
            outs.push(CopyOutParams {
                state: b.state.address(),
                out: b.out.address(),
                topk_ids: b.topk_ids.address(),
                topk_weights: b.topk_weights.address(),
                staged_rows: stage.rows_out.address(),
                staged_ids: stage.ids_out.address(),
                staged_weights: stage.weights_out.address(),
                completion: stage.completion.address(),
                hidden: shape.hidden,
                top_k: shape.top_k,
                max_tokens: shape.max_tokens,
                reserved: 0,
            });
        }
        let most = most_blocks(&device, ranks)?;
        let blocks =
            (dispatch_blocks(&shape, shape.max_tokens, most), combine_blocks(&shape, shape.max_tokens, most));
        let record = || -> Outcome {
            // SAFETY: all addresses are of live buffers of this group.
            unsafe { launch::copy_in(&ins, 8, group.stream.raw())? };
            group.launch(blocks, &group.members)?;
            // SAFETY: as above.
            unsafe { launch::copy_out(&outs, 8, group.stream.raw())? };
            Ok(())
        };
        // Once outside the capture: nothing may be initialised in it.
        record()?;
        group.stream.synchronize()?;
        let mut failed = None;
        let graph = group.stream.capture(|| {
            record().map_err(|error| {
                failed = Some(error.to_string());
                expertd_kernels::device::DeviceError::NoDriver
            })
        });
        if let Some(failed) = failed {
            return Err(failed.into());
        }
        let graph = graph?;
        for index in 0..6_u64 {
            let steps = step(&mut random, &shape);
            let (in_dtype, out_dtype) = (random.pick(&[1, 2, 3]), random.pick(&[1, 2, 3]));
            let number = 1000 * case + index + 1;
            for (stage, step) in stages.iter().zip(&steps) {
                // The values are bf16's, so that every type carries them exactly (f16 has the range for these).
                let values: Vec<f32> = step.rows.iter().map(|&bits| bf16::from_bits(bits).to_f32()).collect();
                match in_dtype {
                    1 => stage.rows_in.write(&bytes_of(&step.rows)),
                    2 => stage.rows_in.write(&bytes_of(
                        &values.iter().map(|&v| f16::from_f32(v).to_bits()).collect::<Vec<u16>>(),
                    )),
                    _ => stage.rows_in.write(&bytes_of(&values)),
                }
                stage.ids.write(&bytes_of(&step.ids));
                stage.weights.write(&bytes_of(&step.weights));
                stage.rows_out.write(&vec![0xff; tokens * h * 4]);
                stage.request.write(&bytes_of(&[StepRequest {
                    step: number,
                    tokens: step.tokens as u32,
                    layer: 0,
                    given_routing: 1,
                    in_dtype,
                    out_dtype,
                    reserved: 0,
                }]));
            }
            graph.launch(&group.stream)?;
            for (rank, stage) in stages.iter().enumerate() {
                // SAFETY: the first word of the completion record, which the device stores with release.
                let done = unsafe { AtomicU64::from_ptr(stage.completion.host.cast::<u64>()) };
                let start = std::time::Instant::now();
                while done.load(Ordering::Acquire) != number {
                    if start.elapsed().as_secs() > 10 {
                        return Err(format!("case {case}, step {index}: rank {rank} never completed").into());
                    }
                    std::hint::spin_loop();
                }
                let word = stage.completion.read(12);
                let error = u32::from_le_bytes([word[8], word[9], word[10], word[11]]);
                if error != 0 {
                    return Err(format!("rank {rank}: {:?}", DeviceFault::decode(error)).into());
                }
                // In f16 and f32 an f16 input may have lost bits of a bf16 value far below 1: use what was sent.
                let mut seen = steps.clone();
                if in_dtype == 2 {
                    for step in &mut seen {
                        for bits in &mut step.rows {
                            let sent = f16::from_f32(bf16::from_bits(*bits).to_f32());
                            *bits = bf16::from_f32(sent.to_f32()).to_bits();
                        }
                    }
                }
                let expected = expect(&shape, &seen, rank as u32).out;
                let width = if out_dtype == 3 { 4 } else { 2 };
                let found = stage.rows_out.read(tokens * h * 4);
                for (i, &wanted) in expected.iter().enumerate() {
                    let at = &found[i * width..][..width];
                    let same = match out_dtype {
                        3 => at == wanted.to_le_bytes(),
                        2 => at == f16::from_f32(wanted).to_le_bytes(),
                        _ => at == bf16::from_f32(wanted).to_le_bytes(),
                    };
                    if !same {
                        return Err(format!(
                            "case {case}, step {index}, rank {rank}: element {i} of {shape:?}"
                        )
                        .into());
                    }
                }
                if found[expected.len() * width..].iter().any(|&byte| byte != 0xff) {
                    return Err(
                        format!("case {case}, step {index}, rank {rank}: wrote past the last token").into()
                    );
                }
                let ids = bytes_of(&steps[rank].ids);
                if stage.ids_out.read(ids.len()) != ids {
                    return Err(
                        format!("case {case}, step {index}, rank {rank}: returned routing differs").into()
                    );
                }
                let weights = bytes_of(&steps[rank].weights);
                if stage.weights_out.read(weights.len()) != weights {
                    return Err(
                        format!("case {case}, step {index}, rank {rank}: returned weights differ").into()
                    );
                }
            }
            steps_run += 1;
        }
        group.stream.synchronize()?;
    }
    println!("staging: {steps_run} replayed steps came back bitwise right");
    Ok(())
}
