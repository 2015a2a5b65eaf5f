/**
 * Consuming a group: what arrives, who works on it, and what is said about it.
 *
 * A member holds what it was given until it is settled. Messages of one key (mostly: one device) are worked on one after the other, keys
 * beside each other. The life of a message here:
 *
 *     queued -> running -> acknowledged -> confirmed (on the gateway's disk: it never comes again)
 *                      \-> given back: comes again
 *
 * When the stream ends, what is queued is forgotten, as it comes again. What is running goes on, and the next stream begins by naming it,
 * and what was acknowledged and not confirmed: the gateway does not deliver these again, also after a restart, and they are
 * acknowledged by their new delivery ids. What comes again all the same, as from a gateway that does not know of this, is the same work
 * under a new delivery, not another. What was acknowledged and not confirmed is remembered for a while; if it comes again it
 * is acknowledged again, and the handler does not see it twice.
 *
 * After a message was given back, its key is blocked until it comes again. The gateway revokes what it had sent of that key meanwhile,
 * and that may be on its way still: without the block it would be worked on out of order.
 */
import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { durationFromMs, durationMs } from "@bufbuild/protobuf/wkt";
import { type Client as Stub, Code } from "@connectrpc/connect";
import { call, HEARTBEAT_MS, Pauses, resumes, sleep, Watchdog } from "./calls.js";
import { errorOf, GatewayError } from "./errors.js";
import {
  AckSchema,
  type Ack,
  type ConsumedMessage,
  type ConsumeItem,
  Consumer as ConsumerService,
  ConsumeRequestSchema,
  type ConsumeRequest,
  type DeliveryRange,
  type Event,
  type Gap,
  Groups as GroupsService,
  type GroupStatus,
  NackSchema,
  type Opened,
  OrderKey,
  type ReceivedMessage,
} from "./v1.js";

/** Ids and ranges that one request may have. */
const MOST_IDS = 10_000;
/** For how long a key stays blocked whose message does not come again, as when it became a dead letter after all. */
const BLOCKED_MS = 5_000;
/** For how long an acknowledgement that nobody confirmed is remembered after the stream ended, and how many of those. */
const REMEMBERED_MS = 120_000;
const MOST_REMEMBERED = 10_000;
/** Longest that work on one message may take before its lease is no longer extended. */
const LONGEST_WORK_MS = 3_600_000;
const MOST_REASON = 1024;

/** Thrown by a handler: the message comes again, not sooner than after `delayMs`, or becomes a dead letter at once. */
export class GiveBack extends Error {
  override name = "GiveBack";
  constructor(
    message = "",
    readonly options: { delayMs?: number; deadLetter?: boolean } = {},
  ) {
    super(message);
  }
}

/** What a handler gets: a message, or an event where the group has those. */
export class Delivery {
  constructor(
    /** Names the message over redelivery and replay: what must be done once can be remembered by it. */
    readonly messageId: string,
    /** 1, and 1 more for each earlier delivery that ended in a failure, an expired deadline or the loss of its member. */
    readonly attempt: number,
    readonly message: ReceivedMessage | undefined,
    readonly event: Event | undefined,
  ) {}

  /** The device that published it, or to which the event happened. */
  get deviceId(): string {
    return this.message?.deviceId ?? this.event?.deviceId ?? "";
  }

  /** Its topic; empty for an event. */
  get topic(): string {
    return this.message?.topic ?? "";
  }

  /** Its payload; empty for an event. */
  get payload(): Uint8Array {
    return this.message?.payload ?? new Uint8Array();
  }

  /** Its payload as UTF-8. */
  get text(): string {
    return new TextDecoder().decode(this.payload);
  }
}

/** Works on a message. It is acknowledged when this resolves, and comes again when it rejects. The signal says that nobody waits for it
 * any more. */
export type Handler = (delivery: Delivery, signal: AbortSignal) => Promise<void> | void;

