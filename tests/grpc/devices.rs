//! Devices: list, get, disconnect, trace.

use mqtt_server::{grpc::proto::gateway::v1, telemetry::trace_clients};
use tonic::Code;

use crate::{client::Got, harness::*};

#[tokio::test(flavor = "multi_thread")]
async fn devices_are_listed_and_disconnected() {
    let setup = Setup::new().await;
    let mut events = setup.events("dev").await;
    let _device = setup.device("dev").await;
    let list = setup.devices().list(v1::ListRequest::default()).await.unwrap().into_inner();
    assert_eq!((list.devices.len(), list.devices[0].client_id.as_str()), (1, "dev"));
    let get = v1::GetRequest { client_id: "dev".to_owned() };
    let found = setup.devices().get(get).await.unwrap().into_inner().device.unwrap();
    assert_eq!((found.online, found.session_expiry_seconds), (true, 600));
    assert_eq!(found.connection.unwrap().protocol(), v1::ProtocolVersion::V50);
    let disconnect =
        |id: &str| v1::DisconnectRequest { client_id: id.to_owned(), ..v1::DisconnectRequest::default() };
    setup.devices().disconnect(disconnect("dev")).await.unwrap();
    until(&mut events, |detail| matches!(detail, v1::event::Detail::Disconnected(_))).await;
    let unknown = setup.devices().disconnect(disconnect("stranger")).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_devices_hold_each_once_and_a_foreign_token_is_refused() {
    let setup = Setup::new().await;
    let mut events = setup.events("d3").await;
    let mut clients: Vec<_> = (0..7).map(|n| setup.raw(&format!("d{n}"), |_| {})).collect();
    drop(clients.remove(3));
    until(&mut events, |detail| matches!(detail, v1::event::Detail::Disconnected(_))).await;
    for (size, online_only) in [(1, false), (3, false), (100, false), (2, true)] {
        let mut request = v1::ListRequest { page_size: size, online_only, ..Default::default() };
        let mut seen = Vec::new();
        loop {
            let page = setup.devices().list(request.clone()).await.unwrap().into_inner();
            assert!(page.devices.len() <= size as usize);
            seen.extend(page.devices.into_iter().map(|device| (device.client_id, device.online)));
            if page.next_page_token.is_empty() {
                break;
            }
            request.page_token = page.next_page_token;
        }
        seen.sort_unstable();
        let all = (0..7).map(|n| (format!("d{n}"), n != 3)).filter(|(_, online)| *online || !online_only);
        assert_eq!(seen, all.collect::<Vec<_>>(), "{size} {online_only}");
    }
    let foreign = v1::ListRequest { page_token: "d3".to_owned(), ..Default::default() };
    let error = setup.devices().list(foreign).await.unwrap_err();
    assert_eq!(refusal(&error), (Code::InvalidArgument, "INVALID_FIELD".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn disconnect_sends_its_code_and_ends_the_session_only_when_asked() {
    let setup = Setup::new().await;
    for (discard, code) in [(false, None), (true, Some(0x8F))] {
        let mut client = setup.raw("dev", |_| {});
        let request = v1::DisconnectRequest {
            client_id: "dev".to_owned(),
            reason_code: code,
            discard_session: discard,
        };
        setup.devices().disconnect(request).await.unwrap();
        let expected = u8::try_from(code.unwrap_or(0x98)).unwrap();
        assert_eq!(client.next(), Got::Disconnect(expected));
        assert_eq!(client.next(), Got::Closed);
        let get = v1::GetRequest { client_id: "dev".to_owned() };
        let found = setup.devices().get(get).await.map(|_| ()).map_err(|error| refusal(&error));
        let gone = Err((Code::NotFound, "DEVICE_NOT_FOUND".to_owned()));
        assert_eq!(found, if discard { gone } else { Ok(()) });
    }
    for bad in [0, 127, 256] {
        let request = v1::DisconnectRequest {
            client_id: "dev".to_owned(),
            reason_code: Some(bad),
            discard_session: false,
        };
        assert_eq!(setup.devices().disconnect(request).await.unwrap_err().code(), Code::InvalidArgument);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tracing_of_one_client_is_switched_by_rpc() {
    let setup = Setup::new().await;
    let set = |enabled| v1::SetTraceRequest { client_id: "traced by the test".to_owned(), enabled };
    let traced = |id: &str| trace_clients().is_traced(id);
    assert!(!traced("traced by the test"));
    setup.devices().set_trace(set(true)).await.unwrap();
    assert!(traced("traced by the test") && !traced("another"));
    setup.devices().set_trace(set(false)).await.unwrap();
    assert!(!traced("traced by the test"));
    let nobody = setup.devices().set_trace(v1::SetTraceRequest::default()).await.unwrap_err();
    assert_eq!(nobody.code(), Code::InvalidArgument);
}
