// One request, and what of it was true at a given moment: its state, its phases' seconds, its TTFT and TPOT.
// The server's own figures count once the request has ended; before that they are read off the steps.

import { interferenceAt } from "./interference.js";
import { seconds } from "./units.js";

function newRequest(number) {
  return {
    number,
    id: null,
    place: 0, // among the requests of the same call
    arrived_s: null,
    admitted_s: null,
    ended_s: null,
    promptTokens: null,
    maxTokens: null,
    level: null,
    sample: 0,
    cachedTokens: null,
    tiers: {},
    prefixBreak: null,
    chunks: [],
    tokenTimes: [],
    drafts: 0,
    held: 0,
    preemptedTimes: [],
    totalsAtFirst: null, // of all steps, when its first token came
    ended: null,
  };
}

function tokensUntil(request, at_s) {
  const times = request.tokenTimes;
  let low = 0;
  let high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= at_s) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** null: it had not arrived yet. */
function requestAt(request, at_s, history) {
  const arrived_s = request.arrived_s ?? request.chunks[0]?.began_s ?? request.tokenTimes[0] ?? null;
  if (arrived_s === null || arrived_s > at_s) return null;
  if (request.ended && request.ended_s <= at_s) return endedState(request);
  const tokens = tokensUntil(request, at_s);
  const admitted_s = request.admitted_s !== null && request.admitted_s <= at_s ? request.admitted_s : null;
  const first_s = tokens ? request.tokenTimes[0] : null;
  const last_s = tokens ? request.tokenTimes[tokens - 1] : null;
  const began_s = admitted_s ?? first_s;
  const taken = interferenceAt(request, history, at_s, { began_s, first_s, last_s });
  return {
    state: tokens ? "writing" : admitted_s === null ? "waiting" : "reading",
    tokens,
    queue_s: (began_s ?? at_s) - arrived_s,
    prefill_s: began_s === null ? 0 : (first_s ?? at_s) - began_s,
    interference_s: taken.prefill_s === null ? null : taken.prefill_s + taken.decode_s,
    prefillInterference_s: taken.prefill_s,
    decode_s: first_s === null ? 0 : last_s - first_s,
    ttft_s: first_s === null ? null : first_s - arrived_s,
    tpot_s: tokens > 1 ? (last_s - first_s) / (tokens - 1) : null,
    total_s: (last_s ?? at_s) - arrived_s,
    cachedTokens: request.cachedTokens,
    promises: [],
    verdict: null,
    arrived_s,
  };
}

function endedState(request) {
  const { ended } = request;
  return {
    state: "ended",
    reason: ended.reason,
    tokens: ended.output_tokens,
    queue_s: ended.queue_s,
    prefill_s: ended.prefill_s,
    interference_s: ended.interference_s,
    prefillInterference_s: ended.prefill_interference_s,
    decode_s: ended.decode_s,
    ttft_s: ended.ttft_s,
    tpot_s: ended.tpot_s,
    total_s: sum(ended.queue_s, ended.prefill_s, ended.decode_s),
    cachedTokens: ended.cached_tokens,
    promises: promisesOf(ended),
    verdict: ended.verdict,
    cause: ended.cause,
    arrived_s: request.arrived_s ?? ended.at_s,
  };
}

/** What was promised, and whether it was kept; nothing of what was not. */
function promisesOf(ended) {
  return [
    { name: "TTFT", limit_s: ended.promised_ttft_s, isKept: ended.kept_ttft },
    { name: "ITL", limit_s: ended.promised_itl_s, isKept: ended.kept_itl },
  ].filter(({ isKept }) => isKept !== null && isKept !== undefined);
}

function sum(...parts) {
  return parts.reduce((total, part) => total + (part || 0), 0);
}

const STATE_WORDS = { waiting: "waiting", reading: "reading (prefill)", writing: "writing (decode)", ended: "done" };

const keptWords = ({ name, isKept }) => `${name} ${isKept ? "✓ kept" : "✗ broken"}`;

const promiseWords = ({ name, limit_s }) => (limit_s ? `${name} up to ${seconds(limit_s)} was promised` : `${name} was promised`);

export { STATE_WORDS, keptWords, newRequest, promiseWords, requestAt, tokensUntil };
