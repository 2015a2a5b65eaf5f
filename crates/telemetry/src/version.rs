//! The version of this build.

use std::sync::LazyLock;

/// Text of `--version`: the package version and, in a release, the git commit. scripts/release.sh and the Dockerfile pass the
/// commit in `GIT_COMMIT`; a build that asked git would start anew at each commit.
pub fn version() -> &'static str {
    static VERSION: LazyLock<String> = LazyLock::new(|| match option_env!("GIT_COMMIT") {
        Some(commit) if !commit.is_empty() => format!("{} ({commit})", env!("CARGO_PKG_VERSION")),
        _ => env!("CARGO_PKG_VERSION").to_owned(),
    });
    &VERSION
}
