/** The client: what backends do most, each as one call. `stubs` has everything else. */
import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { durationFromMs } from "@bufbuild/protobuf/wkt";
import { type Client as Stub, createClient, type Interceptor } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";
import { readFileSync } from "node:fs";
import { call, type CallOptions, HEARTBEAT_MS, Stream, type Unary } from "./calls.js";
import { type ConsumeOptions, Consumer, type Handler } from "./consume.js";
import { errorOf, GatewayError } from "./errors.js";
import * as v1 from "./v1.js";

/** What is shown with each call: text, or what is asked for it each time. */
export type Token = string | (() => string | Promise<string>);

/** How a gateway is reached. */
export interface ConnectOptions {
  /** The authorities to believe: a file, or PEM. Without it those of Node. */
  ca?: string | Buffer;
  token?: Token;
  /** The client's certificate and its key: files, or PEM. */
  certificate?: { cert: string | Buffer; key: string | Buffer };
  /** Without TLS. */
  plaintext?: boolean;
  /** How long calls take at most that say nothing else; 30 seconds. */
  timeoutMs?: number;
}

/** Why something is missing from a stream. RECONNECTED is said by the library: the connection was lost, and what came until it was back
 * is missing. */
export type GapReason = Exclude<keyof typeof v1.GapReason, "UNSPECIFIED"> | "RECONNECTED" | "UNKNOWN";

/** A place in a stream where something is missing. */
export interface Gap {
  case: "gap";
  /** How many messages; undefined where nobody knows. */
  count: bigint | undefined;
  reason: GapReason;
}

const RECONNECTED = (): Gap => ({ case: "gap", count: undefined, reason: "RECONNECTED" });

function gapOf(gap: v1.Gap): Gap {
  const name = v1.GapReason[gap.reason] as keyof typeof v1.GapReason | undefined;
  const reason = name === undefined || name === "UNSPECIFIED" ? "UNKNOWN" : name;
  return { case: "gap", count: gap.count === 0n ? undefined : gap.count, reason };
}

/** What a subscription brings. */
export type SubscribeItem = { case: "message"; message: v1.ReceivedMessage } | Gap;
/** What a watch of latest values brings. */
export type LatestItem =
  | { case: "value"; value: v1.LatestValue }
  | { case: "removed"; removed: v1.RemovedValue }
  | { case: "snapshotEnd" }
  | Gap;
/** What a watch of shadows brings. */
export type ShadowItem =
  | { case: "shadow"; shadow: v1.Shadow }
  | { case: "deleted"; deleted: v1.DeletedShadow }
  | { case: "snapshotEnd" }
  | Gap;

/** A request whose payload may be text. */
type WithPayload<Init> = Omit<Init, "payload" | "$typeName" | "$unknown"> & { payload?: Uint8Array | string };

/** What to publish; `topic` and `payload` mostly. */
export type Publish = WithPayload<MessageInitShape<typeof v1.PublishRequestSchema>>;
/** What to send to a device: `deviceId`, `name` and `payload` mostly. */
export type CommandSpec = WithPayload<MessageInitShape<typeof v1.CommandSpecSchema>>;

const bytes = (payload: Uint8Array | string | undefined): Uint8Array =>
  typeof payload === "string" ? new TextEncoder().encode(payload) : (payload ?? new Uint8Array());

/** A client of the gateway at `address`, "host:port". The connection is made with the first call, and again when it is lost. */
export function connect(address: string, options: ConnectOptions = {}): Client {
  const pem = (source: string | Buffer): string | Buffer =>
    typeof source === "string" && !source.includes("-----BEGIN") ? readFileSync(source) : source;
  const baseUrl = `${options.plaintext ? "http" : "https"}://${address}`;
  const sessions = new Http2SessionManager(
    baseUrl,
    { pingIntervalMs: 20_000, pingTimeoutMs: 10_000, pingIdleConnection: true },
    {
      ...(options.ca !== undefined && { ca: pem(options.ca) }),
      ...(options.certificate && { cert: pem(options.certificate.cert), key: pem(options.certificate.key) }),
    },
  );
  const transport = createGrpcTransport({
    baseUrl,
    sessionManager: sessions,
    interceptors: [typed, shows(options.token)],
    // A page has 3 MiB at most, but for one item that is larger.
    readMaxBytes: 64 << 20,
  });
  return new Client(transport, () => sessions.abort(), typeof options.token === "function", options.timeoutMs ?? 30_000);
}

