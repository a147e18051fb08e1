// Shows the turns of the conversation that is chosen.
import type { JSX } from "preact";
import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { edit, regenerate, say } from "./answers";
import { Composer, sizeOf } from "./composer";
import { chosen, defaults, type Message, state } from "./conversations";
import { DocumentChoice, Passages } from "./document";
import { Button, Icon } from "./icons";
import { render } from "./markdown";
import { useStore } from "./store";

const NEAR_END_PX = 60;

export function Chat(): JSX.Element {
  const { answering } = useStore(state);
  const { id, messages, document } = chosen();
  const scroller = useRef<HTMLDivElement>(null);
  const atEnd = useRef(true);
  const [editing, setEditing] = useState<number | null>(null);

  useLayoutEffect(() => {
    setEditing(null);
    atEnd.current = true;
  }, [id]);
  useLayoutEffect(() => {
    const element = scroller.current!;
    if (atEnd.current) element.scrollTop = element.scrollHeight;
  });
  const busy = answering === id;
  const last = messages.length - 1;
  return (
    <main class="chat">
      <div
        class="scroller"
        ref={scroller}
        tabIndex={0}
        role="region"
        aria-label="Messages"
        onScroll={(event) => {
          const { scrollHeight, scrollTop, clientHeight } = event.currentTarget;
          atEnd.current = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
        }}
      >
        <div class="messages" aria-live="polite" aria-busy={busy}>
          {messages.length === 0 && <Welcome />}
          {messages.map((message, index) =>
            message.role === "user" ? (
              <Question
                key={index}
                message={message}
                isEdited={editing === index}
                canEdit={answering === null}
                onEdit={(on) => setEditing(on ? index : null)}
                onSave={(text) => {
                  setEditing(null);
                  atEnd.current = true;
                  void edit(index, text);
                }}
              />
            ) : (
              <Answer
                key={index}
                message={message}
                isWritten={busy && index === last}
                canRepeat={index === last && answering === null}
              />
            ),
          )}
        </div>
      </div>
      <Composer
        key={id}
        busy={busy}
        blocked={answering !== null && !busy}
        onEditLast={() => setEditing(messages.findLastIndex((each) => each.role === "user"))}
        onSay={() => (atEnd.current = true)}
        document={document}
        isNew={messages.length === 0}
      />
    </main>
  );
}

function Welcome(): JSX.Element {
  const given = useStore(defaults);
  return (
    <div class="welcome">
      <h1>What would you like to know?</h1>
      <p>
        The model keeps what its heads need of this conversation, inside a fixed budget. The cache
        beside it shows what that is. Nothing leaves this server.
      </p>
      {given?.question && (
        <button type="button" class="button" onClick={() => void say(given.question!, [])}>
          {given.question}
        </button>
      )}
      <p>
        {given?.documents
          ? "Drop a text file here: it is read once, and you can ask about it again and again."
          : "Drop a text file here to ask about it."}
      </p>
      {given?.documents && <DocumentChoice />}
    </div>
  );
}

interface QuestionProps {
  message: Message;
  isEdited: boolean;
  canEdit: boolean;
  onEdit: (on: boolean) => void;
  onSave: (text: string) => void;
}

function Question({ message, isEdited, canEdit, onEdit, onSave }: QuestionProps): JSX.Element {
  if (isEdited)
    return <EditedQuestion text={message.text} onCancel={() => onEdit(false)} onSave={onSave} />;
  return (
    <article class="turn user" aria-label="You">
      <div class="bubble">
        {message.attachments?.map((each) => (
          <div class="chip" title={each.name}>
            <Icon name="document" />
            <span>{each.name}</span>
            <small>{sizeOf(each.text)}</small>
          </div>
        ))}
        <div class="plain">{message.text}</div>
      </div>
      <div class="actions">
        <Button
          icon="edit"
          label="Edit this turn"
          disabled={!canEdit}
          onClick={() => onEdit(true)}
        />
      </div>
    </article>
  );
}

interface EditedQuestionProps {
  // What the field contains at first.
  text: string;
  onCancel: () => void;
  onSave: (text: string) => void;
}

function EditedQuestion({ text: before, onCancel, onSave }: EditedQuestionProps): JSX.Element {
  const [text, setText] = useState(before);
  const field = useRef<HTMLTextAreaElement>(null);
  useLayoutEffect(() => field.current?.focus(), []);
  return (
    <form
      class="turn user edited"
      onSubmit={(event) => {
        event.preventDefault();
        onSave(text);
      }}
    >
      <textarea
        ref={field}
        rows={3}
        aria-label="Edit this turn"
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key === "Escape") onCancel();
          if (event.key === "Enter" && !event.shiftKey) {
            event.preventDefault();
            onSave(text);
          }
        }}
      />
      <div class="row end">
        <button type="button" class="button" onClick={onCancel}>
          Cancel
        </button>
        <button type="submit" class="button primary">
          Ask this instead
        </button>
      </div>
    </form>
  );
}

interface AnswerProps {
  message: Message;
  isWritten: boolean;
  canRepeat: boolean;
}

function Answer({ message, isWritten, canRepeat }: AnswerProps): JSX.Element {
  const html = useMemo(() => render(message.text), [message.text]);
  return (
    <article class="turn answer" aria-label="Answer">
      {message.thought && (
        <details class="thought">
          <summary>{isWritten && !message.text ? "Thinking…" : "Thought"}</summary>
          <div class="plain">{message.thought}</div>
        </details>
      )}
      {message.text ? (
        <div class="markdown" dangerouslySetInnerHTML={{ __html: html }} />
      ) : (
        isWritten && !message.thought && <p class="thinking">Reading…</p>
      )}
      {message.error && (
        <p class="error" role="alert">
          {message.error}
        </p>
      )}
      {!isWritten && message.passages !== undefined && <Passages passages={message.passages} />}
      {!isWritten && (
        <div class="actions">
          {canRepeat && (
            <Button icon="again" label="Answer again" onClick={() => void regenerate()} />
          )}
          {message.text && (
            <Button
              icon="copy"
              label="Copy the answer"
              onClick={() => void navigator.clipboard?.writeText(message.text)}
            />
          )}
          {message.note && <small>{message.note}</small>}
        </div>
      )}
    </article>
  );
}
