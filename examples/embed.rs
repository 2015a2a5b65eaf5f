//! The gateway inside another program: on sockets that the program opened, until Ctrl-C.

#![expect(clippy::print_stdout, reason = "it is a command-line tool")]

use std::{error::Error, net::TcpListener};

use mqtt_server::{
    Gateway,
    config::{Config, Grpc, Http, Latest},
};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let config = Config {
        non_tls: true,
        insecure_grpc: true, // plaintext, on loopback only
        grpc: Grpc { tls: false, ..Default::default() },
        http: Http { enabled: false, ..Default::default() },
        latest: Latest { enabled: false, ..Default::default() },
        ..Config::default()
    };
    let gateway = Gateway::builder(config)
        .socket("default", TcpListener::bind("127.0.0.1:0")?)
        .socket("grpc", TcpListener::bind("127.0.0.1:0")?)
        .start()
        .await?;
    for (name, address) in gateway.addresses() {
        println!("{name} {address}");
    }
    tokio::signal::ctrl_c().await?;
    gateway.shutdown().await;
    Ok(())
}
