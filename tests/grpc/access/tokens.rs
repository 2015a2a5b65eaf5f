//! Tokens: what is not one, how they are made and taken away, and what ends with them.

use std::time::SystemTime;

use access::backends::{Role, Scope, Tokens};
use auth::counters::totals;
use mqtt_server::proto::gateway::v1::{
    self, consumer_client::ConsumerClient, events_client::EventsClient, groups_client::GroupsClient,
    publisher_client::PublisherClient, state_client::StateClient, subscriber_client::SubscriberClient,
};
use tokio_stream::StreamExt as _;
use tonic::{Code, Status, metadata::AsciiMetadataValue};

use super::{
    Authorized, Guarded, add,
    raw::{bearer, call},
};
use crate::harness::*;

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_a_good_token_is_refused_with_its_reason() {
    let guarded = Guarded::with_roles().await;
    let expired = add(&guarded.file, "old", Role::Admin, Scope::ALL, Some(1));
    guarded.setup.gateway.reloads().reload_all();
    let before = totals();
    let good = guarded.token("reader").to_owned();
    let long = "x".repeat(9_000);
    let value = |text: &str| AsciiMetadataValue::try_from(text.as_bytes()).unwrap();
    for (values, reason) in [
        (vec![], "MISSING"),
        (vec![value("")], "UNKNOWN"),
        (vec![value("Bearer")], "UNKNOWN"),
        (vec![value("Bearer ")], "UNKNOWN"),
        (vec![value(&good)], "UNKNOWN"),
        (vec![value(&format!("Basic {good}"))], "UNKNOWN"),
        (vec![value(&format!("Bearer {good}x"))], "UNKNOWN"),
        (vec![value(&format!("Bearer {}", &good[..good.len() - 1]))], "UNKNOWN"),
        (vec![value(&format!("Bearer {}", good.to_uppercase()))], "UNKNOWN"),
        (vec![value(&format!("Bearer {long}"))], "UNKNOWN"),
        (vec![bearer(&good), bearer(&good)], "UNKNOWN"),
        (vec![bearer(&expired)], "EXPIRED"),
    ] {
        let status = call(&guarded.setup.channel, "/gateway.v1.Devices/ListDevices", &values).await;
        let refused = refusal(&status.unwrap_err());
        assert_eq!(refused, (Code::Unauthenticated, format!("CREDENTIALS_{reason}")), "{values:?}");
    }
    // Other tests count, too.
    let after = totals();
    assert!(after.backend_denied_nobody > before.backend_denied_nobody);
    assert!(after.backend_denied_wrong >= before.backend_denied_wrong + 10);
    assert!(after.backend_denied_expired > before.backend_denied_expired);
    for values in [vec![value(&format!("bearer {good}"))], vec![value(&format!("BEARER  {good}"))]] {
        assert!(call(&guarded.setup.channel, "/gateway.v1.Devices/ListDevices", &values).await.is_ok());
    }
}

/// One stream of each kind, opened with one token.
struct Open {
    messages: tonic::Streaming<v1::SubscribeResponse>,
    latest: tonic::Streaming<v1::WatchLatestResponse>,
    events: tonic::Streaming<v1::WatchEventsResponse>,
    results: tonic::Streaming<v1::PublishStreamResponse>,
}

impl Open {
    async fn with(channel: Authorized) -> Self {
        let request = v1::SubscribeRequest::default();
        let messages = SubscriberClient::new(channel.clone()).subscribe(request).await;
        let latest = StateClient::new(channel.clone()).watch_latest(v1::WatchLatestRequest::default()).await;
        let events = EventsClient::new(channel.clone()).watch_events(v1::WatchEventsRequest::default()).await;
        // The caller goes on sending for as long as it likes.
        let frames = tokio_stream::pending::<v1::PublishStreamRequest>();
        Self {
            messages: messages.unwrap().into_inner(),
            latest: latest.unwrap().into_inner(),
            events: events.unwrap().into_inner(),
            results: PublisherClient::new(channel).publish_stream(frames).await.unwrap().into_inner(),
        }
    }

