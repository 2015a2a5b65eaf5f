//! Every method by each role.

use std::collections::BTreeSet;

use access::backends::Role;
use prost::Message as _;
use prost_types::FileDescriptorProto;
use tonic::Code;
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
};

use super::{
    Guarded,
    raw::{bearer, call},
};
use crate::harness::*;

const READ: &[Role] = &[Role::Reader, Role::Publisher, Role::Consumer, Role::Operator, Role::Admin];
const CONSUME: &[Role] = &[Role::Consumer, Role::Admin];
const PUBLISH: &[Role] = &[Role::Publisher, Role::Admin];
const OPERATE: &[Role] = &[Role::Operator, Role::Admin];
const CLEAR: &[Role] = &[Role::Publisher, Role::Operator, Role::Admin];
const ADMINISTER: &[Role] = &[Role::Admin];

/// A row for every method, with the roles that may call it.
#[rustfmt::skip]
const ROWS: &[(&str, &[Role])] = &[
    ("/gateway.v1.Commands/CancelCommand", PUBLISH),
    ("/gateway.v1.Commands/GetCommand", READ),
    ("/gateway.v1.Commands/ListCommands", READ),
    ("/gateway.v1.Commands/Send", PUBLISH),
    ("/gateway.v1.Commands/StartCommand", PUBLISH),
    ("/gateway.v1.Commands/WatchCommand", READ),
    ("/gateway.v1.Consumer/Acknowledge", CONSUME),
    ("/gateway.v1.Consumer/Consume", CONSUME),
    ("/gateway.v1.Consumer/Fetch", CONSUME),
    ("/gateway.v1.Consumer/ModifyLease", CONSUME),
    ("/gateway.v1.Devices/DeleteDevice", OPERATE),
    ("/gateway.v1.Devices/DisconnectDevice", OPERATE),
    ("/gateway.v1.Devices/GetDevice", READ),
    ("/gateway.v1.Devices/ListDevices", READ),
    ("/gateway.v1.Devices/ListSubscriptions", READ),
    ("/gateway.v1.Devices/ListQueue", READ),
    ("/gateway.v1.Devices/ListTopDevices", READ),
    ("/gateway.v1.Devices/PurgeQueue", OPERATE),
    ("/gateway.v1.Devices/SetDeviceTrace", OPERATE),
    ("/gateway.v1.Devices/SubscribeDevice", OPERATE),
    ("/gateway.v1.Devices/TracePackets", OPERATE),
    ("/gateway.v1.Devices/UnsubscribeDevice", OPERATE),
    ("/gateway.v1.Events/WatchEvents", READ),
    ("/gateway.v1.Groups/CreateGroup", ADMINISTER),
    ("/gateway.v1.Groups/DeleteGroup", ADMINISTER),
    ("/gateway.v1.Groups/GetGroup", READ),
    ("/gateway.v1.Groups/ListDeadLetters", READ),
    ("/gateway.v1.Groups/ListGroups", READ),
    ("/gateway.v1.Groups/ListMembers", READ),
    ("/gateway.v1.Groups/ListPending", READ),
    ("/gateway.v1.Groups/PurgeDeadLetters", ADMINISTER),
    ("/gateway.v1.Groups/RequeueDeadLetters", ADMINISTER),
    ("/gateway.v1.Groups/SeekGroup", ADMINISTER),
    ("/gateway.v1.Groups/UpdateGroup", ADMINISTER),
    ("/gateway.v1.Operations/GetCaller", READ),
    ("/gateway.v1.Operations/GetConfiguration", ADMINISTER),
    ("/gateway.v1.Operations/GetMetrics", READ),
    ("/gateway.v1.Operations/GetStatus", READ),
    ("/gateway.v1.Operations/ListBridges", READ),
    ("/gateway.v1.Operations/ListCertificates", READ),
    ("/gateway.v1.Publisher/CancelScheduled", CLEAR),
    ("/gateway.v1.Publisher/ListScheduled", READ),
    ("/gateway.v1.Publisher/Publish", PUBLISH),
    ("/gateway.v1.Publisher/PublishBatch", PUBLISH),
    ("/gateway.v1.Publisher/PublishStream", PUBLISH),
    ("/gateway.v1.Publisher/PublishToDevices", PUBLISH),
    ("/gateway.v1.Security/AddBan", ADMINISTER),
    ("/gateway.v1.Security/CreateToken", ADMINISTER),
    ("/gateway.v1.Security/ListBans", ADMINISTER),
    ("/gateway.v1.Security/ExplainAccess", OPERATE),
    ("/gateway.v1.Security/ListRules", OPERATE),
    ("/gateway.v1.Security/ListTenants", ADMINISTER),
    ("/gateway.v1.Security/ListTokens", ADMINISTER),
    ("/gateway.v1.Security/Reload", ADMINISTER),
    ("/gateway.v1.Security/RemoveBan", ADMINISTER),
    ("/gateway.v1.Security/RevokeToken", ADMINISTER),
    ("/gateway.v1.Shadows/DeleteShadow", OPERATE),
    ("/gateway.v1.Shadows/GetShadow", READ),
    ("/gateway.v1.Shadows/ListShadows", READ),
    ("/gateway.v1.Shadows/UpdateShadow", PUBLISH),
    ("/gateway.v1.Shadows/WatchShadow", READ),
    ("/gateway.v1.State/BatchGetLatest", READ),
    ("/gateway.v1.State/DeleteLatest", OPERATE),
    ("/gateway.v1.State/DeleteRetained", CLEAR),
    ("/gateway.v1.State/GetLatest", READ),
    ("/gateway.v1.State/GetRetained", READ),
    ("/gateway.v1.State/ListHistory", READ),
    ("/gateway.v1.State/ListLatest", READ),
    ("/gateway.v1.State/ListRetained", READ),
    ("/gateway.v1.State/SetRetained", PUBLISH),
    ("/gateway.v1.State/WatchLatest", READ),
    ("/gateway.v1.Subscriber/Subscribe", READ),
    ("/gateway.v1.Subscriber/ListStreams", READ),
    ("/grpc.health.v1.Health/Check", READ),
    ("/grpc.health.v1.Health/Watch", READ),
    ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", READ),
    ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", READ),
    ("/rpcserver.PublishedPacketService/PublishPayloadToDevice", PUBLISH),
    ("/rpcserver.PublishedPacketService/StreamPublishedPayload", READ),
];

