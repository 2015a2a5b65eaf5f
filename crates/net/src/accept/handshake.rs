//! From an accepted socket to a connection that owns a session: PROXY header, TLS, WebSocket, CONNECT.
//!
//! Everything here runs under one deadline and one of the handshake permits, in the connection's own task, so
//! a slow peer delays nobody.

mod enhanced;
mod form;
mod websocket;
mod wire;

use std::{any::Any, future::poll_fn, net::SocketAddr, pin::pin, sync::Arc, task::Poll, time::Duration};

use broker::{Charge, ConnectionInfo, Event, EventKind, MemoryKind, OpenRequest, Turn};
use bytes::Bytes;
use codec::{Connect, Packet, reason};
use edge::{
    door::{ConnectionPermit, PendingConnection},
    tls::CertificateId,
};
use gateway_core::{Peer, clock, info_of_peer, log_limits::LineKind};
use links::{GatewayLink, RelayedDevice};
use session::{Accepted, ConnectPolicy, ConnectRefused, Enhanced, Gate, Inbound, evaluate_connect};
use tokio::net::TcpStream;
use tracing::debug;

use self::{form::fit_connack, wire::Wire};
use super::{
    barred,
    claim::{SessionClaim, assigned_id, will},
    error::HandshakeError,
    listener::{Arrived, IncomingSocket, ListenerContext, count_refusal},
    relayed::RelayedArrival,
    unauthenticated::UnauthenticatedPlace,
};
#[cfg(feature = "quic")]
use crate::quic::FirstPacket;
use crate::{
    NetShared,
    connection::{
        Connection,
        ending::finish_alone,
        limiter::Limiter,
        lingering::{LONGEST, Remains},
        reauthentication::Reauthentication,
        relaying::Relaying,
    },
    counters::count,
    homes::HomeWay,
    layers::{LayerError, Layers, layered::Io, socket::Socket},
    shared::Entering,
    timers, wheel,
};
use auth::{
    AuthorizationRequest, Credentials, Denied, NoDecision, Permissions, ProvedIdentity, SecretBytes, Subject,
    grant_held,
};
use device::{Device, Link, Reception, SocketWriter, flush};

/// As the broker keeps it.
type KeptIdentity = Option<Arc<dyn Any + Send + Sync>>;

/// The handshake of one socket under its deadline; `None` if there is no connection. Holds the place among handshakes
/// until then, and loses it to another if it is silent for too long.
pub(crate) async fn run(
    incoming: IncomingSocket,
    shared: Arc<NetShared>,
) -> Option<(EstablishedClient, ConnectionPermit)> {
    let IncomingSocket { stream, mut peer, listener, mut permit, pending } = incoming;
    let (began, deadline) = (clock::now(), shared.limits.connect_timeout.0);
    let place = shared.unauthenticated.enter(listener.address_of(peer));
    let establish = async {
        // Boxed: it would be in here more than once.
        let establish =
            Box::pin(establish(stream, &mut peer, &listener, &mut permit, &pending, shared, &place));
        tokio::select! {
            biased;
            () = place.lost() => Err(HandshakeError::Crowded.into()),
            established = establish => established,
        }
    };
    let established = pending.attend(pin!(timers::timeout(deadline, establish))).await;
    drop(place);
    let listener = listener.name.as_str();
    match established {
        Some(Ok(Ok(client))) => {
            drop(pending);
            return Some((client, permit));
        }
        Some(Ok(Err(HandshakeFailure { error, remains }))) => {
            error.log(peer, listener);
            if let Some(remains) = remains {
                // A stranger has no more time than all handshakes have, and leaves for others as the silent do.
                pending.answered();
                let passed = Duration::from_millis(clock::now().0.saturating_sub(began.0));
                let lingering = remains.linger(LONGEST.min(deadline.saturating_sub(passed)));
                pending.attend(Box::pin(lingering).as_mut()).await;
            }
        }
        Some(Err(_)) => {
            count(|c| c.handshake_timeout.add(1));
            info_of_peer!(LineKind::Handshake, peer.ip(), %peer, listener, "handshake timed out");
        }
        None => {
            count(|c| c.refused_silent.add(1));
            debug!(%peer, listener, "silent handshake closed for another");
        }
    }
    None
}