    /// Returns the end of each stream.
    async fn ends(mut self) -> [Status; 4] {
        async fn end<T>(stream: &mut tonic::Streaming<T>) -> Status {
            loop {
                match stream.next().await {
                    Some(Ok(_)) => {}
                    Some(Err(status)) => return status,
                    None => return Status::ok(""),
                }
            }
        }
        soon("the streams' end", async {
            [
                end(&mut self.messages).await,
                end(&mut self.latest).await,
                end(&mut self.events).await,
                end(&mut self.results).await,
            ]
        })
        .await
    }
}

fn assert_all(ends: &[Status], reason: &str) {
    for status in ends {
        assert_eq!(refusal(status), (Code::Unauthenticated, reason.to_owned()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_token_ends_its_streams_and_no_others() {
    let guarded = Guarded::with_roles().await;
    let mut admin = guarded.security("admin");
    let request = v1::CreateTokenRequest { role: v1::Role::Publisher.into(), ..Default::default() };
    let made = admin.create_token(request).await.unwrap().into_inner();
    let id = made.token.unwrap().token_id;
    let (theirs, other) =
        (Open::with(guarded.channel_of(&made.secret)).await, Open::with(guarded.channel("publisher")).await);
    let text = std::fs::read_to_string(&guarded.file).unwrap();
    assert!(text.contains(&id) && !text.contains(&made.secret));

    let revoke = v1::RevokeTokenRequest { token_id: id.clone() };
    admin.revoke_token(revoke.clone()).await.unwrap();
    assert_all(&theirs.ends().await, "CREDENTIALS_REVOKED");
    let again =
        call(&guarded.setup.channel, "/gateway.v1.Devices/ListDevices", &[bearer(&made.secret)]).await;
    assert_eq!(refusal(&again.unwrap_err()).1, "CREDENTIALS_UNKNOWN");
    let again = admin.revoke_token(revoke).await.unwrap_err();
    assert_eq!(refusal(&again), (Code::NotFound, "TOKEN_NOT_FOUND".to_owned()));

    // The others still get what comes.
    let Open { mut messages, .. } = other;
    let mut publisher = PublisherClient::new(guarded.channel("publisher"));
    publisher.publish(to("a", "still here")).await.unwrap();
    assert!(soon("a message", messages.message()).await.unwrap().is_some());
}

/// Its rights were looked at with each piece that the stream sent: none, while the caller takes nothing. It kept its partitions
/// and could settle what it had.
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_reads_nothing_leaves_when_its_token_is_revoked() {
    let guarded = Guarded::with_roles().await;
    let mut groups = GroupsClient::new(guarded.channel("admin"));
    let filter = v1::Filter { topic_filters: vec!["up/#".into()], ..Default::default() };
    let group = v1::Group { name: "g".into(), filter: Some(filter), ..Default::default() };
    let request = v1::CreateGroupRequest { group: Some(group), ..Default::default() };
    groups.create_group(request).await.unwrap();
    let mut admin = guarded.security("admin");
    let request = v1::CreateTokenRequest { role: v1::Role::Consumer.into(), ..Default::default() };
    let made = admin.create_token(request).await.unwrap().into_inner();

    let open = v1::Open { group: "g".into(), ..Default::default() };
    let open = v1::ConsumeRequest { action: Some(v1::consume_request::Action::Open(open)) };
    let requests = tokio_stream::iter([open]).chain(tokio_stream::pending());
    let mut consumer = ConsumerClient::new(guarded.channel_of(&made.secret));
    let unread = soon("a stream", consumer.consume(requests)).await.unwrap();
    // More than the client's windows take.
    let mut device = guarded.setup.raw("d", |_| {});
    for _ in 0..64 {
        device.publish_acked("up/d", &vec![b'x'; 200 << 10], false);
    }
    let mut members = async || {
        let request = v1::GetGroupRequest { name: "g".into() };
        let group = groups.get_group(request).await.unwrap().into_inner().group.unwrap();
        let status = group.status.unwrap();
        (status.members, status.outstanding)
    };
    // The member has been sent as much as its windows take, and no more leaves.
    let mut before = members().await;
    loop {
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        let now = members().await;
        if now.0 == 1 && now.1 > 0 && now == before {
            break;
        }
        before = now;
    }
    let token_id = made.token.unwrap().token_id;
    admin.revoke_token(v1::RevokeTokenRequest { token_id }).await.unwrap();
    soon("the member's leave", async {
        while members().await.0 > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    })
    .await;
    let mut stream = unread.into_inner();
    let status = loop {
        match soon("the end", stream.next()).await {
            Some(Ok(_)) => {}
            Some(Err(status)) => break status,
            None => panic!("the stream ends without a reason"),
        }
    };
    assert_eq!(refusal(&status), (Code::Unauthenticated, "CREDENTIALS_REVOKED".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_taken_out_of_the_file_or_given_another_role_ends_its_streams() {
    let guarded = Guarded::with_roles().await;
    let (gone, changed) =
        (Open::with(guarded.channel("publisher")).await, Open::with(guarded.channel("admin")).await);
    let text = std::fs::read_to_string(&guarded.file).unwrap();
    let text = Tokens::without(&text, "publisher").unwrap();
    std::fs::write(&guarded.file, text.replace("\"role\":\"admin\"", "\"role\":\"reader\"")).unwrap();
    // The watch of the files sees it by itself.
    assert_all(&gone.ends().await, "CREDENTIALS_REVOKED");
    assert_all(&changed.ends().await, "CREDENTIALS_REVOKED");
    let admin = bearer(guarded.token("admin"));
    let now = call(&guarded.setup.channel, "/gateway.v1.Publisher/Publish", &[admin]).await;
    assert_eq!(refusal(&now.unwrap_err()).1, "ROLE_DENIED");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_expires_ends_its_streams() {
    let guarded = Guarded::with_roles().await;
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
    let token = add(&guarded.file, "short", Role::Admin, Scope::ALL, Some(now + 3));
    guarded.setup.gateway.reloads().reload_all();
    let open = Open::with(guarded.channel_of(&token)).await;
    assert_all(&open.ends().await, "CREDENTIALS_EXPIRED");
    let after = call(&guarded.setup.channel, "/gateway.v1.Devices/ListDevices", &[bearer(&token)]).await;
    assert_eq!(refusal(&after.unwrap_err()).1, "CREDENTIALS_EXPIRED");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_file_keeps_the_tokens_and_the_answer_names_the_line() {
    let guarded = Guarded::with_roles().await;
    let mut admin = guarded.security("admin");
    let open = Open::with(guarded.channel("publisher")).await;
    let text = std::fs::read_to_string(&guarded.file).unwrap();
    std::fs::write(&guarded.file, text.replace("\"publisher\"", "\"nobody\"")).unwrap();
    let parts = admin.reload(v1::ReloadRequest {}).await.unwrap().into_inner().parts;
    let tokens = parts.iter().find(|part| part.name == "tokens").unwrap();
    assert!(tokens.summary.is_empty() && tokens.problems[0].contains("line 2"), "{tokens:?}");
    assert!(parts.iter().any(|part| part.name == "certificates" && !part.summary.is_empty()), "{parts:?}");
    // As long as it is broken, nothing is written into it.
    let request = v1::CreateTokenRequest { role: v1::Role::Reader.into(), ..Default::default() };
    let refused = admin.create_token(request).await.unwrap_err();
    assert_eq!(refusal(&refused), (Code::FailedPrecondition, "NO_TOKENS".to_owned()));
    std::fs::write(&guarded.file, text).unwrap();
    let parts = admin.reload(v1::ReloadRequest {}).await.unwrap().into_inner().parts;
    assert!(parts.iter().any(|part| part.name == "tokens" && part.summary == "5 tokens"), "{parts:?}");
    let Open { mut messages, .. } = open;
    PublisherClient::new(guarded.channel("publisher")).publish(to("a", "still here")).await.unwrap();
    assert!(soon("a message", messages.message()).await.unwrap().is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_admin_gives_and_sees_no_more_than_it_has() {
    let tenant: &[&str] = &["t/a/#"];
    let wanted = [("root", Role::Admin, None, None), ("tenant", Role::Admin, Some(tenant), None)];
    let guarded = Guarded::with(&wanted, |_| {}).await;
    let (mut root, mut tenant) = (guarded.security("root"), guarded.security("tenant"));
    let scope = |filter: &str| {
        Some(v1::Scope { topic_filters: vec![filter.to_owned()], device_patterns: Vec::new() })
    };
    let admin = |scope| v1::CreateTokenRequest { role: v1::Role::Admin.into(), scope, ..Default::default() };
    for wide in [scope("#"), scope("t/+"), Some(v1::Scope::default())] {
        let refused = tenant.create_token(admin(wide)).await.unwrap_err();
        assert_eq!(refusal(&refused), (Code::PermissionDenied, "OUT_OF_SCOPE".to_owned()));
    }
    let inner = tenant.create_token(admin(scope("t/a/b"))).await.unwrap().into_inner().token.unwrap();
    let own = tenant.create_token(admin(None)).await.unwrap().into_inner().token.unwrap();
    assert_eq!(own.scope, scope("t/a/#"), "nothing said is the caller's own");
    let wide = root.create_token(admin(None)).await.unwrap().into_inner().token.unwrap();
    assert_eq!(wide.scope, None);

    let list = tenant.list_tokens(v1::ListTokensRequest::default()).await.unwrap().into_inner().tokens;
    let ids: Vec<_> = list.iter().map(|token| token.token_id.as_str()).collect();
    assert_eq!(ids, ["tenant", &inner.token_id, &own.token_id]);
    let mut request = v1::ListTokensRequest { page_size: 2, ..Default::default() };
    let mut all = Vec::new();
    loop {
        let page = root.list_tokens(request.clone()).await.unwrap().into_inner();
        all.extend(page.tokens);
        if page.next_page_token.is_empty() {
            break;
        }
        request.page_token = page.next_page_token;
    }
    assert_eq!(all.len(), 5);
    let refused = tenant.revoke_token(v1::RevokeTokenRequest { token_id: wide.token_id }).await.unwrap_err();
    assert_eq!(refusal(&refused).1, "OUT_OF_SCOPE");
    let refused = tenant.reload(v1::ReloadRequest {}).await.unwrap_err();
    assert_eq!(refusal(&refused).1, "OUT_OF_SCOPE");
    for (request, field) in [
        (v1::CreateTokenRequest { role: 0, ..admin(None) }, "role"),
        (v1::CreateTokenRequest { role: 99, ..admin(None) }, "role"),
        (admin(scope("a/#/b")), "scope"),
        (
            v1::CreateTokenRequest { expire_time: Some(prost_types::Timestamp::default()), ..admin(None) },
            "expire",
        ),
        (v1::CreateTokenRequest { note: "two\nlines".to_owned(), ..admin(None) }, "note"),
    ] {
        let refused = root.create_token(request).await.unwrap_err();
        assert!(refused.code() == Code::InvalidArgument && refused.message().starts_with(field), "{refused}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_file_there_are_no_tokens_to_make() {
    let setup = Setup::new().await;
    let mut client = v1::security_client::SecurityClient::new(setup.channel.clone());
    let request = v1::CreateTokenRequest { role: v1::Role::Reader.into(), ..Default::default() };
    let refused = client.create_token(request).await.unwrap_err();
    assert_eq!(refusal(&refused), (Code::FailedPrecondition, "NO_TOKENS".to_owned()));
    assert!(refused.message().contains("backends.tokens"), "{refused}");
}
