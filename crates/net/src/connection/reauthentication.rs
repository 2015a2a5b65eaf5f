//! Authentication once more on a live connection (MQTT 5.0, 4.12.1), for clients whose CONNECT named a method. Everything
//! else goes on meanwhile, under who the client was; when it has proved who it is, it is that from then on.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use access::scram;
use broker::{Account, Charge, CloseReason, Event, EventKind, MemoryKind, Session};
use bytes::Bytes;
use codec::{Packet, reason};
use edge::tls::CertificateId;
use gateway_core::{Effort, QoS, clock, info_of_peer, log_limits::LineKind};
use session::{Enhanced, PresentedAuth};
use tokio::time::Sleep;

use super::{Connection, ending::End};
use crate::{counters::count, layers::layered::Io, local::PacketWork, timers};
use auth::{
    AuthProgress, Authority, Credentials, Denied, Dialogue, NoDecision, Permissions, Principal,
    ProvedIdentity, Subject, abuse::LoginName, grant_held,
};

/// The authenticator's pending answer, with the dialogue to go on with.
type PendingReauthentication =
    Pin<Box<dyn Future<Output = (Box<dyn Dialogue>, Result<AuthProgress, Denied>)> + Send>>;

/// The subscriptions that it allows.
type AskingFilters = Pin<Box<dyn Future<Output = Result<Vec<Box<str>>, NoDecision>> + Send>>;

/// The identity that has been proved, and the subscriptions that the user's service allows it.
struct Granting {
    principal: Arc<Principal>,
    data: Option<Bytes>,
    /// Filters that the service was asked about.
    filters: Vec<(String, QoS)>,
    asking: AskingFilters,
}

/// The authentications of one connection.
pub(crate) struct Reauthentication {
    pub enhanced: Enhanced,
    /// User name that the client has given in the authentication that is under way.
    given_name: Option<Box<str>>,
    /// Waits for the client's next AUTH.
    dialogue: Option<Box<dyn Dialogue>>,
    /// The authenticator's pending answer to the last AUTH.
    answering: Option<PendingReauthentication>,
    granting: Option<Granting>,
    /// Fires when the authentication under way must be over.
    deadline: Option<Pin<Box<Sleep>>>,
    /// The data of the authentication that is under way, on the memory account.
    charge: Charge,
}

impl Reauthentication {
    /// For a connection that has authenticated so.
    pub(crate) fn new(enhanced: Enhanced, account: &Arc<Account>) -> Self {
        let charge = Charge::new(account, MemoryKind::Partial);
        Self {
            enhanced,
            given_name: None,
            dialogue: None,
            answering: None,
            granting: None,
            deadline: None,
            charge,
        }
    }

    /// Charges the client's data until the authentication is over; false if there is no room.
    fn hold(&mut self, data: &Bytes) -> bool {
        self.charge.set(self.charge.bytes() + AuthProgress::FOOTPRINT * data.len())
    }
}

impl Connection {
    fn reauthentication(&mut self) -> Option<&mut Reauthentication> {
        self.rare.as_mut()?.reauthentication.as_deref_mut()
    }

    /// Lets the authenticator look at what the client has presented; [`Self::poll_reauthentication`] hears what it says.
    pub(crate) fn authenticate(&mut self, presented: PresentedAuth) -> Result<(), End> {
        let PresentedAuth { begins, data } = presented;
        let begun = if begins { Some(self.begin_reauthentication(&data)?) } else { None };
        let allowed = self.device.broker().limits().connect_timeout.0;
        let Some(this) = self.reauthentication() else { return Err(End::Protocol(reason::PROTOCOL_ERROR)) };
        if begun.is_some() {
            this.dialogue = begun;
            this.deadline = Some(Box::pin(timers::sleep(allowed)));
        }
        let Some(mut dialogue) = this.dialogue.take() else {
            return Err(End::Protocol(reason::PROTOCOL_ERROR));
        };
        if !this.hold(&data) {
            broker::counters::count(|c| c.memory_partial.add(1));
            return Err(self.refuse_reauthentication(Denied::Busy));
        }
        this.answering = Some(Box::pin(async move {
            let said = timers::run_within(|| dialogue.answer(data)).await;
            (dialogue, said)
        }));
        Ok(())
    }

