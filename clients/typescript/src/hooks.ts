/** The service that you implement and the gateway calls, as proto/gateway/hooks/v1 describes it. */
export * from "./gen/gateway/hooks/v1/hooks_pb.js";
