// What others' work has taken of a request that still runs, as the server defines it at the end (`_interference` in
// server/watch_wording.py): so what is shown while it runs meets what is told then. Pure functions over steps.

import { chunkTokens, prefillShare, stepSeconds } from "./step_words.js";

const NO_STEPS = { plainSteps: 0, plain_s: 0, mixedSteps: 0, mixed_s: 0, chunks_s: 0 };

/** Sums over all steps, this one included: what lay between two steps is the difference of theirs. */
function totalsAfter(before, step) {
  const step_s = stepSeconds(step);
  if (!step.chunks.length) return { ...before, plainSteps: before.plainSteps + 1, plain_s: before.plain_s + step_s };
  return {
    ...before,
    mixedSteps: before.mixedSteps + 1,
    mixed_s: before.mixed_s + step_s,
    chunks_s: before.chunks_s + step_s * prefillShare(step),
  };
}

/** Of a step's time, what one of its chunks took; by its tokens where a record does not say it. */
function chunkShare(step, place) {
  const [, , numTokens] = step.chunks[place];
  return step.chunk_shares?.[place] ?? (prefillShare(step) * numTokens) / chunkTokens(step);
}

/** Of the time from `began_s` to `until_s`: steps that held none of its chunks, and what shared a step with one. */
function inPrefill(request, began_s, until_s) {
  const prefill_s = Math.max(until_s - began_s, 0);
  let held_s = 0;
  let beside_s = 0;
  for (const chunk of request.chunks) {
    if (chunk.done_s > until_s) break;
    const step_s = chunk.done_s - chunk.began_s;
    held_s += step_s;
    beside_s += step_s * (1 - chunk.share);
  }
  return Math.min(prefill_s, Math.max(prefill_s - held_s, 0) + beside_s);
}

/** Between two of its tokens: what steps with chunks took longer than those without. Where there was none without, what
 * the cost model says of the chunks. `from` and `until` are sums at those tokens. */
function inDecode(request, from, until, first_s, last_s) {
  const between = (field) => until[field] - from[field];
  const whole_s = last_s - first_s;
  if (whole_s <= 0) return 0;
  const away_s = Math.min(awaySeconds(request, first_s, last_s), whole_s);
  const present = 1 - away_s / whole_s; // steps while it was away are not its own
  const plainSteps = between("plainSteps");
  const longer_s = plainSteps
    ? Math.max(between("mixed_s") - (between("mixedSteps") * between("plain_s")) / plainSteps, 0)
    : between("chunks_s");
  const compute_s = Math.min(whole_s - away_s, (between("plain_s") + between("mixed_s")) * present);
  return Math.min(compute_s, longer_s * present);
}

/** From each preemption to its next token. */
function awaySeconds(request, first_s, last_s) {
  let away_s = 0;
  let back_s = first_s;
  for (const lost_s of request.preemptedTimes) {
    if (lost_s < back_s) continue; // before the first token, or it was not back yet
    const next_s = request.tokenTimes.find((time_s) => time_s > lost_s);
    if (next_s === undefined || next_s > last_s) break;
    away_s += next_s - lost_s;
    back_s = next_s;
  }
  return away_s;
}

/** Seconds of both phases up to a moment: `first_s` and `last_s` are its tokens by then, null where there is none.
 * Both are null where its beginning was not seen. */
function interferenceAt(request, history, at_s, { began_s, first_s, last_s }) {
  const latest = history.stepBefore(last_s ?? at_s);
  if (began_s === null || !latest) return { prefill_s: null, decode_s: null };
  if (first_s === null) return { prefill_s: inPrefill(request, began_s, latest.done_s), decode_s: 0 };
  if (request.totalsAtFirst === null) return { prefill_s: null, decode_s: null };
  return {
    prefill_s: inPrefill(request, began_s, first_s),
    decode_s: inDecode(request, request.totalsAtFirst, latest.totals, first_s, last_s),
  };
}

export { NO_STEPS, chunkShare, interferenceAt, totalsAfter };
