//! When certificates expire. Only the date is read from them; whether they are valid is for the TLS library and its peers.

use rustls::pki_types::CertificateDer;
use x509_parser::parse_x509_certificate;

/// Unix time in seconds at which the first certificate of the chain expires; `None` if no certificate has a date that can be read.
pub(super) fn first_expiry(chain: &[CertificateDer<'_>]) -> Option<i64> {
    let parsed = chain.iter().filter_map(|certificate| parse_x509_certificate(certificate).ok());
    parsed.map(|(_, certificate)| certificate.validity().not_after.timestamp()).min()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::*;

    fn until(year: i32) -> CertificateDer<'static> {
        let mut params = CertificateParams::new(vec!["a.example".to_owned()]).unwrap();
        params.not_after = date_time_ymd(year, 1, 1);
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    #[test]
    fn the_first_date_of_a_chain_counts_and_broken_certificates_have_none() {
        let broken = CertificateDer::from(until(2026)[..100].to_vec());
        // Years from 2050 on have another encoding.
        for (years, expected) in [([2031, 2027], 1_798_761_600), ([2100, 2101], 4_102_444_800)] {
            let [one, other] = years.map(until);
            assert_eq!(first_expiry(&[one, broken.clone(), other]), Some(expected), "{years:?}");
        }
        assert_eq!(first_expiry(&[broken]), None);
        assert_eq!(first_expiry(&[]), None);
    }
}
