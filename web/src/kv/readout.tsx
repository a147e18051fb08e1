// Shows the position that the pointer is at: its token, and how many heads hold it.
import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { useStore } from "../store";
import { about, type HeldMap, type HeldText, heldText } from "./stream";

const POINTING_MS = 120;

// Returns the text at a position, and asks again when the cache has changed; only one request runs
// at a time.
function useTextAt(map: HeldMap, at: number | null, shown: boolean): HeldText | null {
  const [text, setText] = useState<HeldText | null>(null);
  const wanted = useRef({ at, id: map.id });
  const isAsking = useRef(false);
  wanted.current = { at, id: map.id };
  useEffect(() => {
    if (!shown || at === null || isAsking.current) return;
    isAsking.current = true;
    setTimeout(async () => {
      let asked: typeof wanted.current;
      do {
        asked = wanted.current;
        if (asked.at !== null)
          await heldText(asked.id, asked.at, 16).then(setText, () => undefined);
      } while (wanted.current.at !== asked.at);
      isAsking.current = false;
    }, POINTING_MS);
  }, [at, map, shown]);
  return text;
}

interface Props {
  map: HeldMap;
  at: number | null;
  row: number | null;
}

export function Readout({ map, at, row }: Props): JSX.Element {
  const model = useStore(about)!;
  const text = useTextAt(map, at, model.text);
  if (at === null)
    return (
      <p class="readout">
        Point at a position{model.text && " for its token"}; drag to look closer, or use the arrow
        keys, + and −.
      </p>
    );
  const known = text && text.first === at && text.texts.length > 0 ? text : null;
  const held = known?.held[0] ?? 0;
  const frozen = known?.frozen[0] ?? 0;
  return (
    <p class="readout" aria-live="polite">
      <b>Position {at.toLocaleString("en")}</b>
      {known && (
        <span>
          held by {held} of {known.heads} heads{frozen > 0 && `, frozen in ${frozen}`}
        </span>
      )}
      {row !== null && map.rows > 1 && <span>{rowName(row, model.layers, map, at)}</span>}
      {known && (
        <code>
          <mark>{known.texts[0] || "␣"}</mark>
          {known.texts.slice(1).join("").replace(/\s+/g, " ")}
        </code>
      )}
    </p>
  );
}

function rowName(row: number, layers: number[], map: HeldMap, at: number): string {
  let layer = 0;
  let head = row;
  while (layer < layers.length - 1 && head >= layers[layer]!) head -= layers[layer++]!;
  const column = Math.floor((at - map.first) / map.per_column);
  const inside = column >= 0 && column < map.columns;
  const i = row * map.columns + column;
  const where = `layer ${layer}, KV head ${head}`;
  if (!inside) return where;
  const part = Math.round((100 * map.held[i]!) / 255);
  if (map.per_column > 1) return `${where}: ${part} % of ${map.per_column} positions`;
  return `${where}: ${part ? "held" : map.frozen[i] ? "frozen" : "dropped"}`;
}
