// Manages the server's documents: texts that it reads once, and that conversations ask questions
// about.
import { ApiError, get, request } from "./api";
import { change, chosen, defaults } from "./conversations";
import { models, withModel } from "./models";
import { Store } from "./store";

// The largest text that the server accepts as a document.
export const MOST_DOCUMENT_BYTES = 8 * 2 ** 20;
// For a longer document, the server does not measure passages.
const MOST_PASSAGE_TOKENS = 2 ** 18;
const WATCH_MS = 400;
const MOST_NAMES = 20;

export interface DocumentState {
  id: string;
  model: string;
  status: "queued" | "reading" | "ready" | "interrupted" | "failed";
  tokens_read: number;
  tokens: number;
  error: string | null;
}

// The states of the documents of the chosen model, by name.
export const documents = new Store<Record<string, DocumentState>>({});

const isRead = (state: DocumentState | undefined): boolean =>
  state !== undefined && ["queued", "reading", "interrupted"].includes(state.status);

function note(state: DocumentState): void {
  documents.update({ [state.id]: state });
}

export async function learnDocuments(): Promise<void> {
  if (!defaults.value?.documents) return;
  const { data } = await get<{ data: DocumentState[] }>("v1/documents");
  const model = models.value.chosen;
  const own = data.filter((each) => model === null || each.model === model);
  documents.set(Object.fromEntries(own.map((each) => [each.id, each])));
}

// Makes a name that the server takes from a file's name.
function nameOf(file: string): string {
  const name = file
    .replace(/\.[^.]*$/, "")
    .replace(/[^A-Za-z0-9._-]+/g, "-")
    .replace(/^\.+/, "")
    .slice(0, 100);
  return name || "document";
}

// Let the server read a text, and make the chosen conversation one about it.
export async function readDocument(file: string, text: string): Promise<void> {
  const { id } = chosen();
  const name = nameOf(file);
  for (let number = 1; ; ++number) {
    const tried = number === 1 ? name : `${name}-${number}`;
    try {
      const { chosen: model } = models.value;
      const response = await request("v1/documents", {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify({ name: tried, text, filename: file, ...(model ? { model } : {}) }),
      });
      note((await response.json()) as DocumentState);
      change(id, () => ({ document: tried }));
      return;
    } catch (error) {
      // The name is taken by another text: try the next one.
      if (!(error instanceof ApiError) || error.status !== 409 || number >= MOST_NAMES) throw error;
    }
  }
}

// Ask how far a document is until it was read or failed; the function that is returned stops that.
export function watchDocument(name: string): () => void {
  const controller = new AbortController();
  const ask = async (): Promise<void> => {
    const path = `v1/documents/${encodeURIComponent(name)}?${withModel({})}`;
    try {
      const state = await get<DocumentState>(path, controller.signal);
      note(state);
      if (!isRead(state)) return;
    } catch (error) {
      if (controller.signal.aborted) return;
      if (error instanceof ApiError && error.status === 404) {
        const gone = { id: name, model: "", tokens_read: 0, tokens: 0 };
        note({ ...gone, status: "failed", error: "The server has no such document any more." });
        return;
      }
    }
    if (!controller.signal.aborted) setTimeout(() => void ask(), WATCH_MS);
  };
  void ask();
  return () => controller.abort();
}

// Returns the sentence that says why an answer about a document has no passages.
export function whyNoPassages(name: string | undefined): string {
  const tokens = (name && documents.value[name]?.tokens) || 0;
  return tokens > MOST_PASSAGE_TOKENS
    ? "No passages are shown: the document is longer than 262,144 tokens."
    : "No passages are shown: the policy of this server does not measure what an answer looks at. " +
        "With --policy adaptive, it does.";
}

// Take the document out of the chosen conversation, and stop reading it.
export function leaveDocument(name: string): void {
  change(chosen().id, () => ({ document: undefined }));
  if (!isRead(documents.value[name])) return;
  const path = `v1/documents/${encodeURIComponent(name)}?${withModel({})}`;
  void request(path, { method: "DELETE" }).catch(() => undefined);
}
