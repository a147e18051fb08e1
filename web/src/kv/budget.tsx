// What the budget holds: of one conversation, or of all that share a pool.
import type { JSX } from "preact";
import { useStore } from "../store";
import { colourOf } from "./colours";
import { about, type Holder, picture } from "./stream";
import { bytes, count, share } from "./units";

export function Budget(): JSX.Element {
  const model = useStore(about)!;
  const { pool, conversations } = useStore(picture)!;
  return (
    <section class="budget" aria-label="Budget">
      <h2>
        {bytes(pool.used)} <span>of {bytes(pool.budget)} for the cache</span>
      </h2>
      <div class="pool" role="img" aria-label={`${share(pool.used, pool.budget)} of the budget`}>
        {conversations
          .filter((each) => each.bytes > 0)
          .map((each) => (
            <i
              key={each.id}
              class={model.shared ? colourOf(each.id) : "map-held"}
              ref={(element) => {
                if (element)
                  element.style.width = `${(100 * each.bytes) / Math.max(pool.budget, 1)}%`;
              }}
            />
          ))}
      </div>
      <dl>
        {model.shared ? <OfAll /> : conversations[0] && <OfOne map={conversations[0]} />}
        <Figure name="Policy" value={model.policy} more={`${model.store}, ${model.kv_type}`} />
      </dl>
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

function OfAll(): JSX.Element {
  const { pool, conversations } = useStore(picture)!;
  const total = (of: (each: Holder) => number): number =>
    conversations.reduce((sum, each) => sum + of(each), 0);
  const swappedOut = conversations.filter((each) => each.swapped_out).length;
  return (
    <>
      <Figure
        name="With a share"
        value={count(conversations.length - swappedOut)}
        more={`of ${pool.sequences} at a time`}
      />
      <Figure
        name="Swapped out"
        value={count(swappedOut)}
        more={`${bytes(pool.swapped_bytes)} outside`}
      />
      <Figure name="Tokens" value={count(total((each) => each.position))} more="of all texts" />
      <Figure
        name="Full f16 caches"
        value={bytes(total((each) => each.bytes_full))}
        more="without a budget"
      />
    </>
  );
}

function Figure(props: { name: string; value: string; more?: string }): JSX.Element {
  return (
    <div>
      <dt>{props.name}</dt>
      <dd>
        {props.value}
        {props.more && <small>{props.more}</small>}
      </dd>
    </div>
  );
}
