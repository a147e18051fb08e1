// Shows the conversations of a pool: how much each has of it, its costs, and which one's heads are
// shown.
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { state } from "../conversations";
import { useStore } from "../store";
import { colourOf } from "./colours";
import { type Holder, history, picture, type Share } from "./stream";
import { bytes, count, duration, share, short } from "./units";

// a UUID, which web pages use as the name of a conversation
const NUMBER = /^[0-9a-f]{8}-[0-9a-f-]{27}$/;

function titleOf({ id, name }: Holder): string {
  const own = state.value.list.find((each) => each.id === name);
  return own?.title ?? (name === null || NUMBER.test(name) ? `Conversation ${id}` : name);
}

// Returns the seconds since the last picture, and updates them every second: no picture comes while
// nobody reads or writes.
function useAge(received: number): number {
  const [now, set] = useState(performance.now());
  useEffect(() => {
    const timer = setInterval(() => set(performance.now()), 1000);
    return () => clearInterval(timer);
  }, []);
  return Math.max(0, now - received) / 1000;
}

function doing(holder: Holder, now: Share | undefined, age: number): string {
  if (holder.state === "swapped_out")
    return holder.bytes > 0
      ? "swapped out, in the pool"
      : `swapped out: ${bytes(holder.swapped_bytes)}`;
  if (holder.state === "waiting") return "waits for room";
  if (holder.state === "idle" && holder.document) return "document";
  if (holder.state === "idle") return `idle for ${duration(holder.idle_seconds + age)}`;
  const [read, written] = [now?.read ?? 0, now?.written ?? 0];
  if (read > written && read > 1) return `reads ${short(read)}/s`;
  if (written > 0) return `writes ${short(written)}/s`;
  return "reads";
}

interface Props {
  shown: string | null;
  onChoose: (id: string) => void;
}

export function Holders({ shown, onChoose }: Props): JSX.Element {
  const { conversations, received } = useStore(picture)!;
  const age = useAge(received);
  const points = useStore(history);
  useStore(state); // draws again when titles change
  const now = points.at(-1)?.of;
  return (
    <section class="holders" aria-label="Conversations in the pool">
      <table>
        <thead>
          <tr>
            <th scope="col">Conversation</th>
            <th scope="col" class="not-phone">
              Tokens
            </th>
            <th scope="col">Bytes</th>
            <th scope="col">Held</th>
            <th scope="col" title="Entries that left because others came">
              Given up
            </th>
          </tr>
        </thead>
        <tbody>
          {conversations.map((each) => (
            <tr
              key={each.id}
              class={`${each.state} ${each.id === shown ? "chosen" : ""}`}
              onClick={() => onChoose(each.id)}
            >
              <td>
                <button type="button" aria-pressed={each.id === shown} title="Show what it holds">
                  <i class={`key ${colourOf(each.id)}`} />
                  <span>{titleOf(each)}</span>
                </button>
                <small>{doing(each, now?.get(each.id), age)}</small>
              </td>
              <td class="not-phone">{count(each.position)}</td>
              <td>
                {each.bytes > 0 ? bytes(each.bytes) : "–"}
                {each.budget > 0 && <small>of {bytes(each.budget)}</small>}
              </td>
              <td>{share(Math.min(each.entries, each.entries_full), each.entries_full)}</td>
              <td>{each.given_up > 0 ? count(each.given_up) : "–"}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}
