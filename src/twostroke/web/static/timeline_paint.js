// Draws steps as columns: height is time, the lower part decode slots, the upper, hatched part prefill chunks, each in
// its request's colour. Below them a rail tells the phases, and a strip the drafts that were accepted and rejected.

import { hatch, ticks } from "./canvas.js";
import { requestColour, theme } from "./colours.js";
import { drafts, prefillShare, stepSeconds } from "./step_words.js";
import { seconds } from "./units.js";

const LEFT = 58;
const RIGHT = 10;
const TOP = 26;
const RAIL = 7;
const DRAFTS = 34;
const LEAST_PART = 2; // pixels: what took part is seen

/** Where things lie, for drawing and for finding what lies under a pointer. */
function layout(width, height, { hasDrafts, columnWidth }) {
  const strip = hasDrafts ? DRAFTS : 0;
  const floor = height - 8 - RAIL - strip;
  const columns = Math.max(1, Math.floor((width - LEFT - RIGHT) / columnWidth));
  return { left: LEFT, right: width - RIGHT, top: TOP, floor, rail: floor + 3, strip: floor + RAIL + 6, columns };
}

/** The steps that are seen: from `first` on, below `end`. */
function visible(history, cursor_s, columns) {
  const end = history.stepsUntil(cursor_s);
  return { first: Math.max(0, end - columns), end };
}

function paintTimeline(context, width, height, scene) {
  const place = layout(width, height, scene);
  const { first, end } = visible(scene.history, scene.cursor_s, place.columns);
  const { steps } = scene.history;
  const top_s = scene.scale.towards(highest(steps, first, end, scene.target_s));
  const span = place.floor - place.top;
  const heightOf = scene.isRoot
    ? (value_s) => Math.sqrt(Math.min(value_s / top_s, 1)) * span
    : (value_s) => Math.min(value_s / top_s, 1) * span;
  paintAxis(context, place, top_s, heightOf);
  for (let index = first; index < end; index += 1) {
    const x = place.right - (end - index) * scene.columnWidth;
    paintColumn(context, steps[index], x, place, scene, heightOf);
  }
  if (scene.target_s) paintTarget(context, place, scene.target_s, heightOf);
  if (scene.hasDrafts) paintDrafts(context, steps, first, end, place, scene.columnWidth);
  paintSelection(context, scene, first, end, place);
}

function highest(steps, first, end, target_s) {
  let most_s = (target_s || 0) * 1.15;
  for (let index = first; index < end; index += 1) {
    const step = steps[index];
    most_s = Math.max(most_s, stepSeconds(step), Math.min(step.predicted_s || 0, 2 * stepSeconds(step)));
  }
  return most_s * 1.06 || 0.01;
}

function paintAxis(context, place, top_s, heightOf) {
  const colours = theme();
  context.font = colours.smallFont;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const tick_s of ticks(top_s, 4)) {
    const y = Math.round(place.floor - heightOf(tick_s)) + 0.5;
    if (y < place.top - 2) continue;
    context.strokeStyle = tick_s ? colours.faint : colours.line;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(place.left, y);
    context.lineTo(place.right, y);
    context.stroke();
    context.fillStyle = colours.soft;
    context.fillText(seconds(tick_s), place.left - 8, y);
  }
}

function paintColumn(context, step, x, place, scene, heightOf) {
  const colours = theme();
  const gap = scene.columnWidth > 4 ? 1 : 0;
  const wide = scene.columnWidth - gap;
  const tall = Math.max(heightOf(stepSeconds(step)), LEAST_PART);
  let upper = tall * prefillShare(step);
  if (step.chunks.length && step.slots.length) {
    upper = Math.min(Math.max(upper, LEAST_PART), Math.max(tall - LEAST_PART, 0));
  }
  paintSlots(context, step, x, wide, place.floor, tall - upper, scene);
  paintChunks(context, step, x, wide, place.floor - (tall - upper), upper, scene);
  if (step.chunks.length) {
    context.fillStyle = colours.prefill;
    context.fillRect(x, place.rail, wide, step.slots.length ? RAIL / 2 : RAIL);
  }
  if (step.slots.length) {
    context.fillStyle = colours.decode;
    context.fillRect(x, place.rail + (step.chunks.length ? RAIL / 2 : 0), wide, step.chunks.length ? RAIL / 2 : RAIL);
  }
  if (step.predicted_s && scene.columnWidth > 3) {
    context.fillStyle = colours.ink;
    context.fillRect(x, Math.round(place.floor - heightOf(step.predicted_s)), wide, 1);
  }
  if (step.preempted && step.preempted.length) {
    context.fillStyle = colours.alarm;
    context.fillRect(x, place.top - 4, wide, 4);
  }
}

