// Draws a map: one row per KV head, or one for all heads, and one column per range of positions.
import { colour } from "../theme";
import type { HeldMap } from "./stream";

export const LEFT = 44; // width of the layers' labels in pixels
export const STRIP = 40; // height in pixels of the strip that shows how many heads hold a column
const GAP = 8;
const AXIS = 20;
const LEVELS = 32;

export interface Layout {
  width: number;
  height: number; // without the strip
}

export const layoutOf = (width: number, height: number): Layout => ({
  width: Math.max(1, width - LEFT),
  height: Math.max(1, height - STRIP - GAP - AXIS),
});

type Rgb = [number, number, number];

function rgbOf(text: string): Rgb {
  const value = Number.parseInt(text.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

const mix = (from: Rgb, to: Rgb, share: number): Rgb =>
  from.map((each, i) => each + (to[i]! - each) * share) as Rgb;

const packed = ([r, g, b]: Rgb): number =>
  (255 << 24) | (Math.round(b) << 16) | (Math.round(g) << 8) | Math.round(r);

// Holds the colours for all mixtures of held and frozen shares, and for restored entries.
export class Palette {
  readonly mixtures = new Uint32Array(LEVELS * LEVELS);
  readonly restored = new Uint32Array(LEVELS);

  constructor() {
    const none = rgbOf(colour("map-none"));
    const held = rgbOf(colour("map-held"));
    const frozen = rgbOf(colour("map-frozen"));
    const restored = rgbOf(colour("map-restored"));
    const shown = (level: number): number =>
      level === 0 ? 0 : 0.12 + (0.88 * level) / (LEVELS - 1);
    for (let h = 0; h < LEVELS; ++h) {
      this.restored[h] = packed(mix(none, restored, 0.8 + 0.2 * shown(h)));
      for (let f = 0; f < LEVELS; ++f)
        this.mixtures[h * LEVELS + f] = packed(mix(mix(none, frozen, shown(f)), held, shown(h)));
    }
  }
}

// Draws the map as an image with one pixel for each row and column.
export function imageOf(map: HeldMap, palette: Palette): ImageData {
  const image = new ImageData(map.columns, map.rows);
  const pixels = new Uint32Array(image.data.buffer);
  const { held, frozen, restored } = map;
  const { mixtures, restored: back } = palette;
  for (let i = 0; i < pixels.length; ++i) {
    const came = restored[i]!;
    pixels[i] = came ? back[came >> 3]! : mixtures[((held[i]! >> 3) << 5) | (frozen[i]! >> 3)]!;
  }
  return image;
}

export class Heatmap {
  private palette = new Palette();
  private readonly cells = document.createElement("canvas");
  private map: HeldMap | null = null;
  private layers: number[] = [];

  constructor(private readonly canvas: HTMLCanvasElement) {}

  // Must be called when the colours of the page have changed.
  recolour(): void {
    this.palette = new Palette();
    if (this.map) this.show(this.map, this.layers);
  }

  show(map: HeldMap, layers: number[]): void {
    this.map = map;
    this.layers = map.rows === 1 ? [1] : layers;
    this.cells.width = map.columns;
    this.cells.height = map.rows;
    this.cells.getContext("2d")!.putImageData(imageOf(map, this.palette), 0, 0);
    this.draw();
  }

  draw(): void {
    const { canvas, map } = this;
    const ratio = devicePixelRatio;
    const { clientWidth, clientHeight } = canvas;
    const width = Math.round(clientWidth * ratio);
    const height = Math.round(clientHeight * ratio);
    if (canvas.width !== width || canvas.height !== height) {
      canvas.width = width;
      canvas.height = height;
    }
    const context = canvas.getContext("2d")!;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, clientWidth, clientHeight);
    if (!map) return;
    const layout = layoutOf(clientWidth, clientHeight);
    // Rows that are smaller than a pixel are averaged, larger ones keep their edges.
    context.imageSmoothingEnabled = layout.height * ratio < map.rows;
    context.drawImage(this.cells, LEFT, 0, layout.width, layout.height);
    this.drawLayers(context, layout);
    this.drawStrip(context, layout);
    this.drawAxis(context, layout);
  }

  private drawLayers(context: CanvasRenderingContext2D, layout: Layout): void {
    const rows = this.layers.reduce((sum, heads) => sum + heads, 0);
    const rowHeight = layout.height / rows;
    context.fillStyle = colour("quiet");
    context.font = `11px ${colour("font")}`;
    context.textAlign = "right";
    context.textBaseline = "middle";
    const mean = layout.height / this.layers.length;
    const stride = [1, 2, 4, 5, 8, 10, 16, 32, 64].find((each) => each * mean >= 14) ?? 128;
    let top = 0;
    this.layers.forEach((heads, layer) => {
      const height = heads * rowHeight;
      const text = this.map!.rows === 1 ? "all" : `L${layer}`;
      const middle = Math.min(Math.max(top + height / 2, 6), layout.height - 6);
      if (layer % stride === 0) context.fillText(text, LEFT - 8, middle);
      if (layer > 0 && height >= 6) {
        context.fillStyle = colour("panel");
        context.fillRect(LEFT, top - 0.5, layout.width, height >= 14 ? 1.5 : 1);
        context.fillStyle = colour("quiet");
      }
      top += height;
    });
  }

  // Draws the strip: for every column, which share of all heads holds it, and which has frozen it.
  private drawStrip(context: CanvasRenderingContext2D, layout: Layout): void {
    const map = this.map!;
    const top = layout.height + GAP;
    context.fillStyle = colour("map-none");
    context.fillRect(LEFT, top, layout.width, STRIP);
    const means = (plane: Uint8Array): Float64Array => {
      const sums = new Uint32Array(map.columns);
      for (let row = 0; row < map.rows; ++row) {
        const start = row * map.columns;
        for (let column = 0; column < map.columns; ++column)
          sums[column]! += plane[start + column]!;
      }
      return Float64Array.from(sums, (sum) => sum / (255 * map.rows));
    };
    const held = means(map.held);
    const area = (shares: Float64Array, fill: string): void => {
      context.fillStyle = fill;
      context.beginPath();
      context.moveTo(LEFT, top + STRIP);
      for (let column = 0; column < map.columns; ++column) {
        const y = top + STRIP * (1 - Math.min(1, shares[column]!));
        context.lineTo(LEFT + (layout.width * column) / map.columns, y);
        context.lineTo(LEFT + (layout.width * (column + 1)) / map.columns, y);
      }
      context.lineTo(LEFT + layout.width, top + STRIP);
      context.fill();
    };
    area(
      means(map.frozen).map((share, i) => share + held[i]!),
      colour("map-frozen"),
    );
    area(held, colour("map-held"));
    context.fillStyle = colour("quiet");
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillText("heads", LEFT - 8, top + STRIP / 2);
  }

  private drawAxis(context: CanvasRenderingContext2D, layout: Layout): void {
    const map = this.map!;
    const span = map.columns * map.per_column;
    const top = layout.height + GAP + STRIP + 5;
    context.fillStyle = colour("quiet");
    context.textBaseline = "top";
    for (const tick of ticks(map.first, map.first + span, layout.width / 90)) {
      const x = LEFT + (layout.width * (tick - map.first)) / span;
      context.fillRect(x, top - 4, 1, 3);
      context.textAlign =
        x > LEFT + layout.width - 30 ? "right" : x < LEFT + 20 ? "left" : "center";
      context.fillText(tick.toLocaleString("en"), x, top);
    }
  }
}

// Return about `wanted` round numbers between two positions.
function ticks(first: number, last: number, wanted: number): number[] {
  const rough = (last - first) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1)));
  const step = Math.max(
    1,
    [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough)!,
  );
  const found = [];
  for (let tick = Math.ceil(first / step) * step; tick <= last; tick += step) found.push(tick);
  return found;
}