/// Error that left a socket without a connection, and the remains of the socket if its peer was told.
struct HandshakeFailure {
    error: HandshakeError,
    remains: Option<Remains>,
}

impl From<HandshakeError> for HandshakeFailure {
    fn from(error: HandshakeError) -> Self {
        Self { error, remains: None }
    }
}

/// A client whose CONNECT was accepted.
pub(crate) enum EstablishedClient {
    /// Owns a session.
    Here(Connection),
    /// Has its session at another gateway.
    Elsewhere(Box<Relaying>),
}

/// `peer` becomes the one that a proxy names.
async fn establish(
    stream: Arrived,
    peer: &mut Peer,
    listener: &ListenerContext,
    permit: &mut ConnectionPermit,
    pending: &PendingConnection,
    shared: Arc<NetShared>,
    place: &UnauthenticatedPlace,
) -> Result<EstablishedClient, HandshakeFailure> {
    let mut relayed = None;
    let socket = match stream {
        Arrived::Stream(stream) => TcpStream::from_std(stream).map_err(HandshakeError::from)?.into(),
        #[cfg(feature = "quic")]
        Arrived::Quic(call) => Box::pin(answer(*call, *peer, permit, pending, &shared)).await?,
        Arrived::Relayed(arrival) => {
            let RelayedArrival { device, stream } = *arrival;
            relayed = Some(device);
            Socket::Relayed(Box::new(stream))
        }
    };
    let (layers, plain) = (Layers::default(), Vec::new());
    let mut wire = Wire { socket, pending, place, layers, plain, relayed, presented: 0, told: false };
    // Boxed, so that a socket that waits for its CONNECT holds little.
    let max = shared.limits.max_connect_size.0.min(shared.limits.max_packet_size.0);
    let connect = match Box::pin(wire.put_on_layers(listener, permit, &shared)).await {
        Ok(named) => {
            *peer = named.map_or(*peer, Peer::from);
            wire.read_connect(max).await
        }
        Err(error) => Err(error),
    };
    let connect = match connect {
        Ok(connect) => connect,
        Err(error) => {
            let error = wire.with_size(error, &shared.limits);
            Box::pin(wire.close_websocket(&error)).await;
            return Err(wire.fail(error));
        }
    };
    if connect.auth_method.is_none() {
        // The rest of the handshake waits for the gateway alone.
        pending.heard();
    }
    Box::pin(conclude(wire, connect, *peer, listener, shared)).await
}

/// The handshake of QUIC, up to the client's stream.
#[cfg(feature = "quic")]
async fn answer(
    call: FirstPacket,
    peer: Peer,
    permit: &mut ConnectionPermit,
    pending: &PendingConnection,
    shared: &NetShared,
) -> Result<Socket, HandshakeError> {
    let proved = call.is_proved();
    let shaken = call.shake(shared.broker.account()).await;
    edge::counters::count(|c| {
        if shaken.is_ok() { c.handshake_tls_ok.add(1) } else { c.handshake_tls_failed.add(1) }
    });
    let shaken = shaken?;
    pending.spoke();
    if !proved {
        name(permit, pending, peer.into(), shared)?;
    }
    let stream = shaken.stream().await?;
    pending.spoke();
    Ok(Socket::Quic(Box::new(stream)))
}

/// Holds the address, which is known only now, against bans and its limits.
fn name(
    permit: &mut ConnectionPermit,
    pending: &PendingConnection,
    peer: SocketAddr,
    shared: &NetShared,
) -> Result<(), HandshakeError> {
    let barred = barred::at_door(peer.into(), shared);
    let named = barred.map_or_else(|| permit.named(pending, peer.into()), Err);
    named.map_err(|refusal| {
        count_refusal(refusal);
        HandshakeError::Address(refusal)
    })
}

