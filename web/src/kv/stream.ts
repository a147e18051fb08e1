// Receives pictures of the cache from the server, and keeps their history.
import { ApiError, connection, eventsOf, keyQuestion, request } from "../api";
import { state } from "../conversations";
import { withModel } from "../models";
import { Store } from "../store";

// The least time between two requests, so that a server that refuses is not asked all the time.
const REQUEST_MS = 2000;
const MOST_POINTS = 1200;
// No speed is given for shorter work: the first token of an answer, for example, costs nothing but
// sampling.
const LEAST_SECONDS = 0.02;
// The time over which speeds of conversations are measured, because few tokens lie between two
// pictures.
const SPEED_SECONDS = 1.5;
// Pictures come only while something changes. A conversation rests if none came for REST_SECONDS,
// and for REST_TIMES the usual time between two pictures, since large pictures are rare. An active
// conversation never rests, because one step of a large model may take longer.
const REST_SECONDS = 3;
const REST_TIMES = 4;
// How often the server looks for changes, in seconds.
const LOOK_SECONDS = 0.25;

export interface About {
  model: string;
  store: string;
  policy: string;
  kv_type: string;
  kv_budget: string;
  freeze: boolean;
  n_ctx: number;
  // True if several conversations share a pool.
  shared: boolean;
  // True if the server lets the page see the text of conversations.
  text: boolean;
  // The number of KV heads of every layer.
  layers: number[];
}

// Describes a conversation, and its share of the pool.
export interface Holder {
  id: string;
  // The client's name for the conversation: its id if it is one of this page, or the name of the
  // document.
  name: string | null;
  // True for a document, which conversations copy.
  document: boolean;
  position: number;
  state: "active" | "idle" | "swapped_out" | "waiting";
  idle_seconds: number;
  // Entries that the conversation lost so that others get pages.
  given_up: number;
  swapped_out: boolean;
  // Bytes of the conversation that are stored outside of the pool.
  swapped_bytes: number;
  entries: number;
  entries_full: number;
  frozen_entries: number;
  budget: number;
  bytes: number;
  bytes_full: number;
  frozen_bytes: number;
  prompt_tokens: number;
  generated_tokens: number;
  // Tokens that were drafted, how many of these were accepted, and the steps that generated tokens.
  drafted_tokens: number;
  accepted_drafts: number;
  draft_steps: number;
  prompt_seconds: number;
  decode_seconds: number;
  evictions: number;
  entries_frozen: number;
  entries_restored: number;
  entries_recalled: number;
}

interface Shape {
  id: string;
  first: number;
  per_column: number;
  rows: number;
  columns: number;
}

// Describes what the heads of a conversation hold: planes are [row][column], in 255ths of a
// column's positions.
export interface HeldMap extends Shape {
  position: number;
  held: Uint8Array;
  frozen: Uint8Array;
  restored: Uint8Array;
}

interface Sent {
  time: number;
  pool: {
    budget: number;
    used: number;
    peak: number;
    sequences: number;
    // True if texts of other users are in the pool.
    others: boolean;
    swapped_bytes: number;
  };
  requests: number;
  conversations: Holder[];
  map: (Shape & { planes: string }) | null;
}

export interface Picture extends Omit<Sent, "map"> {
  // When the picture came, in milliseconds of performance.now().
  received: number;
  // null: the conversation shown is swapped out, or nothing has been read yet.
  map: HeldMap | null;
}

// The positions that are shown, without `last`; null: up to the end of the text.
export interface Range {
  first: number;
  last: number | null;
}

// Describes one conversation at one time; speeds are in tokens per second.
export interface Share {
  bytes: number;
  givenUp: number;
  prompt: number;
  generated: number;
  read: number | null;
  written: number | null;
}

export interface Point {
  time: number;
  // True at the end of a time in which nothing happened.
  rests: boolean;
  held: number;
  frozen: number;
  // Entries and tokens per second; null: nothing happened, or for too short a time.
  evicted: number | null;
  restored: number | null;
  read: number | null;
  written: number | null;
  of: Map<string, Share>;
}

