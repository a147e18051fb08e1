// Shows how the budget is used: by one conversation, or by all that share a pool.
import type { JSX } from "preact";
import { useStore } from "../store";
import { colourOf } from "./colours";
import { about, hasSeveral, type Holder, picture } from "./stream";
import { bytes, count, share } from "./units";

// `shown` is the conversation whose heads are shown.
export function Budget({ shown }: { shown: Holder | undefined }): JSX.Element {
  const model = useStore(about)!;
  const now = useStore(picture)!;
  const { pool, conversations } = now;
  const several = hasSeveral(model, now);
  const bands = several
    ? conversations.map((each) => ({ name: colourOf(each.id), size: each.bytes }))
    : [{ name: "map-held", size: pool.used }];
  const swappedOut = conversations.filter((each) => each.swapped_out).length;
  return (
    <section class="budget" aria-label="Budget">
      <h2>
        {bytes(pool.used)} <span>of {bytes(pool.budget)} for the cache</span>
      </h2>
      <div class="pool" role="img" aria-label={`${share(pool.used, pool.budget)} of the budget`}>
        {bands
          .filter(({ size }) => size > 0)
          .map(({ name, size }) => (
            <i
              key={name}
              class={name}
              ref={(element) => {
                if (element) element.style.width = `${(100 * size) / Math.max(pool.budget, 1)}%`;
              }}
            />
          ))}
      </div>
      <dl>
        {several && (
          <Figure
            name="In the pool"
            value={count(conversations.length - swappedOut)}
            more={`of ${count(conversations.length)}`}
          />
        )}
        {shown && <OfOne map={shown} />}
      </dl>
      <p class="beside policy">
        Policy {model.policy.split(/(?<=[:+])/).map((part) => [part, <wbr />])}, {model.store}{" "}
        store, {model.kv_type}
      </p>
      <Outside />
    </section>
  );
}

function OfOne({ map }: { map: Holder }): JSX.Element {
  const model = useStore(about)!;
  return (
    <>
      <Figure name="Tokens" value={count(map.position)} />
      <Figure
        name="Entries held"
        value={share(map.entries, map.entries_full)}
        more={`${count(map.entries)} of ${count(map.entries_full)}`}
      />
      {model.freeze ? (
        <Figure name="Frozen" value={count(map.frozen_entries)} more={bytes(map.frozen_bytes)} />
      ) : (
        <Figure name="Evicted" value={count(map.evictions)} />
      )}
      <Figure name="Full f16 cache" value={bytes(map.bytes_full)} more="without a budget" />
      {map.drafted_tokens > 0 && (
        <Figure
          name="Drafts accepted"
          value={share(map.accepted_drafts, map.drafted_tokens)}
          more={`${(1 + map.accepted_drafts / Math.max(map.draft_steps, 1)).toFixed(2)} tokens a step`}
        />
      )}
    </>
  );
}

// Because the budget is hard, the page lists the memory outside of it, and why that is needed.
function Outside(): JSX.Element | null {
  const { pool, conversations } = useStore(picture)!;
  const frozen = conversations.reduce((sum, each) => sum + each.frozen_bytes, 0);
  if (frozen + pool.swapped_bytes === 0) return null;
  return (
    <p class="beside">
      {frozen > 0 &&
        `${bytes(frozen)} of frozen entries lie outside of the budget: nothing is computed with them until they come back. `}
      {pool.swapped_bytes > 0 &&
        `${bytes(pool.swapped_bytes)} of swapped out texts lie outside of the budget: they come back with their next turn.`}
    </p>
  );
}

interface FigureProps {
  name: string;
  value: string;
  more?: string;
}

function Figure({ name, value, more }: FigureProps): JSX.Element {
  return (
    <div>
      <dt>{name}</dt>
      <dd>
        {value}
        {more && <small>{more}</small>}
      </dd>
    </div>
  );
}
