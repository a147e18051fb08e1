// Shows the document that a conversation is about, and those that it could be about.
import type { JSX } from "preact";
import { useEffect } from "preact/hooks";
import { change, chosen, type Passage } from "./conversations";
import {
  documents,
  type DocumentState,
  learnDocuments,
  leaveDocument,
  watchDocument,
  whyNoPassages,
} from "./documents";
import { Button, Icon } from "./icons";
import { useStore } from "./store";

interface ChipProps {
  name: string;
  // True if the document can be taken out of the conversation, because nothing was asked yet.
  canLeave: boolean;
}

export function DocumentChip({ name, canLeave }: ChipProps): JSX.Element {
  const state = useStore(documents)[name];
  useEffect(() => watchDocument(name), [name]);
  return (
    <div class="chip document" role="group" aria-label={`Document ${name}`}>
      <Icon name="document" />
      <span>{name}</span>
      {state && state.status !== "ready" && state.status !== "failed" && (
        <progress
          aria-label={`Reading ${name}`}
          max={Math.max(state.tokens, 1)}
          value={state.tokens_read}
        />
      )}
      {state?.status === "failed" ? (
        <small class="error" role="alert">
          {state.error}
        </small>
      ) : (
        <small>{state ? progressOf(state) : ""}</small>
      )}
      {canLeave && (
        <Button icon="close" label={`Leave ${name} out`} onClick={() => leaveDocument(name)} />
      )}
    </div>
  );
}

function progressOf({ status, tokens_read, tokens }: DocumentState): string {
  const all = tokens.toLocaleString("en");
  if (status === "ready") return `${all} tokens read`;
  if (status === "queued" || tokens === 0) return "waits to be read";
  return `${tokens_read.toLocaleString("en")} of ${all} tokens read`;
}

// Shows the passages that an answer attended to, in the order of the document; more attention gives
// a stronger mark.
export function Passages({ passages }: { passages: Passage[] | null }): JSX.Element | null {
  if (passages === null) return <p class="passages">{whyNoPassages(chosen().document)}</p>;
  if (passages.length === 0) return null;
  const most = Math.max(...passages.map((each) => each.share));
  const inOrder = [...passages].sort((one, other) => one.start - other.start);
  return (
    <details class="passages">
      <summary>Passages that this answer looked at</summary>
      {inOrder.map(({ start, text, share }) => (
        <blockquote key={start}>
          <mark style={{ "--strength": `${Math.round((100 * share) / most)}%` }}>
            {text.trim()}
          </mark>{" "}
          <small>{Math.round(100 * share)} % of what this answer looked at</small>
        </blockquote>
      ))}
    </details>
  );
}

// Offers the server's documents for a new conversation.
export function DocumentChoice(): JSX.Element | null {
  const known = useStore(documents);
  useEffect(() => void learnDocuments().catch(() => undefined), []);
  const ready = Object.values(known).filter((each) => each.status === "ready");
  if (ready.length === 0) return null;
  return (
    <section aria-label="Documents">
      <p>Documents that have been read:</p>
      {ready.map(({ id }) => (
        <button
          type="button"
          class="button"
          key={id}
          onClick={() => change(chosen().id, () => ({ document: id }))}
        >
          Ask {id}
        </button>
      ))}
    </section>
  );
}
