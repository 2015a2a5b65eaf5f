//! Requests as they arrive, within a size and a time, on the memory account.

use axum::body::Body;
use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::Body as _;

use super::{JsonOptions, problem::HttpProblem};
use crate::{
    counters::count,
    held::{HeldBytes, NoMemory},
};

impl From<NoMemory> for HttpProblem {
    fn from(NoMemory: NoMemory) -> Self {
        Self::no_memory()
    }
}

/// Bytes of a body that have a time of their own.
const STEP: usize = 64 << 10;
/// All of a request's body.
pub(super) async fn read(
    body: Body,
    options: &JsonOptions,
    held: &mut HeldBytes,
) -> Result<Bytes, HttpProblem> {
    let most = options.max_body;
    let announced = body.size_hint().lower();
    if announced > most as u64 {
        count(|c| c.http_bodies_large.add(1));
        return Err(HttpProblem::too_large(most));
    }
    let mut body = body;
    let mut whole = Vec::new();
    let mut ended = false;
    while !ended {
        let step = whole.len() + STEP;
        let arrive = async {
            while whole.len() < step {
                let Some(frame) = body.frame().await else {
                    ended = true;
                    break;
                };
                let frame = frame.map_err(|_| HttpProblem::incomplete())?;
                let Ok(data) = frame.into_data() else { continue };
                if whole.len() + data.len() > most {
                    count(|c| c.http_bodies_large.add(1));
                    return Err(HttpProblem::too_large(most));
                }
                // A vector doubles.
                held.more(2 * data.len())?;
                whole.extend_from_slice(&data);
            }
            Ok(())
        };
        match tokio::time::timeout(options.body_timeout, arrive).await {
            Ok(arrived) => arrived?,
            Err(_) => {
                count(|c| c.http_bodies_late.add(1));
                return Err(HttpProblem::late());
            }
        }
    }
    Ok(whole.into())
}