async fn conclude(
    mut wire: Wire<'_>,
    connect: Connect,
    peer: Peer,
    listener: &ListenerContext,
    shared: Arc<NetShared>,
) -> Result<EstablishedClient, HandshakeFailure> {
    let mut admitted = match admit(&connect, &mut wire, peer, listener, &shared).await {
        Ok(admitted) => admitted,
        Err(NotAdmitted::Refused(ConnectRefused(code))) => {
            count(|c| c.refused_connect.add(1));
            return Err(wire.refuse(&connect, code).await);
        }
        Err(NotAdmitted::Failed(error)) => return Err(wire.fail(error)),
    };
    wire.pending.heard();
    let home = match shared.way(admitted.accepted.client_id.as_str(), wire.relayed.as_ref()) {
        HomeWay::Here(home) => home,
        HomeWay::Elsewhere(number, link) => {
            let relaying =
                Box::pin(relay(wire, connect, admitted, peer, listener, (number, &link), &shared)).await?;
            return Ok(EstablishedClient::Elsewhere(Box::new(relaying)));
        }
        HomeWay::Nobody => {
            count(|c| c.refused_connect.add(1));
            return Err(wire.refuse(&connect, Some(reason::SERVER_UNAVAILABLE)).await);
        }
    };
    // The bans of a home are its own.
    if !Arc::ptr_eq(&home, &shared)
        && let Err(ConnectRefused(code)) = barred::at_home(
            &connect,
            &admitted.accepted,
            admitted.certificate.as_ref(),
            admitted.permissions.principal(),
            peer,
            &home,
        )
    {
        count(|c| c.refused_connect.add(1));
        return Err(wire.refuse(&connect, code).await);
    }
    if !fit_connack(&mut admitted.accepted.connack, &admitted.accepted.link) {
        count(|c| c.refused_connect.add(1));
        return Err(wire.refuse(&connect, Some(reason::PACKET_TOO_LARGE)).await);
    }
    // A client that is let in before the gateway stops is told by the DISCONNECT that all connections get.
    let Some(entering) = home.enter() else {
        count(|c| c.refused_connect.add(1));
        return Err(wire.refuse(&connect, Some(reason::SERVER_UNAVAILABLE)).await);
    };
    let connection = open(wire, connect, admitted, peer, listener, &home, entering).await?;
    Ok(EstablishedClient::Here(connection))
}

/// Hands an admitted client to the gateway that has its home, which opens the session and answers.
async fn relay(
    mut wire: Wire<'_>,
    connect: Connect,
    admitted: AdmittedClient,
    peer: Peer,
    listener: &ListenerContext,
    (home, link): (u32, &GatewayLink),
    shared: &NetShared,
) -> Result<Relaying, HandshakeFailure> {
    let AdmittedClient { accepted, permissions, .. } = admitted;
    let client_id = accepted.client_id.as_str();
    let mut device = RelayedDevice::new(client_id, &listener.name, peer, permissions.principal());
    device.certificate = wire.certificate().unwrap_or_default().into();
    device.auth_data = accepted.connack.auth_data;
    device.home = home;
    let opened = timers::run_within(|| link.relay(&device)).await;
    let stream = match opened {
        Ok(stream) => stream,
        Err(error) => {
            count(|c| c.refused_connect.add(1));
            info_of_peer!(LineKind::Handshake, peer.ip(), %peer, client_id, %error, "device not relayed");
            return Err(wire.refuse(&connect, Some(reason::SERVER_UNAVAILABLE)).await);
        }
    };
    debug!(%peer, client_id, listener = &**listener.name, "relayed");
    let (mut connect, mut hello) = (connect, Vec::new());
    // Nobody asks for them again.
    (connect.password, connect.auth_data) = (None, None);
    let protocol = connect.protocol;
    codec::encode(&Packet::Connect(Box::new(connect)), protocol, &mut hello);
    hello.append(&mut wire.plain);
    wire.layers.wire.drain(..wire.layers.sent);
    wire.layers.sent = 0;
    Ok(Relaying::new(wire.socket, wire.layers, stream, hello, shared))
}

