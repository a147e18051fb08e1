// Shows the cache while it works: who holds what, what it costs, and how it changes.
import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useMemo, useState } from "preact/hooks";
import { connection } from "../api";
import { state } from "../conversations";
import { useStore } from "../store";
import { Budget } from "./budget";
import { Charts } from "./charts";
import { assignColours } from "./colours";
import { Holders } from "./holders";
import { MapView, WHOLE } from "./map";
import {
  absence,
  about,
  hasSeveral,
  type Holder,
  type Picture,
  picture,
  type Range,
  watch,
} from "./stream";
import { ShadedText } from "./text";

// Tells whether the page is visible; for a hidden page, the server need not send anything.
function useVisible(): boolean {
  const [visible, set] = useState(!document.hidden);
  useEffect(() => {
    const change = (): void => set(!document.hidden);
    document.addEventListener("visibilitychange", change);
    return () => document.removeEventListener("visibilitychange", change);
  }, []);
  return visible;
}

// Returns the conversation whose heads are shown, and a function that chooses another. Without a
// choice it is the conversation of the chat; null: the server chooses.
function useWanted(conversations: Holder[]): [string | null, (id: string) => void] {
  const { chosen } = useStore(state);
  const [picked, setPicked] = useState<string | null>(null);
  useLayoutEffect(() => setPicked(null), [chosen]);
  const own = conversations
    .filter((each) => each.name === chosen)
    .sort((a, b) => a.idle_seconds - b.idle_seconds)[0];
  const found = conversations.find((each) => each.id === picked) ?? own;
  return [found?.id ?? null, setPicked];
}

export function Panel({ isOpen }: { isOpen: boolean }): JSX.Element {
  const phone = useMemo(() => matchMedia("(max-width: 760px)"), []);
  const visible = useVisible();
  const connected = useStore(connection);
  const model = useStore(about);
  const now = useStore(picture);
  const why = useStore(absence);
  const { chosen } = useStore(state);
  const [wanted, choose] = useWanted(now?.conversations ?? []);
  const [range, setRange] = useState<Range>(WHOLE);
  const [at, setAt] = useState<number | null>(null);
  const looks = visible && (isOpen || phone.matches) && connected !== "starting";

  const asked = model?.shared ? wanted : null;
  useLayoutEffect(() => {
    setRange(WHOLE);
    setAt(null);
  }, [asked]);
  useEffect(() => {
    if (!looks) return;
    const controller = new AbortController();
    void watch(asked, range, columnsWanted(), controller.signal);
    return () => controller.abort();
  }, [looks, range, asked, chosen]);

  if (!model || !now)
    return (
      <aside class="panel" aria-label="Cache">
        {why === "unloaded" ? (
          <p class="unseen">The model is not in memory. The first question loads it.</p>
        ) : (
          <p class="thinking">Looking at the cache…</p>
        )}
      </aside>
    );
  if (model.shared) assignColours(now.conversations.map((each) => each.id));
  const id = wanted ?? now.map?.id ?? null;
  const shown = now.conversations.find((each) => each.id === id);
  return (
    <aside class="panel" aria-label="Cache">
      <Budget shown={shown} />
      {hasSeveral(model, now) && now.conversations.length > 0 && (
        <Holders shown={id} onChoose={choose} />
      )}
      {now.map && now.map.id === id && now.map.position > 0 ? (
        <MapView map={now.map} range={range} onRange={setRange} at={at} onPoint={setAt} />
      ) : (
        <p class="unseen">{shown && shown.position > 0 ? whyUnseen(shown) : whyNone(now)}</p>
      )}
      <Charts model={model} now={now} />
      {shown &&
        (model.text ? (
          <ShadedText key={id} conversation={shown.id} at={at} onPoint={setAt} />
        ) : (
          <p class="unseen">
            This server does not show what texts say; whoever runs it can start it with --show-text.
          </p>
        ))}
    </aside>
  );
}

const whyUnseen = (holder: Holder): string =>
  holder.swapped_out
    ? "Swapped out: others needed the room. What its heads hold comes back with its next turn; nothing " +
      "is read again."
    : "Looking at the cache…";

// Entries of other users are not shown, only their share of the budget.
const whyNone = (now: Picture): string =>
  now.pool.used > 0 ? "Nothing of yours is in the cache." : "Nothing has been read yet.";

const columnsWanted = (): number =>
  Math.min(2048, Math.max(64, 2 ** Math.ceil(Math.log2(Math.max(screen.width / 2, 1)))));
