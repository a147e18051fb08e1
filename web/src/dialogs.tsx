// Asks for the API key, and for the settings of a conversation.
import type { ComponentChildren, JSX } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { setKey } from "./api";
import { chosen, type SamplingName, type Settings, set } from "./conversations";
import { Button } from "./icons";

interface Props {
  title: string;
  children: ComponentChildren;
  onClose?: () => void;
}

function Dialog({ title, children, onClose }: Props): JSX.Element {
  const element = useRef<HTMLDialogElement>(null);
  useLayoutEffect(() => {
    element.current?.showModal();
    return () => element.current?.close();
  }, []);
  return (
    <dialog
      ref={element}
      aria-labelledby="dialog-title"
      onCancel={(event) => {
        event.preventDefault();
        onClose?.();
      }}
    >
      <header>
        <h2 id="dialog-title">{title}</h2>
        {onClose && <Button icon="close" label="Close" onClick={onClose} />}
      </header>
      {children}
    </dialog>
  );
}

export function KeyDialog({ question }: { question: string }): JSX.Element {
  const [key, setText] = useState("");
  return (
    <Dialog title="API key">
      <form
        onSubmit={(event) => {
          event.preventDefault();
          if (key.trim()) setKey(key.trim());
        }}
      >
        <label>
          <span>{question} It stays in this tab, and is forgotten with it.</span>
          <input
            type="password"
            autocomplete="off"
            value={key}
            autofocus
            onInput={(event) => setText(event.currentTarget.value)}
          />
        </label>
        <div class="row end">
          <button type="submit" class="button primary" disabled={!key.trim()}>
            Use this key
          </button>
        </div>
      </form>
    </Dialog>
  );
}

const NUMBERS: [SamplingName, string, number, number][] = [
  ["temperature", "Temperature", 0, 2],
  ["top_p", "Top-p", 0, 1],
  ["top_k", "Top-k", 0, 1000],
  ["min_p", "Min-p", 0, 1],
  ["repeat_penalty", "Repeat penalty", 0, 2],
  ["presence_penalty", "Presence penalty", -2, 2],
  ["frequency_penalty", "Frequency penalty", -2, 2],
];

const numberOf = (text: string): number | null =>
  text.trim() === "" || Number.isNaN(Number(text)) ? null : Number(text);

export function SettingsDialog({ onClose }: { onClose: () => void }): JSX.Element {
  const [settings, change] = useState<Settings>(chosen().settings);
  const sample = (name: SamplingName, text: string): void => {
    const { [name]: _, ...others } = settings.sampling;
    const value = numberOf(text);
    change({ ...settings, sampling: value === null ? others : { ...others, [name]: value } });
  };
  return (
    <Dialog title="Settings of this conversation" onClose={onClose}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          set(settings);
          onClose();
        }}
      >
        <label>
          <span>System prompt</span>
          <textarea
            rows={6}
            value={settings.system}
            onInput={(event) => change({ ...settings, system: event.currentTarget.value })}
          />
        </label>
        <div class="fields">
          {NUMBERS.map(([name, label, least, most]) => (
            <label key={name}>
              <span>{label}</span>
              <input
                type="number"
                min={least}
                max={most}
                step={name === "top_k" ? 1 : "any"}
                placeholder="default"
                value={settings.sampling[name] ?? ""}
                onInput={(event) => sample(name, event.currentTarget.value)}
              />
            </label>
          ))}
          <label>
            <span>Longest answer</span>
            <input
              type="number"
              min={1}
              placeholder="no limit"
              value={settings.maxTokens ?? ""}
              onInput={(event) =>
                change({ ...settings, maxTokens: numberOf(event.currentTarget.value) })
              }
            />
          </label>
          <label>
            <span>Seed</span>
            <input
              type="number"
              min={0}
              placeholder="random"
              value={settings.seed ?? ""}
              onInput={(event) =>
                change({ ...settings, seed: numberOf(event.currentTarget.value) })
              }
            />
          </label>
        </div>
        <div class="row end">
          <button type="button" class="button" onClick={onClose}>
            Cancel
          </button>
          <button type="submit" class="button primary">
            Save
          </button>
        </div>
      </form>
    </Dialog>
  );
}
