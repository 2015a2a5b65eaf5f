//! Devices with links, for tests.

use std::{
    future::Future,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll, Wake, Waker},
};

use broker::{Broker, BrokerConfig, ConnectionInfo, OpenRequest, Turn};
use gateway_core::{ClientId, Protocol, Timestamp, limits::Limits};
use session::LinkParams;
use tokio::net::{TcpListener, TcpStream, tcp::OwnedReadHalf};

use super::{Device, DeviceContext, Link, Reception, SocketWriter, session_maker};

/// Time at which all of it happens.
pub const NOW: Timestamp = Timestamp(1_000);

/// Counts how often a connection's task is woken.
#[derive(Default)]
pub struct Wakes(
    /// Wakes so far.
    pub AtomicUsize,
);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
    }
}

/// The devices of a gateway with these limits.
pub fn context(limits: Limits) -> Arc<DeviceContext> {
    DeviceContext::new(Broker::new(BrokerConfig { limits: Arc::new(limits), ..BrokerConfig::default() }))
}

/// Does the work of a CONNECT before it attaches; returns the device and the epoch.
pub fn open(context: &Arc<DeviceContext>, clean_start: bool) -> (Arc<Device>, u32) {
    open_as(context, "c", clean_start)
}

/// As [`open`], for this client.
pub fn open_as(context: &Arc<DeviceContext>, client_id: &str, clean_start: bool) -> (Arc<Device>, u32) {
    let info = ConnectionInfo {
        peer: std::net::SocketAddr::from(([127, 0, 0, 1], 1)).into(),
        listener: Arc::new("test".to_owned()),
        protocol: Protocol::V5,
        keep_alive: 0,
        username: None,
        identity: None,
    };
    let request = OpenRequest {
        client_id: ClientId::new(client_id),
        clean_start,
        expiry: 60,
        will: None,
        info,
        quota_holders: Default::default(),
        now: NOW,
    };
    let mut turn = Turn::default();
    let opening = context.broker.open(request, session_maker(context), &mut turn);
    let Poll::Ready(opened) = pin!(opening).poll(&mut Context::from_waker(Waker::noop())) else {
        panic!("an open that waits")
    };
    let opened = opened.expect("no quotas");
    let device = opened.session.into_any().downcast::<Device>().expect("a device");
    (device, opened.epoch)
}

/// Attaches a link; false if the session is another connection's.
pub fn attach(device: &Device, epoch: u32, waker: &Arc<Wakes>, writer: SocketWriter) -> bool {
    attach_with(device, epoch, waker, writer, Reception::default())
}

/// As [`attach`], with what the client may get.
pub fn attach_with(
    device: &Device,
    epoch: u32,
    waker: &Arc<Wakes>,
    writer: SocketWriter,
    reception: Reception,
) -> bool {
    let params = LinkParams {
        protocol: Protocol::V5,
        receive_maximum: 10,
        maximum_packet_size: u32::MAX,
        topic_alias_maximum: 0,
    };
    let link = Link::new(epoch, Waker::from(Arc::clone(waker)), writer);
    device.attach(link, params, reception, b"connack", NOW).is_ok()
}

/// A socket of the loopback with its writer, the other half and the peer.
pub async fn socket() -> (SocketWriter, OwnedReadHalf, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let peer = TcpStream::connect(listener.local_addr().expect("address")).await.expect("connect");
    let (read, write) = listener.accept().await.expect("accept").0.into_split();
    // Before the runtime has seen that, no write is tried.
    write.writable().await.expect("writable");
    (SocketWriter::Direct(Some(write)), read, peer)
}
