//! Bans by RPC.

#![expect(clippy::disallowed_methods, reason = "bans end by the calendar")]

use std::time::{Duration, SystemTime};

use gateway_core::Protocol;
use mqtt_server::proto::gateway::v1::{self, ban_target::Target};
use tonic::Code;

use crate::{
    client::{Client, Got, hello},
    harness::*,
};

fn target(target: Target) -> Option<v1::BanTarget> {
    Some(v1::BanTarget { target: Some(target) })
}

fn client(id: &str) -> Option<v1::BanTarget> {
    target(Target::ClientId(id.to_owned()))
}

fn add(target: Option<v1::BanTarget>) -> v1::AddBanRequest {
    v1::AddBanRequest { target, reason: "test".to_owned(), expire_time: None }
}

async fn list(setup: &Setup) -> Vec<v1::Ban> {
    let mut request = v1::ListBansRequest { page_size: 2, ..Default::default() };
    let mut all = Vec::new();
    loop {
        let page = setup.security().list_bans(request.clone()).await.unwrap().into_inner();
        assert!(page.bans.len() <= 2);
        all.extend(page.bans);
        if page.next_page_token.is_empty() {
            return all;
        }
        request.page_token = page.next_page_token;
    }
}

/// Returns the answer to a CONNECT.
fn answer(setup: &Setup, id: &str) -> Got {
    let mut client = Client::open(setup.mqtt, Protocol::V5);
    client.send(&codec::Packet::Connect(hello(Protocol::V5, id).into()));
    client.next()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ban_is_in_force_when_it_is_answered_and_survives_a_restart() {
    let home = tempfile::tempdir().unwrap();
    let data = home.path().join("kept");
    let setup = Setup::with(|config| config.data_dir.clone_from(&data)).await;
    let ban = setup.security().add_ban(add(client("thief"))).await.unwrap().into_inner().ban.unwrap();
    assert_eq!((ban.source(), ban.reason.as_str()), (v1::BanSource::Rpc, "test"));
    assert_eq!(answer(&setup, "thief"), Got::ConnAck(0x8A));
    setup.gateway.shutdown().await;
    let setup = Setup::with(|config| config.data_dir.clone_from(&data)).await;
    assert_eq!(list(&setup).await, [ban]);
    assert_eq!(answer(&setup, "thief"), Got::ConnAck(0x8A));
    let request = v1::RemoveBanRequest { target: client("thief") };
    setup.security().remove_ban(request.clone()).await.unwrap();
    assert_eq!(answer(&setup, "thief"), Got::ConnAck(0));
    let again = setup.security().remove_ban(request).await.unwrap_err();
    assert_eq!(refusal(&again), (Code::NotFound, "BAN_NOT_FOUND".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn bans_are_listed_in_pages_and_what_is_wrong_is_refused() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("ops.toml");
    std::fs::write(&file, "[[bans]]\nusername = \"u\"\n").unwrap();
    let setup = Setup::with(|config| {
        config.bans.max = 4;
        config.bans.file = Some(file.clone());
    })
    .await;
    let later = SystemTime::now() + Duration::from_secs(3_600);
    let targets = [
        client("c"),
        target(Target::Username("u".to_owned())),
        target(Target::Address("192.0.2.0/24".to_owned())),
        target(Target::Fingerprint("ab".repeat(32))),
    ];
    for target in &targets {
        let request = v1::AddBanRequest { expire_time: Some(later.into()), ..add(target.clone()) };
        setup.security().add_ban(request).await.unwrap();
    }
    let listed = list(&setup).await;
    let users: Vec<v1::BanSource> =
        listed.iter().filter(|ban| ban.target == targets[1]).map(v1::Ban::source).collect();
    assert_eq!((listed.len(), users), (5, vec![v1::BanSource::File, v1::BanSource::Rpc]));
    let full = setup.security().add_ban(add(client("d"))).await.unwrap_err();
    assert_eq!(refusal(&full), (Code::ResourceExhausted, "TOO_MANY_BANS".to_owned()));
    for _ in 0..2 {
        let removed = setup.security().remove_ban(v1::RemoveBanRequest { target: targets[1].clone() }).await;
        if let Err(error) = removed {
            assert_eq!(refusal(&error), (Code::FailedPrecondition, "BAN_IN_FILE".to_owned()));
        }
    }
    assert_eq!(list(&setup).await.len(), 4, "that of the file stays");
    let past = Some((SystemTime::now() - Duration::from_secs(1)).into());
    for wrong in [
        add(None),
        add(client("")),
        add(target(Target::Address("192.0.2.1/24".to_owned()))),
        add(target(Target::Fingerprint("ab".to_owned()))),
        v1::AddBanRequest { reason: "x".repeat(257), ..add(client("x")) },
        v1::AddBanRequest { expire_time: past, ..add(client("x")) },
    ] {
        let error = setup.security().add_ban(wrong).await.unwrap_err();
        assert_eq!(refusal(&error), (Code::InvalidArgument, "INVALID_FIELD".to_owned()));
    }
}
