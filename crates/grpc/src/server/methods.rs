//! Every method that is served, who may call it, and where it is answered in a cluster of several homes.

use access::backends::{Role, Roles};

use self::AnsweredAt::{
    AnyHome, EveryHome, Here, HomeOfDevice, HomeOfDeviceOrEvery, HomeOfGroup, HomeOfKey, HomeThatHas,
};

/// Callers of a method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AllowedCallers {
    /// Every caller, anonymous ones included.
    Anybody,
    /// Callers with one of these roles.
    Has(Roles),
}

/// A field of text in a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextField {
    /// Its name, from the request on, as `spec.device_id`.
    pub name: &'static str,
    /// Its number in the protos, behind those of the messages that it is in.
    pub tags: &'static [u32],
}

/// Place in a cluster of several homes that answers a method. A cluster of one home answers everything there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnsweredAt {
    /// The node that is called: what its own files and its process say.
    Here,
    /// The home of the device in this field.
    HomeOfDevice(TextField),
    /// The home of the device in this field, or every home if the field is empty.
    HomeOfDeviceOrEvery(TextField),
    /// The home of the text in this field.
    HomeOfKey(TextField),
    /// The home of consumer groups, and of bridges, which read them.
    HomeOfGroup,
    /// Any one: all have the same.
    AnyHome,
    /// The one that knows what is asked for; others answer NOT_FOUND.
    HomeThatHas,
    /// Every home that is concerned, with the answers merged.
    EveryHome,
}

/// A method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GrpcMethod {
    /// As in the request.
    pub path: &'static str,
    pub(crate) who: AllowedCallers,
    /// True if the call stays open, so that its caller can lose its rights meanwhile.
    pub(crate) stays: bool,
    /// Place that answers it.
    pub at: AnsweredAt,
    /// True if the method does more than read and publish: then each call is in the audit log.
    pub(crate) administers: bool,
}

impl TextField {
    const fn new(name: &'static str, tags: &'static [u32]) -> Self {
        Self { name, tags }
    }
}

impl GrpcMethod {
    const fn asks(path: &'static str, roles: Roles, at: AnsweredAt) -> Self {
        Self { path, who: AllowedCallers::Has(roles), stays: false, at, administers: false }
    }

    const fn stays(path: &'static str, roles: Roles, at: AnsweredAt) -> Self {
        Self { stays: true, ..Self::asks(path, roles, at) }
    }

    const fn watches(path: &'static str, roles: Roles, at: AnsweredAt) -> Self {
        Self { administers: true, ..Self::stays(path, roles, at) }
    }

    const fn administers(path: &'static str, roles: Roles, at: AnsweredAt) -> Self {
        Self { administers: true, ..Self::asks(path, roles, at) }
    }
}

/// `device_id`, which most requests have first.
const DEVICE: AnsweredAt = HomeOfDevice(TextField::new("device_id", &[1]));