    fn begin_reauthentication(&mut self, first: &[u8]) -> Result<Box<dyn Dialogue>, End> {
        let device = Arc::clone(&self.device);
        let core = device.core();
        let shared = Arc::clone(&self.shared);
        let Some(info) = core.connection(self.epoch) else { return Err(End::Superseded) };
        let Some(this) = self.reauthentication() else { return Err(End::Protocol(reason::PROTOCOL_ERROR)) };
        let of_scram = this.enhanced.method() == scram::METHOD;
        this.given_name = of_scram.then(|| scram::user_of(first)).flatten().map(Into::into);
        let login = LoginName { username: this.given_name.as_deref(), client_id: core.client_id().as_str() };
        if shared.guard.waits(&login, info.peer, clock::now()).is_some() {
            count(|c| c.refused_failed_logins.add(1));
            return Err(self.refuse_reauthentication(Denied::NotAuthorized));
        }
        let credentials = Credentials {
            client_id: core.client_id().to_string(),
            username: None,
            password: None,
            certificate: self.certificate(),
            peer: info.peer.to_string(),
            listener: info.listener,
        };
        let Some(this) = self.reauthentication() else { return Err(End::Protocol(reason::PROTOCOL_ERROR)) };
        let begun = timers::within(|| shared.auth.begin(this.enhanced.method(), credentials));
        // The listener offers the method no longer.
        begun.ok_or(End::Protocol(reason::BAD_AUTHENTICATION_METHOD))
    }

    /// DER of the client's certificate, if TLS verified one.
    fn certificate(&self) -> Option<Vec<u8>> {
        let Io::Layered(io) = &self.io else { return None };
        io.layers.certificate().or_else(|| io.socket.certificate())
    }

    /// Goes on with an authentication that is under way. The task is woken for more.
    pub(super) fn poll_reauthentication(
        &mut self,
        work: &mut PacketWork,
        cx: &mut Context<'_>,
    ) -> Result<(), End> {
        let Some(this) = self.reauthentication() else { return Ok(()) };
        if let Some(answering) = &mut this.answering
            && let Poll::Ready((dialogue, said)) = answering.as_mut().poll(cx)
        {
            this.answering = None;
            match said {
                Ok(AuthProgress::Challenge(challenge)) => {
                    this.dialogue = Some(dialogue);
                    let auth = this.enhanced.ask(challenge);
                    self.send_auth(&auth, work)?;
                }
                Ok(AuthProgress::Proved(principal, data)) => self.take_proved(principal, data, work)?,
                Err(denied) => return Err(self.refuse_reauthentication(denied)),
            }
        }
        self.poll_granting(work, cx)?;
        let Some(deadline) = self.reauthentication().and_then(|this| this.deadline.as_mut()) else {
            return Ok(());
        };
        if deadline.as_mut().poll(cx).is_pending() {
            return Ok(());
        }
        count(|c| c.reauthentication_timeout.add(1));
        Err(End::Close(CloseReason::NotAuthorized))
    }

    fn send_auth(&mut self, auth: &Packet<'_>, work: &mut PacketWork) -> Result<(), End> {
        work.answers.clear();
        self.answer(auth, None, &mut work.answers)?;
        if work.answers.is_empty() {
            // The AUTH exceeds the client's maximum packet size, and the authentication cannot go on without it.
            return Err(End::Protocol(reason::PACKET_TOO_LARGE));
        }
        session::counters::count(|c| c.packets_out.add(1));
        self.append_answers(work);
        Ok(())
    }

    /// Somebody has proved who he is. He has to be the user that he was, of the same tenant: what is counted for them would
    /// be counted for others.
    fn take_proved(
        &mut self,
        principal: Arc<Principal>,
        data: Option<Bytes>,
        work: &mut PacketWork,
    ) -> Result<(), End> {
        if !self.rights.permissions().is_of_user(&principal) {
            return Err(self.refuse_reauthentication(Denied::NotAuthorized));
        }
        let core = self.device.core();
        let Some(info) = core.connection(self.epoch) else { return Err(End::Superseded) };
        let (client_id, listener) = (core.client_id().as_str(), info.listener.as_str());
        let subject = Subject { client_id, listener, principal: &principal };
        let shared = &self.shared;
        // Its groups and claims may be others than before.
        if shared.authority.as_ref().is_some_and(|authority| !authority.may_connect(&subject)) {
            return Err(self.refuse_reauthentication(Denied::ClientId));
        }
        match shared.authority.as_ref().filter(|authority| authority.authorizer().is_some()) {
            None => self.replace_principal(&principal, data, None, work),
            Some(authority) => {
                let authority = Arc::clone(authority);
                self.ask_about_subscriptions(authority, principal, data, work)
            }
        }
    }

    /// Asks the user's service again about all subscriptions: what it allowed before, it allowed to the former identity.
    fn ask_about_subscriptions(
        &mut self,
        authority: Arc<Authority>,
        principal: Arc<Principal>,
        data: Option<Bytes>,
        work: &mut PacketWork,
    ) -> Result<(), End> {
        let core = self.device.core();
        let Some(info) = core.connection(self.epoch) else { return Err(End::Superseded) };
        let filters = self.subscriptions(work);
        let (client_id, listener, asked) = (core.client_id().clone(), info.listener, filters.clone());
        let permissions = Permissions::new(Arc::clone(&principal));
        let asking =
            Box::pin(
                async move { permissions.ask_again(&authority, client_id.as_str(), &listener, asked).await },
            );
        if let Some(this) = self.reauthentication() {
            this.granting = Some(Granting { principal, data, filters, asking });
        }
        Ok(())
    }

