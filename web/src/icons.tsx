// Draws icons as lines, 16 x 16 units each, and makes buttons with an icon.
import type { ButtonHTMLAttributes, JSX } from "preact";

const PATHS = {
  plus: "M8 3v10M3 8h10",
  menu: "M2.5 4h11M2.5 8h11M2.5 12h11",
  send: "M8 13V3M3.5 7.5 8 3l4.5 4.5",
  stop: "M4.5 4.5h7v7h-7z",
  attach:
    "m13 7-5.3 5.3a3 3 0 0 1-4.3-4.3l5.6-5.6a2 2 0 0 1 2.9 2.9l-5.5 5.5a1 1 0 0 1-1.5-1.5l5-5",
  edit: "m3 13 .6-2.8 7.7-7.7a1.2 1.2 0 0 1 1.7 0l.5.5a1.2 1.2 0 0 1 0 1.7l-7.7 7.7zM9.8 4.2l2 2",
  again: "M13 8a5 5 0 1 1-1.6-3.7M13 2.5v3h-3",
  copy: "M5.5 5.5h7.5v7.5H5.5zM10.5 5.5V3H3v7.5h2.5",
  bin: "M3 4.5h10M6.5 4.5V3h3v1.5M4.5 4.5l.5 8.5h6l.5-8.5M6.7 7v3.5M9.3 7v3.5",
  sliders: "M2.5 5h6M12 5h1.5M2.5 11H4M7.5 11h6M10.2 3.3v3.4M5.8 9.3v3.4",
  close: "m4 4 8 8M12 4l-8 8",
  sun: "M8 5.2a2.8 2.8 0 1 0 0 5.6 2.8 2.8 0 0 0 0-5.6M8 1.5v1.4M8 13.1v1.4M1.5 8h1.4M13.1 8h1.4M3.4 3.4l1 1M11.6 11.6l1 1M12.6 3.4l-1 1M4.4 11.6l-1 1",
  moon: "M13 9.5A5.5 5.5 0 0 1 6.5 3a5.5 5.5 0 1 0 6.5 6.5z",
  half: "M8 2.5a5.5 5.5 0 1 0 0 11 5.5 5.5 0 0 0 0-11v11",
  cache: "M2.5 4h11M2.5 8h3M8 8h5.5M2.5 12h6M11 12h2.5",
  document: "M4 2.5h5l3 3v8H4zM9 2.5v3h3",
  chat: "M2.5 3.5h11v7.5H7.5L4.5 13.5V11h-2z",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name }: { name: IconName }): JSX.Element {
  return (
    <svg class="icon" viewBox="0 0 16 16" aria-hidden="true">
      <path d={PATHS[name]} />
    </svg>
  );
}

interface Props extends ButtonHTMLAttributes<HTMLButtonElement> {
  icon: IconName;
  label: string;
  // Show the label beside the icon.
  labelled?: boolean;
}

export function Button({ icon, label, labelled, class: name, ...rest }: Props): JSX.Element {
  return (
    <button
      type="button"
      class={`button ${labelled ? "" : "bare"} ${name ?? ""}`}
      aria-label={labelled ? undefined : label}
      title={labelled ? undefined : label}
      {...rest}
    >
      <Icon name={icon} />
      {labelled && <span>{label}</span>}
    </button>
  );
}
