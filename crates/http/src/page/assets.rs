//! The style sheet, the script and the icon: in the binary, under names with their hash, so that browsers keep them for good.

use std::sync::LazyLock;

use aws_lc_rs::digest::{SHA256, digest};
use axum::{
    extract::Path,
    http::{
        StatusCode,
        header::{CACHE_CONTROL, CONTENT_TYPE},
    },
    response::{IntoResponse, Response},
};

/// One file.
pub(super) struct Asset {
    name: String,
    kind: &'static str,
    text: &'static str,
}

impl Asset {
    fn new(stem: &str, ending: &str, kind: &'static str, text: &'static str) -> Self {
        let hash = digest(&SHA256, text.as_bytes());
        let hash: String = hash.as_ref().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        Self { name: format!("{stem}-{hash}.{ending}"), kind, text }
    }

    /// Returns the path under which the asset is served.
    pub(super) fn path(&self) -> String {
        format!("/page/assets/{}", self.name)
    }
}

pub(super) static STYLE: LazyLock<Asset> =
    LazyLock::new(|| Asset::new("style", "css", "text/css; charset=utf-8", include_str!("style.css")));
pub(super) static SCRIPT: LazyLock<Asset> =
    LazyLock::new(|| Asset::new("page", "js", "text/javascript; charset=utf-8", include_str!("page.js")));
pub(super) static ICON: LazyLock<Asset> =
    LazyLock::new(|| Asset::new("icon", "svg", "image/svg+xml", include_str!("icon.svg")));

/// The file of this name.
pub(super) async fn serve(Path(name): Path<String>) -> Response {
    let all: [&Asset; 3] = [&STYLE, &SCRIPT, &ICON];
    match all.into_iter().find(|asset| asset.name == name) {
        Some(asset) => {
            let headers =
                [(CONTENT_TYPE, asset.kind), (CACHE_CONTROL, "public, max-age=31536000, immutable")];
            (headers, asset.text).into_response()
        }
        None => (StatusCode::NOT_FOUND, "not found\n").into_response(),
    }
}
