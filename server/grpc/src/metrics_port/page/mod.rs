//! The status page: one file with its script and style in it, which shows what `/status.json` and `/metrics` say.
//!
//! The page itself holds no data. Browsers run only the script of this file and connect only to this listener, as the
//! content security policy says; texts of the service become text nodes, never markup.

mod document;

use std::sync::LazyLock;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use http::header::{self, HeaderName, HeaderValue};

pub(super) use document::{document, experts};

/// The page.
pub(super) const PAGE: &str = include_str!("status.html");

/// Headers of the page and of the data that it reads.
pub(super) fn headers() -> [(HeaderName, HeaderValue); 5] {
    static POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
        HeaderValue::try_from(policy(PAGE)).unwrap_or(HeaderValue::from_static("default-src 'none'"))
    });
    [
        (header::CONTENT_SECURITY_POLICY, POLICY.clone()),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        (header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
    ]
}

/// A policy that allows the script and the style of `page`, by their digests, and connections to the page's own origin.
fn policy(page: &str) -> String {
    let digest = |tag: &str| {
        let (open, close) = (format!("<{tag}>"), format!("</{tag}>"));
        let inner = page.split_once(&open).and_then(|(_, rest)| rest.split_once(&close));
        BASE64.encode(
            ring::digest::digest(&ring::digest::SHA256, inner.map_or("", |(inner, _)| inner).as_bytes())
                .as_ref(),
        )
    };
    format!(
        "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; connect-src 'self'; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'",
        digest("script"),
        digest("style")
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_policy_names_the_digests_of_script_and_style() {
        let policy = policy("<style>b{}</style><script>let a;</script>");
        // `printf 'let a;' | openssl dgst -sha256 -binary | base64`
        assert!(
            policy.contains("script-src 'sha256-81WALLbUROF1pWdYjuQYKuIcGgY/+TqVJr8UsV6Tkvo='"),
            "{policy}"
        );
        assert!(
            policy.contains("style-src 'sha256-7yqHVAesot11p6HczDsgKRipvI5UPgs97z80zNXlans='"),
            "{policy}"
        );
    }

    #[test]
    fn the_page_is_one_file_without_other_hosts_and_without_markup_from_data() {
        for tag in ["script", "style"] {
            assert_eq!(PAGE.matches(&format!("<{tag}")).count(), 1, "one {tag} without attributes");
            assert!(PAGE.contains(&format!("<{tag}>")));
        }
        // The name of SVG's elements, which is never fetched.
        let page = PAGE.replace("\"http://www.w3.org/2000/svg\"", "");
        for forbidden in [
            "http:",
            "https:",
            "//cdn",
            "innerHTML",
            "outerHTML",
            "insertAdjacent",
            "document.write",
            "eval(",
            " style=\"",
            "onclick=",
            "onload=",
        ] {
            assert!(!page.contains(forbidden), "the page must not contain {forbidden}");
        }
    }
}