export const about = new Store<About | null>(null);
export const picture = new Store<Picture | null>(null);
export const history = new Store<Point[]>([]);
// Why there is no picture.
export const absence = new Store<"unknown" | "unloaded">("unknown");

// Names the chat beside the cache, so that among several replicas the one that has this chat
// answers.
const named = (): Record<string, string> => ({ "x-session-id": state.value.chosen });

async function inflated(base64: string): Promise<Uint8Array> {
  const text = atob(base64);
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < packed.length; ++i) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function mapOf(sent: Sent): Promise<HeldMap | null> {
  if (!sent.map) return null;
  const { planes, ...shape } = sent.map;
  const bytes = await inflated(planes);
  const size = shape.rows * shape.columns;
  const plane = (i: number): Uint8Array => bytes.subarray(i * size, (i + 1) * size);
  const position = sent.conversations.find((each) => each.id === shape.id)?.position ?? 0;
  return { ...shape, position, held: plane(0), frozen: plane(1), restored: plane(2) };
}

// Receive pictures of one conversation, or of the latest one, until `signal` is aborted. A stream
// that ended is requested again: each replica ends its streams after a few seconds, and the next
// one must follow without a gap.
export async function watch(
  conversation: string | null,
  range: Range,
  columns: number,
  signal: AbortSignal,
): Promise<void> {
  const query = withModel({ first: `${range.first}`, columns: `${columns}` });
  if (conversation !== null) query.set("conversation", conversation);
  if (range.last !== null) query.set("last", `${range.last}`);
  while (!signal.aborted) {
    const begun = performance.now();
    try {
      const response = await request(`v1/kv/stream?${query}`, { headers: named(), signal });
      const newest = new Newest();
      for await (const event of eventsOf(response)) {
        if (signal.aborted) return;
        const data = JSON.parse(event.data);
        if (event.name === "model") {
          about.set(data);
          absence.set("unknown");
        } else newest.take(data, signal);
      }
    } catch (error) {
      if (signal.aborted) return;
      // watch() is called again with a new key
      if (error instanceof ApiError && error.status === 401) return;
      if (error instanceof ApiError && error.status === 400) forget("unloaded");
    }
    await until(begun + REQUEST_MS, signal);
  }
}

// Tells whether several conversations share the pool at present, also of other users. A document
// and the only conversation about it count as one.
export const hasSeveral = ({ shared }: About, { conversations, pool }: Picture): boolean =>
  shared && (pool.others || conversations.filter((each) => !each.document).length > 1);

// Remove all figures, because the model is not in memory, or is not shown any more.
export function forget(why: "unknown" | "unloaded"): void {
  absence.set(why);
  about.set(null);
  picture.set(null);
  history.set([]);
  noted = null;
}

// Shows the newest picture, and adds each one to the history: a page that is slower than its server
// would otherwise fall further and further behind.
class Newest {
  private waiting: Sent | null = null;
  private shows = false;

  take(sent: Sent, signal: AbortSignal): void {
    note(sent);
    this.waiting = sent;
    if (!this.shows) void this.showAll(signal);
  }

  private async showAll(signal: AbortSignal): Promise<void> {
    this.shows = true;
    try {
      while (this.waiting !== null && !signal.aborted) {
        const sent = this.waiting;
        this.waiting = null;
        const map = await mapOf(sent);
        if (!signal.aborted) picture.set({ ...sent, received: performance.now(), map });
      }
    } finally {
      this.shows = false;
    }
  }
}

// What the last point of the history was made from.
let noted: Sent | null = null;

function note(now: Sent): void {
  const points = history.value.slice(2 - MOST_POINTS);
  const [last, lastButOne] = [points.at(-1), points.at(-2)];
  const usual = last && lastButOne ? last.time - lastButOne.time : 0;
  const works = noted?.conversations.some((each) => each.state === "active") ?? false;
  // While nothing happens, the number of held entries stays the same, and there are no speeds.
  if (last && !works && now.time - last.time > Math.max(REST_SECONDS, REST_TIMES * usual))
    points.push(restOf(last, now.time - LOOK_SECONDS));
  history.set([...points, pointOf(now, noted, points)]);
  noted = now;
}

