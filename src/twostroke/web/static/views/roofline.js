// Roofline: what this machine can do at best, and where each phase's steps lie under it. Both axes are logarithmic.

import { Canvas } from "../canvas.js";
import { theme } from "../colours.js";
import { html, useRevision } from "../dom.js";
import { Empty } from "../empty.js";
import { Legend } from "../legend.js";
import { count, known, operations, bytes, percent } from "../units.js";

const RECENT = 160; // steps whose points are seen
const PLACE = { left: 78, right: 18, top: 18, bottom: 46 };
const LEGEND = [
  ["swatch-prefill-dot", "prefill: squares; many tokens share a reading of the weights"],
  ["swatch-decode-dot", "decode: circles; each token reads all weights"],
  ["swatch-roof", "what this machine can do at best"],
];

function RooflineView({ source, mayAct }) {
  const { history, player } = source;
  useRevision(() => `${history.firstStep} ${history.stepsUntil(player.cursor_s())} ${history.hello?.now_s}`, 4);
  const ceilings = history.hello?.ceilings;
  const points = pointsOf(history, player.cursor_s());
  const paint = (context, width, tall) =>
    paintRoof(context, width, tall, ceilings, pointsOf(history, player.cursor_s()));
  if (!ceilings?.flops_per_s) {
    return html`<div class="card"><h2>Roofline</h2><p>This machine's ceilings are not known yet.</p></div>`;
  }
  return html`<div class="card">
    <h2>Roofline</h2>
    <p class="lead">The roof is this machine, measured: ${operations(ceilings.flops_per_s)} of arithmetic and
      ${" "}${bytes(ceilings.read_bytes_per_s)}/s of memory. Left of the ridge at ${ridge(ceilings)} memory limits; right
      of it arithmetic does.</p>
    ${
      points.prefill.length + points.decode.length === 0 &&
      html`<${Empty} title="No point yet" mayAct=${mayAct}>Each step puts a point here: prefill to the right, decode to the left.<//>`
    }
    <div class="plot roofline" role="img" aria-label=${spoken(points, ceilings)}>
      <${Canvas} height=${400} paint=${paint}
        revision=${() => `${history.firstStep} ${history.stepsUntil(player.cursor_s())}`} />
    </div>
    <${Legend} rows=${LEGEND} />
    <div class="pair">
      <${PhaseFigures} name="prefill" point=${points.prefill.at(-1)} ceilings=${ceilings} />
      <${PhaseFigures} name="decode" point=${points.decode.at(-1)} ceilings=${ceilings} />
    </div>
    ${ceilings.source && html`<p class="note">Ceilings: ${ceilings.source}</p>`}
  </div>`;
}

function pointsOf(history, cursor_s) {
  const end = history.stepsUntil(cursor_s);
  const points = { prefill: [], decode: [] };
  for (const step of history.steps.slice(Math.max(0, end - RECENT), end)) {
    for (const phase of ["prefill", "decode"]) {
      const point = step.intensity?.[phase];
      if (point && point[0] > 0 && point[1] > 0) points[phase].push(point);
    }
  }
  return points;
}

const ridgeOf = (ceilings) => ceilings.ridge_flops_per_byte || ceilings.flops_per_s / ceilings.read_bytes_per_s;
const ridge = (ceilings) => `${count(ridgeOf(ceilings))} FLOP/byte`;

/** The best this machine could do at this intensity. */
const roofAt = (intensity, ceilings) => Math.min(ceilings.flops_per_s, intensity * ceilings.read_bytes_per_s);

function spoken(points, ceilings) {
  const parts = ["prefill", "decode"].map((phase) => {
    const point = points[phase].at(-1);
    if (!point) return `${phase}: no step yet`;
    const share = percent(point[1] / roofAt(point[0], ceilings));
    return `${phase}: ${point[0].toFixed(1)} FLOP/byte, ${operations(point[1])}, ${share} of the roof`;
  });
  return `Roofline. ${parts.join(". ")}.`;
}

function PhaseFigures({ name, point, ceilings }) {
  const bound = point && (point[0] < ridgeOf(ceilings) ? "memory" : "arithmetic");
  return html`<dl class="figures boxed of-${name}">
    <div><dt><span class="phase ${name}">${name}</span></dt><dd>${point ? `bound by ${bound}` : "no step yet"}</dd></div>
    <div><dt>intensity</dt><dd>${point ? `${point[0].toFixed(1)} FLOP/byte` : "–"}</dd></div>
    <div><dt>reached</dt><dd>${operations(point?.[1])}</dd></div>
    <div><dt>of the roof</dt><dd>${point ? percent(point[1] / roofAt(point[0], ceilings)) : "–"}</dd></div>
  </dl>`;
}

function bounds(ceilings, points) {
  const all = [...points.prefill, ...points.decode];
  const xs = [ridgeOf(ceilings), ...all.map((point) => point[0])];
  const ys = [ceilings.flops_per_s, roofAt(0.5, ceilings), ...all.map((point) => point[1])];
  const floorOf = (values) => Math.floor(Math.log10(Math.min(...values)) - 0.15);
  const ceilOf = (values) => Math.ceil(Math.log10(Math.max(...values)) + 0.15);
  return { x: [Math.min(floorOf(xs), 0), Math.max(ceilOf(xs), 3)], y: [floorOf(ys), ceilOf(ys)] };
}

function paintRoof(context, width, tall, ceilings, points) {
  const colours = theme();
  const range = bounds(ceilings, points);
  const right = width - PLACE.right;
  const floor = tall - PLACE.bottom;
  const { left } = PLACE;
  const xOf = (value) => left + ((Math.log10(value) - range.x[0]) / (range.x[1] - range.x[0])) * (right - left);
  const yOf = (value) => floor - ((Math.log10(value) - range.y[0]) / (range.y[1] - range.y[0])) * (floor - PLACE.top);
  paintGrid(context, range, xOf, yOf, { left, right, floor }, colours, width);
  const corner = ridgeOf(ceilings);
  const lowest = 10 ** range.x[0];
  context.save();
  context.beginPath();
  context.rect(left, PLACE.top, right - left, floor - PLACE.top);
  context.clip();
  context.strokeStyle = colours.ink;
  context.lineWidth = 2.5;
  context.beginPath();
  context.moveTo(xOf(lowest), yOf(lowest * ceilings.read_bytes_per_s));
  context.lineTo(xOf(corner), yOf(ceilings.flops_per_s));
  context.lineTo(right, yOf(ceilings.flops_per_s));
  context.stroke();
  context.setLineDash([3, 4]);
  context.lineWidth = 1;
  context.strokeStyle = colours.soft;
  context.beginPath();
  context.moveTo(xOf(corner), yOf(ceilings.flops_per_s));
  context.lineTo(xOf(corner), floor);
  context.stroke();
  context.setLineDash([]);
  paintPoints(context, points.decode, "decode", xOf, yOf, colours);
  paintPoints(context, points.prefill, "prefill", xOf, yOf, colours);
  context.restore();
  context.fillStyle = colours.soft;
  context.font = colours.smallFont;
  context.textAlign = "center";
  context.textBaseline = "bottom";
  if (!known(corner)) return;
  const words = `ridge ${ridge(ceilings)}`;
  const half = context.measureText(words).width / 2 + 4;
  const middle = Math.min(xOf(corner), right - half);
  context.fillStyle = colours.surface;
  context.fillRect(middle - half, floor - 22, 2 * half, 16);
  context.fillStyle = colours.soft;
  context.fillText(words, middle, floor - 7);
}

function paintGrid(context, range, xOf, yOf, place, colours, width) {
  context.font = colours.smallFont;
  context.lineWidth = 1;
  context.strokeStyle = colours.faint;
  context.fillStyle = colours.soft;
  context.textAlign = "center";
  context.textBaseline = "top";
  for (let power = range.x[0]; power <= range.x[1]; power += 1) {
    line(context, xOf(10 ** power), PLACE.top, xOf(10 ** power), place.floor);
    const words = power < 0 ? String(10 ** power) : count(10 ** power);
    context.fillText(words, Math.min(Math.max(xOf(10 ** power), place.left + 4), place.right - 12), place.floor + 6);
  }
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (let power = range.y[0]; power <= range.y[1]; power += 1) {
    line(context, place.left, yOf(10 ** power), place.right, yOf(10 ** power));
    context.fillText(operations(10 ** power), place.left - 6, yOf(10 ** power));
  }
  context.textAlign = "center";
  context.fillText(
    "arithmetic for each byte read (FLOP/byte)",
    (place.left + Math.min(place.right, width)) / 2,
    place.floor + 32,
  );
}

function line(context, x1, y1, x2, y2) {
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x2, y2);
  context.stroke();
}

/** Older points fade; the latest one is large and has its name. */
function paintPoints(context, points, phase, xOf, yOf, colours) {
  context.fillStyle = colours[phase];
  points.forEach(([intensity, reached], index) => {
    const isLast = index === points.length - 1;
    context.globalAlpha = isLast ? 1 : 0.12 + 0.5 * (index / points.length);
    mark(context, phase, xOf(intensity), yOf(reached), isLast ? 7 : 3.5);
  });
  context.globalAlpha = 1;
  const last = points.at(-1);
  if (!last) return;
  context.font = colours.font;
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.fillStyle = colours.ink;
  context.fillText(phase, xOf(last[0]) + 13, yOf(last[1]) + 1);
}

function mark(context, phase, x, y, radius) {
  if (phase === "prefill") {
    context.fillRect(x - radius, y - radius, 2 * radius, 2 * radius);
    return;
  }
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
}

export { RooflineView };
