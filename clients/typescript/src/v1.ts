/** Messages, enumerations and services of gateway.v1, as proto/gateway/v1 describes them. */
export * from "./gen/gateway/v1/commands_pb.js";
export * from "./gen/gateway/v1/common_pb.js";
export * from "./gen/gateway/v1/devices_pb.js";
export * from "./gen/gateway/v1/events_pb.js";
export * from "./gen/gateway/v1/groups_pb.js";
export * from "./gen/gateway/v1/operations_pb.js";
export * from "./gen/gateway/v1/publisher_pb.js";
export * from "./gen/gateway/v1/security_pb.js";
export * from "./gen/gateway/v1/shadows_pb.js";
export * from "./gen/gateway/v1/state_pb.js";
export * from "./gen/gateway/v1/subscriber_pb.js";