/// A CONNECT that is accepted, and who it is.
struct AdmittedClient {
    accepted: Accepted,
    certificate: Option<CertificateId>,
    permissions: Permissions,
    identity: KeptIdentity,
    /// If it named a method of enhanced authentication.
    enhanced: Option<Enhanced>,
}

/// Reason to admit no connection.
enum NotAdmitted {
    /// The client is told.
    Refused(ConnectRefused),
    /// The client cannot be told.
    Failed(HandshakeError),
}

impl NotAdmitted {
    fn refused(code: u8) -> Self {
        Self::Refused(ConnectRefused(Some(code)))
    }
}

impl From<ConnectRefused> for NotAdmitted {
    fn from(refused: ConnectRefused) -> Self {
        Self::Refused(refused)
    }
}

impl From<HandshakeError> for NotAdmitted {
    fn from(error: HandshakeError) -> Self {
        Self::Failed(error)
    }
}

async fn admit(
    connect: &Connect,
    wire: &mut Wire<'_>,
    peer: Peer,
    listener: &ListenerContext,
    shared: &Arc<NetShared>,
) -> Result<AdmittedClient, NotAdmitted> {
    // A bridge is told the mark of the home to which it comes.
    let named = wire.relayed.as_ref().map_or(&*connect.client_id, |device| &*device.client_id);
    let home = match shared.way(named, wire.relayed.as_ref()) {
        HomeWay::Here(home) => Some(home),
        _ => None,
    };
    let mut accepted = evaluate_connect(
        connect,
        &ConnectPolicy {
            limits: &shared.limits,
            non_broker: shared.broker.is_non_broker(),
            assigned_id: &|| {
                wire.relayed.as_ref().map_or_else(assigned_id, |device| device.client_id.clone())
            },
            response_information: &shared.response_information,
            bridge_mark: home.as_ref().map_or("", |home| &home.bridge_mark),
        },
    )?;
    let certificate = match &wire.relayed {
        Some(device) => Some(device.certificate.to_vec()).filter(|der| !der.is_empty()),
        None => wire.certificate(),
    };
    let certificate_id = certificate.as_deref().and_then(CertificateId::of);
    let credentials = Credentials {
        client_id: accepted.client_id.to_string(),
        username: connect.username.clone(),
        password: connect.password.clone().map(SecretBytes),
        certificate,
        peer: peer.to_string(),
        listener: Arc::clone(&listener.name),
    };
    barred::at_connect(connect, &accepted, certificate_id.as_ref(), peer, shared)?;
    wire.present(held_by(connect) + shared.auth.footprint(&credentials))?;
    let mut enhanced = None;
    let decided = match &connect.auth_method {
        _ if wire.relayed.is_some() => {
            let device = wire.relayed.as_ref();
            let principal = device.and_then(RelayedDevice::principal).ok_or(Denied::NotAuthorized);
            accepted.connack.auth_data = device.and_then(|device| device.auth_data.clone());
            enhanced = connect.auth_method.as_deref().map(Enhanced::connected);
            principal.map(Arc::new)
        }
        None => timers::run_within(|| shared.auth.authenticate(credentials)).await,
        Some(method) => {
            let proved = wire.converse(connect, method, credentials, shared).await?;
            accepted.connack.auth_data = proved.data;
            enhanced = Some(proved.enhanced);
            proved.principal
        }
    };
    // Before the session of that client id is touched.
    let decided = decided.and_then(|principal| {
        let authority = shared.authority.as_ref();
        let client_id = accepted.client_id.as_str();
        let subject = Subject { client_id, listener: &listener.name, principal: &principal };
        let allowed = authority.is_none_or(|authority| authority.may_connect(&subject));
        if allowed { Ok(principal) } else { Err(Denied::ClientId) }
    });
    match decided {
        Ok(principal) => {
            barred::admitted(connect, &accepted, &principal, peer, shared)?;
            wire.present(held_by(connect) + principal.bytes())?;
            let Ok(identity) =
                ProvedIdentity::kept(&principal, certificate_id.clone(), shared.broker.account())
            else {
                return Err(NotAdmitted::refused(reason::QUOTA_EXCEEDED));
            };
            let permissions = Permissions::new(principal);
            if may_leave_will(connect, &permissions, &accepted, listener, shared).await {
                Ok(AdmittedClient { accepted, certificate: certificate_id, permissions, identity, enhanced })
            } else {
                Err(NotAdmitted::refused(reason::NOT_AUTHORIZED))
            }
        }
        Err(denied) => {
            count(|c| match denied {
                Denied::BadCredentials => c.auth_failed.add(1),
                Denied::NotAuthorized => c.auth_not_authorized.add(1),
                Denied::ClientId => c.auth_client_id.add(1),
                Denied::Busy => c.auth_busy.add(1),
                Denied::Unavailable => c.auth_unavailable.add(1),
            });
            if denied == Denied::BadCredentials {
                barred::failed(connect, &accepted, peer, shared);
            }
            let client_id = accepted.client_id;
            shared.emit(Event { at: clock::now(), client_id, kind: EventKind::AuthFailed });
            Err(NotAdmitted::refused(match denied {
                Denied::BadCredentials => reason::BAD_USER_NAME_OR_PASSWORD,
                Denied::NotAuthorized => reason::NOT_AUTHORIZED,
                Denied::ClientId => reason::CLIENT_IDENTIFIER_NOT_VALID,
                Denied::Busy => reason::SERVER_BUSY,
                Denied::Unavailable => reason::SERVER_UNAVAILABLE,
            }))
        }
    }
}

