//! A listener behind a door: sockets wait for a place, each address in turn, and a failing system is not asked in a spin.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use tokio::{
    net::{TcpListener, TcpStream},
    time::{Instant, sleep_until},
};

use super::{AcceptQueue, ConnectionPermit, Door, DoorRefusal, PendingConnection};

/// Pause after a failed accept (usually: no file descriptors left).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Event of a [`DoorListener`].
#[derive(Debug)]
pub enum Arrival {
    /// A socket has come through the door, and has these places.
    Entered(TcpStream, SocketAddr, ConnectionPermit, PendingConnection),
    /// The door refused a socket, which is closed.
    Refused(SocketAddr, DoorRefusal),
    /// A socket had waited longest and was closed for another.
    TurnedAway,
    /// No socket could be accepted. Pending connections were told to leave.
    Failed(io::Error),
}

/// Accepts the sockets of one listener whose peers are known by their own addresses.
#[derive(Debug)]
pub struct DoorListener {
    listener: TcpListener,
    door: Arc<Door>,
    accept_queue: AcceptQueue<(TcpStream, SocketAddr)>,
    paused_until: Option<Instant>,
}

impl DoorListener {
    /// Of these sockets, at most `waiting` wait for a place.
    pub fn new(listener: TcpListener, door: Arc<Door>, waiting: usize) -> Self {
        Self { listener, door, accept_queue: AcceptQueue::new(waiting), paused_until: None }
    }

    /// The next event. `prepare` is called before each look at the places. Cancel safe.
    pub async fn next(&mut self, prepare: impl Fn(&Door)) -> Arrival {
        loop {
            let enter = |address| {
                prepare(&self.door);
                self.door.enter(address)
            };
            match self.accept_queue.next(enter) {
                Some(((socket, peer), Ok((permit, pending)))) => {
                    return Arrival::Entered(socket, peer, permit, pending);
                }
                Some(((_, peer), Err(refusal))) => return Arrival::Refused(peer, refusal),
                None => {}
            }
            if let Some(until) = self.paused_until {
                sleep_until(until).await;
                self.paused_until = None;
            }
            tokio::select! {
                accepted = self.listener.accept() => match accepted {
                    Ok((socket, peer)) => {
                        if self.accept_queue.push(Some(peer.into()), (socket, peer)).is_some() {
                            return Arrival::TurnedAway;
                        }
                    }
                    Err(error) => {
                        self.door.shed();
                        self.paused_until = Some(Instant::now() + ACCEPT_PAUSE);
                        return Arrival::Failed(error);
                    }
                },
                () = self.door.changed(), if !self.accept_queue.is_empty() => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::DoorBounds, *};

    /// The failure: a socket whose event was given up by a `select` is lost, or waits although a place is free.
    #[tokio::test]
    async fn sockets_wait_for_a_place_and_the_oldest_leaves_for_more() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let address = listener.local_addr().expect("an address");
        let patience = Duration::from_secs(3600);
        let door = Door::alone(DoorBounds { handshakes: 1, patience, ..DoorBounds::default() });
        let mut arrivals = DoorListener::new(listener, door, 1);
        let connect = async || TcpStream::connect(address).await.expect("connect");
        let first = connect().await;
        let Arrival::Entered(_, peer, _permit, pending) = arrivals.next(|_| ()).await else {
            panic!("a place is free");
        };
        assert_eq!(peer, first.local_addr().expect("an address"));
        let _second = connect().await;
        let given_up = tokio::time::timeout(Duration::from_millis(50), arrivals.next(|_| ())).await;
        assert!(given_up.is_err(), "no place is free: {given_up:?}");
        let third = connect().await;
        assert!(matches!(arrivals.next(|_| ()).await, Arrival::TurnedAway), "of two, one may wait");
        drop(pending);
        let Arrival::Entered(_, peer, ..) = arrivals.next(|_| ()).await else { panic!("a place is free") };
        assert_eq!(peer, third.local_addr().expect("an address"));
    }
}
