// Shows the field for the next message of a conversation, and lets files be attached to it.
import type { JSX } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { say, stop } from "./answers";
import { type Attachment, chosen, defaults } from "./conversations";
import { DocumentChip } from "./document";
import { MOST_DOCUMENT_BYTES, readDocument } from "./documents";
import { Button, Icon } from "./icons";
import { known } from "./store";

const MOST_BYTES = 3_500_000;

interface ComposerProps {
  busy: boolean;
  // True if another conversation is being answered.
  blocked: boolean;
  onEditLast: () => void;
  onSay: () => void;
  // The document that the conversation is about.
  document: string | undefined;
  // True if the conversation has no messages yet.
  isNew: boolean;
}

export function Composer({
  busy,
  blocked,
  onEditLast,
  onSay,
  document,
  isNew,
}: ComposerProps): JSX.Element {
  const [text, setText] = useState("");
  const [files, setFiles] = useState<Attachment[]>([]);
  const [problem, setProblem] = useState("");
  const field = useRef<HTMLTextAreaElement>(null);
  const picker = useRef<HTMLInputElement>(null);
  const form = useRef<HTMLFormElement>(null);

  useLayoutEffect(() => field.current?.focus(), []);
  useLayoutEffect(() => {
    const element = field.current!;
    element.style.height = "auto";
    element.style.height = `${Math.min(element.scrollHeight + 2, 240)}px`;
  }, [text]);

  const send = (): void => {
    if (busy || blocked || !(text.trim() || files.length)) return;
    onSay();
    void say(text.trim(), files);
    setText("");
    setFiles([]);
    setProblem("");
  };
  const add = async (chosenFiles: FileList | null): Promise<void> => {
    for (const file of chosenFiles ?? []) {
      const content = await file.text().catch(() => "\0");
      if (content.includes("\0")) setProblem(`${file.name} is no text; give a text file.`);
      else if (isNew && !chosen().document && (await known(defaults)).documents) {
        if (file.size > MOST_DOCUMENT_BYTES) setProblem(`${file.name} is longer than 8 MiB.`);
        else
          await readDocument(file.name, content).catch((error: Error) => setProblem(error.message));
      } else if (file.size > MOST_BYTES) setProblem(`${file.name} is longer than 3.5 MB.`);
      else setFiles((others) => [...others, { name: file.name, text: content }]);
    }
  };
  // Files can be dropped anywhere on the chat, not only on this form.
  useLayoutEffect(() => {
    const chat = form.current!.parentElement!;
    const allow = (event: DragEvent): void => event.preventDefault();
    const drop = (event: DragEvent): void => {
      event.preventDefault();
      void add(event.dataTransfer?.files ?? null);
    };
    chat.addEventListener("dragover", allow);
    chat.addEventListener("drop", drop);
    return () => {
      chat.removeEventListener("dragover", allow);
      chat.removeEventListener("drop", drop);
    };
  });
  return (
    <form
      ref={form}
      class="composer"
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
    >
      {(document || files.length > 0 || problem) && (
        <div class="attachments">
          {document && <DocumentChip key={document} name={document} canLeave={isNew} />}
          {files.map((each, index) => (
            <div class="chip">
              <Icon name="document" />
              <span>{each.name}</span>
              <small>{sizeOf(each.text)}</small>
              <Button
                icon="close"
                label={`Leave ${each.name} out`}
                onClick={() => setFiles(files.filter((_, i) => i !== index))}
              />
            </div>
          ))}
          {problem && (
            <span class="error" role="alert">
              {problem}
            </span>
          )}
        </div>
      )}
      <div class="entry">
        <input
          ref={picker}
          type="file"
          multiple
          hidden
          aria-label="Text files"
          accept="text/*,.md,.txt,.json,.csv,.py,.js,.ts,.c,.cpp,.h,.html,.xml,.yaml,.toml,.log"
          onChange={(event) => {
            void add(event.currentTarget.files);
            event.currentTarget.value = "";
          }}
        />
        <Button icon="attach" label="Add a text file" onClick={() => picker.current?.click()} />
        <textarea
          ref={field}
          rows={1}
          placeholder={blocked ? "Another conversation is being answered" : "Ask something"}
          aria-label="Your message"
          value={text}
          onInput={(event) => setText(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.isComposing) return;
            if (event.key === "Enter" && !event.shiftKey) {
              event.preventDefault();
              send();
            } else if (event.key === "Escape" && busy) stop();
            else if (event.key === "ArrowUp" && !text && !busy) {
              event.preventDefault();
              onEditLast();
            }
          }}
        />
        {busy ? (
          <Button icon="stop" label="Stop (Esc)" class="primary" onClick={stop} />
        ) : (
          <Button
            icon="send"
            label="Send (Enter)"
            class="primary"
            type="submit"
            disabled={blocked || !(text.trim() || files.length)}
          />
        )}
      </div>
    </form>
  );
}

export function sizeOf(text: string): string {
  const { length } = text;
  return `${length < 1000 ? length : `${(length / 1000).toFixed(1)}k`} characters`;
}
