// Writes numbers as people read them.
export const count = (value: number): string => value.toLocaleString("en");

export const share = (part: number, whole: number): string =>
  whole ? `${((100 * part) / whole).toFixed(1)} %` : "–";

export const bytes = (size: number): string => {
  for (const [least, unit] of [
    [2 ** 30, "GiB"],
    [2 ** 20, "MiB"],
    [2 ** 10, "KiB"],
  ] as const)
    if (size >= least) return `${(size / least).toFixed(size < 100 * least ? 1 : 0)} ${unit}`;
  return `${Math.round(size)} B`;
};

export const short = (value: number): string => {
  for (const [least, unit] of [
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ] as const)
    if (value >= least) return `${(value / least).toFixed(value < 10 * least ? 1 : 0)}${unit}`;
  return value < 10 && value % 1 ? value.toFixed(1) : `${Math.round(value)}`;
};

export const duration = (seconds: number): string =>
  seconds < 120 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`;
