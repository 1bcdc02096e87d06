//! Which reports of ptxas fail a build with `EXPERTD_PTXAS_STRICT`.

#[path = "../ptxas.rs"]
mod ptxas;

use ptxas::regressions;

fn spill(function: &str, stores: u32, loads: u32) -> String {
    format!(
        "ptxas warning : Registers are spilled to local memory in function '{function}', {stores} bytes spill stores, {loads} bytes \
         spill loads"
    )
}

#[test]
fn lost_optimisations_and_unlisted_spills_are_regressions() {
    let serialised = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ill formed \
                      pipeline stage in the function '_ZN7expertd14experts_kernelINS_4W8a8EEEv20ExpertdExpertsParams'";
    assert_eq!(regressions(serialised), [serialised]);
    assert_eq!(regressions("ptxas info : (C7520) setmaxnreg ignored").len(), 1);
    let of_dispatch = spill("_ZN7expertd8dispatchILi1EEEvNS_5RanksE", 8, 8);
    let mxfp4 = "_ZN7expertd14experts_kernelINS_5Mxfp4EEEv20ExpertdExpertsParams";
    let (listed, grown) = (spill(mxfp4, 32, 64), spill(mxfp4, 320, 1640));
    let other = "experts.cu(12): warning #177-D: variable \"x\" was declared but never referenced (C75)";
    let all = [&*listed, &of_dispatch, other, &grown].join("\n");
    assert_eq!(regressions(&all), [&*of_dispatch, &grown]);
}
