//! Answers of a home that goes to another gateway while they are on their way.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use tokio::sync::watch;

use crate::{BodyError, LinkBody};

/// A body that breaks off with an error once `gone` holds true.
pub fn until_gone(body: LinkBody, mut gone: watch::Receiver<bool>) -> LinkBody {
    let gone = Box::pin(async move {
        let _ = gone.wait_for(|gone| *gone).await;
    });
    LinkBody::new(UntilGone { body, gone })
}

struct UntilGone {
    body: LinkBody,
    gone: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl Body for UntilGone {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if self.gone.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err("the home is another gateway's".into())));
        }
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
