// Chooses the colours: light, dark, or those of the system.
import { Store } from "./store";

const PLACE = "entropykv.theme";
export const THEMES = ["system", "light", "dark"] as const;
export type Theme = (typeof THEMES)[number];

const dark = matchMedia("(prefers-color-scheme: dark)");
const saved = localStorage.getItem(PLACE) as Theme | null;

export const theme = new Store<Theme>(saved && THEMES.includes(saved) ? saved : "system");
// True if dark colours are in use; canvases are drawn again when it changes.
export const isDark = new Store<boolean>(false);

export function applyTheme(): void {
  const now = theme.value === "system" ? dark.matches : theme.value === "dark";
  document.documentElement.dataset.theme = now ? "dark" : "light";
  isDark.set(now);
}

export function nextTheme(): void {
  theme.set(THEMES[(THEMES.indexOf(theme.value) + 1) % THEMES.length]!);
  localStorage.setItem(PLACE, theme.value);
  applyTheme();
}

dark.addEventListener("change", applyTheme);

// Returns a colour of the style sheet.
export const colour = (name: string): string =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
