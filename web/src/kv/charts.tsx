// Figures over time.
import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { useStore } from "../store";
import { colour, isDark } from "../theme";
import { history, type Point } from "./stream";

const HEIGHT = 92;
const LEAST_SECONDS = 10;

interface Line {
  name: string;
  colour: string;
  value: (point: Point) => number | null;
}

export const short = (value: number): string => {
  for (const [size, unit] of [
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ] as const)
    if (value >= size) return `${(value / size).toFixed(value < 10 * size ? 1 : 0)}${unit}`;
  return value < 10 && value % 1 ? value.toFixed(1) : `${Math.round(value)}`;
};

const agoOf = (seconds: number): string =>
  seconds < 120 ? `−${Math.round(seconds)} s` : `−${Math.round(seconds / 60)} min`;

function options(lines: Line[], width: number): uPlot.Options {
  const axis = {
    stroke: colour("quiet"),
    font: `10px ${colour("font")}`,
    grid: { stroke: colour("line"), width: 1 },
    ticks: { show: false },
  };
  return {
    width,
    height: HEIGHT,
    padding: [6, 14, 0, 0],
    legend: { show: false },
    cursor: { show: false },
    scales: {
      x: { time: false, range: (_, least) => [Math.min(least, -LEAST_SECONDS), 0] },
      y: { range: (_, __, most) => [0, Math.max(1, most * 1.05)] },
    },
    axes: [
      {
        ...axis,
        size: 18,
        gap: 2,
        space: 60,
        values: (_, splits) => splits.map((each) => (each === 0 ? "now" : agoOf(-each))),
      },
      { ...axis, size: 40, gap: 2, space: 26, values: (_, splits) => splits.map(short) },
    ],
    series: [
      {},
      ...lines.map((line) => ({
        stroke: colour(line.colour),
        width: 1.5,
        spanGaps: false,
        points: { show: false },
      })),
    ],
  };
}

function Chart({ title, lines }: { title: string; lines: Line[] }): JSX.Element {
  const points = useStore(history);
  const dark = useStore(isDark);
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const last = points.at(-1);

  useEffect(() => {
    const element = place.current!;
    const made = new uPlot(
      options(lines, element.clientWidth || 200),
      [[], ...lines.map(() => [])],
      element,
    );
    plot.current = made;
    const observer = new ResizeObserver(() =>
      made.setSize({ width: Math.max(element.clientWidth, 80), height: HEIGHT }),
    );
    observer.observe(element);
    return () => {
      observer.disconnect();
      made.destroy();
    };
  }, [dark]);
  useEffect(() => {
    plot.current?.setData([
      points.map((each) => each.time - last!.time),
      ...lines.map((line) => points.map(line.value)),
    ]);
  }, [points, dark]);
  return (
    <figure class="chart">
      <figcaption>
        <b>{title}</b>
        {lines.map((line) => {
          const value = last && line.value(last);
          return (
            <span key={line.name}>
              <i class={`key ${line.colour}`} />
              {line.name} {value !== null && value !== undefined && short(value)}
            </span>
          );
        })}
      </figcaption>
      <div ref={place} aria-hidden="true" />
    </figure>
  );
}

const ENTRIES: Line[] = [
  { name: "held", colour: "map-held", value: (each) => each.held },
  { name: "frozen", colour: "map-frozen-line", value: (each) => each.frozen },
];
const MOVES: Line[] = [
  { name: "frozen", colour: "map-left", value: (each) => each.evicted },
  { name: "came back", colour: "map-restored", value: (each) => each.restored },
];
const EVICTED: Line[] = [{ name: "evicted", colour: "map-left", value: (each) => each.evicted }];
const SPEEDS: Line[] = [
  { name: "read", colour: "map-left", value: (each) => each.read },
  { name: "written", colour: "map-held", value: (each) => each.written },
];

export function Charts({ freezes }: { freezes: boolean }): JSX.Element {
  return (
    <div class="charts">
      <Chart
        key={`held-${freezes}`}
        title="Entries"
        lines={freezes ? ENTRIES : ENTRIES.slice(0, 1)}
      />
      <Chart key={`${freezes}`} title="Entries per second" lines={freezes ? MOVES : EVICTED} />
      <Chart title="Tokens per second" lines={SPEEDS} />
    </div>
  );
}
