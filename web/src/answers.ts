// Says, changes and repeats turns of conversations, and brings the answers into them.
import { ApiError, connection, eventsOf, request } from "./api";
import {
  type Attachment,
  type Conversation,
  change,
  chosen,
  type Message,
  type Passage,
  remove,
  state,
} from "./conversations";
import { models } from "./models";

const LEAST_MS = 50;
// An answer that took less time than this shows no speed, because the figure would mean nothing.
const LEAST_SECONDS = 0.05;
// How many passages of a document are shown under an answer.
const PASSAGES = 4;

// Answers are sent back unchanged, with their spaces: only then can the next turn continue from
// what the server has read.
const wholeText = ({ role, text, attachments }: Message): string =>
  role === "assistant"
    ? text
    : [...(attachments ?? []).map((each) => each.text), text].join("\n").trim();

function titleOf(message: Message): string {
  const text = message.text.trim() || message.attachments?.[0]?.name || "";
  const line = text.split("\n")[0]!;
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

let controller: AbortController | null = null;

export const stop = (): void => controller?.abort();

// Delete a conversation, and stop the answer that is being written in it.
export function forget(id: string): void {
  if (state.value.answering === id) stop();
  remove(id);
}

export async function say(text: string, attachments: Attachment[]): Promise<void> {
  const { id, messages } = chosen();
  const message: Message = attachments.length
    ? { role: "user", text, attachments }
    : { role: "user", text };
  change(id, () => ({ messages: [...messages, message] }));
  if (messages.length === 0) change(id, () => ({ title: titleOf(message) }));
  await answer(id);
}

// Say something else in an earlier turn; everything after it is deleted.
export async function edit(index: number, text: string): Promise<void> {
  const { id, messages } = chosen();
  const message = { ...messages[index]!, text };
  change(id, () => ({ messages: [...messages.slice(0, index), message] }));
  if (index === 0) change(id, () => ({ title: titleOf(message) }));
  await answer(id);
}

export async function regenerate(): Promise<void> {
  const { id, messages } = chosen();
  const last = messages.findLastIndex((each) => each.role === "user");
  change(id, () => ({ messages: messages.slice(0, last + 1) }));
  await answer(id);
}

function requestOf({ settings, messages, document }: Conversation): object {
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  const { chosen: model } = models.value;
  return {
    ...(model === null ? {} : { model }),
    ...(document === undefined ? {} : { document, passages: PASSAGES }),
    messages: [
      ...system,
      ...messages.map((each) => ({ role: each.role, content: wholeText(each) })),
    ],
    ...settings.sampling,
    max_tokens: settings.maxTokens,
    seed: settings.seed,
    stream: true,
    stream_options: { include_usage: true },
  };
}

async function answer(id: string): Promise<void> {
  if (state.value.answering) return;
  const asked = state.value.list.find((each) => each.id === id)!;
  const body = JSON.stringify(requestOf(asked));
  const message: Message = { role: "assistant", text: "" };
  const show = (): void => change(id, () => ({ messages: [...asked.messages, { ...message }] }));
  controller = new AbortController();
  state.update({ answering: id, problem: null });
  show();
  const figures = new Figures();
  // Longer texts take longer to draw, so they are drawn less often, with more tokens at a time.
  let pending: number | undefined;
  const showSoon = (): void => {
    pending ??= window.setTimeout(
      () => {
        pending = undefined;
        show();
      },
      Math.max(LEAST_MS, (message.text.length + (message.thought?.length ?? 0)) / 50),
    );
  };
  try {
    const response = await request("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", "x-session-id": id },
      body,
      signal: controller.signal,
    });
    for await (const event of eventsOf(response)) {
      if (event.data === "[DONE]") break;
      const chunk = JSON.parse(event.data);
      if (chunk.error) throw new ApiError(500, chunk.error.message);
      const delta = chunk.choices?.[0]?.delta ?? {};
      if (delta.reasoning_content || delta.content) {
        figures.note();
        if (delta.reasoning_content)
          message.thought = (message.thought ?? "") + delta.reasoning_content;
        message.text += delta.content ?? "";
        showSoon();
      }
      const passages: Passage[] | null | undefined = chunk.choices?.[0]?.passages;
      if (passages !== undefined) message.passages = passages;
      if (chunk.choices?.[0]?.finish_reason === "length") figures.ending = "cut off";
      if (chunk.usage) {
        figures.tokens = chunk.usage.completion_tokens;
        figures.thought = chunk.usage.completion_tokens_details?.reasoning_tokens ?? 0;
      }
    }
  } catch (error) {
    if (controller.signal.aborted) figures.ending = "stopped";
    else message.error = sentence(error);
  }
  clearTimeout(pending);
  message.note = figures.text();
  show();
  state.update({ answering: null });
}

function sentence(error: unknown): string {
  if (error instanceof ApiError) return error.message;
  // Any other error means that the connection ended within the answer.
  if (connection.value === "ready") void request("health").catch(() => undefined);
  return "The connection was lost before the answer was complete.";
}

class Figures {
  tokens = 0;
  thought = 0;
  ending = "";
  private first = 0;
  private last = 0;
  private pieces = 0;

  note(): void {
    this.last = performance.now();
    this.first ||= this.last;
    ++this.pieces;
  }

  text(): string {
    const tokens = this.tokens || this.pieces;
    const seconds = (this.last - this.first) / 1000;
    const parts = [];
    if (tokens) parts.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
    if (this.thought) parts.push(`${this.thought} of them thought`);
    if (seconds > LEAST_SECONDS && tokens > 1)
      parts.push(`${((tokens - 1) / seconds).toFixed(1)} per second`);
    if (this.ending) parts.push(this.ending);
    return parts.join(" · ");
  }
}
