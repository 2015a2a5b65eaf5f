//! Every method that is served, and who may call it.

use access::backends::{Role, Roles};

/// Callers of a method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AllowedCallers {
    /// Every caller, anonymous ones included.
    Anybody,
    /// Callers with one of these roles.
    Has(Roles),
}

/// A method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GrpcMethod {
    /// As in the request.
    pub path: &'static str,
    pub who: AllowedCallers,
    /// True if the call stays open, so that its caller can lose its rights meanwhile.
    pub stays: bool,
    /// True if the method does more than read and publish: then each call is in the audit log.
    pub(crate) administers: bool,
}

impl GrpcMethod {
    const fn asks(path: &'static str, roles: Roles) -> Self {
        Self { path, who: AllowedCallers::Has(roles), stays: false, administers: false }
    }

    const fn stays(path: &'static str, roles: Roles) -> Self {
        Self { stays: true, ..Self::asks(path, roles) }
    }

    const fn watches(path: &'static str, roles: Roles) -> Self {
        Self { administers: true, ..Self::stays(path, roles) }
    }

    const fn administers(path: &'static str, roles: Roles) -> Self {
        Self { administers: true, ..Self::asks(path, roles) }
    }
}

/// The table: what is not in it is not served. Documented in docs/security.md, and held against reflection by a test.
#[rustfmt::skip]
const METHODS: &[GrpcMethod] = &[
    // As /healthz: asked by those who have nothing to show.
    GrpcMethod { path: "/grpc.health.v1.Health/Check", who: AllowedCallers::Anybody, stays: false, administers: false },
    GrpcMethod::stays("/grpc.health.v1.Health/Watch", Roles::READ),
    GrpcMethod::stays("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", Roles::READ),
    GrpcMethod::stays("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", Roles::READ),

    GrpcMethod::asks("/gateway.v1.Publisher/Publish", Roles::PUBLISH),
    GrpcMethod::asks("/gateway.v1.Publisher/PublishBatch", Roles::PUBLISH),
    GrpcMethod::stays("/gateway.v1.Publisher/PublishStream", Roles::PUBLISH),
    GrpcMethod::stays("/gateway.v1.Publisher/PublishToDevices", Roles::PUBLISH),
    GrpcMethod::asks("/gateway.v1.Publisher/ListScheduled", Roles::READ),
    GrpcMethod::administers("/gateway.v1.Publisher/CancelScheduled", Roles::CLEAR),

    GrpcMethod::stays("/gateway.v1.Subscriber/Subscribe", Roles::READ),
    GrpcMethod::asks("/gateway.v1.Subscriber/ListStreams", Roles::READ),

    GrpcMethod::asks("/gateway.v1.State/GetLatest", Roles::READ),
    GrpcMethod::asks("/gateway.v1.State/BatchGetLatest", Roles::READ),
    GrpcMethod::asks("/gateway.v1.State/ListLatest", Roles::READ),
    GrpcMethod::stays("/gateway.v1.State/WatchLatest", Roles::READ),
    GrpcMethod::administers("/gateway.v1.State/DeleteLatest", Roles::OPERATE),
    GrpcMethod::asks("/gateway.v1.State/ListHistory", Roles::READ),
    GrpcMethod::asks("/gateway.v1.State/GetRetained", Roles::READ),
    GrpcMethod::asks("/gateway.v1.State/SetRetained", Roles::PUBLISH),
    // An empty retained message deletes one just as well.
    GrpcMethod::administers("/gateway.v1.State/DeleteRetained", Roles::CLEAR),
    GrpcMethod::asks("/gateway.v1.State/ListRetained", Roles::READ),

    GrpcMethod::asks("/gateway.v1.Devices/ListDevices", Roles::READ),
    GrpcMethod::asks("/gateway.v1.Devices/ListTopDevices", Roles::READ),
    GrpcMethod::asks("/gateway.v1.Devices/GetDevice", Roles::READ),
    GrpcMethod::asks("/gateway.v1.Devices/ListSubscriptions", Roles::READ),
    GrpcMethod::asks("/gateway.v1.Devices/ListQueue", Roles::READ),
    GrpcMethod::administers("/gateway.v1.Devices/PurgeQueue", Roles::OPERATE),
    GrpcMethod::administers("/gateway.v1.Devices/SubscribeDevice", Roles::OPERATE),
    GrpcMethod::administers("/gateway.v1.Devices/UnsubscribeDevice", Roles::OPERATE),
    GrpcMethod::administers("/gateway.v1.Devices/DisconnectDevice", Roles::OPERATE),
    GrpcMethod::administers("/gateway.v1.Devices/DeleteDevice", Roles::OPERATE),
    GrpcMethod::administers("/gateway.v1.Devices/SetDeviceTrace", Roles::OPERATE),
    GrpcMethod::watches("/gateway.v1.Devices/TracePackets", Roles::OPERATE),

    GrpcMethod::stays("/gateway.v1.Events/WatchEvents", Roles::READ),

    GrpcMethod::administers("/gateway.v1.Groups/CreateGroup", Roles::ADMINISTER),
    GrpcMethod::asks("/gateway.v1.Groups/GetGroup", Roles::READ),
    GrpcMethod::asks("/gateway.v1.Groups/ListGroups", Roles::READ),
    GrpcMethod::administers("/gateway.v1.Groups/UpdateGroup", Roles::ADMINISTER),
    GrpcMethod::administers("/gateway.v1.Groups/DeleteGroup", Roles::ADMINISTER),
    GrpcMethod::administers("/gateway.v1.Groups/SeekGroup", Roles::ADMINISTER),
    GrpcMethod::asks("/gateway.v1.Groups/ListMembers", Roles::READ),
    GrpcMethod::asks("/gateway.v1.Groups/ListPending", Roles::READ),
    GrpcMethod::asks("/gateway.v1.Groups/ListDeadLetters", Roles::READ),
    GrpcMethod::administers("/gateway.v1.Groups/RequeueDeadLetters", Roles::ADMINISTER),
    GrpcMethod::administers("/gateway.v1.Groups/PurgeDeadLetters", Roles::ADMINISTER),

    GrpcMethod::stays("/gateway.v1.Consumer/Consume", Roles::CONSUME),
    GrpcMethod::asks("/gateway.v1.Consumer/Fetch", Roles::CONSUME),
    GrpcMethod::asks("/gateway.v1.Consumer/Acknowledge", Roles::CONSUME),
    GrpcMethod::asks("/gateway.v1.Consumer/ModifyLease", Roles::CONSUME),

    GrpcMethod::asks("/gateway.v1.Commands/Send", Roles::PUBLISH),
    GrpcMethod::asks("/gateway.v1.Commands/StartCommand", Roles::PUBLISH),
    GrpcMethod::asks("/gateway.v1.Commands/GetCommand", Roles::READ),
    GrpcMethod::asks("/gateway.v1.Commands/ListCommands", Roles::READ),
    GrpcMethod::asks("/gateway.v1.Commands/CancelCommand", Roles::PUBLISH),
    GrpcMethod::stays("/gateway.v1.Commands/WatchCommand", Roles::READ),

    GrpcMethod::asks("/gateway.v1.Shadows/GetShadow", Roles::READ),
    GrpcMethod::asks("/gateway.v1.Shadows/UpdateShadow", Roles::PUBLISH),
    GrpcMethod::administers("/gateway.v1.Shadows/DeleteShadow", Roles::OPERATE),
    GrpcMethod::asks("/gateway.v1.Shadows/ListShadows", Roles::READ),
    GrpcMethod::stays("/gateway.v1.Shadows/WatchShadow", Roles::READ),

    GrpcMethod::administers("/gateway.v1.Security/CreateToken", Roles::ADMINISTER),
    GrpcMethod::administers("/gateway.v1.Security/ListTokens", Roles::ADMINISTER),
    GrpcMethod::administers("/gateway.v1.Security/RevokeToken", Roles::ADMINISTER),
    GrpcMethod::administers("/gateway.v1.Security/Reload", Roles::ADMINISTER),
    GrpcMethod::administers("/gateway.v1.Security/ExplainAccess", Roles::OPERATE),
    GrpcMethod::administers("/gateway.v1.Security/ListRules", Roles::OPERATE),
    GrpcMethod::administers("/gateway.v1.Security/ListBans", Roles::ADMINISTER),
    GrpcMethod::administers("/gateway.v1.Security/AddBan", Roles::ADMINISTER),
    GrpcMethod::administers("/gateway.v1.Security/RemoveBan", Roles::ADMINISTER),
    GrpcMethod::administers("/gateway.v1.Security/ListTenants", Roles::ADMINISTER),

    GrpcMethod::asks("/gateway.v1.Operations/GetCaller", Roles::READ),
    GrpcMethod::asks("/gateway.v1.Operations/GetStatus", Roles::READ),
    GrpcMethod::asks("/gateway.v1.Operations/GetMetrics", Roles::READ),
    GrpcMethod::asks("/gateway.v1.Operations/ListCertificates", Roles::READ),
    GrpcMethod::administers("/gateway.v1.Operations/GetConfiguration", Roles::ADMINISTER),
    GrpcMethod::asks("/gateway.v1.Operations/ListBridges", Roles::READ),

    GrpcMethod::stays("/rpcserver.PublishedPacketService/StreamPublishedPayload", Roles::READ),
    GrpcMethod::asks("/rpcserver.PublishedPacketService/PublishPayloadToDevice", Roles::PUBLISH),
];

