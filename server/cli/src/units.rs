//! Sizes, times, counts and lines as people read them.

use std::time::Duration;

/// Columns that output for terminals may take.
pub(crate) const COLUMNS: usize = 100;

/// Formats a size in bytes.
#[must_use]
pub(crate) fn bytes(size: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = size as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{size} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// Formats a time to three digits.
pub(crate) fn time(time: Duration) -> String {
    let (value, unit) = match time.as_nanos() {
        0..1_000_000 => (time.as_secs_f64() * 1e6, "µs"),
        1_000_000..1_000_000_000 => (time.as_secs_f64() * 1e3, "ms"),
        _ => (time.as_secs_f64(), "s"),
    };
    let decimals = match value {
        0.0..10.0 => 2,
        10.0..100.0 => 1,
        _ => 0,
    };
    format!("{value:.decimals$} {unit}")
}

/// A number of things that `one` names, such as `1 rank` or `2 ranks`.
pub(crate) fn count(number: u64, one: &str) -> String {
    format!("{number} {one}{}", if number == 1 { "" } else { "s" })
}

/// First and last number of each run of consecutive numbers.
pub(crate) fn runs(numbers: impl IntoIterator<Item = usize>) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => runs.push((number, number)),
        }
    }
    runs
}

/// The text in lines of at most [`COLUMNS`] columns, broken between words. Lines after the first begin with `indent` spaces, for which
/// the first has room as well.
pub(crate) fn wrap(text: &str, indent: usize) -> String {
    let mut wrapped = String::new();
    let mut column = indent;
    for word in text.split(' ') {
        let length = word.chars().count();
        if column > indent && column + 1 + length > COLUMNS {
            wrapped.push('\n');
            wrapped.extend(std::iter::repeat_n(' ', indent));
            column = indent;
        } else if column > indent {
            wrapped.push(' ');
            column += 1;
        }
        wrapped.push_str(word);
        column += length;
    }
    wrapped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_times_and_counts_are_short() {
        assert_eq!([bytes(17), bytes(3 << 19), bytes(5 << 40)], ["17 B", "1.5 MiB", "5.0 TiB"]);
        let times = [0, 945_384, 9_990_000, 75_803_771, 758_037_711, 61_000_000_000]
            .map(Duration::from_nanos)
            .map(time);
        assert_eq!(times, ["0.00 µs", "945 µs", "9.99 ms", "75.8 ms", "758 ms", "61.0 s"]);
        assert_eq!([count(0, "rank"), count(1, "rank"), count(2, "rank")], ["0 ranks", "1 rank", "2 ranks"]);
    }

    #[test]
    fn long_lines_are_broken_between_words() {
        let text = "word ".repeat(60);
        let wrapped = wrap(text.trim(), 11);
        let lines: Vec<&str> = wrapped.lines().collect();
        assert!(
            lines.iter().skip(1).all(|line| line.starts_with("           word") && line.len() <= COLUMNS)
        );
        assert!(lines[0].len() + 11 <= COLUMNS && lines.len() > 3);
        assert_eq!(wrapped.split_whitespace().count(), 60);
        let long = "x".repeat(200);
        assert_eq!(wrap(&long, 11), long, "a word is never broken");
    }
}
