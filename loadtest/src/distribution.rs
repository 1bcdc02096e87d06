//! Distributions of the number of rows per request.

use std::fmt;
use std::str::FromStr;

use rand::{Rng, RngExt as _};
use rand_distr::{Distribution as _, LogNormal, Zipf};

/// A distribution of row counts, all at least 1.
#[derive(Clone, Debug, PartialEq)]
pub enum TokenCounts {
    /// Always the same count.
    Fixed(u32),
    /// Each count of an inclusive range with equal probability.
    Uniform(u32, u32),
    /// Log-normal, given by its median and the standard deviation of the logarithm; lengths of prompts have this shape.
    LogNormal {
        /// Median number of rows.
        median: f64,
        /// Standard deviation of ln(rows).
        sigma: f64,
    },
    /// Zipf over `1..=max`: 1 is the most frequent count.
    Zipf {
        /// Largest count.
        max: u32,
        /// Exponent.
        exponent: f64,
    },
    /// Each of these counts with equal probability.
    List(Vec<u32>),
}

impl TokenCounts {
    /// Draws a count from 1 to `limit`.
    pub fn draw(&self, rng: &mut impl Rng, limit: u32) -> u32 {
        let count = match self {
            TokenCounts::Fixed(count) => *count,
            TokenCounts::Uniform(low, high) => rng.random_range(*low..=*high),
            // Parsing has checked both parameters; `max` keeps the count valid in any case.
            TokenCounts::LogNormal { median, sigma } => {
                LogNormal::new(median.ln(), *sigma).map_or(1, |drawn| drawn.sample(rng).round() as u32)
            }
            TokenCounts::Zipf { max, exponent } => {
                Zipf::new(f64::from(*max), *exponent).map_or(1, |drawn| drawn.sample(rng) as u32)
            }
            TokenCounts::List(counts) => counts[rng.random_range(0..counts.len())],
        };
        count.clamp(1, limit.max(1))
    }

    /// The largest count that can be drawn, at most `limit`.
    #[must_use]
    pub fn largest(&self, limit: u32) -> u32 {
        let largest = match self {
            TokenCounts::Fixed(count) => *count,
            TokenCounts::Uniform(_, high) => *high,
            TokenCounts::LogNormal { .. } => u32::MAX,
            TokenCounts::Zipf { max, .. } => *max,
            TokenCounts::List(counts) => counts.iter().copied().max().unwrap_or(1),
        };
        largest.min(limit)
    }
}

impl fmt::Display for TokenCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TokenCounts::Fixed(count) => write!(f, "{count}"),
            TokenCounts::Uniform(low, high) => write!(f, "uniform:{low}-{high}"),
            TokenCounts::LogNormal { median, sigma } => write!(f, "lognormal:{median},{sigma}"),
            TokenCounts::Zipf { max, exponent } => write!(f, "zipf:{max},{exponent}"),
            TokenCounts::List(counts) => {
                let counts = counts.iter().map(u32::to_string).collect::<Vec<_>>();
                write!(f, "list:{}", counts.join(","))
            }
        }
    }
}

impl FromStr for TokenCounts {
    type Err = String;