/// The table: what is not in it is not served. Documented in docs/security.md, and held against reflection by a test.
#[rustfmt::skip]
const METHODS: &[GrpcMethod] = &[
    // As /healthz: asked by those who have nothing to show.
    GrpcMethod { path: "/grpc.health.v1.Health/Check", who: AllowedCallers::Anybody, stays: false, at: Here, administers: false },
    GrpcMethod::stays("/grpc.health.v1.Health/Watch", Roles::READ, Here),
    GrpcMethod::stays("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", Roles::READ, Here),
    GrpcMethod::stays("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", Roles::READ, Here),

    GrpcMethod::asks("/gateway.v1.Publisher/Publish", Roles::PUBLISH, EveryHome),
    GrpcMethod::asks("/gateway.v1.Publisher/PublishBatch", Roles::PUBLISH, EveryHome),
    GrpcMethod::stays("/gateway.v1.Publisher/PublishStream", Roles::PUBLISH, EveryHome),
    GrpcMethod::stays("/gateway.v1.Publisher/PublishToDevices", Roles::PUBLISH, EveryHome),
    GrpcMethod::asks("/gateway.v1.Publisher/ListScheduled", Roles::READ, EveryHome),
    GrpcMethod::administers("/gateway.v1.Publisher/CancelScheduled", Roles::CLEAR, EveryHome),

    GrpcMethod::stays("/gateway.v1.Subscriber/Subscribe", Roles::READ, EveryHome),
    GrpcMethod::asks("/gateway.v1.Subscriber/ListStreams", Roles::READ, EveryHome),

    GrpcMethod::asks("/gateway.v1.State/GetLatest", Roles::READ, HomeOfDeviceOrEvery(TextField::new("device_id", &[2]))),
    GrpcMethod::asks("/gateway.v1.State/BatchGetLatest", Roles::READ, EveryHome),
    GrpcMethod::asks("/gateway.v1.State/ListLatest", Roles::READ, EveryHome),
    GrpcMethod::stays("/gateway.v1.State/WatchLatest", Roles::READ, EveryHome),
    GrpcMethod::administers("/gateway.v1.State/DeleteLatest", Roles::OPERATE, DEVICE),
    GrpcMethod::asks("/gateway.v1.State/ListHistory", Roles::READ, DEVICE),
    GrpcMethod::asks("/gateway.v1.State/GetRetained", Roles::READ, HomeOfKey(TextField::new("topic", &[1]))),
    GrpcMethod::asks("/gateway.v1.State/SetRetained", Roles::PUBLISH, EveryHome),
    // An empty retained message deletes one just as well.
    GrpcMethod::administers("/gateway.v1.State/DeleteRetained", Roles::CLEAR, EveryHome),
    GrpcMethod::asks("/gateway.v1.State/ListRetained", Roles::READ, AnyHome),

    GrpcMethod::asks("/gateway.v1.Devices/ListDevices", Roles::READ, EveryHome),
    GrpcMethod::asks("/gateway.v1.Devices/ListTopDevices", Roles::READ, EveryHome),
    GrpcMethod::asks("/gateway.v1.Devices/GetDevice", Roles::READ, DEVICE),
    GrpcMethod::asks("/gateway.v1.Devices/ListSubscriptions", Roles::READ, DEVICE),
    GrpcMethod::asks("/gateway.v1.Devices/ListQueue", Roles::READ, DEVICE),
    GrpcMethod::administers("/gateway.v1.Devices/PurgeQueue", Roles::OPERATE, DEVICE),
    GrpcMethod::administers("/gateway.v1.Devices/SubscribeDevice", Roles::OPERATE, DEVICE),
    GrpcMethod::administers("/gateway.v1.Devices/UnsubscribeDevice", Roles::OPERATE, DEVICE),
    GrpcMethod::administers("/gateway.v1.Devices/DisconnectDevice", Roles::OPERATE, DEVICE),
    GrpcMethod::administers("/gateway.v1.Devices/DeleteDevice", Roles::OPERATE, EveryHome),
    GrpcMethod::administers("/gateway.v1.Devices/SetDeviceTrace", Roles::OPERATE, DEVICE),
    GrpcMethod::watches("/gateway.v1.Devices/TracePackets", Roles::OPERATE, DEVICE),

    GrpcMethod::stays("/gateway.v1.Events/WatchEvents", Roles::READ, EveryHome),

    GrpcMethod::administers("/gateway.v1.Groups/CreateGroup", Roles::ADMINISTER, HomeOfGroup),
    GrpcMethod::asks("/gateway.v1.Groups/GetGroup", Roles::READ, HomeOfGroup),
    GrpcMethod::asks("/gateway.v1.Groups/ListGroups", Roles::READ, HomeOfGroup),
    GrpcMethod::administers("/gateway.v1.Groups/UpdateGroup", Roles::ADMINISTER, HomeOfGroup),
    GrpcMethod::administers("/gateway.v1.Groups/DeleteGroup", Roles::ADMINISTER, HomeOfGroup),
    GrpcMethod::administers("/gateway.v1.Groups/SeekGroup", Roles::ADMINISTER, HomeOfGroup),
    GrpcMethod::asks("/gateway.v1.Groups/ListMembers", Roles::READ, HomeOfGroup),
    GrpcMethod::asks("/gateway.v1.Groups/ListPending", Roles::READ, HomeOfGroup),
    GrpcMethod::asks("/gateway.v1.Groups/ListDeadLetters", Roles::READ, HomeOfGroup),
    GrpcMethod::administers("/gateway.v1.Groups/RequeueDeadLetters", Roles::ADMINISTER, HomeOfGroup),
    GrpcMethod::administers("/gateway.v1.Groups/PurgeDeadLetters", Roles::ADMINISTER, HomeOfGroup),

    GrpcMethod::stays("/gateway.v1.Consumer/Consume", Roles::CONSUME, HomeOfGroup),
    GrpcMethod::asks("/gateway.v1.Consumer/Fetch", Roles::CONSUME, HomeOfGroup),
    GrpcMethod::asks("/gateway.v1.Consumer/Acknowledge", Roles::CONSUME, HomeOfGroup),
    GrpcMethod::asks("/gateway.v1.Consumer/ModifyLease", Roles::CONSUME, HomeOfGroup),

    GrpcMethod::asks("/gateway.v1.Commands/Send", Roles::PUBLISH, HomeOfDevice(TextField::new("spec.device_id", &[1, 1]))),
    GrpcMethod::asks("/gateway.v1.Commands/StartCommand", Roles::PUBLISH, HomeOfDevice(TextField::new("spec.device_id", &[2, 1]))),
    GrpcMethod::asks("/gateway.v1.Commands/GetCommand", Roles::READ, HomeThatHas),
    GrpcMethod::asks("/gateway.v1.Commands/ListCommands", Roles::READ, HomeOfDeviceOrEvery(TextField::new("device_id", &[1]))),
    GrpcMethod::asks("/gateway.v1.Commands/CancelCommand", Roles::PUBLISH, HomeThatHas),
    GrpcMethod::stays("/gateway.v1.Commands/WatchCommand", Roles::READ, HomeThatHas),

    GrpcMethod::asks("/gateway.v1.Shadows/GetShadow", Roles::READ, DEVICE),
    GrpcMethod::asks("/gateway.v1.Shadows/UpdateShadow", Roles::PUBLISH, DEVICE),
    GrpcMethod::administers("/gateway.v1.Shadows/DeleteShadow", Roles::OPERATE, DEVICE),
    GrpcMethod::asks("/gateway.v1.Shadows/ListShadows", Roles::READ, DEVICE),
    GrpcMethod::stays("/gateway.v1.Shadows/WatchShadow", Roles::READ, EveryHome),

    GrpcMethod::administers("/gateway.v1.Security/CreateToken", Roles::ADMINISTER, Here),
    GrpcMethod::administers("/gateway.v1.Security/ListTokens", Roles::ADMINISTER, Here),
    GrpcMethod::administers("/gateway.v1.Security/RevokeToken", Roles::ADMINISTER, Here),
    GrpcMethod::administers("/gateway.v1.Security/Reload", Roles::ADMINISTER, Here),
    GrpcMethod::administers("/gateway.v1.Security/ExplainAccess", Roles::OPERATE, DEVICE),
    GrpcMethod::administers("/gateway.v1.Security/ListRules", Roles::OPERATE, Here),
    GrpcMethod::administers("/gateway.v1.Security/ListBans", Roles::ADMINISTER, EveryHome),
    GrpcMethod::administers("/gateway.v1.Security/AddBan", Roles::ADMINISTER, EveryHome),
    GrpcMethod::administers("/gateway.v1.Security/RemoveBan", Roles::ADMINISTER, EveryHome),
    GrpcMethod::administers("/gateway.v1.Security/ListTenants", Roles::ADMINISTER, EveryHome),

    GrpcMethod::asks("/gateway.v1.Operations/GetCaller", Roles::READ, Here),
    GrpcMethod::asks("/gateway.v1.Operations/GetStatus", Roles::READ, EveryHome),
    GrpcMethod::asks("/gateway.v1.Operations/GetMetrics", Roles::READ, Here),
    GrpcMethod::asks("/gateway.v1.Operations/ListCertificates", Roles::READ, Here),
    GrpcMethod::administers("/gateway.v1.Operations/GetConfiguration", Roles::ADMINISTER, Here),
    GrpcMethod::asks("/gateway.v1.Operations/ListBridges", Roles::READ, HomeOfGroup),

    GrpcMethod::stays("/rpcserver.PublishedPacketService/StreamPublishedPayload", Roles::READ, HomeOfDeviceOrEvery(TextField::new("device_id", &[1]))),
    GrpcMethod::asks("/rpcserver.PublishedPacketService/PublishPayloadToDevice", Roles::PUBLISH, DEVICE),
];

