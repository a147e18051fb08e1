// A value that components follow.
import { useEffect, useState } from "preact/hooks";

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

export function useStore<T>(store: Store<T>): T {
  const [, redraw] = useState(0);
  useEffect(() => store.follow(() => redraw((n) => n + 1)), [store]);
  return store.value;
}