    fn from_str(text: &str) -> Result<TokenCounts, String> {
        let bad = |form: &str| format!("{text}: expected {form}");
        let count = |text: &str| text.trim().parse::<u32>().ok().filter(|&count| count > 0);
        let real = |text: &str| text.trim().parse::<f64>().ok().filter(|value| value.is_finite());
        let Some((kind, rest)) = text.split_once(':') else {
            let form =
                "a number above 0, uniform:MIN-MAX, lognormal:MEDIAN,SIGMA, zipf:MAX,EXPONENT or list:N,N";
            return count(text).map(TokenCounts::Fixed).ok_or_else(|| bad(form));
        };
        match kind {
            "uniform" => {
                let (low, high) = rest.split_once('-').unwrap_or((rest, ""));
                let (low, high) = (count(low), count(high));
                low.zip(high)
                    .filter(|(low, high)| low <= high)
                    .map(|(low, high)| TokenCounts::Uniform(low, high))
                    .ok_or_else(|| bad("uniform:MIN-MAX with 1 <= MIN <= MAX"))
            }
            "lognormal" => {
                let (median, sigma) = rest.split_once(',').unwrap_or((rest, "1"));
                real(median)
                    .zip(real(sigma))
                    .filter(|(median, sigma)| *median >= 1.0 && *sigma >= 0.0)
                    .map(|(median, sigma)| TokenCounts::LogNormal { median, sigma })
                    .ok_or_else(|| bad("lognormal:MEDIAN,SIGMA with MEDIAN >= 1 and SIGMA >= 0"))
            }
            "zipf" => {
                let (max, exponent) = rest.split_once(',').unwrap_or((rest, "1"));
                count(max)
                    .zip(real(exponent))
                    .filter(|(_, exponent)| *exponent >= 0.0)
                    .map(|(max, exponent)| TokenCounts::Zipf { max, exponent })
                    .ok_or_else(|| bad("zipf:MAX,EXPONENT with MAX >= 1 and EXPONENT >= 0"))
            }
            "list" => rest
                .split(',')
                .map(count)
                .collect::<Option<Vec<_>>>()
                .map(TokenCounts::List)
                .ok_or_else(|| bad("list:N,N,... of numbers above 0")),
            _ => Err(bad("uniform, lognormal, zipf or list before the colon")),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use rand::SeedableRng as _;
    use rand::rngs::SmallRng;

    use super::*;

    fn draws(text: &str, limit: u32) -> Vec<u32> {
        let counts: TokenCounts = text.parse().unwrap();
        assert_eq!(counts.to_string().parse::<TokenCounts>().unwrap(), counts);
        let mut rng = SmallRng::seed_from_u64(7);
        let mut drawn = (0..20_000).map(|_| counts.draw(&mut rng, limit)).collect::<Vec<_>>();
        drawn.sort_unstable();
        drawn
    }

    fn share(drawn: &[u32], wanted: impl Fn(u32) -> bool) -> f64 {
        drawn.iter().filter(|&&count| wanted(count)).count() as f64 / drawn.len() as f64
    }

    #[test]
    fn fixed_and_list_give_their_counts() {
        assert!(draws("12", 64).iter().all(|&count| count == 12));
        assert!(draws("100", 64).iter().all(|&count| count == 64), "the service's limit applies");
        let drawn = draws("list:1,8,64", 4096);
        for count in [1, 8, 64] {
            let share = share(&drawn, |drawn| drawn == count);
            assert!((share - 1.0 / 3.0).abs() < 0.02, "{count}: {share}");
        }
    }

    #[test]
    fn uniform_reaches_both_ends_evenly() {
        let drawn = draws("uniform:3-6", 4096);
        for count in 3..=6 {
            assert!((share(&drawn, |drawn| drawn == count) - 0.25).abs() < 0.02);
        }
        assert_eq!((drawn[0], drawn[drawn.len() - 1]), (3, 6));
    }

    #[test]
    fn lognormal_has_its_median_and_spread() {
        let drawn = draws("lognormal:100,0.5", 100_000);
        let median = f64::from(drawn[drawn.len() / 2]);
        assert!((median - 100.0).abs() < 3.0, "median {median}");
        // One standard deviation above the median lies at the 84.13th percentile.
        let above = f64::from(drawn[(drawn.len() as f64 * 0.8413) as usize]);
        assert!((above / 100.0 - 0.5_f64.exp()).abs() < 0.06, "{above}");
    }

    #[test]
    fn zipf_has_its_probabilities() {
        let drawn = draws("zipf:64,1", 4096);
        let (one, four) = (share(&drawn, |c| c == 1), share(&drawn, |c| c == 4));
        assert!((one / four - 4.0).abs() < 0.6, "{one} {four}");
        assert!(*drawn.last().unwrap() <= 64);
    }

    #[test]
    fn invalid_distributions_are_refused() {
        for bad in
            ["0", "-1", "x", "uniform:5-2", "uniform:0-2", "lognormal:0.5,1", "zipf:0,1", "list:", "no:1"]
        {
            assert!(bad.parse::<TokenCounts>().is_err(), "{bad}");
        }
    }
}
