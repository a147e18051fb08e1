// The cache as it works: who holds what, what it costs, and how it changes.
import type { JSX } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { connection } from "../api";
import { useStore } from "../store";
import { Charts } from "./charts";
import { MapView, WHOLE } from "./map";
import { about, picture, type Range, watch } from "./stream";
import { ShadedText } from "./text";

export const bytes = (count: number): string => {
  for (const [size, unit] of [
    [2 ** 30, "GiB"],
    [2 ** 20, "MiB"],
    [2 ** 10, "KiB"],
  ] as const)
    if (count >= size) return `${(count / size).toFixed(count < 100 * size ? 1 : 0)} ${unit}`;
  return `${count} B`;
};
const count = (value: number): string => value.toLocaleString("en");
const share = (part: number, whole: number): string =>
  whole ? `${((100 * part) / whole).toFixed(1)} %` : "–";

// Whether the page can be seen: what nobody sees costs the server nothing.
function useVisible(): boolean {
  const [visible, set] = useState(!document.hidden);
  useEffect(() => {
    const change = (): void => set(!document.hidden);
    document.addEventListener("visibilitychange", change);
    return () => document.removeEventListener("visibilitychange", change);
  }, []);
  return visible;
}

export function Panel({ isOpen }: { isOpen: boolean }): JSX.Element {
  const phone = useMemo(() => matchMedia("(max-width: 760px)"), []);
  const visible = useVisible();
  const connected = useStore(connection);
  const model = useStore(about);
  const now = useStore(picture);
  const [id, setId] = useState<string | null>(null);
  const [range, setRange] = useState<Range>(WHOLE);
  const [at, setAt] = useState<number | null>(null);
  const looks = visible && (isOpen || phone.matches) && connected !== "starting";

  useEffect(() => {
    if (!looks) return;
    const controller = new AbortController();
    void watch(range, columnsWanted(), controller.signal);
    return () => controller.abort();
  }, [looks, range]);

  const map = now?.conversations.find((each) => each.id === id) ?? now?.conversations[0];
  return (
    <aside class="panel" aria-label="Cache">
      {model && now && map ? (
        <>
          <Budget id={map.id} onChoose={setId} />
          <MapView map={map} range={range} onRange={setRange} at={at} onPoint={setAt} />
          <Charts freezes={model.freeze} />
          <ShadedText conversation={map.id} at={at} onPoint={setAt} />
        </>
      ) : (
        <p class="thinking">Looking at the cache…</p>
      )}
    </aside>
  );
}

const columnsWanted = (): number =>
  Math.min(2048, Math.max(64, 2 ** Math.ceil(Math.log2(Math.max(screen.width / 2, 1)))));

// What the pool holds, and how much of it every conversation has.
function Budget({ id, onChoose }: { id: string; onChoose: (id: string) => void }): JSX.Element {
  const model = useStore(about)!;
  const { pool, conversations } = useStore(picture)!;
  const map = conversations.find((each) => each.id === id)!;
  return (
    <section class="budget" aria-label="Budget">
      <h2>
        {bytes(pool.used)} <span>of {bytes(pool.budget)} for the cache</span>
      </h2>
      <div class="pool" role="img" aria-label={`${share(pool.used, pool.budget)} of the budget`}>
        {conversations.map((each) => (
          <i
            key={each.id}
            ref={(element) => {
              if (element)
                element.style.width = `${(100 * each.bytes) / Math.max(pool.budget, 1)}%`;
            }}
          />
        ))}
      </div>
      <dl>
        <Figure name="Tokens" value={count(map.position)} />
        <Figure
          name="Entries held"
          value={share(map.entries, map.entries_full)}
          more={`${count(map.entries)} of ${count(map.entries_full)}`}
        />
        {model.freeze ? (
          <Figure name="Frozen" value={count(map.frozen_entries)} more={bytes(map.frozen_bytes)} />
        ) : (
          <Figure name="Evicted" value={count(map.evictions)} />
        )}
        <Figure name="Full f16 cache" value={bytes(map.bytes_full)} more="without a budget" />
        <Figure name="Policy" value={model.policy} more={`${model.store}, ${model.kv_type}`} />
      </dl>
      {conversations.length > 1 && (
        <ul class="holders" aria-label="Conversations in the pool">
          {conversations.map((each) => (
            <li key={each.id}>
              <button type="button" aria-pressed={each.id === id} onClick={() => onChoose(each.id)}>
                {each.id}: {count(each.position)} tokens, {bytes(each.bytes)}
              </button>
            </li>
          ))}
        </ul>
      )}
    </section>
  );
}

function Figure(props: { name: string; value: string; more?: string }): JSX.Element {
  return (
    <div>
      <dt>{props.name}</dt>
      <dd>
        {props.value}
        {props.more && <small>{props.more}</small>}
      </dd>
    </div>
  );
}