/** Shows the token with each call. */
function shows(token: Token | undefined): Interceptor {
  return (next) => async (request) => {
    const shown = typeof token === "function" ? await token() : token;
    if (shown) request.header.set("authorization", `Bearer ${shown}`);
    return next(request);
  };
}

/** Makes errors of this library of all that calls and streams fail with. */
const typed: Interceptor = (next) => async (request) => {
  try {
    const response = await next(request);
    return response.stream ? { ...response, message: typedMessages(response.message, request.signal) } : response;
  } catch (thrown) {
    throw errorOf(thrown, request.signal.aborted);
  }
};

async function* typedMessages<T>(messages: AsyncIterable<T>, signal: AbortSignal): AsyncIterable<T> {
  try {
    yield* messages;
  } catch (thrown) {
    throw errorOf(thrown, signal.aborted);
  }
}

type Transport = Parameters<typeof createClient>[1];

/** The generated clients of all services. Their errors are GatewayErrors, too. */
export class Stubs {
  readonly publisher: Stub<typeof v1.Publisher>;
  readonly subscriber: Stub<typeof v1.Subscriber>;
  readonly groups: Stub<typeof v1.Groups>;
  readonly consumer: Stub<typeof v1.Consumer>;
  readonly commands: Stub<typeof v1.Commands>;
  readonly shadows: Stub<typeof v1.Shadows>;
  readonly state: Stub<typeof v1.State>;
  readonly devices: Stub<typeof v1.Devices>;
  readonly events: Stub<typeof v1.Events>;
  readonly security: Stub<typeof v1.Security>;
  readonly operations: Stub<typeof v1.Operations>;

  constructor(transport: Transport) {
    this.publisher = createClient(v1.Publisher, transport);
    this.subscriber = createClient(v1.Subscriber, transport);
    this.groups = createClient(v1.Groups, transport);
    this.consumer = createClient(v1.Consumer, transport);
    this.commands = createClient(v1.Commands, transport);
    this.shadows = createClient(v1.Shadows, transport);
    this.state = createClient(v1.State, transport);
    this.devices = createClient(v1.Devices, transport);
    this.events = createClient(v1.Events, transport);
    this.security = createClient(v1.Security, transport);
    this.operations = createClient(v1.Operations, transport);
  }
}

/** How the parts of a client make their calls. */
interface Calls {
  readonly stubs: Stubs;
  readonly renews: boolean;
  /** A call that changes nothing, or twice what it changes once. */
  read<Request, Response>(method: Unary<Request, Response>, request: Request, options?: CallOptions): Promise<Response>;
  /** A call that is made once. */
  write<Request, Response>(method: Unary<Request, Response>, request: Request, options?: CallOptions): Promise<Response>;
}

/** Made by `connect`. */
export class Client {
  /** The generated clients: every method there is. */
  readonly stubs: Stubs;
  /** Requests to devices, with their answers. */
  readonly commands: Commands;
  /** The last message of each device on each topic. */
  readonly latest: Latest;
  /** What devices are to be, and what they say they are. */
  readonly shadows: Shadows;
  /** Devices and their sessions. */
  readonly devices: Devices;
  readonly #calls: Calls;
  readonly #end: () => void;

