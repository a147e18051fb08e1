// Shows the list of conversations.
import type { JSX } from "preact";
import { forget } from "./answers";
import { begin, choose, state } from "./conversations";
import { Button, Icon, type IconName } from "./icons";
import { useStore } from "./store";
import { nextTheme, theme } from "./theme";

const THEME_ICONS: Record<string, IconName> = { system: "half", light: "sun", dark: "moon" };

export function Sidebar({ onClose }: { onClose: () => void }): JSX.Element {
  const { list, chosen, answering } = useStore(state);
  const shown = useStore(theme);
  return (
    <nav class="sidebar" aria-label="Conversations">
      <div class="brand">
        <img src="web/icon.svg" alt="" width="22" height="22" />
        <span>entropykv</span>
        <Button icon="close" label="Close the list" class="only-narrow" onClick={onClose} />
      </div>
      <Button icon="plus" label="New conversation" labelled class="wide" onClick={begin} />
      <ul class="conversations">
        {list.map((each) => (
          <li key={each.id} class={each.id === chosen ? "chosen" : ""}>
            <button
              type="button"
              class="title"
              aria-current={each.id === chosen ? "true" : undefined}
              onClick={() => choose(each.id)}
            >
              <Icon name="chat" />
              <span>{each.title}</span>
              {answering === each.id && <i class="pulse" title="being answered" />}
            </button>
            <Button
              icon="bin"
              label={`Delete “${each.title}”`}
              onClick={() => confirm(`Delete “${each.title}”?`) && forget(each.id)}
            />
          </li>
        ))}
      </ul>
      <div class="foot">
        <Button icon={THEME_ICONS[shown]!} label={`Theme: ${shown}`} onClick={nextTheme} />
        <a href="docs" target="_blank" rel="noopener">
          API
        </a>
        <a href="web/licenses.txt" target="_blank" rel="noopener">
          Licenses
        </a>
      </div>
    </nav>
  );
}
