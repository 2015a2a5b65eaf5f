/// The files of the API, for the build scripts of messages, clients and servers.
const PROTOS: [&str; 12] = [
    "gateway/v1/common.proto",
    "gateway/v1/publisher.proto",
    "gateway/v1/subscriber.proto",
    "gateway/v1/state.proto",
    "gateway/v1/devices.proto",
    "gateway/v1/events.proto",
    "gateway/v1/groups.proto",
    "gateway/v1/commands.proto",
    "gateway/v1/security.proto",
    "gateway/v1/shadows.proto",
    "gateway/v1/operations.proto",
    "rpcserver/rpcserver.proto",
];
