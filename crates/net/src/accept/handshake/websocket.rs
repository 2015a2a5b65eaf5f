//! WebSocket during the handshake: the upgrade, and the end of one that did not come to a CONNECT.

use tokio::io::AsyncWriteExt as _;

use super::{HandshakeError, LayerError, Wire};
use crate::{
    accept::listener::WebSocketEntry,
    layers::websocket::{Frames, WebSocketUpgrade, upgrade},
};

impl Wire<'_> {
    /// Answers the request that opens a WebSocket, and reads on in frames.
    pub(super) async fn upgrade(
        &mut self,
        entry: &WebSocketEntry,
        this_machine: bool,
    ) -> Result<(), HandshakeError> {
        let (answer, go) = loop {
            match upgrade(&self.plain, &entry.path, &entry.origins, this_machine) {
                WebSocketUpgrade::Partial => self.fill().await?,
                WebSocketUpgrade::Answer(answer, go) => break (answer, go),
            }
        };
        self.layers.seal_raw(&[&answer])?;
        self.flush().await?;
        let Some(len) = go else { return Err(HandshakeError::Upgrade) };
        let early = self.plain.split_off(len);
        self.plain.clear();
        let mut frames = Box::new(Frames::default());
        let mut replies = Vec::new();
        let opened = frames.open(&early, &mut self.plain, &mut replies);
        self.layers.websocket = Some(frames);
        self.layers.seal_raw(&[&replies])?;
        Ok(opened.map_err(LayerError::from)?)
    }

    /// Ends a WebSocket that did not come to a CONNECT, by the Close frame for `error`.
    pub(super) async fn close_websocket(&mut self, error: &HandshakeError) {
        if self.layers.websocket.is_none() || self.told {
            return;
        }
        self.layers.close(error.reason_code());
        if self.flush().await.is_ok() {
            let _ = self.socket.shutdown().await;
            self.told = true;
        }
    }
}