/// The method of this path.
pub fn method(path: &str) -> Option<&'static GrpcMethod> {
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
    use prost_types::{FileDescriptorProto, FileDescriptorSet, field_descriptor_proto::Type};

    use super::*;
    use crate::proto::DESCRIPTORS;

    /// Numbers of a field and of the messages that it is in, by its name; `None` if it is no text.
    fn tags(files: &[FileDescriptorProto], message: &str, name: &str) -> Option<Vec<u32>> {
        let (first, rest) = name.split_once('.').map_or((name, None), |(first, rest)| (first, Some(rest)));
        let of = files.iter().find_map(|file| {
            let mut messages = file.message_type.iter();
            messages.find(|of| format!(".{}.{}", file.package(), of.name()) == message)
        })?;
        let field = of.field.iter().find(|field| field.name() == first)?;
        let mut tags = vec![u32::try_from(field.number()).ok()?];
        match rest {
            Some(rest) => tags.extend(self::tags(files, field.type_name(), rest)?),
            None if field.r#type() != Type::String => return None,
            None => {}
        }
        Some(tags)
    }

    /// The failure: a call goes to the home of another field's text, or of none.
    #[test]
    fn homes_are_found_by_fields_that_requests_have() {
        let files = FileDescriptorSet::decode(DESCRIPTORS).unwrap().file;
        let mut looked_at = 0;
        for file in &files {
            for (service, of) in
                file.service.iter().flat_map(|service| service.method.iter().map(move |of| (service, of)))
            {
                let row = method(&format!("/{}.{}/{}", file.package(), service.name(), of.name())).unwrap();
                if let HomeOfDevice(field) | HomeOfDeviceOrEvery(field) | HomeOfKey(field) = row.at {
                    assert_eq!(
                        tags(&files, of.input_type(), field.name).as_deref(),
                        Some(field.tags),
                        "{row:?}"
                    );
                    assert!(!of.client_streaming(), "{row:?}");
                    looked_at += 1;
                }
            }
        }
        assert!(looked_at > 20, "{looked_at}");
    }

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