/** How a member consumes; all of it may be left out. */
export interface ConsumeOptions {
  /** How many handlers run at once, each for another key; 16. */
  concurrency?: number;
  /** Names the member over reconnects; drawn. */
  memberId?: string;
  /** How long the member keeps its share after its stream ended; 15 seconds. */
  leaseMs?: number;
  /** How many messages it holds at once; 500. */
  maxOutstanding?: number;
  /** How long a drain may take before what is held is given back; 30 seconds. */
  drainTimeoutMs?: number;
  /** Drains when it aborts. */
  signal?: AbortSignal;
  /** Told of messages that retention removed, or the disk has lost. */
  onGap?: (gap: Gap) => void;
  /** Told of what handlers threw, and of streams that were lost. */
  onError?: (error: unknown) => void;
}

interface Work {
  readonly delivery: Delivery;
  readonly key: string;
  /** On this stream, with the attempt; undefined if it ended, or the delivery was revoked. */
  deliveryId: bigint | undefined;
  attempt: number;
  extendAt: number;
  readonly since: number;
  running: boolean;
}

/** What is held of one key, in order. */
interface Key {
  queue: Work[];
  running: Work | undefined;
  offered: boolean;
  /** The message that must come again before others, and until when that is waited for. */
  blocked: string | undefined;
  until: number;
}

/** What is said on one stream. */
class Voice implements AsyncIterable<ConsumeRequest> {
  #waiting: (() => void) | undefined;
  #over = false;

  constructor(readonly next: () => ConsumeRequest | undefined) {}

  wake(): void {
    this.#waiting?.();
  }

