// A step in words and numbers: what the details beside the timeline say, and what a screen reader hears.

import { count, percent, plural, seconds, tokens } from "./units.js";

function stepSeconds(step) {
  return step.compute_s ?? step.done_s - step.began_s;
}

function chunkTokens(step) {
  return step.chunks.reduce((total, chunk) => total + chunk[2], 0);
}

function slotTokens(step) {
  return step.slots.reduce((total, slot) => total + 1 + slot[3], 0);
}

function drafts(step) {
  let offered = 0;
  let held = 0;
  for (const slot of step.slots) {
    offered += slot[2];
    held += Math.max(slot[3], 0);
  }
  return { offered, held };
}

/** The part of a step's time that goes to its chunks, and how it is known. */
function prefillShare(step) {
  if (!step.chunks.length) return 0;
  if (!step.slots.length) return 1;
  const [prefill_s, decode_s] = step.split || [0, 0];
  if (prefill_s + decode_s > 0) return prefill_s / (prefill_s + decode_s);
  const read = chunkTokens(step);
  const written = step.slots.reduce((total, slot) => total + 1 + slot[2], 0);
  return read / (read + written);
}

function againstPrediction(step) {
  if (!step.predicted_s) return null;
  const off = stepSeconds(step) / step.predicted_s - 1;
  if (Math.abs(off) < 0.005) return "as predicted";
  return `${percent(Math.abs(off))} ${off > 0 ? "longer" : "shorter"} than predicted`;
}

function stepSentence(step) {
  const parts = [`Step ${count(step.id)}: ${seconds(stepSeconds(step))} measured`];
  if (step.predicted_s) parts.push(`${seconds(step.predicted_s)} predicted`);
  if (step.chunks.length) {
    parts.push(`prefill of ${tokens(chunkTokens(step))} in ${plural(step.chunks.length, "chunk")}`);
  }
  if (step.slots.length) parts.push(`decode of ${plural(step.slots.length, "stream")}, ${tokens(slotTokens(step))}`);
  const { offered, held } = drafts(step);
  if (offered) parts.push(`${count(held)} of ${count(offered)} drafts accepted`);
  return parts.join(", ");
}

export { againstPrediction, chunkTokens, drafts, prefillShare, slotTokens, stepSeconds, stepSentence };
