// Holds conversations, which this browser stores.
import { ApiError, get } from "./api";
import { learnModels, withModel } from "./models";
import { Store } from "./store";

const PLACE = "entropykv.conversations";
const SAMPLING = [
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "repeat_penalty",
  "presence_penalty",
  "frequency_penalty",
] as const;

export interface Attachment {
  name: string;
  text: string;
}

// Describes a passage of a document that an answer attended to; `start` and `end` count characters,
// and `share` is the part of the attention that the passage got.
export interface Passage {
  start: number;
  end: number;
  text: string;
  share: number;
}

export interface Message {
  role: "user" | "assistant";
  text: string;
  // What the model thought before the answer; it is not sent back to the server.
  thought?: string;
  attachments?: Attachment[];
  // The passages of the document that the answer attended to; null: the server did not measure
  // them.
  passages?: Passage[] | null;
  // What the answer cost, and why it ended.
  note?: string;
  error?: string;
}

export type SamplingName = (typeof SAMPLING)[number];

export interface Settings {
  system: string;
  sampling: Partial<Record<SamplingName, number>>;
  maxTokens: number | null;
  seed: number | null;
}

export interface Conversation {
  id: string;
  title: string;
  settings: Settings;
  messages: Message[];
  // The name of the server's document that the conversation is about.
  document?: string;
}

export interface Defaults {
  model: string;
  system: string | null;
  question: string | null;
  // True if the server reads documents.
  documents: boolean;
  sampling: Record<string, number>;
}

interface Props {
  default_generation_settings: { params: Record<string, number> };
}

interface State {
  list: Conversation[];
  chosen: string;
  // The conversation that is being answered, or null.
  answering: string | null;
  problem: string | null;
}

export const defaults = new Store<Defaults | null>(null);

const emptySettings = (): Settings => {
  const given = defaults.value;
  const sampling: Settings["sampling"] = {};
  for (const name of SAMPLING) {
    const value = given?.sampling[name];
    if (value !== undefined) sampling[name] = value;
  }
  return {
    system: given?.system ?? "",
    sampling,
    maxTokens: given?.sampling.max_tokens ?? null,
    seed: given?.sampling.seed ?? null,
  };
};

// Returns settings whose empty fields are replaced by the server's defaults.
function filled({ system, maxTokens, seed }: Settings): Settings {
  const given = emptySettings();
  return {
    system: system || given.system,
    sampling: given.sampling,
    maxTokens: maxTokens ?? given.maxTokens,
    seed: seed ?? given.seed,
  };
}

const made = (settings = emptySettings()): Conversation => ({
  id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`,
  title: "New conversation",
  settings,
  messages: [],
});

function restored(): State {
  try {
    const saved = JSON.parse(localStorage.getItem(PLACE) ?? "null");
    if (saved?.list?.length) return { ...saved, answering: null, problem: null };
  } catch {
    // A saved text that cannot be read is ignored, and overwritten when conversations are saved
    // next.
  }
  const first = made();
  return { list: [first], chosen: first.id, answering: null, problem: null };
}

export const state = new Store<State>(restored());

let saving: number | undefined;

function save(): void {
  clearTimeout(saving);
  saving = window.setTimeout(saveNow, 300);
}

function saveNow(): void {
  const { list, chosen } = state.value;
  try {
    localStorage.setItem(PLACE, JSON.stringify({ list, chosen }));
  } catch {
    state.update({
      problem:
        "This browser has no room to keep all conversations: delete some, or they end with this tab.",
    });
  }
}

window.addEventListener("pagehide", saveNow);

export const chosen = (): Conversation =>
  state.value.list.find((each) => each.id === state.value.chosen) ?? state.value.list[0]!;

export function change(
  id: string,
  by: (conversation: Conversation) => Partial<Conversation>,
): void {
  const list = state.value.list.map((each) => (each.id === id ? { ...each, ...by(each) } : each));
  state.update({ list });
  save();
}

export function choose(id: string): void {
  state.update({ chosen: id, problem: null });
  save();
}

// Begins a conversation with the settings of the chosen one, unless there is an empty one, which is
// then chosen.
export function begin(): void {
  const empty = state.value.list.find((each) => each.messages.length === 0 && !each.document);
  if (empty) {
    choose(empty.id);
    return;
  }
  const fresh = made(chosen().settings);
  state.update({ list: [fresh, ...state.value.list], chosen: fresh.id, problem: null });
  save();
}

export function remove(id: string): void {
  const list = state.value.list.filter((each) => each.id !== id);
  if (list.length === 0) list.push(made());
  const gone = state.value.chosen === id;
  state.update({ list, chosen: gone ? list[0]!.id : state.value.chosen });
  save();
}

export function set(settings: Settings): void {
  change(chosen().id, () => ({ settings }));
}

// Ask for the server's defaults; the first ones are used in conversations without messages.
export async function learnDefaults(): Promise<void> {
  const given = await get<Defaults>("v1/web/defaults");
  await learnModels(given.model);
  // Asking for the defaults of a model does not load it.
  const props = await get<Props>(`props?${withModel({ autoload: "false" })}`).catch((error) => {
    if (error instanceof ApiError && error.status === 400) return null;
    throw error;
  });
  const sampling = { ...props?.default_generation_settings.params, ...given.sampling };
  const first = defaults.value === null;
  defaults.set({ ...given, sampling });
  if (!first) return;
  for (const each of state.value.list)
    if (each.messages.length === 0 && !Object.keys(each.settings.sampling).length)
      change(each.id, ({ settings }) => ({ settings: filled(settings) }));
}