  constructor(transport: Transport, end: () => void, renews: boolean, timeoutMs: number) {
    this.stubs = new Stubs(transport);
    this.#end = end;
    this.#calls = {
      stubs: this.stubs,
      renews,
      read: (method, request, options) => call(method, request, options?.timeoutMs ?? timeoutMs, true, options?.signal),
      write: (method, request, options) => call(method, request, options?.timeoutMs ?? timeoutMs, false, options?.signal),
    };
    this.commands = new Commands(this.#calls);
    this.latest = new Latest(this.#calls);
    this.shadows = new Shadows(this.#calls);
    this.devices = new Devices(this.#calls);
  }

  /** Ends the connection, and every call on it. */
  close(): void {
    this.#end();
  }

  [Symbol.dispose](): void {
    this.close();
  }

  /** Publishes, and tells what became of it once it is routed, or as `wait` says. A message without an `idempotencyKey` is sent once: if
   * the connection is lost meanwhile, nobody knows whether it was published, and this fails. */
  publish(message: Publish, options?: CallOptions): Promise<v1.PublishResponse> {
    return this.#publish(create(v1.PublishRequestSchema, { ...message, payload: bytes(message.payload) }), options);
  }

  /**
   * Publishes once, and waits until every receiver that is online has acknowledged it, or as `wait` says.
   *
   * It is tried again over lost connections and restarts of the gateway, always with the same idempotency key, so that it is published once.
   * An error has that key: the same call with it goes on waiting, for as long as the gateway remembers it. After OUTCOME_LOST it must not
   * be sent again.
   */
  publishAndWait(message: Publish, options?: CallOptions): Promise<v1.PublishResponse> {
    const request = create(v1.PublishRequestSchema, { ...message, payload: bytes(message.payload) });
    if (request.wait === v1.Wait.UNSPECIFIED) request.wait = v1.Wait.ACKED;
    request.idempotencyKey ||= crypto.randomUUID();
    return this.#publish(request, options);
  }

  async #publish(request: v1.PublishRequest, options?: CallOptions): Promise<v1.PublishResponse> {
    const make = request.idempotencyKey === "" ? this.#calls.write : this.#calls.read;
    try {
      return await make((one: v1.PublishRequest, how) => this.stubs.publisher.publish(one, how), request, options);
    } catch (thrown) {
      if (thrown instanceof GatewayError && request.idempotencyKey !== "") thrown.idempotencyKey = request.idempotencyKey;
      throw thrown;
    }
  }

  /** Follows what is published from now on, at most once; resolves when the gateway has the subscription. What a slow reader has lost, and
   * what came while the connection was away, is told by a gap in its place. Who must not miss anything consumes a group. */
  subscribe(
    request: MessageInitShape<typeof v1.SubscribeRequestSchema>,
    options?: { signal?: AbortSignal },
  ): Promise<Stream<SubscribeItem>> {
    const asked = { heartbeatInterval: durationFromMs(HEARTBEAT_MS), ...request };
    function* items(response: v1.SubscribeResponse): Iterable<SubscribeItem> {
      for (const { item } of response.items) {
        if (item.case === "message") yield { case: "message", message: item.value };
        else if (item.case === "gap") yield gapOf(item.value);
      }
    }
    return Stream.open((how) => this.stubs.subscriber.subscribe(asked, how), items, RECONNECTED, this.#calls.renews,
      HEARTBEAT_MS * 3, options?.signal);
  }

  /** A member of `group`, which calls `handler` with each message and acknowledges those for which it resolved. Its `run` consumes. */
  consume(group: string, handler: Handler, options: ConsumeOptions = {}): Consumer {
    return new Consumer(this.stubs.consumer, this.stubs.groups, this.#calls.renews, group, handler, options);
  }
}

/** Requests to devices, with their answers. */
export class Commands {
  readonly #calls: Calls;

  constructor(calls: Calls) {
    this.#calls = calls;
  }

  /** Sends a command and resolves to the device's answer; what the device calls an error is one, too (`deviceStatus`). A device that is not
   * connected is waited for as long as `waitForDeviceMs` says. Sent once: an error tells the `stage`. */
  async send(spec: CommandSpec, options: CallOptions & { waitForDeviceMs?: number } = {}): Promise<v1.Reply> {
    const request = create(v1.SendRequestSchema, {
      spec: { ...spec, payload: bytes(spec.payload) },
      ...(options.waitForDeviceMs !== undefined && { waitForDevice: durationFromMs(options.waitForDeviceMs) }),
    });
    const answer = await this.#calls.write((one: v1.SendRequest, how) => this.#calls.stubs.commands.send(one, how), request, options);
    return answer.reply ?? create(v1.ReplySchema);
  }

  /** Stores a command, which goes out when its device is there, and resolves when it is on disk. Started once: without a `commandId` the
   * library makes one, and keeps it over its attempts. */
  async start(
    spec: CommandSpec,
    rest: Omit<MessageInitShape<typeof v1.StartCommandRequestSchema>, "spec" | "$typeName" | "$unknown"> = {},
    options?: CallOptions,
  ): Promise<v1.Command> {
    const request = create(v1.StartCommandRequestSchema, { ...rest, spec: { ...spec, payload: bytes(spec.payload) } });
    request.commandId ||= crypto.randomUUID();
    const answer = await this.#calls.read((one: v1.StartCommandRequest, how) => this.#calls.stubs.commands.startCommand(one, how),
      request, options);
    return answer.command ?? create(v1.CommandSchema);
  }

  /** A stored command as it is now. */
  async get(commandId: string, options?: CallOptions): Promise<v1.Command> {
    const answer = await this.#calls.read((one: { commandId: string }, how) => this.#calls.stubs.commands.getCommand(one, how),
      { commandId }, options);
    return answer.command ?? create(v1.CommandSchema);
  }

  /** Stored commands, the newest first. Pages are read as they are needed. */
  list(request: MessageInitShape<typeof v1.ListCommandsRequestSchema> = {}, options?: CallOptions): AsyncGenerator<v1.Command> {
    return pages(this.#calls, create(v1.ListCommandsRequestSchema, request),
      (one, how) => this.#calls.stubs.commands.listCommands(one, how), (page) => page.commands, options);
  }

  /** Cancels a stored command; COMMAND_ENDED if it has ended. */
  async cancel(commandId: string, options?: CallOptions): Promise<v1.Command> {
    const answer = await this.#calls.write((one: { commandId: string }, how) => this.#calls.stubs.commands.cancelCommand(one, how),
      { commandId }, options);
    return answer.command ?? create(v1.CommandSchema);
  }

  /** A stored command as it is, and after each change; the stream ends when the command does. */
  watch(commandId: string, options?: { signal?: AbortSignal }): Promise<Stream<v1.Command>> {
    const items = (response: v1.WatchCommandResponse) => (response.command === undefined ? [] : [response.command]);
    // No heartbeats here: the pings of the connection show that it lives.
    return Stream.open((how) => this.#calls.stubs.commands.watchCommand({ commandId }, how), items, undefined, this.#calls.renews,
      undefined, options?.signal);
  }
}

/** The last message of each device on each topic. */
export class Latest {
  readonly #calls: Calls;

