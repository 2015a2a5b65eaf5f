//! Lists, of which pages are read as they are needed.

use std::{collections::VecDeque, fmt, future::Future, pin::Pin};

use gateway_api::gateway::v1::{
    Command, Device, LatestValue, ListCommandsRequest, ListDevicesRequest, ListLatestRequest,
};

use crate::{Client, Error};

/// The items of a page, and the token of the next one, empty at the end.
type Page<T> = Pin<Box<dyn Future<Output = Result<(Vec<T>, String), Error>> + Send>>;

/// A list that is read page by page, each when the one before it is used up.
pub struct Pages<T> {
    read: Box<dyn Fn(String) -> Page<T> + Send>,
    items: VecDeque<T>,
    /// Of the next page; none behind the last.
    token: Option<String>,
}

impl<T> fmt::Debug for Pages<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pages").field("read_ahead", &self.items.len()).finish_non_exhaustive()
    }
}

impl<T> Pages<T> {
    fn from(token: String, read: impl Fn(String) -> Page<T> + Send + 'static) -> Self {
        Self { read: Box::new(read), items: VecDeque::new(), token: Some(token) }
    }

    /// The next item; none at the end. Safe to cancel, and to call again after an error.
    ///
    /// # Errors
    /// What the gateway refuses, and the last failure when the patience is over.
    pub async fn next(&mut self) -> Result<Option<T>, Error> {
        loop {
            if let Some(item) = self.items.pop_front() {
                return Ok(Some(item));
            }
            let Some(token) = self.token.clone() else { return Ok(None) };
            let (items, next) = (self.read)(token).await?;
            self.items.extend(items);
            self.token = Some(next).filter(|token| !token.is_empty());
        }
    }

    /// All that is left, in memory.
    ///
    /// # Errors
    /// As [`Self::next`].
    pub async fn all(mut self) -> Result<Vec<T>, Error> {
        let mut all = Vec::new();
        while let Some(item) = self.next().await? {
            all.push(item);
        }
        Ok(all)
    }
}

macro_rules! lists {
    ($($(#[$doc:meta])* $name:ident($request:ident) of $item:ident: $service:ident, $items:ident;)*) => {
        impl Client {
            $($(#[$doc])*
            pub fn $name(&self, request: $request) -> Pages<$item> {
                let client = self.clone();
                Pages::from(request.page_token.clone(), move |page_token| {
                    let (client, request) = (client.clone(), $request { page_token, ..request.clone() });
                    Box::pin(async move {
                        let page = || {
                            let (mut service, request) = (client.$service(), request.clone());
                            async move { Ok(service.$name(request).await?.into_inner()) }
                        };
                        let page = client.again(page).await?;
                        Ok((page.$items, page.next_page_token))
                    })
                })
            })*
        }
    };
}

lists! {
    /// The devices that have a session, as the request describes them.
    list_devices(ListDevicesRequest) of Device: devices, devices;
    /// Latest values in the order of device and topic.
    list_latest(ListLatestRequest) of LatestValue: state, values;
    /// Stored commands.
    list_commands(ListCommandsRequest) of Command: commands, commands;
}
