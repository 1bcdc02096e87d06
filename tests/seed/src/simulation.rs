//! Parts that simulations share: counts of events, and the program that runs schedules.

use std::fmt::{Debug, Display};
use std::process::ExitCode;
use std::time::Instant;

/// Defines `Seen`, the counts of the events that schedules are meant to cause.
#[macro_export]
macro_rules! seen {
    ($($name:ident),+) => {
        /// Counts of the events that schedules are meant to cause.
        #[derive(Clone, Copy, Debug, Default)]
        pub struct Seen {
            $($name: u64,)+
        }

        impl Seen {
            /// Each count with its name.
            #[allow(dead_code, reason = "the example prints them all instead")]
            pub fn all(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),+]
            }

            #[allow(dead_code, reason = "not every simulation has sums")]
            fn add_to(&self, sum: &mut Seen) {
                $(sum.$name += self.$name;)+
            }
        }
    };
}

/// The program of an example: `FIRST COUNT` runs the schedules of these seeds, `SEED` prints the trace of one.
pub fn program<F: Display, S: Debug>(
    run_seeds: impl FnOnce(u64, u64) -> (Option<F>, S),
    trace_of: impl FnOnce(u64) -> String,
) -> ExitCode {
    let numbers: Option<Vec<u64>> = std::env::args().skip(1).map(|text| text.parse().ok()).collect();
    match numbers.as_deref() {
        Some(&[seed]) => println!("{}", trace_of(seed)),
        Some(&[first, count]) => {
            let start = Instant::now();
            let (failure, seen) = run_seeds(first, count);
            if let Some(failure) = failure {
                println!("{failure}");
                return ExitCode::FAILURE;
            }
            let seconds = start.elapsed().as_secs_f64();
            println!("{count} schedules from seed {first} on: all invariants held, {seconds:.1} s");
            println!("{seen:#?}");
        }
        _ => {
            println!("usage: FIRST COUNT | SEED");
            return ExitCode::from(64);
        }
    }
    ExitCode::SUCCESS
}