/// The method of this path.
pub(crate) fn method(path: &str) -> Option<&'static GrpcMethod> {
    // Some fifty comparisons, most of which end with the length.
    METHODS.iter().find(|method| method.path == path)
}

/// The paths of what `role` may call.
pub(crate) fn methods_of(role: Role) -> impl Iterator<Item = &'static str> {
    let may = move |who| match who {
        AllowedCallers::Anybody => true,
        AllowedCallers::Has(roles) => roles.include(role),
    };
    METHODS.iter().filter(move |method| may(method.who)).map(|method| method.path)
}

#[cfg(test)]
mod tests {
    use prost::Message as _;
    use prost_types::FileDescriptorSet;

    use super::*;
    use crate::proto::DESCRIPTORS;

    /// A method that is not in the table would be served to nobody; one that streams and does not say so would outlive its
    /// caller's rights.
    #[test]
    fn the_table_has_every_method_of_the_protos() {
        let health = tonic_health::pb::FILE_DESCRIPTOR_SET;
        let mut paths = Vec::new();
        for set in [DESCRIPTORS, health] {
            for file in FileDescriptorSet::decode(set).unwrap().file {
                for service in &file.service {
                    for of in &service.method {
                        let path = format!("/{}.{}/{}", file.package(), service.name(), of.name());
                        let row = method(&path).unwrap_or_else(|| panic!("no row for {path}"));
                        assert_eq!(row.stays, of.server_streaming(), "{path}");
                        paths.push(path);
                    }
                }
            }
        }
        let others = METHODS.iter().filter(|method| !paths.iter().any(|path| path == method.path));
        assert_eq!(others.filter(|method| !method.path.contains("reflection")).count(), 0);
        assert!(method("/gateway.v1.Publisher/Other").is_none() && method("").is_none());
    }
}
