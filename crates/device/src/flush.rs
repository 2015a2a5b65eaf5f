//! Writing out-buffers to sockets: at the end of a turn, and early what came alone.

use std::pin::Pin;
use std::{
    io,
    task::{Context, Poll},
};

use broker::Session;
use codec::reason;
use gateway_core::{Protocol, clock};
use session::{recycle, take_buffer};
use tokio::{io::AsyncWrite, net::tcp::OwnedWriteHalf};

use super::{Device, Link, SocketWriter, Unsent, link::NextWrite, trace};
use crate::counters::count;

const ROUNDS: usize = 4;

/// Buffers and writer that a flush borrowed from the link.
pub struct BorrowedWriter {
    epoch: u32,
    writer: OwnedWriteHalf,
    unsent: Unsent,
    v5: bool,
}

/// The one for whom a flush takes the writer.
#[derive(Clone, Copy)]
enum Taker {
    /// The turn that has the device on its list and keeps it there.
    Turn,
    /// The same at its end.
    TurnEnd,
    /// The owner of this epoch: it has no right to a later connection, whose owner it would not wake.
    Owner(u32),
}

/// Writes what waits, directly from this thread, or wakes the owner where only it may write.
pub fn flush(device: &Device) {
    write_rounds(device, Taker::TurnEnd);
}

/// Writes what waits, if this thread may. The device stays on the list of the caller's turn, which flushes it once more:
/// what the rest of the turn brings goes out in one write.
pub fn flush_early(device: &Device) {
    write_rounds(device, Taker::Turn);
}

fn write_rounds(device: &Device, taker: Taker) {
    for round in 1..=ROUNDS {
        let Some(flight) = take(device, taker) else { return };
        let result = flight.writer.try_write(flight.unsent.rest());
        if give_back(device, flight, result, round == ROUNDS, false) != NextWrite::Again {
            return;
        }
    }
}

/// Writes until nothing waits or the socket is full, at the end of the connection. Does nothing while another thread
/// writes, or if the session has another connection.
pub fn flush_owned(device: &Device, epoch: u32) {
    while let Some(flight) = take(device, Taker::Owner(epoch)) {
        let result = flight.writer.try_write(flight.unsent.rest());
        let failed = result.is_err();
        give_back(device, flight, result, false, true);
        if failed {
            return;
        }
    }
}

/// The owner's turn after the socket was full. `Pending` has registered the task for writability.
pub fn poll_flush(device: &Device, epoch: u32, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
    for round in 1..=ROUNDS {
        let Some(mut flight) = take(device, Taker::Owner(epoch)) else { return Poll::Ready(Ok(())) };
        let polled = Pin::new(&mut flight.writer).poll_write(cx, flight.unsent.rest());
        let (result, pending) = match polled {
            Poll::Ready(result) => (result, false),
            Poll::Pending => (Err(io::ErrorKind::WouldBlock.into()), true),
        };
        let failed = match &result {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Some(io::Error::from(error.kind())),
            _ => None,
        };
        // After the last round it is still the owner that goes on: nobody else would.
        let then = give_back(device, flight, result, round == ROUNDS, true);
        if let Some(error) = failed {
            return Poll::Ready(Err(error));
        }
        if pending {
            return Poll::Pending;
        }
        if then != NextWrite::Again && !device.lock().link.as_ref().is_some_and(|link| link.sending.is_left())
        {
            return Poll::Ready(Ok(()));
        }
    }
    cx.waker().wake_by_ref();
    Poll::Pending
}

/// Sends what is left of a started frame and then `last`, if the socket takes it at once; then closes.
pub fn farewell(writer: &OwnedWriteHalf, unsent: Option<&Unsent>, last: &[u8]) {
    let (bytes, written) = unsent.map_or((&[][..], 0), |unsent| (&unsent.bytes, unsent.written));
    let Some(end) = codec::end_of_begun(bytes, written) else { return };
    let mut rest = bytes[written.min(end)..end].to_vec();
    rest.extend_from_slice(last);
    if !rest.is_empty() {
        let _ = writer.try_write(&rest);
    }
}

