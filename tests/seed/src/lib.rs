//! What unit tests share: a [socket whose close blocks](lingering), and random numbers. Every run draws new data from a seed that is printed (cargo shows it when a test fails), and
//! `EXPERTD_TEST_SEED` repeats a run: a test's numbers depend on the seed and on the names of its threads only, so that the
//! test can be run alone.

mod lingering;
mod random;
pub mod simulation;

use std::cell::Cell;
use std::sync::OnceLock;

use rand::SeedableRng as _;

pub use lingering::lingering;
pub use random::Random;

/// The generator of [`rng`].
pub type TestRng = rand_chacha::ChaCha8Rng;

const VARIABLE: &str = "EXPERTD_TEST_SEED";

/// The seed of this process: `EXPERTD_TEST_SEED`, otherwise a random number.
///
/// # Panics
/// If the variable is not a number.
fn of_process() -> u64 {
    static SEED: OnceLock<u64> = OnceLock::new();
    *SEED.get_or_init(|| match std::env::var(VARIABLE) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{VARIABLE} is {text:?}, expected a number")),
        Err(_) => rand::random(),
    })
}

/// A seed for the calling thread: another one with each call, the same ones in each run with the same `EXPERTD_TEST_SEED`.
#[must_use]
pub fn seed() -> u64 {
    thread_local! {
        static CALLS: Cell<u64> = const { Cell::new(0) };
    }
    let (process, call) = (of_process(), CALLS.get());
    CALLS.set(call + 1);
    if call == 0 {
        eprintln!("{VARIABLE}={process}");
    }
    let thread = std::thread::current();
    // FNV-1a.
    let name = thread.name().unwrap_or_default().bytes();
    let name = name.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    process.wrapping_add(name).wrapping_add(call.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// A generator from [`seed`].
#[must_use]
pub fn rng() -> TestRng {
    TestRng::seed_from_u64(seed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_and_threads_differ_and_threads_of_one_name_agree() {
        let of_thread = |name: &str| {
            let thread = std::thread::Builder::new().name(name.to_owned()).spawn(|| [seed(), seed()]);
            thread.expect("a thread").join().expect("two seeds")
        };
        let [first, second] = of_thread("a");
        assert_ne!(first, second);
        assert_eq!(of_thread("a"), [first, second]);
        assert!(!of_thread("b").contains(&first));
    }
}