/** Of a slot with drafts the filled share is what came of it; the pale rest was computed and rejected. */
function paintSlots(context, step, x, wide, floor, tall, scene) {
  const colours = theme();
  const all = step.slots.reduce((total, slot) => total + 1 + slot[2], 0);
  let y = floor;
  for (const [request, , offered, held] of step.slots) {
    const part = (tall * (1 + offered)) / all;
    context.fillStyle = scene.byPhase ? colours.decode : requestColour(request);
    const filled = wide * Math.min((1 + held) / (1 + offered), 1);
    context.fillRect(x, y - part, filled, part);
    if (filled < wide) {
      context.globalAlpha = 0.28;
      context.fillRect(x + filled, y - part, wide - filled, part);
      context.globalAlpha = 1;
    }
    y -= part;
  }
}

function paintChunks(context, step, x, wide, floor, tall, scene) {
  if (!step.chunks.length) return;
  const colours = theme();
  const all = step.chunks.reduce((total, chunk) => total + chunk[2], 0) || 1;
  let y = floor;
  for (const [request, , count] of step.chunks) {
    const part = (tall * count) / all;
    context.fillStyle = scene.byPhase ? colours.prefill : requestColour(request);
    context.fillRect(x, y - part, wide, part);
    y -= part;
  }
  context.fillStyle = hatch(context, colours.surface);
  context.fillRect(x, floor - tall, wide, tall);
}

function paintTarget(context, place, target_s, heightOf) {
  const colours = theme();
  const y = Math.round(place.floor - heightOf(target_s)) + 0.5;
  context.strokeStyle = colours.alarm;
  context.lineWidth = 1.5;
  context.setLineDash([6, 4]);
  context.beginPath();
  context.moveTo(place.left, y);
  context.lineTo(place.right, y);
  context.stroke();
  context.setLineDash([]);
  const words = `ITL target ${seconds(target_s)}`;
  context.font = colours.smallFont;
  context.textAlign = "left";
  context.fillStyle = colours.alarm;
  context.textBaseline = "alphabetic";
  context.fillText(words, place.left, place.top - 9); // above the plot: no column is hidden
}

/** Accepted drafts go up, filled; rejected ones go down, hollow. */
function paintDrafts(context, steps, first, end, place, columnWidth) {
  const colours = theme();
  const middle = place.strip + DRAFTS / 2;
  let most = 1;
  for (let index = first; index < end; index += 1) most = Math.max(most, drafts(steps[index]).offered);
  const unit = (DRAFTS / 2 - 3) / most;
  for (let index = first; index < end; index += 1) {
    const { offered, held } = drafts(steps[index]);
    if (!offered) continue;
    const x = place.right - (end - index) * columnWidth;
    const wide = Math.max(columnWidth - 1, 1);
    context.fillStyle = colours.decode;
    context.fillRect(x, middle - held * unit, wide, held * unit);
    if (offered > held) {
      context.strokeStyle = colours.soft;
      context.lineWidth = 1;
      context.strokeRect(x + 0.5, middle + 0.5, Math.max(wide - 1, 0.5), (offered - held) * unit);
    }
  }
  context.fillStyle = colours.soft;
  context.font = colours.smallFont;
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.fillText("accepted", place.left - 6, middle - 8);
  context.fillText("rejected", place.left - 6, middle + 8);
  context.fillStyle = colours.line;
  context.fillRect(place.left, middle, place.right - place.left, 1);
}

function paintSelection(context, scene, first, end, place) {
  const index = scene.selected === null ? -1 : scene.selected - scene.history.firstStep;
  if (index < first || index >= end) return;
  const x = place.right - (end - index) * scene.columnWidth;
  context.strokeStyle = theme().focus;
  context.lineWidth = 2;
  context.strokeRect(x - 1.5, place.top - 4, scene.columnWidth + 2, place.rail + RAIL - place.top + 6);
}

/** The scale of the height, which follows the highest column without jumping. */
function makeScale() {
  let top_s = null;
  return {
    isMoving: false,
    towards(wanted_s) {
      if (top_s === null || wanted_s > top_s) top_s = wanted_s;
      this.isMoving = wanted_s < top_s * 0.75;
      if (this.isMoving) top_s += (wanted_s - top_s) * 0.08;
      return top_s;
    },
  };
}

export { layout, makeScale, paintTimeline, visible };
