// Sends requests to the server of this page, with the API key that the user entered for this tab.
import { Store } from "./store";

const KEY = "entropykv.key";
const RETRY_MS = 1500;

export type Connection = "starting" | "ready" | "loading" | "gone";

export const connection = new Store<Connection>("starting");
// Why the user is asked for the key; null: nobody is asked.
export const keyQuestion = new Store<string | null>(null);

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

export function setKey(key: string): void {
  sessionStorage.setItem(KEY, key);
  keyQuestion.set(null);
}

// Returns the URL of a path on the server, relative to the page, which a proxy may serve below a
// path of its own.
const address = (path: string): string => new URL(path, document.baseURI).href;

export async function request(path: string, options: RequestInit = {}): Promise<Response> {
  const headers = new Headers(options.headers);
  const key = sessionStorage.getItem(KEY);
  if (key) headers.set("authorization", `Bearer ${key}`);
  let response: Response;
  try {
    response = await fetch(address(path), { ...options, headers });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    lost("gone");
    throw new ApiError(0, "The server does not answer.");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const message: string = body?.error?.message ?? `The server answered ${response.status}.`;
  if (response.status === 401)
    keyQuestion.set(key ? "The server refuses this key." : "This server wants its API key.");
  if (body?.error?.code === "model_loading") lost("loading");
  throw new ApiError(response.status, message);
}

export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await request(path, { signal })).json() as Promise<T>;
}

let waiting = false;

// Show that the server cannot be reached, and ask until it answers again.
export async function lost(how: Connection): Promise<void> {
  connection.set(how);
  if (waiting) return;
  waiting = true;
  for (;;) {
    try {
      const response = await fetch(address("health"), { cache: "no-store" });
      if (response.ok) break;
      connection.set("loading");
    } catch {
      if (connection.value !== "starting") connection.set("gone");
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
  waiting = false;
  connection.set("ready");
}

export interface ServerEvent {
  name: string;
  data: string;
}

// Yields the server-sent events of a response. (EventSource could send no key.)
export async function* eventsOf(response: Response): AsyncGenerator<ServerEvent> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      // An event ends with "\n\n". Only new characters can complete it, so the search begins with
      // the last old one.
      let from = Math.max(0, buffer.length - 1);
      buffer += value;
      for (;;) {
        const end = buffer.indexOf("\n\n", from);
        if (end < 0) break;
        const part = buffer.slice(0, end);
        buffer = buffer.slice(end + 2);
        from = 0;
        const event = { name: "message", data: "" };
        for (const line of part.split("\n")) {
          if (line.startsWith("event: ")) event.name = line.slice(7);
          else if (line.startsWith("data: ")) event.data += line.slice(6);
        }
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}
