//! Calls that are refused.

use super::*;
use crate::exchange::ExchangeError;

type Call<'a> = &'a dyn Fn(&mut CpuGroup) -> Result<(), EpError>;

#[test]
fn calls_out_of_order_are_errors_that_change_nothing() {
    let mut group = loopback(&config(1)).expect("memory").pop().expect("one");
    let step = Step {
        owners: ExpertOwners::single([Rank(0); 3]),
        k: 2,
        ranks: vec![Tokens {
            count: 1,
            ids: vec![2, 0],
            weights: vec![0.5, 0.25],
            rows: vec![1.0, 2.0, 3.0, 4.0, 5.0],
        }],
    };
    let tokens = &step.ranks[0];
    let mut out = [f32::NAN; 5];
    // Tries every call but the one that is due; each must be refused as misuse.
    let refuse = |group: &mut CpuGroup, due: usize| {
        let slot = Slot(0);
        let calls: [Call<'_>; 6] = [
            &|g| g.prepare(slot, routing(&step, 0)).map(drop),
            &|g| g.dispatch_send(slot, &tokens.rows, None),
            &|g| g.dispatch_wait(slot),
            &|g| g.received(slot).map(drop),
            &|g| g.combine_send(slot),
            &|g| g.combine_wait(slot, &mut [0.0; 5], None),
        ];
        for (i, call) in calls.iter().enumerate() {
            // `received` may be called repeatedly, and `combine_send` is due at the same time.
            if i != due && !(due == 3 && i == 4) {
                let error = call(group).expect_err("not due");
                assert!(
                    matches!(error, EpError::Exchange(ExchangeError::State { .. })),
                    "{due} {i}: {error}"
                );
                assert!(error.is_misuse());
            }
        }
    };
    for _ in 0..3 {
        refuse(&mut group, 0);
        group.prepare(Slot(0), routing(&step, 0)).expect("due");
        refuse(&mut group, 1);
        assert!(matches!(
            group.dispatch_send(Slot(0), &[0.0; 4], None),
            Err(EpError::Length { what: "rows", .. })
        ));
        group.dispatch_send(Slot(0), &tokens.rows, None).expect("due");
        refuse(&mut group, 2);
        group.dispatch_wait(Slot(0)).expect("due");
        refuse(&mut group, 3);
        run_experts(&mut group, Slot(0), &step);
        group.combine_send(Slot(0)).expect("due");
        refuse(&mut group, 5);
        assert!(matches!(
            group.combine_wait(Slot(0), &mut [0.0; 6], None),
            Err(EpError::Length { what: "out", .. })
        ));
        group.combine_wait(Slot(0), &mut out, None).expect("due");
        assert_eq!(out.as_slice(), reference(&step, 0, 5));
    }
    let error = group.prepare(Slot(2), routing(&step, 0)).expect_err("no such slot");
    assert!(error.is_misuse() && error.to_string() == "slot 2 is not one of 2 slots", "{error}");
}

#[test]
fn bad_routing_is_refused_and_leaves_the_slot_idle() {
    let mut group = loopback(&config(2)).expect("memory").remove(0);
    let owners = ExpertOwners::single([0, 1, 2].map(Rank));
    let (ids, weights) = ([0, 1], [1.0, 1.0]);
    let good = HostRouting { owners: &owners, turn: 0, tokens: 1, k: 2, ids: &ids, weights: &weights };
    let many = [0; 14];
    let cases = [
        (HostRouting { tokens: 7, ids: &many, ..good }, "tokens is 7, expected 1 to 6, the group's limit"),
        (HostRouting { k: 5, ..good }, "k is 5, expected 1 to 4, the group's limit"),
        (HostRouting { k: 0, ..good }, "k is 0, expected 1 to 4, the group's limit"),
        (HostRouting { tokens: 2, ..good }, "ids has 2 elements, expected 4"),
        (HostRouting { weights: &[1.0], ..good }, "weights has 1 elements, expected 2"),
        (HostRouting { ids: &[0, 3], ..good }, "token 0 chooses expert 3, but the layer has experts 0 to 2"),
        (
            HostRouting { ids: &[0, -2], ..good },
            "token 0 chooses expert -2, but the layer has experts 0 to 2",
        ),
        (HostRouting { ids: &[0, 2], ..good }, "expert 2 is placed on rank 2, but the group has 2 ranks"),
    ];
    for (routing, message) in cases {
        let error = group.prepare(Slot(0), routing).expect_err(message);
        assert_eq!(error.to_string(), message);
        assert!(error.is_misuse());
    }
    group.prepare(Slot(0), good).expect("still idle");
}

#[test]
fn windows_are_joined_once_by_ranks_of_the_same_shape() {
    let config = config(2);
    let region = create_windows(&config).expect("memory");
    let join = |config: EpConfig| CpuGroup::attach(&region, config).expect_err("must not fit").to_string();
    let wrong = EpConfig { generation: Generation(4), ..config.clone() };
    assert_eq!(join(wrong), "the windows were created with generation = 3, this rank expects 4");
    let wrong = EpConfig { max_top_k: 3, ..config.clone() };
    assert_eq!(join(wrong), "the windows were created with max_top_k = 4, this rank expects 3");
    let fd = rustix::io::fcntl_dupfd_cloexec(&*region, 0).expect("dup");
    let wrong = EpConfig { max_tokens_per_rank: 5000, ..config.clone() };
    let error = CpuGroup::from_fd(fd, wrong).expect_err("another length").to_string();
    assert!(error.starts_with("inherited shared memory has"), "{error}");
    let _first = CpuGroup::attach(&region, config.clone()).expect("fresh");
    let error = join(config);
    assert!(error.contains("has been claimed before"), "{error}");
}
