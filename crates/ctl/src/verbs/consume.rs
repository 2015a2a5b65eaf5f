//! Consuming a group over a stream.

use std::time::Duration;

use mqtt_gateway_client::{
    Delivery,
    v1::{Ack, Drain, Flow, Open, consume_item::Item, consume_request::Action},
};
use tokio::time::sleep;

use super::{
    groups::line,
    messages::{lost, missing},
};
use crate::{VerbContext, failure::Failure, remark};

/// Prints messages of a group as one of its members, and acknowledges each once it is printed.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ConsumeVerb {
    /// The group
    group: String,
    /// Name of this member over reconnects; without it the gateway gives it one, for one stream only
    #[arg(short, long, value_name = "NAME", default_value = "")]
    member: String,
    /// End after so many messages
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Acknowledge each message once it is printed; the default
    #[arg(long, conflicts_with = "no_ack")]
    ack: bool,
    /// Acknowledge nothing: the messages come again
    #[arg(long)]
    no_ack: bool,
    /// Print payloads alone, as they are
    #[arg(long, conflicts_with = "output")]
    raw: bool,
}

/// Most messages that are not acknowledged.
const WINDOW: u64 = 1000;

impl ConsumeVerb {
    pub(crate) async fn run(self, context: &mut VerbContext) -> Result<(), Failure> {
        let mut left = self.count.unwrap_or(u64::MAX);
        let mut joined = false;
        let mut pause = Duration::from_millis(100);
        let mut interrupted = std::pin::pin!(tokio::signal::ctrl_c());
        loop {
            let over = tokio::select! {
                over = self.once(context, &mut left, &mut joined) => over,
                _ = &mut interrupted => {
                    // Printed messages are acknowledged with their batch; the rest comes again.
                    context.out.flush()?;
                    return Ok(());
                }
            };
            match over {
                // All is printed, and whether it is acknowledged nobody has said.
                Err(Failure::Call(error)) if left == 0 => return Err(Failure::Call(error)),
                Err(Failure::Call(error)) if joined && error.is_temporary() => lost(&error),
                over => return over,
            }
            tokio::select! {
                () = sleep(pause) => {}
                _ = &mut interrupted => return Ok(()),
            }
            pause = (pause * 2).min(Duration::from_secs(5));
        }
    }

    /// One stream.
    async fn once(
        &self,
        context: &mut VerbContext,
        left: &mut u64,
        joined: &mut bool,
    ) -> Result<(), Failure> {
        let mut window = (*left).min(WINDOW);
        let flow = |messages: u64| Flow {
            max_outstanding_messages: u32::try_from(messages).unwrap_or(u32::MAX),
            ..Flow::default()
        };
        let open = Open {
            group: self.group.clone(),
            member_id: self.member.clone(),
            flow: Some(flow(window)),
            ..Open::default()
        };
        let mut member = context.client.join(open).await?;
        if std::mem::replace(joined, true) {
            remark("connected again");
        }
        let mut printed = Vec::new();
        while let Some(item) = member.next().await? {
            match item {
                Item::Message(message) if *left > 0 => {
                    self.print(context, &message)?;
                    printed.push(message.delivery_id);
                    *left -= 1;
                }
                Item::Gap(gap) => remark(&missing(gap.count, gap.reason().as_str_name())),
                Item::AckResults(results) if !results.lost.is_empty() => {
                    let lost: u64 = results.lost.iter().map(|range| range.last - range.first + 1).sum();
                    remark(&format!("{lost} acknowledged too late: these messages come again"));
                }
                Item::Message(_)
                | Item::Opened(_)
                | Item::AckResults(_)
                | Item::Heartbeat(_)
                | Item::Revoked(_) => {}
            }
            if *left > 0 && member.read_ahead() > 0 {
                continue;
            }
            context.out.flush()?;
            if self.no_ack {
                if *left == 0 {
                    return Ok(());
                }
                continue;
            }
            if printed.is_empty() {
                continue;
            }
            if *left == 0 {
                // No more; the stream ends once the acknowledgements are on disk.
                member.say(Action::Drain(Drain {})).await?;
            } else if *left < window {
                // Never more than are wanted: what is too much would come to others late.
                window = *left;
                member.say(Action::Flow(flow(window))).await?;
            }
            let delivery_ids = std::mem::take(&mut printed);
            member.say(Action::Ack(Ack { delivery_ids, ..Ack::default() })).await?;
        }
        Ok(())
    }

    fn print(&self, context: &mut VerbContext, delivery: &Delivery) -> Result<(), Failure> {
        use mqtt_gateway_client::v1::consumed_message::Content;
        match &delivery.content {
            Some(Content::Message(message)) if self.raw => context.out.raw(&message.payload)?,
            _ => context.out.line_of(&line(delivery), delivery)?,
        }
        Ok(())
    }
}
