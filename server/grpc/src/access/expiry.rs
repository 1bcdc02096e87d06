//! When certificates expire. Only the date is read from them; whether they are valid is for the TLS library and its peers.

use rustls::pki_types::CertificateDer;

/// Tags of DER elements.
const SEQUENCE: u8 = 0x30;
const VERSION: u8 = 0xa0;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;

/// Days of a common year before the first of each month.
const DAYS_BEFORE: [i64; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];

/// Unix time in seconds at which the first certificate of the chain expires; `None` if no certificate has a date that can be read.
pub(super) fn first_expiry(chain: &[CertificateDer<'_>]) -> Option<i64> {
    chain.iter().filter_map(|certificate| not_after(certificate)).min()
}

/// Unix time in seconds of a certificate's `notAfter`.
fn not_after(certificate: &[u8]) -> Option<i64> {
    let (certificate, _) = sequence(certificate)?;
    let (mut fields, _) = sequence(certificate)?;
    if fields.first() == Some(&VERSION) {
        fields = element(fields)?.2;
    }
    // The serial number, the algorithm of the signature and the issuer.
    for _ in 0..3 {
        fields = element(fields)?.2;
    }
    let (validity, _) = sequence(fields)?;
    let (_, _, validity) = element(validity)?;
    let (tag, time, _) = element(validity)?;
    seconds(tag, std::str::from_utf8(time).ok()?)
}

/// The content of a sequence, and the bytes after it.
fn sequence(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (tag, content, rest) = element(bytes)?;
    (tag == SEQUENCE).then_some((content, rest))
}

/// The tag and the content of the first element, and the bytes after it.
fn element(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&tag, rest) = bytes.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (length, rest) = match first {
        0..=0x7f => (usize::from(first), rest),
        0x81..=0x84 => {
            let (digits, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
            (digits.iter().fold(0, |length, &digit| length << 8 | usize::from(digit)), rest)
        }
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(length)?;
    Some((tag, content, rest))
}

/// Unix time of `YYMMDDhhmmssZ` or `YYYYMMDDhhmmssZ`.
fn seconds(tag: u8, text: &str) -> Option<i64> {
    let number = |digits: &str| digits.parse::<i64>().ok();
    let (year, rest) = match tag {
        UTC_TIME => {
            let year = number(text.get(..2)?)?;
            (if year < 50 { 2000 + year } else { 1900 + year }, text.get(2..)?)
        }
        GENERALIZED_TIME => (number(text.get(..4)?)?, text.get(4..)?),
        _ => return None,
    };
    let rest = rest.strip_suffix('Z')?;
    let pair = |at: usize| number(rest.get(2 * at..2 * at + 2)?);
    let (month, day, hour, minute, second) = (pair(0)?, pair(1)?, pair(2)?, pair(3)?, pair(4)?);
    let before_month = DAYS_BEFORE.get(usize::try_from(month - 1).ok()?)?;
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let leap_days_before = |year: i64| (year - 1) / 4 - (year - 1) / 100 + (year - 1) / 400;
    let days = 365 * (year - 1970) + leap_days_before(year) - leap_days_before(1970)
        + before_month
        + i64::from(is_leap && month > 2)
        + day
        - 1;
    Some(((days * 24 + hour) * 60 + minute) * 60 + second)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::*;

    fn until(year: i32, month: u8, day: u8) -> CertificateDer<'static> {
        let mut params = CertificateParams::new(vec!["a.example".to_owned()]).unwrap();
        params.not_after = date_time_ymd(year, month, day);
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    #[test]
    fn dates_of_certificates_are_read() {
        for (year, month, day, expected) in [
            (2000, 2, 29, 951_782_400),
            (2027, 1, 1, 1_798_761_600),
            (2049, 12, 31, 2_524_521_600),
            (2100, 3, 1, 4_107_542_400),
        ] {
            assert_eq!(not_after(&until(year, month, day)), Some(expected), "{year}-{month}-{day}");
        }
        let chain = [until(2031, 1, 1), until(2027, 1, 1), until(2040, 1, 1)];
        assert_eq!(first_expiry(&chain), Some(1_798_761_600));
        assert_eq!(first_expiry(&[]), None);
    }

    #[test]
    fn broken_certificates_have_no_date() {
        let whole = until(2027, 1, 1);
        for length in 0..whole.len() {
            assert_eq!(not_after(&whole[..length]), None, "{length} bytes");
        }
        for wrong in
            ["", "Z", "270101000000", "2701010000Z", "271301000000Z", "270001000000Z", "27010100000éZ"]
        {
            assert_eq!(seconds(UTC_TIME, wrong), None, "{wrong}");
        }
        assert_eq!(seconds(UTC_TIME, "270101000001Z"), Some(1_798_761_601));
        assert_eq!(seconds(GENERALIZED_TIME, "20270101000001Z"), Some(1_798_761_601));
    }
}
