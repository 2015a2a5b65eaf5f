//! Clients that speak HTTP to the gateway.

use super::attack::{Client, Door};

/// The head of a request to the API, whose body has so many bytes.
pub fn head(method: &str, path: &str, body: usize) -> Vec<u8> {
    format!("{method} /v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {body}\r\n\r\n").into_bytes()
}

/// One that begins with these bytes, and waits for nothing before it goes on.
pub fn client(first: Vec<u8>) -> Client {
    let mut client = Client::new(move |out| out.extend_from_slice(&first)).eager();
    client.door = Door::Http;
    client
}
