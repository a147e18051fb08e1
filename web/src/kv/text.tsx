// Shows the text of a conversation; the more KV heads hold a token, the stronger is its shade.
import type { JSX } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { ApiError } from "../api";
import { useStore } from "../store";
import { type HeldText, heldText, picture } from "./stream";

const TOKENS = 1024;
const LEVELS = 10;
const PAUSE_MS = 1000;

interface Props {
  conversation: string;
  // The position that the user points at; null: follow the end of the text.
  at: number | null;
  onPoint: (position: number | null) => void;
}

const levelOf = (count: number, heads: number): number =>
  count === 0 ? 0 : Math.max(1, Math.round((LEVELS * count) / heads));

export function ShadedText({ conversation, at, onPoint }: Props): JSX.Element {
  const now = useStore(picture);
  const position = now?.conversations.find((each) => each.id === conversation)?.position ?? 0;
  const [first, setFirst] = useState<number | null>(null);
  const [text, setText] = useState<HeldText | null>(null);
  // The position of the conversation when the server no longer had it. Its text is asked for again
  // once it reads on, because another replica may have answered.
  const [endedAt, setEndedAt] = useState<number | null>(null);
  const ended = endedAt === position;
  const asked = useRef(0);
  const scroller = useRef<HTMLDivElement>(null);

  useEffect(() => {
    if (at === null) setFirst(null);
    else if (text && (at < text.first || at >= text.first + text.texts.length))
      setFirst(Math.floor(at / TOKENS) * TOKENS);
  }, [at]);
  const begin = first ?? Math.max(0, Math.floor((position - 1) / TOKENS) * TOKENS);
  useEffect(() => {
    if (ended) return;
    const controller = new AbortController();
    const wait = Math.max(0, asked.current + PAUSE_MS - performance.now());
    const timer = setTimeout(() => {
      asked.current = performance.now();
      heldText(conversation, begin, TOKENS, controller.signal).then(setText, (error) => {
        // The picture is older than the answer, and the next one no longer has the conversation.
        if (error instanceof ApiError && error.status === 404) setEndedAt(position);
      });
    }, wait);
    return () => {
      clearTimeout(timer);
      controller.abort();
    };
  }, [conversation, begin, now, ended]);
  useEffect(() => {
    const element = scroller.current;
    element?.querySelector(".pointed")?.classList.remove("pointed");
    const token = at === null ? null : element?.querySelector<HTMLElement>(`[data-p="${at}"]`);
    token?.classList.add("pointed");
    if (element && token) element.scrollTop = token.offsetTop - element.clientHeight / 2;
    else if (element && first === null) element.scrollTop = element.scrollHeight;
  }, [at, text]);
  // Drawing a thousand tokens is slow, so it is repeated only if they, or their holders, have
  // changed.
  const spans = useMemo(
    () =>
      text?.texts.map((each, i) => (
        <span
          key={text.first + i}
          class={
            text.swapped_out
              ? "t"
              : `t h${levelOf(text.held[i]!, text.heads)} ${text.frozen[i] ? "f" : ""}`
          }
          data-p={text.first + i}
          onClick={() => onPoint(text.first + i)}
        >
          {each}
        </span>
      )),
    [text],
  );

  const end = text ? text.first + text.texts.length : 0;
  return (
    <section class="held-text" aria-label="Text, shaded by how much of it is held">
      <header>
        <h3>
          {ended
            ? "Text of a conversation that has ended"
            : text?.swapped_out
              ? "Text of what is swapped out"
              : "Text, shaded by how many heads hold it"}
        </h3>
        <span class="range">
          {text && text.texts.length > 0
            ? `${text.first.toLocaleString("en")}–${(end - 1).toLocaleString("en")}`
            : ""}
        </span>
        <button
          type="button"
          class="button small"
          disabled={!text || text.first === 0}
          onClick={() => {
            onPoint(null);
            setFirst(Math.max(0, begin - TOKENS));
          }}
        >
          Earlier
        </button>
        <button
          type="button"
          class="button small"
          disabled={!text || end >= text.position}
          onClick={() => {
            onPoint(null);
            setFirst(begin + TOKENS);
          }}
        >
          Later
        </button>
        <button
          type="button"
          class="button small"
          disabled={first === null}
          onClick={() => {
            onPoint(null);
            setFirst(null);
          }}
        >
          Follow
        </button>
      </header>
      <div class="tokens" ref={scroller} tabIndex={0} role="region" aria-label="Shaded text">
        {spans}
        {text?.texts.length === 0 && <p class="thinking">Nothing has been read yet.</p>}
      </div>
    </section>
  );
}