fn take(device: &Device, taker: Taker) -> Option<BorrowedWriter> {
    let mut guard = device.lock();
    let slot = &mut *guard;
    let link = slot.link.as_mut()?;
    let is_owner = match taker {
        Taker::Owner(epoch) if epoch != link.epoch => return None,
        Taker::Owner(_) => true,
        Taker::Turn if matches!(link.writer, SocketWriter::Owner) => return None,
        Taker::Turn | Taker::TurnEnd => false,
    };
    if !link.sending.may_write(matches!(taker, Taker::Turn), is_owner) {
        return None;
    }
    let SocketWriter::Direct(writer) = &mut link.writer else {
        if slot.out.buffered() == 0 {
            // Its owner has been here.
            return None;
        }
        let waker = link.waker.clone();
        drop(guard);
        waker.wake();
        return None;
    };
    if link.unsent.is_none() && slot.out.buffered() == 0 {
        link.sending.is_done();
        return None;
    }
    let writer = writer.take()?;
    link.sending.start();
    let begun = link.unsent.take();
    let is_fresh = begun.is_none();
    let unsent = match begun {
        Some(unsent) => *unsent,
        None => Unsent::new(slot.out.take_out()),
    };
    let protocol = slot.out.protocol();
    let flight = BorrowedWriter { epoch: link.epoch, writer, unsent, v5: protocol.is_v5() };
    drop(guard);
    if is_fresh {
        trace::written(device.core().client_id().as_str(), &flight.unsent.bytes, protocol);
    }
    Some(flight)
}

/// The `owner` is never woken by itself: it has registered for writability or goes on at once.
fn give_back(
    device: &Device,
    mut flight: BorrowedWriter,
    result: io::Result<usize>,
    last_round: bool,
    owner: bool,
) -> NextWrite {
    let (wrote, failed) = match result {
        Ok(n) => (n, false),
        Err(error) => (0, error.kind() != io::ErrorKind::WouldBlock),
    };
    count(|c| c.bytes_out.add(wrote as u64));
    flight.unsent.written += wrote;
    let mut guard = device.lock();
    let slot = &mut *guard;
    let Some(link) = slot.link.as_mut().filter(|link| link.epoch == flight.epoch) else {
        drop(guard);
        // The link is gone while this thread was writing: nobody else can end the started frame, and if another
        // connection has taken the session (and may be gone by now), nobody else can tell it [MQTT-3.1.4-3].
        let taken_over = device.core().connection(flight.epoch).is_none();
        let last: &[u8] = match taken_over && flight.v5 {
            true => &[0xE0, 0x01, reason::SESSION_TAKEN_OVER],
            false => &[],
        };
        farewell(&flight.writer, Some(&flight.unsent), last);
        return NextWrite::Done;
    };
    let unsent = flight.unsent.rest().len();
    slot.out.note_written(unsent);
    link.writer = SocketWriter::Direct(Some(flight.writer));
    let complete = unsent == 0;
    if complete {
        recycle(flight.unsent.bytes);
    } else {
        flight.unsent.stands(device.broker().account());
        link.unsent = Some(Box::new(flight.unsent));
        link.settle_unsent(slot.out.buffered());
    }
    if failed {
        link.close.get_or_insert(broker::CloseReason::SessionEnded);
    }
    if complete && slot.out.has_waiting() {
        slot.out.pump(&device.env(clock::now()));
    }
    let more = complete && slot.out.buffered() > 0;
    let then = link.sending.stop(complete, failed, more, last_round);
    if !owner && (then == NextWrite::Leave || (link.notify_room && complete) || slot.out.wants_load()) {
        let waker = link.waker.clone();
        drop(guard);
        waker.wake();
    }
    then
}

/// Keeps a buffer ready for the owner's own writes.
pub fn scratch() -> Vec<u8> {
    take_buffer()
}

/// Ends the replaced link `old` with `last` (a DISCONNECT in v5) where its writer is here.
pub fn end_replaced(device: &Device, old: Link, last: &[u8]) {
    if let SocketWriter::Direct(Some(writer)) = &old.writer {
        farewell(writer, old.unsent.as_deref(), last);
        trace::written(device.core().client_id().as_str(), last, Protocol::V5);
    }
    old.waker.wake();
}
