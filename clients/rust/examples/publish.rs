//! Publishes, waits for everybody who reads it, and asks a lamp: runs as it stands against `mqtt-server --dev`, in the directory where
//! that has made `certs/`.
//!
//! ```sh
//! cargo run -p mqtt-gateway-client --example publish
//! ```
//!
//! `GATEWAY_ADDRESS`, `GATEWAY_CA` and `GATEWAY_TOKEN` lead to another gateway.
#![allow(clippy::print_stdout, reason = "it is an example")]

use std::{env, error::Error, time::Duration};

use mqtt_gateway_client::{
    Client, Reason,
    v1::{CommandSpec, ListDevicesRequest, PublishRequest},
};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let set = |name: &str, otherwise: &str| env::var(name).unwrap_or_else(|_| otherwise.to_owned());
    let address = set("GATEWAY_ADDRESS", "localhost:10000");
    let address = if address.contains("://") { address } else { format!("https://{address}") };
    let mut gateway = Client::at(address).ca_file(set("GATEWAY_CA", "certs/ca.crt"))?;
    if env::var("GATEWAY_TOKEN").is_ok() {
        // Asked for each call: another one may be there by then.
        gateway = gateway.token_from(|| env::var("GATEWAY_TOKEN"));
    }
    let client = gateway.connect().await?;

    let request =
        PublishRequest { topic: "lamp/switch".to_owned(), payload: "on".into(), ..PublishRequest::default() };
    let response = client.publish_and_wait(request).await?;
    println!("{}: {} have it", response.outcome().as_str_name(), response.sent);

    let mut devices = client.list_devices(ListDevicesRequest::default());
    while let Some(device) = devices.next().await? {
        println!("{} is {}", device.device_id, if device.online { "online" } else { "away" });
    }

    let spec = CommandSpec {
        device_id: "lamp".to_owned(),
        name: "blink".to_owned(),
        payload: "3".into(),
        ..CommandSpec::default()
    };
    match client.command(spec, None, Duration::from_secs(10)).await {
        Ok(reply) => println!("the lamp says {}", reply.device_status),
        Err(error) if *error.reason() == Reason::DeviceOffline => println!("the lamp is away"),
        Err(error) => return Err(error.into()),
    }
    Ok(())
}
