// Gives each conversation a colour while it is there, the same in every figure.
const COUNT = 8;
const slots = new Map<string, number>();

// Give a colour to every present conversation, and free the colours of those that are gone.
export function assignColours(ids: string[]): void {
  for (const id of slots.keys()) if (!ids.includes(id)) slots.delete(id);
  for (const id of ids) {
    if (slots.has(id)) continue;
    const uses = Array.from({ length: COUNT }, () => 0);
    for (const slot of slots.values()) ++uses[slot]!;
    slots.set(id, uses.indexOf(Math.min(...uses)));
  }
}

// Returns the name of a conversation's colour in the style sheet.
export const colourOf = (id: string): string => `holder-${slots.get(id) ?? 0}`;
