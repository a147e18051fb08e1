// Draws figures over time.
import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { useStore } from "../store";
import { colour, isDark } from "../theme";
import { colourOf } from "./colours";
import {
  type About,
  hasSeveral,
  type Holder,
  history,
  type Picture,
  type Point,
  type Share,
} from "./stream";
import { bytes, duration, short } from "./units";

const HEIGHT = 92;
const LEAST_SECONDS = 10;

interface Line {
  name: string;
  colour: string;
  value: (point: Point) => number | null;
}

interface ChartProps {
  title: string;
  lines: Line[];
  // True if the lines are drawn as areas, one upon the other.
  stacked?: boolean;
  // True for one line per conversation, whose names are in the table above.
  unnamed?: boolean;
  // The largest value in bytes; null: values are counts without a limit.
  limit?: number | null;
}

const POWERS_OF_TWO = Array.from({ length: 50 }, (_, i) => 2 ** i);

// Labels a time, except at the left edge, where the label would touch the axis of values.
function timeLabel(seconds: number, least: number): string {
  if (seconds === 0) return "now";
  return seconds < 0.93 * least ? "" : `−${duration(-seconds)}`;
}

// Lists the places of values without neighbours in time, which no line can show: they are points.
function alone(plot: uPlot, series: number): number[] {
  const values = plot.data[series]!;
  const found = [];
  for (let at = 0; at < values.length; ++at)
    if (values[at] != null && values[at - 1] == null && values[at + 1] == null) found.push(at);
  return found;
}

function options({ lines, stacked, limit = null }: ChartProps, width: number): uPlot.Options {
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
      y: { range: (_, __, most) => [0, limit ?? Math.max(1, most * 1.05)] },
    },
    axes: [
      {
        ...axis,
        size: 18,
        gap: 2,
        space: 60,
        values: (plot, splits) => splits.map((each) => timeLabel(each, plot.scales["x"]!.min ?? 0)),
      },
      {
        ...axis,
        size: limit === null ? 40 : 56,
        gap: 2,
        space: 26,
        incrs: limit === null ? undefined : POWERS_OF_TWO,
        values: (_, splits) => splits.map(limit === null ? short : bytes),
      },
    ],
    series: [
      {},
      ...lines.map((line) => ({
        stroke: colour(line.colour),
        fill: stacked ? colour(line.colour) : undefined,
        width: stacked ? 0 : 1.5,
        spanGaps: false,
        points: { show: true, size: 3, width: 0, fill: colour(line.colour), filter: alone },
      })),
    ],
  };
}

// Returns the values of every line. Stacked lines have the sums of their own and all later lines,
// so that the first one is drawn first, behind the others.
function valuesOf({ lines, stacked }: ChartProps, points: Point[]): (number | null)[][] {
  const values = lines.map((line) => points.map(line.value));
  if (stacked)
    for (let i = lines.length - 2; i >= 0; --i)
      values[i] = values[i]!.map((value, at) => (value ?? 0) + (values[i + 1]![at] ?? 0));
  return values;
}

function Chart(props: ChartProps): JSX.Element {
  const { title, lines, unnamed } = props;
  const points = useStore(history);
  const dark = useStore(isDark);
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const last = points.at(-1);

  useEffect(() => {
    const element = place.current!;
    const made = new uPlot(
      options(props, element.clientWidth || 200),
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
      ...valuesOf(props, points),
    ] as uPlot.AlignedData);
  }, [points, dark]);
  return (
    <figure class="chart">
      <figcaption>
        <b>{title}</b>
        {!unnamed &&
          lines.map((line) => {
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
  { name: "frozen", colour: "map-frozen-line", value: (each) => each.evicted },
  { name: "came back", colour: "map-restored", value: (each) => each.restored },
];
const EVICTED: Line[] = [{ name: "evicted", colour: "map-left", value: (each) => each.evicted }];
const SPEEDS: Line[] = [
  { name: "read", colour: "speed-read", value: (each) => each.read },
  { name: "written", colour: "speed-written", value: (each) => each.written },
];

// Makes one line for each conversation.
const linesOf = (
  conversations: Holder[],
  value: (of: Share) => number | null,
  absent: number | null,
): Line[] =>
  conversations.map(({ id }) => ({
    name: id,
    colour: colourOf(id),
    value: (point) => {
      const of = point.of.get(id);
      return of ? value(of) : absent;
    },
  }));

function PoolCharts({ conversations, pool }: Picture): JSX.Element {
  const of = (value: (of: Share) => number | null, absent: number | null = null): Line[] =>
    linesOf(conversations, value, absent);
  // The key changes with the conversations, so that charts with other lines are made anew.
  const key = conversations.map((each) => `${each.id}-${colourOf(each.id)}`).join(" ");
  return (
    <>
      <Chart
        key={`bytes ${pool.budget} ${key}`}
        title="Bytes of the pool"
        lines={of((each) => each.bytes, 0)}
        stacked
        unnamed
        limit={pool.budget}
      />
      <Chart
        key={`given ${key}`}
        title="Entries given up for others"
        lines={of((each) => each.givenUp)}
        unnamed
      />
      <Chart
        key={`written ${key}`}
        title="Tokens written per second"
        lines={of((each) => each.written)}
        unnamed
      />
    </>
  );
}

export function Charts({ model, now }: { model: About; now: Picture }): JSX.Element {
  const { freeze } = model;
  const several = hasSeveral(model, now);
  return (
    <div class={`charts ${several ? "of-pool" : ""}`}>
      {several ? (
        <PoolCharts {...now} />
      ) : (
        <Chart key={`held-${freeze}`} title="Entries" lines={ENTRIES.slice(0, freeze ? 2 : 1)} />
      )}
      <Chart key={`${freeze}`} title="Entries per second" lines={freeze ? MOVES : EVICTED} />
      {!several && <Chart title="Tokens per second" lines={SPEEDS} />}
    </div>
  );
}