/// Returns whether the client's will, if there is one, is allowed by the rules or, where they are silent, by the user's
/// service.
async fn may_leave_will(
    connect: &Connect,
    permissions: &Permissions,
    accepted: &Accepted,
    listener: &ListenerContext,
    shared: &NetShared,
) -> bool {
    let (Some(will), Some(authority)) = (&connect.will, &shared.authority) else { return true };
    let subject = permissions.subject(accepted.client_id.as_str(), &listener.name);
    let grant = authority.publish(&subject, &will.topic);
    let allowed = match authority.authorizer().filter(|_| grant.is_unnamed()) {
        None => grant.permits(will.qos, will.retain, will.payload.len()).is_ok(),
        Some(authorizer) => {
            let authorization_request = AuthorizationRequest::Publish {
                topic: will.topic.as_str().into(),
                qos: will.qos,
                retain: will.retain,
            };
            authorizer.may(&subject, &authorization_request).await.unwrap_or(false)
        }
    };
    broker::counters::count(|c| c.wills_denied.add(u64::from(!allowed)));
    allowed
}

async fn open(
    mut wire: Wire<'_>,
    connect: Connect,
    admitted: AdmittedClient,
    peer: Peer,
    listener: &ListenerContext,
    shared: &Arc<NetShared>,
    entering: Entering<'_>,
) -> Result<Connection, HandshakeFailure> {
    let now = clock::now();
    let AdmittedClient { accepted, permissions, identity, enhanced, .. } = admitted;
    // The device counts for its proved user name, or else its client id, and for its tenant, or else the listener.
    let tenant = permissions.tenant().unwrap_or(&listener.name);
    let quota_holders =
        shared.broker.quota_holders(permissions.username(), accepted.client_id.as_str(), tenant);
    let Accepted { client_id, clean_start, expiry, keep_alive, link, mut connack } = accepted;
    let info = ConnectionInfo {
        peer,
        listener: Arc::clone(&listener.name),
        protocol: connect.protocol,
        keep_alive,
        username: permissions.username().or(connect.username.as_deref()).map(Box::from),
        identity,
    };
    if expiry > 0 && !shared.broker.can_keep(client_id.as_str()) {
        drop(entering);
        count(|c| c.refused_connect.add(1));
        return Err(wire.refuse(&connect, Some(reason::SERVER_UNAVAILABLE)).await);
    }
    let author = || {
        let authority = shared.authority.as_ref()?;
        let subject = permissions.subject(client_id.as_str(), &listener.name);
        let unnamed = |topic: &str| authority.publish(&subject, topic).is_unnamed();
        // The will was allowed above: by the service if no rule names its topic.
        let by_service = connect.will.as_ref().is_some_and(|will| unnamed(&will.topic));
        Some(permissions.author(&listener.name, by_service))
    };
    let will = will(&connect, &client_id, shared, author, now)
        .ok()
        .filter(|_| shared.broker.has_room_for(&client_id, connect.username.as_deref()));
    let Some(will) = will else {
        drop(entering);
        count(|c| c.refused_connect.add(1));
        return Err(wire.refuse(&connect, Some(reason::QUOTA_EXCEEDED)).await);
    };
    let limiter = Limiter::new(&shared.limits, &quota_holders, now);
    let room = limiter.as_ref().and_then(|limiter| limiter.room());
    let request =
        OpenRequest { client_id: client_id.clone(), clean_start, expiry, will, info, quota_holders, now };
    let mut turn = Turn::default();
    let opened = shared.broker.open(request, shared.session_maker(), &mut turn).await;
    turn.flush();
    let mut opened = match opened {
        Ok(opened) => opened,
        Err(exceeded) => {
            drop(entering);
            count(|c| c.refused_connect.add(1));
            info_of_peer!(
                LineKind::Limit, peer.ip(), %peer, %client_id, listener = &**listener.name, quota = %exceeded,
                "CONNECT over a quota"
            );
            return Err(wire.refuse(&connect, Some(reason::QUOTA_EXCEEDED)).await);
        }
    };
    finish_alone(opened.cleanup.take());
    if opened.took_over {
        info_of_peer!(
            LineKind::Takeover, (peer.ip(), client_id.as_str()), %peer, %client_id, listener = &**listener.name,
            "session taken over, its earlier connection ends"
        );
    }
    let session = Some(Arc::clone(&opened.session));
    let claim = SessionClaim { session, epoch: opened.epoch, fresh: !opened.present, shared };
    let session = Arc::clone(&opened.session);
    let Ok(device) = opened.session.into_any().downcast::<Device>() else {
        return Err(HandshakeError::Superseded.into());
    };
    // Neither a disk that hangs nor a service that does not answer keeps the gateway from stopping.
    let ready = async {
        if !device.is_written(opened.commit).await {
            return None;
        }
        let is_barred = !shared.broker.lease().is_open();
        if is_barred && !device.is_written(Some(shared.broker.lease().wait_for(None))).await {
            return None;
        }
        if !opened.present {
            return Some(Vec::new());
        }
        // Boxed: few have anything to ask.
        Box::pin(ask_again(&permissions, client_id.as_str(), listener, shared)).await.ok()
    };
    let ready = tokio::select! {
        biased;
        ready = ready => ready,
        () = shared.until_shut() => None,
    };
    let Some(granted) = ready else {
        // Before the answer, for which the peer may let us wait.
        drop(claim);
        drop(entering);
        count(|c| c.refused_connect.add(1));
        return Err(wire.refuse(&connect, Some(reason::SERVER_UNAVAILABLE)).await);
    };
    connack.session_present = opened.present;
    let mut hello = Vec::with_capacity(64);
    codec::encode(&Packet::ConnAck(Box::new(connack)), connect.protocol, &mut hello);

    let waker = poll_fn(|cx| Poll::Ready(cx.waker().clone())).await;
    wire.layers.wire.drain(..wire.layers.sent);
    wire.layers.sent = 0;
    // If a rate limits sending, only the connection's own task sends.
    let (io, writer) = match wire.socket {
        Socket::Stream(read, write) if wire.layers.is_plain() && room.is_none() => {
            (Io::Plain(read), SocketWriter::Direct(Some(write)))
        }
        socket => {
            let charge = Charge::new(shared.broker.account(), MemoryKind::Replies);
            (Io::layered(socket, wire.layers, charge), SocketWriter::Owner)
        }
    };
    claim.keep();
    device.heard(opened.epoch, wheel::now());
    let gate = shared.authority.as_ref().map(|authority| {
        let account = shared.broker.account();
        let mut gate = permissions.gate(authority, client_id.as_str(), &listener.name, account);
        grant_held(&mut gate, &granted, peer, &client_id, &listener.name);
        Box::new(gate) as Box<dyn Gate>
    });
    let owner = Link::new(opened.epoch, waker, writer);
    let attached = device.attach(owner, link, Reception { gate, room }, &hello, now);
    let Ok(replaced) = attached else { return Err(HandshakeError::Superseded.into()) };
    let expires = permissions.expires();
    let mut connection = Connection::new(
        shared,
        Arc::clone(&device),
        opened.epoch,
        io,
        Inbound::new(connect.protocol, expiry).for_client(&connect),
        permissions,
        listener.durability,
        wire.plain,
        limiter,
    );
    if let Some(old) = replaced {
        flush::end_replaced(&device, old, connection.disconnect_bytes(reason::SESSION_TAKEN_OVER));
    }
    if let Some(enhanced) = enhanced {
        connection.rare().reauthentication =
            Some(Box::new(Reauthentication::new(enhanced, shared.broker.account())));
    }
    if let Some(at) = expires {
        connection.expire_at(at, now);
    }
    count(|c| c.connections_established.add(1));
    wheel::watch(&device, opened.epoch, keep_alive);
    flush::flush(&device);
    if shared.broker.online(&session, now, &mut turn) {
        connection.rare().group_queues = true;
    }
    turn.flush();
    debug!(%peer, %client_id, listener = &*listener.name, protocol = ?connect.protocol, "connected");
    shared.check_connection(&*session, opened.epoch);
    Ok(connection)
}

