/** How calls are made: deadlines, which failures are tried again, and streams that come back. */
import { Code } from "@connectrpc/connect";
import { errorOf, GatewayError } from "./errors.js";

/** Milliseconds between the heartbeats that streams ask for; three without one and the stream is opened anew. */
export const HEARTBEAT_MS = 15_000;
/** The first and the longest pause before something is tried again; each is drawn from 0 to its bound. */
const FIRST_PAUSE_MS = 100;
const LONGEST_PAUSE_MS = 5_000;

/** What each call takes besides its request. */
export interface CallOptions {
  /** How many milliseconds it may take, over all attempts; otherwise `timeoutMs` of the client. */
  timeoutMs?: number;
  /** Ends it at once. */
  signal?: AbortSignal;
}

/** Pauses that grow, with full jitter: clients that lost the same gateway do not come back all at once. */
export class Pauses {
  #bound = FIRST_PAUSE_MS;

  next(error: GatewayError): number {
    const pause = Math.random() * this.#bound;
    this.#bound = Math.min(this.#bound * 2, LONGEST_PAUSE_MS);
    return Math.max(pause, error.retryAfterMs ?? 0);
  }

  reset(): void {
    this.#bound = FIRST_PAUSE_MS;
  }
}

/** Waits, or less if the signal says so. */
export function sleep(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", done);
      resolve();
    };
    const timer = setTimeout(done, ms);
    signal?.addEventListener("abort", done);
    if (signal?.aborted) done();
  });
}

/** Whether the same call may go better a little later. */
export function passes(error: GatewayError): boolean {
  return error.code === Code.Unavailable || (error.code === Code.ResourceExhausted && error.retryAfterMs !== undefined);
}

/** Whether a stream that ended so is opened again: not where the gateway has said that it is of no use. */
export function resumes(error: GatewayError, renews: boolean): boolean {
  switch (error.code) {
    case Code.Unauthenticated:
      // Whoever gives tokens may have a new one.
      return renews && (error.reason === "CREDENTIALS_EXPIRED" || error.reason === "CREDENTIALS_REVOKED");
    case Code.Unavailable:
    case Code.ResourceExhausted:
      return error.reason !== "SLOW_CONSUMER";
    case Code.Unknown:
    case Code.Internal:
    case Code.Canceled:
      // The connection broke, and the transport says so in one way or another.
      return error.reason === "UNKNOWN";
    default:
      return false;
  }
}

/** A method of a generated client with one answer. */
export type Unary<Request, Response> = (
  request: Request,
  options: { headers: Record<string, string>; signal: AbortSignal },
) => Promise<Response>;

/** Waited for the gateway's own word that the time is over, which says how far it came. */
const GRACE_MS = 1_000;

/** One answer within its time, over as many attempts as it takes where doing it `again` does no harm. */
export async function call<Request, Response>(
  method: Unary<Request, Response>,
  request: Request,
  timeoutMs: number,
  again: boolean,
  signal?: AbortSignal,
): Promise<Response> {
  const deadline = performance.now() + timeoutMs;
  const pauses = new Pauses();
  for (;;) {
    let error: GatewayError;
    const ended = new AbortController();
    const left = Math.max(Math.ceil(deadline - performance.now()), 1);
    let late = false;
    const timer = setTimeout(() => {
      late = true;
      ended.abort();
    }, left + GRACE_MS);
    const onAbort = () => ended.abort();
    signal?.addEventListener("abort", onAbort);
    if (signal?.aborted) ended.abort();
    try {
      return await method(request, { headers: { "grpc-timeout": `${Math.min(left, 99_999_999)}m` }, signal: ended.signal });
    } catch (thrown) {
      error = late ? new GatewayError("the gateway did not answer in time", Code.DeadlineExceeded) : errorOf(thrown);
    } finally {
      clearTimeout(timer);
      signal?.removeEventListener("abort", onAbort);
    }
    const pause = pauses.next(error);
    if (!again || !passes(error) || performance.now() + pause >= deadline || signal?.aborted) throw error;
    await sleep(pause, signal);
  }
}

/** A stream of a generated client. */
export type Streaming<Response> = (options: {
  signal: AbortSignal;
  onHeader: (header: Headers) => void;
}) => AsyncIterable<Response>;

/** What a stream of the gateway brings, item by item: `for await` reads it, once. It is opened again when its connection is lost. */
export class Stream<T> implements AsyncIterable<T> {
  readonly #open: () => Promise<AsyncIterator<unknown>>;
  readonly #items: (response: unknown) => Iterable<T>;
  readonly #onReconnect: (() => T) | undefined;
  readonly #renews: boolean;
  readonly #end: AbortController;
  readonly #reader: AsyncGenerator<T, void, undefined>;
  #current: AsyncIterator<unknown> | undefined;

  private constructor(
    open: () => Promise<AsyncIterator<unknown>>,
    items: (response: unknown) => Iterable<T>,
    onReconnect: (() => T) | undefined,
    renews: boolean,
    end: AbortController,
  ) {
    this.#open = open;
    this.#items = items;
    this.#onReconnect = onReconnect;
    this.#renews = renews;
    this.#end = end;
    this.#reader = this.#read();
  }

