//! A backend that stores what sensors send, and switches a lamp: runs as it stands against `mqtt-server --dev`, in the
//! directory where that has made `certs/`.
//!
//! ```sh
//! cargo run -p mqtt-gateway-client --example readings
//! ```
//!
//! `GATEWAY_ADDRESS`, `GATEWAY_CA` and `GATEWAY_TOKEN` lead to another gateway. It ends with Ctrl-C: what is being worked on is finished and acknowledged first.
#![allow(clippy::print_stdout, reason = "it is an example")]

use std::{env, error::Error};

use mqtt_gateway_client::{
    Client, Delivery, GiveBack,
    consume::Options,
    v1::{CreateGroupRequest, Filter, Group, PublishRequest, consumed_message::Content},
};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let set = |name: &str, otherwise: &str| env::var(name).unwrap_or_else(|_| otherwise.to_owned());
    let mut gateway = Client::at(set("GATEWAY_ADDRESS", "https://localhost:10000"))
        .ca_file(set("GATEWAY_CA", "certs/ca.crt"))?;
    if let Ok(token) = env::var("GATEWAY_TOKEN") {
        gateway = gateway.token(&token)?;
    }
    let client = gateway.connect().await?;

    // The same group again does no harm.
    let filter =
        Filter { topic_filters: vec!["sensors/#".to_owned()], include_backends: true, ..Filter::default() };
    let group = Group { name: "example".to_owned(), filter: Some(filter), ..Group::default() };
    client
        .groups()
        .create_group(CreateGroupRequest { group: Some(group), ..CreateGroupRequest::default() })
        .await?;

    let request = PublishRequest {
        topic: "sensors/attic/humidity".to_owned(),
        payload: "40".into(),
        ..PublishRequest::default()
    };
    let response = client.publish(request).await?;
    println!("published: {} matched", response.matched);

    println!("consuming; Ctrl-C ends it");
    let stop = async {
        let _ = tokio::signal::ctrl_c().await;
    };
    let told = client.consume(Options::of("example").member("example-1"), store, stop).await?;
    println!("{} acknowledged, {} given back", told.acknowledged, told.given_back);
    Ok(())
}

/// Stores one message. Messages of one device come one after the other.
async fn store(delivery: Delivery) -> Result<(), GiveBack> {
    let Some(Content::Message(message)) = delivery.content else { return Ok(()) };
    // An error gives the message back: it comes again after a pause.
    let value: f64 = std::str::from_utf8(&message.payload)?.trim().parse()?;
    println!("{} {} {value}", message.device_id, message.topic);
    Ok(())
}
