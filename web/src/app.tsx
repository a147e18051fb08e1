// Shows the page: conversations, the chat, and the cache beside it.
import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useState } from "preact/hooks";
import { type Connection, connection, keyQuestion, lost } from "./api";
import { Chat } from "./chat";
import { defaults, learnDefaults, state } from "./conversations";
import { KeyDialog, SettingsDialog } from "./dialogs";
import { Button } from "./icons";
import { chooseModel, models } from "./models";
import { Panel } from "./kv/panel";
import { forget } from "./kv/stream";
import { Sidebar } from "./sidebar";
import { useStore } from "./store";

const NOTICES: Record<Connection, string> = {
  starting: "",
  ready: "",
  loading: "The model is loading. The page goes on as soon as it is there.",
  gone: "The server does not answer. Trying again…",
};

type View = "chat" | "cache";

export function App(): JSX.Element {
  const { chosen, problem } = useStore(state);
  const connected = useStore(connection);
  const question = useStore(keyQuestion);
  const given = useStore(defaults);
  const { names, chosen: model } = useStore(models);
  const [view, setView] = useState<View>("chat");
  const [hasPanel, setPanel] = useState(localStorage.getItem("entropykv.panel") !== "closed");
  const [hasList, setList] = useState(false);
  const [hasSettings, setSettings] = useState(false);

  useEffect(() => void lost("starting"), []);
  useEffect(() => {
    if (connected === "ready" && question === null) learnDefaults().catch(() => undefined);
  }, [connected, question, model]);
  useEffect(() => {
    const name = model ?? given?.model;
    document.title = name ? `${name} · entropykv` : "entropykv";
  }, [given, model]);
  useLayoutEffect(() => setList(false), [chosen]);

  const togglePanel = (): void => {
    localStorage.setItem("entropykv.panel", hasPanel ? "closed" : "open");
    setPanel(!hasPanel);
  };
  const notice = NOTICES[connected] || problem;
  return (
    <div class={`page view-${view} ${hasPanel ? "with-panel" : ""} ${hasList ? "with-list" : ""}`}>
      <Sidebar onClose={() => setList(false)} />
      <button
        type="button"
        class="shade"
        tabIndex={-1}
        aria-label="Close the list"
        onClick={() => setList(false)}
      />
      <header class="top">
        <Button
          icon="menu"
          label="Conversations"
          class="only-narrow"
          onClick={() => setList(true)}
        />
        {names.length > 1 ? (
          <div class="model">
            <select
              aria-label="Model"
              value={model ?? ""}
              onChange={(event) => {
                chooseModel(event.currentTarget.value);
                forget("unknown");
              }}
            >
              {names.map((name) => (
                <option value={name}>{name}</option>
              ))}
            </select>
          </div>
        ) : (
          <div class="model" title={given?.model}>
            {model ?? given?.model ?? "entropykv"}
          </div>
        )}
        <nav class="views only-phone" aria-label="View">
          {(["chat", "cache"] as const).map((name) => (
            <button
              type="button"
              class="segment"
              aria-pressed={view === name}
              onClick={() => setView(name)}
            >
              {name === "chat" ? "Chat" : "Cache"}
            </button>
          ))}
        </nav>
        <Button icon="sliders" label="Settings" onClick={() => setSettings(true)} />
        <Button
          icon="cache"
          label={hasPanel ? "Hide the cache" : "Show the cache"}
          class="not-phone"
          aria-pressed={hasPanel}
          onClick={togglePanel}
        />
      </header>
      <div class="notice" role="status" hidden={!notice}>
        {notice}
      </div>
      <Chat />
      <Panel key={`${question === null ? "open" : "shut"} ${model}`} isOpen={hasPanel} />
      {hasSettings && <SettingsDialog onClose={() => setSettings(false)} />}
      {question !== null && connected === "ready" && <KeyDialog question={question} />}
    </div>
  );
}