const restOf = (last: Point, time: number): Point => ({
  ...last,
  time,
  rests: true,
  evicted: null,
  restored: null,
  read: null,
  written: null,
  of: new Map([...last.of].map(([id, of]) => [id, { ...of, read: null, written: null }])),
});

type Count = Exclude<keyof Holder, "id" | "name" | "document" | "state" | "swapped_out">;

// Returns what happened since the last of the `points`; speeds are given only if something was read
// or written.
function pointOf(now: Sent, before: Sent | null, points: Point[]): Point {
  const former = new Map(before?.conversations.map((each) => [each.id, each]));
  const of = (each: Holder, name: Count): number =>
    Math.max(0, each[name] - (former.get(each.id)?.[name] ?? each[name]));
  const more = (name: Count): number =>
    now.conversations.reduce((sum, each) => sum + of(each, name), 0);
  const seconds = Math.max(now.time - (points.at(-1)?.time ?? now.time - 1), 0.001);
  const speed = (tokens: Count, during: Count): number | null => {
    const time = more(during);
    return before && time > LEAST_SECONDS && more(tokens) > 0 ? more(tokens) / time : null;
  };
  // While the server reads a document, its count of prompt tokens does not grow.
  const ofDocuments = now.conversations
    .filter((each) => each.document)
    .reduce((sum, each) => sum + of(each, "position"), 0);
  const there = now.conversations.filter((each) => !each.swapped_out);
  const total = (name: Count): number => there.reduce((sum, each) => sum + each[name], 0);
  return {
    time: now.time,
    rests: false,
    held: total("entries"),
    frozen: total("frozen_entries"),
    evicted: before ? (more("evictions") + more("entries_frozen")) / seconds : 0,
    restored: before ? more("entries_restored") / seconds : 0,
    read: speed("prompt_tokens", "prompt_seconds") ?? (ofDocuments ? ofDocuments / seconds : null),
    written: speed("generated_tokens", "decode_seconds"),
    of: new Map(now.conversations.map((each) => [each.id, shareOf(each, now.time, points)])),
  };
}

function shareOf(holder: Holder, time: number, points: Point[]): Share {
  const then = points.findLast((point) => point.rests || point.time <= time - SPEED_SECONDS);
  const former = then?.of.get(holder.id);
  // A new conversation starts from zero.
  const rate = (now: number, before = 0): number =>
    then ? Math.max(0, now - before) / (time - then.time) : 0;
  const prompt = holder.document ? holder.position : holder.prompt_tokens;
  return {
    bytes: holder.bytes,
    givenUp: holder.given_up,
    prompt,
    generated: holder.generated_tokens,
    read: rate(prompt, former?.prompt),
    written: rate(holder.generated_tokens, former?.generated),
  };
}

// Wait until the server can be reached with a key, and performance.now() has reached `time`.
function until(time: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    let timer = 0;
    const done = (): void => {
      clearTimeout(timer);
      unfollow();
      signal.removeEventListener("abort", done);
      resolve();
    };
    const begin = (): void => {
      if (connection.value === "ready" && keyQuestion.value === null && !timer)
        timer = window.setTimeout(done, Math.max(0, time - performance.now()));
    };
    const unfollow = connection.follow(begin);
    signal.addEventListener("abort", done);
    begin();
  });
}

export interface HeldText {
  position: number;
  first: number;
  heads: number;
  texts: string[];
  held: number[];
  frozen: number[];
  // True if the conversation is swapped out, so that no head is counted.
  swapped_out: boolean;
}

export async function heldText(
  conversation: string,
  first: number,
  count: number,
  signal?: AbortSignal,
): Promise<HeldText> {
  const query = withModel({ conversation, first: `${first}`, count: `${count}` });
  const response = await request(`v1/kv/text?${query}`, { headers: named(), signal });
  return (await response.json()) as HeldText;
}
