// Shows the map of what KV heads hold; the user can point at positions, and zoom in.
import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { Button } from "../icons";
import { useStore } from "../store";
import { isDark } from "../theme";
import { Heatmap, LEFT, layoutOf } from "./heatmap";
import { Readout } from "./readout";
import { about, type HeldMap, type Range } from "./stream";

export const WHOLE: Range = { first: 0, last: null };
const LEAST_SPAN = 16;

interface MapProps {
  map: HeldMap;
  range: Range;
  onRange: (range: Range) => void;
  at: number | null;
  onPoint: (position: number | null) => void;
}

export function MapView({ map, range, onRange, at, onPoint }: MapProps): JSX.Element {
  const model = useStore(about)!;
  const dark = useStore(isDark);
  const canvas = useRef<HTMLCanvasElement>(null);
  const overlay = useRef<HTMLDivElement>(null);
  const selection = useRef<HTMLDivElement>(null);
  const drawn = useRef<Heatmap | null>(null);
  const pressed = useRef<number | null>(null);
  const [row, setRow] = useState<number | null>(null);
  const span = map.columns * map.per_column;

  useEffect(() => {
    drawn.current = new Heatmap(canvas.current!);
    const observer = new ResizeObserver(() => drawn.current?.draw());
    observer.observe(canvas.current!);
    return () => observer.disconnect();
  }, []);
  useEffect(() => drawn.current?.recolour(), [dark]);
  useEffect(() => {
    const frame = requestAnimationFrame(() => drawn.current?.show(map, model.layers));
    return () => cancelAnimationFrame(frame);
  }, [map, model]);
  useEffect(() => {
    const line = overlay.current!;
    const inside = at !== null && at >= map.first && at < map.first + span;
    line.hidden = !inside;
    if (!inside) return;
    place(line, Math.floor((at - map.first) / map.per_column), 1, map);
  }, [at, map]);

  const pointed = (event: PointerEvent): [number, number] => {
    const box = canvas.current!.getBoundingClientRect();
    const { width, height } = layoutOf(box.width, box.height);
    const x = Math.min(Math.max((event.clientX - box.left - LEFT) / width, 0), 0.999999);
    const y = Math.min(Math.max((event.clientY - box.top) / height, 0), 0.999999);
    const column = Math.floor(x * map.columns);
    const position = Math.min(map.first + column * map.per_column, map.position - 1);
    return [Math.max(0, position), Math.floor(y * map.rows)];
  };
  const zoom = (first: number, last: number): void => {
    const from = Math.max(0, Math.min(first, map.position - LEAST_SPAN));
    const to = Math.max(last, from + LEAST_SPAN);
    onRange(from === 0 && to >= map.position ? WHOLE : { first: from, last: to });
  };
  const move = (steps: number): void => {
    const start = at ?? map.first;
    onPoint(Math.min(Math.max(0, start + steps * map.per_column), Math.max(0, map.position - 1)));
  };
  const zoomBy = (factor: number): void => {
    const middle = at ?? map.first + span / 2;
    const half = Math.min(span * factor, map.position) / 2;
    zoom(Math.floor(middle - half), Math.ceil(middle + half));
  };
  const keys: Record<string, () => void> = {
    ArrowLeft: () => move(-1),
    ArrowRight: () => move(1),
    PageUp: () => move(-10),
    PageDown: () => move(10),
    Home: () => onPoint(map.first),
    End: () => onPoint(Math.max(0, map.position - 1)),
    ArrowUp: () => setRow(Math.max(0, (row ?? 0) - 1)),
    ArrowDown: () => setRow(Math.min(map.rows - 1, (row ?? -1) + 1)),
    "+": () => zoomBy(0.5),
    "-": () => zoomBy(2),
    "0": () => onRange(WHOLE),
    Escape: () => onPoint(null),
  };
  const zoomed = range.first > 0 || range.last !== null;
  return (
    <section class="map" aria-label="What every KV head holds">
      <header>
        <h3>Positions that every KV head holds</h3>
        <ul class="keys">
          <li>
            <i class="key map-held" />
            held
          </li>
          {model.freeze && (
            <>
              <li>
                <i class="key map-frozen" />
                frozen
              </li>
              <li>
                <i class="key map-restored" />
                came back in this step
              </li>
            </>
          )}
          <li>
            <i class="key map-none" />
            dropped
          </li>
        </ul>
        <Button
          icon="close"
          label="Show the whole text"
          hidden={!zoomed}
          onClick={() => onRange(WHOLE)}
        />
      </header>
      <div
        class="surface"
        tabIndex={0}
        role="slider"
        aria-label="Position in the text"
        aria-valuemin={0}
        aria-valuemax={Math.max(0, map.position - 1)}
        aria-valuenow={at ?? 0}
        aria-valuetext={at === null ? "no position chosen" : `position ${at}`}
        onKeyDown={(event) => {
          const act = keys[event.key];
          if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
          event.preventDefault();
          act();
        }}
        onPointerDown={(event) => {
          pressed.current = pointed(event)[0];
          event.currentTarget.setPointerCapture(event.pointerId);
        }}
        onPointerMove={(event) => {
          const [position, pointedRow] = pointed(event);
          onPoint(position);
          setRow(pointedRow);
          markSelection(selection.current!, pressed.current, position, map);
        }}
        onPointerUp={(event) => {
          const [position] = pointed(event);
          const from = pressed.current;
          pressed.current = null;
          selection.current!.hidden = true;
          if (from !== null && Math.abs(position - from) >= 4 * map.per_column)
            zoom(Math.min(from, position), Math.max(from, position) + map.per_column);
        }}
        onDblClick={() => onRange(WHOLE)}
      >
        <canvas ref={canvas} />
        <div class="pointer" ref={overlay} hidden />
        <div class="selection" ref={selection} hidden />
      </div>
      <Readout map={map} at={at} row={row} />
    </section>
  );
}

// Place an element over columns of the map, in fractions, so that it stays there when the size of
// the page changes.
function place(element: HTMLElement, column: number, columns: number, map: HeldMap): void {
  const of = (n: number): string => `(100% - ${LEFT}px) * ${n / map.columns}`;
  element.style.left = `calc(${LEFT}px + ${of(column)})`;
  element.style.width = `max(1px, ${of(columns)})`;
}

function markSelection(element: HTMLElement, from: number | null, to: number, map: HeldMap): void {
  element.hidden = from === null || Math.abs(to - from) < 4 * map.per_column;
  if (element.hidden || from === null) return;
  const columnOf = (position: number): number => (position - map.first) / map.per_column;
  const first = columnOf(Math.min(from, to));
  place(element, first, columnOf(Math.max(from, to)) - first, map);
}
