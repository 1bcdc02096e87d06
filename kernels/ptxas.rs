//! What ptxas reports of kernels that became slower than they should be. build.rs and tests/ptxas.rs contain this file.

/// Kernels that may spill registers: a part of the name, and the most bytes that it stores and loads together. They spill outside of their
/// loops over k, but for portable products and one or two numbers that do not change, which a k block of 4-bit weights loads.
const MAY_SPILL: [(&str, u32); 15] = [
    ("experts_kernelINS_4Bf16E", 64),
    ("experts_kernelINS_5Mxfp4E", 128),
    ("experts_kernelINS_4W8a8E", 128),
    ("experts_kernelINS_4W4a8E", 896),
    ("experts_kernelINS_8W4a8RowsE", 288),
    ("experts_kernelINS_6Int4OfILb0E", 832),
    ("experts_kernelINS_6Int4OfILb1E", 1056),
    ("experts_kernelINS_5Nvfp4E", 352),
    ("experts_few_kernelINS_9FewInt4OfI", 16),
    ("gateILi8ELi8E", 16),
    ("combineILi", 96),
    ("portable_groupedINS_12GroupedShapeI", 1664),
    ("portable_fewINS0_3FewINS_9FewNarrowI", 128),
    ("portable_fewINS0_3FewINS_9FewInt4OfI", 128),
    ("portable_fewINS0_3FewINS_10FewWidenedI", 128),
];

/// The lines that report a lost optimisation (C75xx: wgmmas that run one after the other, setmaxnreg that is ignored), or registers that
/// are spilled and not listed.
pub(crate) fn regressions(diagnostics: &str) -> Vec<&str> {
    diagnostics.lines().filter(|line| is_lost_optimisation(line) || is_unlisted_spill(line)).collect()
}

fn is_lost_optimisation(line: &str) -> bool {
    line.split('(').skip(1).any(|rest| {
        let digits = rest.strip_prefix("C75").unwrap_or_default().as_bytes();
        digits.len() > 2 && digits[..2].iter().all(u8::is_ascii_digit) && digits[2] == b')'
    })
}

fn is_unlisted_spill(line: &str) -> bool {
    let Some((_, rest)) = line.split_once("spilled to local memory in function '") else { return false };
    let Some((function, counts)) = rest.split_once('\'') else { return true };
    let bytes: u32 = counts.split(' ').filter_map(|word| word.parse::<u32>().ok()).sum();
    let most = MAY_SPILL.iter().find(|(name, _)| function.contains(name)).map_or(0, |(_, most)| *most);
    bytes == 0 || bytes > most
}
