/** Client of mqtt-server's gRPC API. */
export { type CallOptions, Stream } from "./calls.js";
export {
  Client,
  Commands,
  type CommandSpec,
  connect,
  type ConnectOptions,
  Devices,
  type Gap,
  type GapReason,
  Latest,
  type LatestItem,
  type Publish,
  type ShadowItem,
  Shadows,
  Stubs,
  type SubscribeItem,
  type Token,
} from "./client.js";
export { type ConsumeOptions, Consumer, Delivery, GiveBack, type Handler } from "./consume.js";
export { Code, errorOf, GatewayError, type Reason, REASONS } from "./errors.js";
export * as v1 from "./v1.js";