/// Asks the user's service about the subscriptions of a resumed session that no rule names; returns the allowed ones.
async fn ask_again(
    permissions: &Permissions,
    client_id: &str,
    listener: &ListenerContext,
    shared: &NetShared,
) -> Result<Vec<Box<str>>, NoDecision> {
    let Some(authority) = shared.authority.as_ref().filter(|authority| authority.authorizer().is_some())
    else {
        return Ok(Vec::new());
    };
    let filters = shared.broker.subscriptions(client_id, usize::MAX).unwrap_or_default();
    permissions.ask_again(authority, client_id, &listener.name, filters).await
}

/// Bytes of a CONNECT as it was decoded.
fn held_by(connect: &Connect) -> usize {
    let text = |text: &Option<String>| text.as_ref().map_or(0, String::len);
    let data = |data: &Option<Bytes>| data.as_ref().map_or(0, Bytes::len);
    let will = connect.will.as_ref().map_or(0, |will| {
        let properties = will.properties.as_ref().map_or(0, |properties| properties.cost());
        will.topic.len() + will.payload.len() + properties
    });
    let pairs =
        connect.user.iter().map(|(name, value)| size_of::<(String, String)>() + name.len() + value.len());
    connect.client_id.len()
        + pairs.sum::<usize>()
        + text(&connect.username)
        + data(&connect.password)
        + text(&connect.auth_method)
        + data(&connect.auth_data)
        + will
}