    /// In the order of their filters.
    fn subscriptions(&self, work: &mut PacketWork) -> Vec<(String, QoS)> {
        let client_id = self.device.core().client_id().as_str();
        let listed = self.device.broker().subscriptions(client_id, usize::MAX);
        let mut filters = listed.unwrap_or_default();
        work.turn.effort.spend_each(Effort::NODE, filters.len());
        filters.sort_unstable();
        filters
    }

    fn poll_granting(&mut self, work: &mut PacketWork, cx: &mut Context<'_>) -> Result<(), End> {
        while let Some(granting) = self.reauthentication().and_then(|this| this.granting.as_mut()) {
            let Poll::Ready(granted) = granting.asking.as_mut().poll(cx) else { return Ok(()) };
            let granting = self.reauthentication().and_then(|this| this.granting.take());
            let Some(Granting { principal, data, filters, .. }) = granting else { return Ok(()) };
            if granted.is_err() || filters == self.subscriptions(work) {
                return self.replace_principal(&principal, data, granted.ok(), work);
            }
            // The client has subscribed to others meanwhile. It does that at the cost of its own deadline.
            let Some(authority) = self.shared.authority.clone() else { return Ok(()) };
            self.ask_about_subscriptions(authority, principal, data, work)?;
        }
        Ok(())
    }

    /// Makes the client this principal from now on, with its permissions, deliveries and expiry. While nobody can say
    /// which subscriptions the user's service allows, the ones that it has allowed this user before hold.
    fn replace_principal(
        &mut self,
        principal: &Arc<Principal>,
        data: Option<Bytes>,
        granted: Option<Vec<Box<str>>>,
        work: &mut PacketWork,
    ) -> Result<(), End> {
        let now = clock::now();
        if principal.expires.is_some_and(|at| at <= now) {
            return Err(self.refuse_reauthentication(Denied::NotAuthorized));
        }
        let certificate = self.certificate().as_deref().and_then(CertificateId::of);
        let permissions = Permissions::new(Arc::clone(principal));
        let device = Arc::clone(&self.device);
        let core = device.core();
        let Some(info) = core.connection(self.epoch) else { return Err(End::Superseded) };
        let Ok(identity) = ProvedIdentity::kept(principal, certificate, device.broker().account()) else {
            return Err(self.refuse_reauthentication(Denied::Busy));
        };
        let again = |before: &str| permissions.author_again(before);
        if !device.broker().reauthenticated(core, self.epoch, identity, again) {
            return Err(End::Superseded);
        }
        if let Some(authority) = &self.shared.authority {
            let account = device.broker().account();
            let mut gate = permissions.gate(authority, core.client_id().as_str(), &info.listener, account);
            let Some(mut slot) = device.lock_owned(self.epoch) else { return Err(End::Superseded) };
            let granted = granted
                .unwrap_or_else(|| slot.out.gate().map(|before| before.take_granted()).unwrap_or_default());
            grant_held(&mut gate, &granted, info.peer, core.client_id(), &info.listener);
            slot.out.set_gate(Some(Box::new(gate)));
        }
        // The decisions about topics were made for the former identity, and go with it.
        self.rights = permissions.into();
        self.rare().expiry = None;
        if let Some(at) = principal.expires {
            self.expire_at(at, now);
        }
        let Some(this) = self.reauthentication() else { return Ok(()) };
        this.deadline = None;
        this.charge.set(0);
        let auth = this.enhanced.conclude(data);
        count(|c| c.reauthentication_ok.add(1));
        self.send_auth(&auth, work)?;
        self.shared.check_connection(&*device, self.epoch);
        Ok(())
    }

    /// The client has not proved who it is [MQTT-4.12.1-2].
    fn refuse_reauthentication(&self, denied: Denied) -> End {
        count(|c| c.reauthentication_refused.add(1));
        let core = self.device.core();
        if let Some(info) = core.connection(self.epoch) {
            if denied == Denied::BadCredentials {
                let rare = self.rare.as_ref().and_then(|rare| rare.reauthentication.as_deref());
                let username = rare.and_then(|this| this.given_name.as_deref());
                let login = LoginName { username, client_id: core.client_id().as_str() };
                self.shared.guard.failed(&login, info.peer, clock::now());
            }
            let (peer, listener) = (info.peer, info.listener.as_str());
            info_of_peer!(
                LineKind::Refused, peer.ip(), %peer, client_id = %core.client_id(), listener, reason = ?denied,
                "authentication of a live connection refused"
            );
        }
        let client_id = core.client_id().clone();
        self.device.broker().emit(Event { at: clock::now(), client_id, kind: EventKind::AuthFailed });
        match denied {
            // The client may try again.
            Denied::Busy | Denied::Unavailable => {
                End::Close(CloseReason::Administrative(reason::SERVER_BUSY))
            }
            Denied::BadCredentials | Denied::NotAuthorized | Denied::ClientId => {
                End::Close(CloseReason::NotAuthorized)
            }
        }
    }
}