/// Every method, and whether it is administrative: for more than to read and to publish.
pub(super) fn administrative() -> impl Iterator<Item = (&'static str, bool)> {
    ROWS.iter().map(|(path, roles)| (*path, *roles != READ && *roles != PUBLISH && *roles != CONSUME))
}

/// The paths of all methods, as reflection tells them.
async fn methods(guarded: &Guarded) -> BTreeSet<String> {
    let mut client = ServerReflectionClient::new(guarded.channel("reader"));
    let mut ask = async |wanted: MessageRequest| {
        let request = ServerReflectionRequest { host: String::new(), message_request: Some(wanted) };
        let answer = client.server_reflection_info(tokio_stream::once(request)).await.unwrap();
        let answer = answer.into_inner().message().await.unwrap().unwrap();
        answer.message_response.unwrap()
    };
    let MessageResponse::ListServicesResponse(list) = ask(MessageRequest::ListServices(String::new())).await
    else {
        panic!("no list of services");
    };
    let mut paths = BTreeSet::new();
    for service in list.service {
        let MessageResponse::FileDescriptorResponse(files) =
            ask(MessageRequest::FileContainingSymbol(service.name.clone())).await
        else {
            panic!("no file of {}", service.name);
        };
        for file in files.file_descriptor_proto {
            let file = FileDescriptorProto::decode(file.as_slice()).unwrap();
            let named = |name: &str| format!("{}.{name}", file.package()) == service.name;
            for method in
                file.service.iter().filter(|found| named(found.name())).flat_map(|found| &found.method)
            {
                paths.insert(format!("/{}/{}", service.name, method.name()));
            }
        }
    }
    paths
}

/// Rules out a method that nobody has thought of when rights were given.
#[tokio::test(flavor = "multi_thread")]
async fn every_method_is_open_to_the_roles_of_its_row_alone() {
    let guarded = Guarded::with_roles().await;
    let listed = methods(&guarded).await;
    let rows: BTreeSet<String> = ROWS.iter().map(|(path, _)| (*path).to_owned()).collect();
    let reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo".to_owned();
    // The older reflection is served and does not list itself.
    let served = listed.into_iter().chain([reflection]).collect();
    assert_eq!(rows, served, "a method without a row, or a row without a method");
    let channel = &guarded.setup.channel;
    for (path, allowed) in ROWS {
        for role in Role::ALL {
            let token = bearer(guarded.token(role.as_str()));
            let first = soon(path, call(channel, path, &[token])).await;
            let denied = first.err().map(|status| refusal(&status));
            let is_role = denied == Some((Code::PermissionDenied, "ROLE_DENIED".to_owned()));
            assert_eq!(!is_role, allowed.contains(&role), "{path} by {role}: {denied:?}");
            let unserved = matches!(denied, Some((Code::Unauthenticated | Code::Unimplemented, _)));
            assert!(!unserved, "{path} by {role}: {denied:?}");
        }
        let nobody = soon(path, call(channel, path, &[])).await.err().map(|status| refusal(&status));
        let open = *path == "/grpc.health.v1.Health/Check";
        let missing = (!open).then(|| (Code::Unauthenticated, "CREDENTIALS_MISSING".to_owned()));
        assert_eq!(nobody, missing, "{path} by nobody");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_method_is_told_to_those_only_who_are_known() {
    let guarded = Guarded::with_roles().await;
    let channel = &guarded.setup.channel;
    for path in ["/gateway.v1.Devices/Nothing", "/other.Service/Call"] {
        let nobody = call(channel, path, &[]).await.unwrap_err();
        assert_eq!(refusal(&nobody), (Code::Unauthenticated, "CREDENTIALS_MISSING".to_owned()));
        let admin = call(channel, path, &[bearer(guarded.token("admin"))]).await.unwrap_err();
        assert_eq!(admin.code(), Code::Unimplemented);
    }
}

/// As before there were roles: on loopback, with nothing configured.
#[tokio::test(flavor = "multi_thread")]
async fn where_nobody_is_asked_everybody_may_do_everything() {
    let setup = Setup::new().await;
    for (path, _) in ROWS {
        let status = soon(path, call(&setup.channel, path, &[])).await.err();
        let code = status.as_ref().map(tonic::Status::code);
        let refused = [Code::PermissionDenied, Code::Unauthenticated, Code::Unimplemented];
        assert!(!code.is_some_and(|code| refused.contains(&code)), "{path}: {status:?}");
    }
}
