//! An error word that changes while blocks start: threads of a block, and blocks of a pair, read it at different times and must not part.

use expertd_kernels::device::{Device, Mailbox};
use expertd_kernels::experts;

use super::launch::{FEW_ROWS, Launch, MANY_ROWS, load};
use super::mlp::Case;
use super::sizes::draw;
use super::{PLAIN, begin};
use crate::random::Random;
use crate::{Options, Outcome};

/// Times that the host sets and clears the word while a launch starts.
const CHANGES: u32 = 4000;

/// Launches with a word that changes; each must end, or the program hangs. Some blocks see it set and return, and others wait for them
/// until the deadline. Afterwards a launch without an error must compute as before.
fn check_case(device: &Device, random: &mut Random, case: &Case, tiles: [i32; 2], launches: u64) -> Outcome {
    let (all, step) = draw(random, case, &[70, 0, 150, 9], 4);
    let loaded = load(device, case, &all)?;
    let wanted = step.run(device, case, &loaded, tiles)?;
    let word = Mailbox::new(device, 0_u32)?;
    let mut launch = Launch::new(device, &step, case, &loaded, tiles)?;
    launch.params.error = word.address();
    launch.params.deadline_ns = 1_000_000;
    let mut failed = 0;
    for _ in 0..launches {
        launch.enqueue()?;
        for change in 0..CHANGES {
            word.put((change + 1) % 2);
            std::hint::spin_loop();
        }
        launch.wait()?;
        failed += u32::from(launch.state.read()?.iter().any(|state| *state != 0) || word.get() != 0);
        launch.state.fill_bytes(0)?;
        word.put(0);
    }
    if launch.run()?.iter().zip(&wanted).any(|(found, wanted)| found.to_bits() != wanted.to_bits()) {
        return Err(format!(
            "word: format {}, tiles {tiles:?}: a launch after the failed ones differs",
            case.format
        )
        .into());
    }
    println!(
        "word: format {}, tiles {tiles:?}: {launches} launches ended, {failed} of them in parts",
        case.format
    );
    Ok(())
}

pub fn check(options: &Options) -> Outcome {
    let (device, mut random, formats) = begin(options)?;
    let launches = options.number("launches", 500);
    for format in formats {
        let w8a8 = format == experts::W8A8;
        let case = Case { format, hidden: 256, inter: 256, block_scales: w8a8, ..PLAIN };
        // 256: the two blocks of a pair share the segments, or with W8A8 their weights.
        let pairs =
            if matches!(format, experts::BF16 | experts::W8A8) { experts::TILE_TOKEN_PAIRS } else { 256 };
        let shapes = if format == experts::W4A8 {
            vec![[0, 0], MANY_ROWS, [experts::TILE_TOKEN_PAIRS, 0]]
        } else {
            vec![[0, 0], [256, 0], [pairs, 0], FEW_ROWS]
        };
        for tiles in shapes {
            check_case(&device, &mut random, &case, tiles, launches)?;
        }
    }
    Ok(())
}