  constructor(calls: Calls) {
    this.#calls = calls;
  }

  /** The last message of a device on a topic, or of any device. VALUE_NOT_FOUND if there is none. */
  async get(topic: string, deviceId?: string, options?: CallOptions): Promise<v1.LatestValue> {
    const request = create(v1.GetLatestRequestSchema, { topic, ...(deviceId !== undefined && { deviceId }) });
    const answer = await this.#calls.read((one: v1.GetLatestRequest, how) => this.#calls.stubs.state.getLatest(one, how), request, options);
    return answer.value ?? create(v1.LatestValueSchema);
  }

  /** Latest values in order of device and topic. Pages are read as they are needed. */
  list(request: MessageInitShape<typeof v1.ListLatestRequestSchema> = {}, options?: CallOptions): AsyncGenerator<v1.LatestValue> {
    return pages(this.#calls, create(v1.ListLatestRequestSchema, request),
      (one, how) => this.#calls.stubs.state.listLatest(one, how), (page) => page.values, options);
  }

  /** The values there are, a snapshotEnd, then changes, of which a slow reader gets the last. After a lost connection there is a gap, then
   * all of it again. */
  watch(
    request: MessageInitShape<typeof v1.WatchLatestRequestSchema> = {},
    options?: { signal?: AbortSignal },
  ): Promise<Stream<LatestItem>> {
    const asked = { heartbeatInterval: durationFromMs(HEARTBEAT_MS), ...request };
    function* items(response: v1.WatchLatestResponse): Iterable<LatestItem> {
      for (const { item } of response.items) {
        if (item.case === "value") yield { case: "value", value: item.value };
        else if (item.case === "removed") yield { case: "removed", removed: item.value };
        else if (item.case === "snapshotEnd") yield { case: "snapshotEnd" };
        else if (item.case === "gap") yield gapOf(item.value);
      }
    }
    return Stream.open((how) => this.#calls.stubs.state.watchLatest(asked, how), items, RECONNECTED, this.#calls.renews,
      HEARTBEAT_MS * 3, options?.signal);
  }
}

/** What devices are to be, and what they say they are. Documents are JSON text, in which numbers have every digit. */
export class Shadows {
  readonly #calls: Calls;

