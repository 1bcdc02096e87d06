//! The copy pool's portions under loom, which runs each small scenario in every interleaving that the memory model allows. The
//! algorithm is generic over its atomics, so loom checks the production code.

#![allow(unsafe_code, reason = "loom's cells are accessed through raw pointers")]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicUsize;
use loom::thread;

use super::copier::portions::Portions;

/// The owner writes a job only when no helper reads the previous one, each portion is done once, and the owner sees what
/// the helper did.
#[test]
fn loom_portions() {
    struct Job {
        portions: Portions<AtomicUsize>,
        number: UnsafeCell<usize>,
        done: [UnsafeCell<usize>; 2],
    }
    // SAFETY: shared so that loom can check the accesses.
    unsafe impl Sync for Job {}
    // SAFETY: as above.
    unsafe impl Send for Job {}
    impl Job {
        fn take_part(&self) {
            while let Some(portion) = self.portions.take() {
                // SAFETY: loom checks every access before it happens.
                let number = self.number.with(|number| unsafe { *number });
                // SAFETY: as above.
                self.done[portion].with_mut(|done| unsafe { *done += number });
                self.portions.done();
            }
        }
    }
    loom::model(|| {
        let job = Arc::new(Job {
            portions: Portions::over(AtomicUsize::new(0), AtomicUsize::new(0)),
            number: UnsafeCell::new(0),
            done: [UnsafeCell::new(0), UnsafeCell::new(0)],
        });
        let helping = Arc::clone(&job);
        let helper = thread::spawn(move || helping.take_part());
        for (number, portions) in [(3, 2), (5, 1)] {
            // SAFETY: loom checks every access before it happens.
            job.number.with_mut(|at| unsafe { *at = number });
            job.portions.offer(portions);
            job.take_part();
            while !job.portions.all_done() {
                thread::yield_now();
            }
        }
        // SAFETY: as above.
        let done = job.done.each_ref().map(|done| done.with(|done| unsafe { *done }));
        assert_eq!(done, [8, 3]);
        helper.join().expect("sound");
    });
}
