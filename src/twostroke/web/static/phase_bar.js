// A request's time as a bar: queue, prefill, interference, decode. Each part has its word in the title and in the text
// for those who hear it.

import { html } from "./dom.js";
import { seconds } from "./units.js";

const PARTS = [
  ["queue_s", "queue"],
  ["prefill_s", "prefill"],
  ["interference_s", "interference"],
  ["decode_s", "decode"],
];

/** A phase's seconds hold what others' prompts took of it: here that is a part of its own, and the parts add up. */
function partsOf(state) {
  const interference_s = state.interference_s || 0;
  const inPrefill_s = state.prefillInterference_s || 0;
  return {
    queue_s: state.queue_s || 0,
    prefill_s: Math.max((state.prefill_s || 0) - inPrefill_s, 0),
    interference_s,
    decode_s: Math.max((state.decode_s || 0) - (interference_s - inPrefill_s), 0),
  };
}

function PhaseBar({ state, longest_s }) {
  const parts = partsOf(state);
  const total_s = PARTS.reduce((total, [field]) => total + (parts[field] || 0), 0);
  const scale = longest_s ? Math.max(total_s / longest_s, 0.02) : 1;
  const words = PARTS.filter(([field]) => parts[field]).map(([field, name]) => `${name} ${seconds(parts[field])}`);
  return html`<span class="phase-bar" role="img" aria-label=${words.join(", ") || "nothing yet"} title=${words.join(" · ")}>
    <span class="phase-bar-fill" style=${{ width: `${Math.min(scale, 1) * 100}%` }}>
      ${PARTS.map(([field, name]) => {
        const share = total_s ? (parts[field] || 0) / total_s : 0;
        return share > 0 ? html`<span class="part ${name}" style=${{ flexGrow: share }}></span>` : null;
      })}
    </span>
  </span>`;
}

export { PhaseBar, partsOf };
