// Pictures of the cache, as the server sends them, and their history.
import { ApiError, connection, eventsOf, get, keyQuestion, request } from "../api";
import { Store } from "../store";

const RETRY_MS = 2000;
const MOST_POINTS = 1200;
// What is shorter tells no speed: the first token of an answer costs nothing but its sampling.
const LEAST_SECONDS = 0.02;

export interface About {
  model: string;
  store: string;
  policy: string;
  kv_type: string;
  kv_budget: string;
  freeze: boolean;
  n_ctx: number;
  // KV heads of every layer.
  layers: number[];
}

interface Sent {
  id: string;
  position: number;
  first: number;
  per_column: number;
  rows: number;
  columns: number;
  planes: string;
  entries: number;
  entries_full: number;
  frozen_entries: number;
  bytes: number;
  bytes_full: number;
  frozen_bytes: number;
  prompt_tokens: number;
  generated_tokens: number;
  prompt_seconds: number;
  decode_seconds: number;
  evictions: number;
  entries_frozen: number;
  entries_restored: number;
  entries_recalled: number;
}

// What one conversation holds: planes have [row][column], in 255ths of a column's positions.
export interface HeldMap extends Omit<Sent, "planes"> {
  held: Uint8Array;
  frozen: Uint8Array;
  restored: Uint8Array;
}

export interface Picture {
  time: number;
  pool: { budget: number; used: number; peak: number };
  requests: number;
  conversations: HeldMap[];
}

// Positions that are looked at; last null: as far as the text goes.
export interface Range {
  first: number;
  last: number | null;
}

export interface Point {
  time: number;
  held: number;
  frozen: number;
  evicted: number;
  restored: number;
  read: number | null;
  written: number | null;
}

export const about = new Store<About | null>(null);
export const picture = new Store<Picture | null>(null);
export const history = new Store<Point[]>([]);

async function inflated(base64: string): Promise<Uint8Array> {
  const text = atob(base64);
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < packed.length; ++i) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function mapOf({ planes, ...rest }: Sent): Promise<HeldMap> {
  const bytes = await inflated(planes);
  const size = rest.rows * rest.columns;
  const plane = (i: number): Uint8Array => bytes.subarray(i * size, (i + 1) * size);
  return { ...rest, held: plane(0), frozen: plane(1), restored: plane(2) };
}

// Look until `signal` ends it; goes on where the server was gone.
export async function watch(range: Range, columns: number, signal: AbortSignal): Promise<void> {
  const query = new URLSearchParams({ first: `${range.first}`, columns: `${columns}` });
  if (range.last !== null) query.set("last", `${range.last}`);
  while (!signal.aborted) {
    try {
      const response = await request(`v1/kv/stream?${query}`, { signal });
      for await (const event of eventsOf(response)) {
        if (signal.aborted) return;
        const data = JSON.parse(event.data);
        if (event.name === "model") about.set(data);
        else await show(data);
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && error.status === 401) return; // begun anew with a key
    }
    await until(signal);
  }
}

async function show(data: Picture & { conversations: Sent[] }): Promise<void> {
  const conversations = await Promise.all(data.conversations.map(mapOf));
  const before = picture.value;
  const now = { ...data, conversations };
  history.set([...history.value.slice(1 - MOST_POINTS), pointOf(now, before)]);
  picture.set(now);
}

type Figure = Exclude<keyof Sent, "id" | "planes">;

const total = (of: Picture | null, name: Figure): number =>
  (of?.conversations ?? []).reduce((sum, each) => sum + each[name], 0);

// What happened between two pictures; speeds only where something was read or written.
function pointOf(now: Picture, before: Picture | null): Point {
  const more = (name: Figure): number => Math.max(0, total(now, name) - total(before, name));
  const seconds = before ? Math.max(now.time - before.time, 0.001) : 1;
  const speed = (tokens: Figure, spent: Figure): number | null => {
    const time = more(spent);
    return before && time > LEAST_SECONDS && more(tokens) > 0 ? more(tokens) / time : null;
  };
  return {
    time: now.time,
    held: total(now, "entries"),
    frozen: total(now, "frozen_entries"),
    evicted: before ? (more("evictions") + more("entries_frozen")) / seconds : 0,
    restored: before ? more("entries_restored") / seconds : 0,
    read: speed("prompt_tokens", "prompt_seconds"),
    written: speed("generated_tokens", "decode_seconds"),
  };
}

// A moment, and then until the server can be asked again.
function until(signal: AbortSignal): Promise<void> {
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
        timer = window.setTimeout(done, RETRY_MS);
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
}

export const heldText = (
  conversation: string,
  first: number,
  count: number,
  signal?: AbortSignal,
): Promise<HeldText> => {
  const query = new URLSearchParams({ conversation, first: `${first}`, count: `${count}` });
  return get(`v1/kv/text?${query}`, signal);
};