  constructor(calls: Calls) {
    this.#calls = calls;
  }

  /** A shadow; without a name the classic one. SHADOW_NOT_FOUND if there is none. */
  async get(deviceId: string, name = "", options?: CallOptions): Promise<v1.Shadow> {
    const answer = await this.#calls.read(
      (one: { deviceId: string; name: string }, how) => this.#calls.stubs.shadows.getShadow(one, how), { deviceId, name }, options);
    return answer.shadow ?? create(v1.ShadowSchema);
  }

  /** Merges into what is `desired` or `reported`, JSON as an object or as text; `null` in it removes a key. VERSION_CONFLICT, with the
   * `version` there is, if it is not `expectedVersion`. Made once: if the connection is lost meanwhile, the version tells whether it was. */
  async update(
    deviceId: string,
    change: { desired?: object | string; reported?: object | string; name?: string; expectedVersion?: bigint; clientToken?: string },
    options?: CallOptions,
  ): Promise<v1.Shadow> {
    const text = (document: object | string) => (typeof document === "string" ? document : JSON.stringify(document));
    const { desired, reported, ...rest } = change;
    const request = create(v1.UpdateShadowRequestSchema, {
      ...rest,
      deviceId,
      ...(desired !== undefined && { desired: text(desired) }),
      ...(reported !== undefined && { reported: text(reported) }),
    });
    const answer = await this.#calls.write((one: v1.UpdateShadowRequest, how) => this.#calls.stubs.shadows.updateShadow(one, how),
      request, options);
    return answer.shadow ?? create(v1.ShadowSchema);
  }

  /** The shadows of these devices, a snapshotEnd, then changes; without devices the changes of all. After a lost connection there is a gap,
   * then all of it again. */
  watch(
    request: MessageInitShape<typeof v1.WatchShadowRequestSchema> = {},
    options?: { signal?: AbortSignal },
  ): Promise<Stream<ShadowItem>> {
    const asked = { heartbeatInterval: durationFromMs(HEARTBEAT_MS), ...request };
    function* items(response: v1.WatchShadowResponse): Iterable<ShadowItem> {
      for (const { item } of response.items) {
        if (item.case === "shadow") yield { case: "shadow", shadow: item.value };
        else if (item.case === "deleted") yield { case: "deleted", deleted: item.value };
        else if (item.case === "snapshotEnd") yield { case: "snapshotEnd" };
        else if (item.case === "gap") yield gapOf(item.value);
      }
    }
    return Stream.open((how) => this.#calls.stubs.shadows.watchShadow(asked, how), items, RECONNECTED, this.#calls.renews,
      HEARTBEAT_MS * 3, options?.signal);
  }
}

/** Devices and their sessions. */
export class Devices {
  readonly #calls: Calls;

  constructor(calls: Calls) {
    this.#calls = calls;
  }

  /** A device that has a session. DEVICE_NOT_FOUND otherwise. */
  async get(deviceId: string, options?: CallOptions): Promise<v1.Device> {
    const answer = await this.#calls.read((one: { deviceId: string }, how) => this.#calls.stubs.devices.getDevice(one, how),
      { deviceId }, options);
    return answer.device ?? create(v1.DeviceSchema);
  }

  /** The devices with a session that the request describes. Pages are read as they are needed. */
  list(request: MessageInitShape<typeof v1.ListDevicesRequestSchema> = {}, options?: CallOptions): AsyncGenerator<v1.Device> {
    return pages(this.#calls, create(v1.ListDevicesRequestSchema, request),
      (one, how) => this.#calls.stubs.devices.listDevices(one, how), (page) => page.devices, options);
  }
}

/** Reads pages as they are needed. */
async function* pages<Request extends { pageToken: string }, Response extends { nextPageToken: string }, T>(
  calls: Calls,
  request: Request,
  method: Unary<Request, Response>,
  content: (page: Response) => T[],
  options?: CallOptions,
): AsyncGenerator<T> {
  do {
    const page = await calls.read(method, request, options);
    yield* content(page);
    request.pageToken = page.nextPageToken;
  } while (request.pageToken !== "");
}