  /** Opens a stream, and returns when the gateway has. What happens from then on comes. */
  static async open<Response, T>(
    method: Streaming<Response>,
    items: (response: Response) => Iterable<T>,
    onReconnect: (() => T) | undefined,
    renews: boolean,
    silenceMs: number | undefined,
    signal?: AbortSignal,
  ): Promise<Stream<T>> {
    const end = new AbortController();
    signal?.addEventListener("abort", () => end.abort(), { once: true });
    if (signal?.aborted) end.abort();
    const stream = new Stream<T>(
      () => opened(method, end.signal, silenceMs),
      (response) => items(response as Response),
      onReconnect,
      renews,
      end,
    );
    const pauses = new Pauses();
    for (let attempt = 0; ; attempt++) {
      try {
        stream.#current = await stream.#open();
        return stream;
      } catch (thrown) {
        const error = errorOf(thrown);
        if (attempt === 2 || !passes(error) || end.signal.aborted) throw error;
        await sleep(pauses.next(error), end.signal);
      }
    }
  }

  /** Ends the stream. Harmless if it has ended. */
  close(): void {
    this.#end.abort();
  }

  [Symbol.asyncIterator](): AsyncGenerator<T, void, undefined> {
    return this.#reader;
  }

  async *#read(): AsyncGenerator<T, void, undefined> {
    const pauses = new Pauses();
    try {
      for (;;) {
        let error: GatewayError;
        try {
          if (this.#current === undefined) {
            this.#current = await this.#open();
            if (this.#onReconnect !== undefined) yield this.#onReconnect();
          }
          for (;;) {
            const next = await this.#current.next();
            if (next.done === true) return;
            pauses.reset();
            yield* this.#items(next.value);
          }
        } catch (thrown) {
          error = errorOf(thrown);
        }
        this.#current = undefined;
        if (this.#end.signal.aborted) return;
        if (!resumes(error, this.#renews)) throw error;
        await sleep(pauses.next(error), this.#end.signal);
        if (this.#end.signal.aborted) return;
      }
    } finally {
      this.close();
    }
  }
}

/** Opens a stream and returns when the gateway has; one that is silent for too long ends as unavailable. */
async function opened<Response>(
  method: Streaming<Response>,
  signal: AbortSignal,
  silenceMs: number | undefined,
): Promise<AsyncIterator<Response>> {
  const watchdog = new Watchdog(signal, silenceMs);
  let header: (header: Headers) => void = () => {};
  const headers = new Promise<Headers>((resolve) => (header = resolve));
  try {
    const iterator = method({ signal: watchdog.signal, onHeader: (told) => header(told) })[Symbol.asyncIterator]();
    let first: Promise<IteratorResult<Response>> | undefined = iterator.next();
    // Whoever reads the first response hears of it.
    first.catch(() => {});
    const told = await Promise.race([headers, first]);
    // Where it refuses, the status is in the headers, and the error comes as the first response.
    if (told instanceof Headers && told.has("grpc-status")) await first;
    // Only waiting for the gateway counts as its silence, not how long the application works on what came.
    watchdog.rest();
    return {
      async next() {
        watchdog.fed();
        try {
          const waiting = first ?? iterator.next();
          first = undefined;
          const result = await waiting;
          if (result.done === true) watchdog.stop();
          else watchdog.rest();
          return result;
        } catch (thrown) {
          watchdog.stop();
          throw watchdog.told(thrown);
        }
      },
    };
  } catch (thrown) {
    watchdog.stop();
    throw watchdog.told(thrown);
  }
}

/** Ends a stream that is silent. */
export class Watchdog {
  readonly #controller = new AbortController();
  readonly #silenceMs: number | undefined;
  readonly #outer: AbortSignal;
  readonly #onOuter = () => this.#controller.abort();
  #timer: NodeJS.Timeout | undefined;
  #silent = false;

  constructor(signal: AbortSignal, silenceMs: number | undefined) {
    this.#silenceMs = silenceMs;
    this.#outer = signal;
    signal.addEventListener("abort", this.#onOuter);
    if (signal.aborted) this.#controller.abort();
    this.fed();
  }

  get signal(): AbortSignal {
    return this.#controller.signal;
  }

  fed(): void {
    clearTimeout(this.#timer);
    if (this.#silenceMs === undefined) return;
    this.#timer = setTimeout(() => {
      this.#silent = true;
      this.#controller.abort();
    }, this.#silenceMs);
    // The connection keeps the process alive, not this.
    this.#timer.unref();
  }

  /** Nobody waits for the stream until it is `fed` again. */
  rest(): void {
    clearTimeout(this.#timer);
  }

  stop(): void {
    this.rest();
    this.#outer.removeEventListener("abort", this.#onOuter);
    this.#controller.abort();
  }

  /** The error, or that the stream was silent if that is why it ended. */
  told(thrown: unknown): GatewayError {
    return this.#silent ? new GatewayError("the stream was silent for too long", Code.Unavailable) : errorOf(thrown);
  }
}
