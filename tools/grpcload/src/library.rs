//! `library`: a member of a group through the client library, that writes down what it gets, for scripts/groups/world.py.

use std::{fs::OpenOptions, io::Write as _, sync::Arc, time::Duration};

use mqtt_gateway_client::{Client, Delivery, GiveBack, consume::Options, v1::consumed_message::Content};

use crate::{
    Failure,
    member::{Member, now},
};

/// Never ends: what fails for good is begun again until the process is killed. Has lines for deliveries only: the library
/// acknowledges.
pub async fn run(args: &Member) -> Result<i32, Failure> {
    let file = OpenOptions::new().append(true).create(true).open(&args.file)?;
    // A killed process may have left half a line.
    writeln!(&file)?;
    let file = Arc::new(file);
    loop {
        let write = |delivery: Delivery| {
            let file = Arc::clone(&file);
            async move {
                let Some(Content::Message(message)) = delivery.content else { return Ok(()) };
                let payload = String::from_utf8_lossy(&message.payload);
                let line = format!("D {} {} {} {payload} .\n", now(), delivery.message_id, delivery.attempt);
                (&*file).write_all(line.as_bytes())?;
                let chance = delivery.delivery_id.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
                match chance % 100 {
                    0 => {
                        return Err(GiveBack {
                            reason: "one in a hundred".to_owned(),
                            ..GiveBack::default()
                        });
                    }
                    1 => tokio::time::sleep(Duration::from_millis(2)).await,
                    _ => {}
                }
                Ok(())
            }
        };
        let ended = async {
            let client = Client::at(format!("http://{}", args.address)).connect().await?;
            let options = Options::of(args.group.clone()).member(args.member_id.clone());
            client.consume(options, write, std::future::pending()).await
        };
        eprintln!("{:?}", ended.await);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}