  end(): void {
    this.#over = true;
    this.wake();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<ConsumeRequest> {
    while (!this.#over) {
      const request = this.next();
      if (request !== undefined) yield request;
      else await new Promise<void>((resolve) => (this.#waiting = resolve));
    }
  }
}

/** A member of a group. */
export class Consumer {
  readonly memberId: string;
  /** Messages for which the handler resolved. */
  handled = 0;
  /** Acknowledgements that are on the gateway's disk. */
  confirmed = 0;
  /** Streams that were opened after the first. */
  reconnects = 0;
  /** How far the group is, as the last heartbeat said. */
  status: GroupStatus | undefined;
  /** Resolves when the member has joined for the first time. */
  readonly joined: Promise<void>;

  readonly #consumer: Stub<typeof ConsumerService>;
  readonly #groups: Stub<typeof GroupsService>;
  readonly #renews: boolean;
  readonly #group: string;
  readonly #handler: Handler;
  readonly #options: Required<Pick<ConsumeOptions, "concurrency" | "leaseMs" | "maxOutstanding" | "drainTimeoutMs">> & ConsumeOptions;
  #join: () => void = () => {};
  #stopping = false;
  #running: Promise<void> | undefined;
  readonly #handlers = new AbortController();

  #order = OrderKey.DEVICE;
  #maxAttempts = 0;
  #ackDeadlineMs = 30_000;
  readonly #works = new Map<string, Work>();
  readonly #deliveries = new Map<bigint, Work>();
  readonly #keys = new Map<string, Key>();
  #ready: string[] = [];
  #active = 0;
  /** Acknowledged, by delivery id, until confirmed; and by message id, with the time until when it is remembered. */
  readonly #unconfirmed = new Map<bigint, string>();
  readonly #done = new Map<string, number>();
  /** The message ids that this stream began with, in order, and work on these that failed before the stream was there. */
  #named: string[] = [];
  readonly #late = new Map<string, { work: Work; thrown: unknown }>();
  /** What is to be said on this stream. */
  #voice: Voice | undefined;
  #end: (() => void) | undefined;
  #acks: bigint[] = [];
  #others: ConsumeRequest[] = [];
  #drainSent = false;
  #drainFrom = 0;
  #stopAt: number | undefined;
  #givingUp = false;

  /** Made by the client's `consume`. */
  constructor(
    consumer: Stub<typeof ConsumerService>,
    groups: Stub<typeof GroupsService>,
    renews: boolean,
    group: string,
    handler: Handler,
    options: ConsumeOptions,
  ) {
    this.#consumer = consumer;
    this.#groups = groups;
    this.#renews = renews;
    this.#group = group;
    this.#handler = handler;
    this.#options = { ...options, concurrency: options.concurrency ?? 16, leaseMs: options.leaseMs ?? 15_000,
      maxOutstanding: options.maxOutstanding ?? 500, drainTimeoutMs: options.drainTimeoutMs ?? 30_000 };
    this.memberId = options.memberId ?? `member-${crypto.randomUUID()}`;
    this.joined = new Promise((resolve) => (this.#join = resolve));
    options.signal?.addEventListener("abort", () => this.stop(), { once: true });
    if (options.signal?.aborted) this.stop();
  }

  /** Messages that wait for the handler, or are with it. */
  get held(): number {
    return this.#works.size;
  }

  /** Takes no more, finishes what it has, acknowledges, and leaves: then `run` resolves. */
  stop(): void {
    this.#stopping = true;
    this.#stopAt ??= performance.now();
    this.#voice?.wake();
  }

  /** Calls `stop` and waits until everything is settled. */
  async drain(): Promise<void> {
    this.stop();
    await this.#running;
  }

  /** Consumes until `stop` is called and everything is settled. Rejects where it failed for good: the group is gone, the caller may not, or
   * another process has the same member id (FENCED). */
  run(): Promise<void> {
    this.#running ??= this.#run();
    return this.#running;
  }

  async #run(): Promise<void> {
    const pauses = new Pauses();
    const ticker = setInterval(() => this.#tick(), 250);
    try {
      await this.#learn(30_000);
      for (;;) {
        const error = await this.#stream(pauses);
        this.#forgetStream();
        if (error === undefined) return;
        if (this.#stopping && this.#works.size === 0 && this.#done.size === 0) return;
        if (this.#givingUp || !resumes(error, this.#renews)) throw error;
        this.#options.onError?.(error);
        await sleep(pauses.next(error));
        this.reconnects++;
        // What cannot be learned anew now stays as it was.
        await this.#learn(5_000).catch(() => {});
      }
    } finally {
      clearInterval(ticker);
      this.#handlers.abort();
    }
  }

  /** What the group keeps in order, and after how many attempts it gives up. */
  async #learn(timeoutMs: number): Promise<void> {
    const { group } = await call((request: { name: string }, options) => this.#groups.getGroup(request, options),
      { name: this.#group }, timeoutMs, true);
    this.#order = group?.orderKey ?? OrderKey.DEVICE;
    this.#maxAttempts = group?.maxAttempts ?? 0;
    if (group?.ackDeadline !== undefined) this.#ackDeadlineMs = Math.max(durationMs(group.ackDeadline), 1_000);
  }

  /** One stream, to its end: undefined if it was drained. */
  async #stream(pauses: Pauses): Promise<GatewayError | undefined> {
    const ended = new AbortController();
    const watchdog = new Watchdog(ended.signal, HEARTBEAT_MS * 3);
    let opened = false;
    const voice = new Voice(() => {
      if (opened) return this.#next();
      opened = true;
      // Since the last stream ended, nothing is held but what is running.
      this.#named = [...this.#works.keys(), ...this.#done.keys()].slice(0, MOST_IDS);
      return request({
        case: "open",
        value: {
          group: this.#group,
          memberId: this.memberId,
          lease: durationFromMs(this.#options.leaseMs),
          flow: { maxOutstandingMessages: this.#options.maxOutstanding },
          heartbeatInterval: durationFromMs(HEARTBEAT_MS),
          outstanding: this.#named,
        },
      });
    });
    this.#voice = voice;
    this.#end = () => ended.abort();
    try {
      for await (const response of this.#consumer.consume(voice, { signal: watchdog.signal })) {
        watchdog.fed();
        pauses.reset();
        for (const item of response.items) this.#take(item);
        this.#pump();
      }
      return this.#drainSent ? undefined : new GatewayError("the stream ended early", Code.Unavailable);
    } catch (thrown) {
      return watchdog.told(errorOf(thrown));
    } finally {
      this.#voice = undefined;
      voice.end();
      watchdog.stop();
      ended.abort();
    }
  }

  /** The next request to be sent, if there is one. */
  #next(): ConsumeRequest | undefined {
    if (this.#acks.length > 0) {
      const ids = this.#acks.splice(0, MOST_IDS);
      return request({ case: "ack", value: rangesOf(ids) });
    }
    const other = this.#others.shift();
    if (other !== undefined) return other;
    // Where a stream was lost, what was acknowledged on it and not confirmed has to come again first.
    if (this.#stopping && !this.#drainSent && performance.now() >= this.#drainFrom) {
      this.#drainSent = true;
      return request({ case: "drain", value: {} });
    }
    return undefined;
  }

  #say(...requests: ConsumeRequest[]): void {
    this.#others.push(...requests);
    this.#voice?.wake();
  }

  #take({ item }: ConsumeItem): void {
    switch (item.case) {
      case "message":
        this.#arrived(item.value);
        break;
      case "ackResults":
        for (const [, message] of taken(item.value.ok, this.#unconfirmed)) {
          this.#done.delete(message);
          this.confirmed++;
        }
        // It comes again; it was handled, so it is acknowledged then.
        for (const [, message] of taken(item.value.lost, this.#unconfirmed)) this.#remember(message);
        break;
      case "revoked":
        for (const [, work] of taken(item.value.void, this.#deliveries)) this.#revoked(work);
        break;
      case "gap":
        this.#options.onGap?.(item.value);
        break;
      case "heartbeat":
        this.status = item.value.status;
        break;
      case "opened":
        this.#resumed(item.value);
        // What was not confirmed comes at once if it comes again.
        if (this.#done.size > this.#unconfirmed.size) this.#drainFrom = performance.now() + 1_000;
        this.#join();
        break;
    }
  }

  /** What the stream began with has delivery ids on it, unless the gateway does not know of this. */
  #resumed(opened: Opened): void {
    const own = new Map(this.#named.map((messageId, at) => [BigInt(at) + 1n, messageId]));
    const late = new Map(this.#late);
    this.#named = [];
    this.#late.clear();
    if (opened.outstanding !== own.size) return;
    taken(opened.void, own);
    for (const [deliveryId, messageId] of own) {
      const work = this.#works.get(messageId);
      const failed = late.get(messageId);
      if (work !== undefined) {
        Object.assign(work, { deliveryId, extendAt: performance.now() + this.#ackDeadlineMs / 2 });
        this.#deliveries.set(deliveryId, work);
      } else if (this.#done.has(messageId)) {
        this.#acknowledge(deliveryId, messageId);
      } else if (failed !== undefined) {
        this.#giveBack(failed.work, deliveryId, this.#keyed(failed.work.key), failed.thrown);
      }
    }
  }

  #arrived(consumed: ConsumedMessage): void {
    const { messageId, deliveryId, attempt, content } = consumed;
    if (this.#done.has(messageId)) {
      this.#acknowledge(deliveryId, messageId);
      return;
    }
    const now = performance.now();
    const extendAt = now + this.#ackDeadlineMs / 2;
    const held = this.#works.get(messageId);
    if (held !== undefined) {
      // Running since an earlier delivery.
      Object.assign(held, { deliveryId, attempt, extendAt });
      this.#deliveries.set(deliveryId, held);
      return;
    }
    const message = content.case === "message" ? content.value : undefined;
    const event = content.case === "event" ? content.value : undefined;
    const delivery = new Delivery(messageId, attempt, message, event);
    const work: Work = { delivery, key: this.#keyOf(delivery), deliveryId, attempt, extendAt, since: now, running: false };
    this.#works.set(messageId, work);
    this.#deliveries.set(deliveryId, work);
    const key = this.#keyed(work.key);
    if (key.blocked === messageId) {
      key.blocked = undefined;
      key.queue.unshift(work);
    } else {
      key.queue.push(work);
    }
    this.#offer(work.key, key);
  }

  /** What is held of a key, perhaps nothing yet. */
  #keyed(name: string): Key {
    let key = this.#keys.get(name);
    if (key === undefined) {
      key = { queue: [], running: undefined, offered: false, blocked: undefined, until: 0 };
      this.#keys.set(name, key);
    }
    return key;
  }

  #keyOf(delivery: Delivery): string {
    if (this.#order === OrderKey.NONE) return delivery.messageId;
    if (this.#order === OrderKey.DEVICE_TOPIC) return `${delivery.deviceId}\0${delivery.topic}`;
    return delivery.deviceId;
  }

  #revoked(work: Work): void {
    work.deliveryId = undefined;
    if (work.running) return;
    this.#works.delete(work.delivery.messageId);
    const key = this.#keys.get(work.key);
    if (key === undefined) return;
    key.queue = key.queue.filter((one) => one !== work);
    this.#tidy(work.key, key);
  }

  /** Notes that a key has work that may begin. */
  #offer(name: string, key: Key): void {
    if (key.queue.length > 0 && key.running === undefined && key.blocked === undefined && !key.offered) {
      key.offered = true;
      this.#ready.push(name);
    }
  }

  /** Starts as much work as may run at once. */
  #pump(): void {
    while (this.#active < this.#options.concurrency && !this.#givingUp) {
      const name = this.#ready.shift();
      if (name === undefined) return;
      const key = this.#keys.get(name);
      if (key === undefined) continue;
      key.offered = false;
      if (key.running !== undefined || key.blocked !== undefined) continue;
      const work = key.queue.shift();
      if (work === undefined) continue;
      key.running = work;
      work.running = true;
      this.#active++;
      void this.#work(work, key);
    }
  }

  async #work(work: Work, key: Key): Promise<void> {
    let failure: { thrown: unknown } | undefined;
    try {
      await this.#handler(work.delivery, this.#handlers.signal);
      this.handled++;
    } catch (thrown) {
      failure = { thrown };
      if (!(thrown instanceof GiveBack)) this.#options.onError?.(thrown);
    }
    this.#active--;
    key.running = undefined;
    this.#works.delete(work.delivery.messageId);
    if (work.deliveryId !== undefined) {
      this.#deliveries.delete(work.deliveryId);
      if (failure === undefined) this.#acknowledge(work.deliveryId, work.delivery.messageId);
      else this.#giveBack(work, work.deliveryId, key, failure.thrown);
    } else if (failure === undefined) {
      this.#remember(work.delivery.messageId);
    } else if (this.#named.includes(work.delivery.messageId)) {
      this.#late.set(work.delivery.messageId, { work, thrown: failure.thrown });
    }
    this.#offer(work.key, key);
    this.#tidy(work.key, key);
    this.#pump();
  }

  #acknowledge(deliveryId: bigint, messageId: string): void {
    this.#acks.push(deliveryId);
    this.#unconfirmed.set(deliveryId, messageId);
    this.#done.set(messageId, Infinity);
    this.#voice?.wake();
  }

  #remember(messageId: string): void {
    this.#done.delete(messageId);
    this.#done.set(messageId, performance.now() + REMEMBERED_MS);
    for (const [other, until] of this.#done) {
      if (this.#done.size <= MOST_REMEMBERED) break;
      if (until !== Infinity) this.#done.delete(other);
    }
  }

  #giveBack(work: Work, deliveryId: bigint, key: Key, thrown: unknown): void {
    const given = thrown instanceof GiveBack ? thrown.options : {};
    const reason = thrown instanceof GiveBack ? thrown.message : String(thrown);
    const nack = create(NackSchema, {
      which: rangesOf([deliveryId]),
      reason: cut(reason),
      deadLetter: given.deadLetter ?? false,
      ...(given.delayMs !== undefined && { delay: durationFromMs(given.delayMs) }),
    });
    this.#say(request({ case: "nack", value: nack }));
    const givesUp = nack.deadLetter || (this.#maxAttempts > 0 && work.attempt >= this.#maxAttempts);
    if (this.#order !== OrderKey.NONE && !givesUp) {
      key.blocked = work.delivery.messageId;
      key.until = performance.now() + BLOCKED_MS;
    }
  }

  #tidy(name: string, key: Key): void {
    if (key.queue.length === 0 && key.running === undefined && key.blocked === undefined) this.#keys.delete(name);
  }

  /** The stream has ended: nothing can be said about its deliveries any more. */
  #forgetStream(): void {
    for (const work of this.#deliveries.values()) {
      work.deliveryId = undefined;
      if (!work.running) this.#works.delete(work.delivery.messageId);
    }
    this.#deliveries.clear();
    for (const messageId of this.#unconfirmed.values()) this.#remember(messageId);
    this.#unconfirmed.clear();
    this.#acks = [];
    this.#others = [];
    this.#ready = [];
    this.#named = [];
    this.#late.clear();
    this.#drainSent = false;
    for (const [name, key] of this.#keys) {
      key.queue = [];
      key.blocked = undefined;
      key.offered = false;
      this.#tidy(name, key);
    }
  }

  /** Extends leases, lets go of what was blocked or remembered for long enough, and ends a drain that takes too long. */
  #tick(): void {
    const now = performance.now();
    const late: bigint[] = [];
    for (const [deliveryId, work] of this.#deliveries) {
      if (work.extendAt > now || now - work.since > LONGEST_WORK_MS) continue;
      work.extendAt = now + this.#ackDeadlineMs / 2;
      late.push(deliveryId);
    }
    for (const ids of chunks(late)) {
      this.#say(request({ case: "extend", value: { which: rangesOf(ids), deadline: durationFromMs(this.#ackDeadlineMs) } }));
    }
    for (const [name, key] of this.#keys) {
      if (key.blocked === undefined || key.until > now) continue;
      key.blocked = undefined;
      this.#offer(name, key);
      this.#tidy(name, key);
    }
    for (const [messageId, until] of this.#done) if (until <= now) this.#done.delete(messageId);
    this.#pump();
    if (this.#stopAt === undefined) return;
    this.#voice?.wake();
    if (now - this.#stopAt > this.#options.drainTimeoutMs && !this.#givingUp) this.#giveUp();
    // Handlers that do not end hold the stream open.
    if (now - this.#stopAt > 2 * this.#options.drainTimeoutMs) this.#end?.();
  }

  /** The drain took too long: what is held goes to others. */
  #giveUp(): void {
    this.#givingUp = true;
    const queued: bigint[] = [];
    for (const [deliveryId, work] of this.#deliveries) {
      if (work.running) continue;
      queued.push(deliveryId);
      this.#works.delete(work.delivery.messageId);
    }
    for (const ids of chunks(queued)) {
      const value = { which: rangesOf(ids), delay: durationFromMs(0), reason: "the member stopped" };
      this.#say(request({ case: "nack", value }));
    }
    this.#handlers.abort();
  }
}

function request(action: MessageInitShape<typeof ConsumeRequestSchema>["action"]): ConsumeRequest {
  return create(ConsumeRequestSchema, { action });
}

/** The same as ranges, in order. */
function rangesOf(ids: bigint[]): Ack {
  const ranges: { first: bigint; last: bigint }[] = [];
  for (const id of [...ids].sort((one, other) => (one < other ? -1 : one > other ? 1 : 0))) {
    const last = ranges.at(-1);
    if (last !== undefined && last.last + 1n === id) last.last = id;
    else ranges.push({ first: id, last: id });
  }
  return create(AckSchema, { ranges });
}

/** Takes those in the ranges out of `known`, in order, at the price of the smaller of both. */
function taken<T>(ranges: DeliveryRange[], known: Map<bigint, T>): [bigint, T][] {
  const found: [bigint, T][] = [];
  for (const { first, last } of ranges) {
    if (last - first < BigInt(known.size)) {
      for (let id = first; id <= last; id++) {
        const one = known.get(id);
        if (one !== undefined) found.push([id, one]);
      }
    } else {
      for (const [id, one] of known) if (first <= id && id <= last) found.push([id, one]);
    }
  }
  for (const [id] of found) known.delete(id);
  return found;
}

function* chunks(ids: bigint[]): Generator<bigint[]> {
  for (let at = 0; at < ids.length; at += MOST_IDS) yield ids.slice(at, at + MOST_IDS);
}

/** As much of a text as a reason may have, in bytes. */
function cut(text: string): string {
  const bytes = new TextEncoder().encode(text);
  return bytes.length <= MOST_REASON ? text : new TextDecoder().decode(bytes.subarray(0, MOST_REASON - 3)).replace(/\uFFFD$/, "");
}
