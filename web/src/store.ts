// Holds a value that components follow.
import { useLayoutEffect, useState } from "preact/hooks";

export class Store<T> {
  private listeners = new Set<() => void>();

  constructor(private current: T) {}

  get value(): T {
    return this.current;
  }

  set(value: T): void {
    this.current = value;
    for (const listener of [...this.listeners]) listener();
  }

  update(change: Partial<T>): void {
    this.set({ ...this.current, ...change });
  }

  follow(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }
}

// Wait until a store has a value.
export function known<T>(store: Store<T | null>): Promise<T> {
  return new Promise((resolve) => {
    const look = (): void => {
      if (store.value === null) return;
      forget();
      resolve(store.value);
    };
    const forget = store.follow(look);
    look();
  });
}

export function useStore<T>(store: Store<T>): T {
  const [, redraw] = useState(0);
  // An ordinary effect runs only after the page is painted, and would miss changes before that.
  useLayoutEffect(() => store.follow(() => redraw((n) => n + 1)), [store]);
  return store.value;
}
