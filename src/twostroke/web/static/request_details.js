// One request from its arrival to its last token: a strip of its chunks and tokens in time, the parts of its time, and
// the text if it was sent from this page, with gaps as its tokens arrived.

import { Canvas, hatch, ticks } from "./canvas.js";
import { requestClass, requestColour, theme } from "./colours.js";
import { html, useEffect, useRef } from "./dom.js";
import { textOf } from "./own_texts.js";
import { PhaseBar } from "./phase_bar.js";
import { STATE_WORDS, keptWords, promiseWords, requestAt } from "./request_state.js";
import { count, percent, plural, seconds, tokens } from "./units.js";

const STRIP = 108;
const MOST_SPACED = 400;
const PIXELS_A_SECOND = 130;
const WIDEST_GAP = 90;

function RequestDetails({ request, history, cursor_s }) {
  const place = useRef(null);
  // Where it was chosen may be far below: on a phone nothing would seem to happen.
  useEffect(() => {
    if (!place.current) return;
    place.current.focus({ preventScroll: true });
    const { top } = place.current.getBoundingClientRect();
    if (top < 0 || top > innerHeight / 2) place.current.scrollIntoView();
  }, [request]);
  const state = requestAt(request, cursor_s, history);
  if (!state) return html`<div class="card"><p>This request had not arrived at the moment that is looked at.</p></div>`;
  const own = textOf(request);
  return html`<article ref=${place} tabindex="-1" class="card request-details" aria-label="Request ${request.number}">
    <div class="card-head">
      <h2><span class="chip ${requestClass(request.number)}">#${request.number}</span> <code>${request.id}</code></h2>
      <a class="button" href="#requests">Close</a>
    </div>
    ${state.verdict && html`<p class="lead verdict-lead">${state.verdict}</p>`}
    <dl class="figures">
      <div><dt>state</dt><dd>${state.state === "ended" ? state.reason || "done" : STATE_WORDS[state.state]}</dd></div>
      <div><dt>queue</dt><dd>${seconds(state.queue_s)}</dd></div>
      <div><dt>prefill</dt><dd>${seconds(state.prefill_s)}<span class="note"> ${readWords(request)}</span></dd></div>
      <div><dt>decode</dt><dd>${seconds(state.decode_s)}<span class="note"> ${tokens(state.tokens)} out</span></dd></div>
      <div><dt>interference</dt><dd>${interferenceWords(state)}</dd></div>
      <div><dt>TTFT</dt><dd>${seconds(state.ttft_s)}</dd></div>
      <div><dt>TPOT</dt><dd>${seconds(state.tpot_s)}</dd></div>
      <div><dt>from the cache</dt><dd>${tokens(state.cachedTokens)}</dd></div>
      ${
        request.drafts > 0 &&
        html`<div><dt>drafts</dt><dd>${count(request.held)} of ${count(request.drafts)}
        <span class="note"> accepted, ${percent(request.held / request.drafts)}</span></dd></div>`
      }
      ${state.promises.map(
        (one) => html`<div><dt>${promiseWords(one)}</dt><dd class=${one.isKept ? "kept" : "broken"}>${keptWords(one)}</dd></div>`,
      )}
      ${request.preemptedTimes.length > 0 && html`<div><dt>preempted</dt><dd>${plural(request.preemptedTimes.length, "time")}</dd></div>`}
    </dl>
    <${PhaseBar} state=${state} />
    <h3>In time</h3>
    <p class="note">${stripWords(request, state, cursor_s)}</p>
    <div class="plot"><${Canvas} height=${STRIP}
      paint=${(context, width, tall) => paintStrip(context, width, tall, request, state, cursor_s)}
      revision=${() => `${request.number} ${cursor_s} ${history.revision}`} /></div>
    ${request.ended?.spans?.length > 0 && html`<${Spans} spans=${request.ended.spans} />`}
    ${
      own
        ? html`<${OwnText} own=${own} request=${request} cursor_s=${cursor_s} />`
        : html`<p class="note">Its text is not shown: it was not sent from this page.</p>`
    }
  </article>`;
}

/** The server tells it with the end; before, it is read off the steps that were seen. */
function interferenceWords(state) {
  if (state.state === "ended") return seconds(state.interference_s);
  if (state.interference_s === null) return "known at its end";
  return html`${seconds(state.interference_s)}<span class="note"> so far</span>`;
}

function readWords(request) {
  const chunks = request.chunks.length > 1 ? `, ${count(request.chunks.length)} chunks` : "";
  return `${tokens(request.promptTokens)} in${chunks}`;
}

function stripWords(request, state, cursor_s) {
  const times = request.tokenTimes.filter((time_s) => time_s <= cursor_s);
  if (times.length < 2) return "Hatched: chunks of its prompt. Bars: its tokens as they came.";
  let longest_s = 0;
  for (let index = 1; index < times.length; index += 1)
    longest_s = Math.max(longest_s, times[index] - times[index - 1]);
  return `Hatched: chunks of its prompt. Bars: its tokens as they came, the longest gap ${seconds(longest_s)}.`;
}

function paintStrip(context, width, tall, request, state, cursor_s) {
  const colours = theme();
  const from_s = state.arrived_s;
  const until_s = Math.min(
    Math.max(request.ended_s ?? cursor_s, request.tokenTimes.at(-1) ?? 0),
    Math.max(cursor_s, from_s),
  );
  const span_s = Math.max(until_s - from_s, 1e-3);
  const left = 8;
  const wide = width - 16;
  const xOf = (time_s) => left + ((time_s - from_s) / span_s) * wide;
  const floor = tall - 24;
  context.fillStyle = colours.queue;
  const begun_s = Math.min(request.admitted_s ?? until_s, until_s);
  context.fillRect(left, floor - 18, Math.max(xOf(begun_s) - left, 1), 18);
  for (const chunk of request.chunks) {
    if (chunk.began_s > cursor_s) break;
    const x = xOf(chunk.began_s);
    const size = Math.max(xOf(Math.min(chunk.done_s, until_s)) - x, 2);
    context.fillStyle = colours.prefill;
    context.fillRect(x, floor - 58, size, 58);
    context.fillStyle = hatch(context, colours.surface);
    context.fillRect(x, floor - 58, size, 58);
  }
  context.fillStyle = requestColour(request.number);
  for (const time_s of request.tokenTimes) {
    if (time_s > cursor_s) break;
    context.fillRect(Math.min(xOf(time_s), left + wide - 1.5) - 0.75, floor - 38, 1.5, 38);
  }
  paintTimes(context, span_s, xOf, from_s, floor, width, colours);
}

function paintTimes(context, span_s, xOf, from_s, floor, width, colours) {
  context.fillStyle = colours.line;
  context.fillRect(8, floor, width - 16, 1);
  context.fillStyle = colours.soft;
  context.font = colours.smallFont;
  context.textBaseline = "top";
  for (const tick_s of ticks(span_s, width > 600 ? 8 : 4)) {
    const x = xOf(from_s + tick_s);
    context.textAlign = x > width - 40 ? "right" : tick_s ? "center" : "left";
    context.fillText(seconds(tick_s), x, floor + 6);
  }
}

function Spans({ spans }) {
  return html`<table class="spans"><caption>Where its time went</caption><tbody>
    ${spans.map(
      ([kind, start_s, length_s, note]) => html`<tr>
      <th scope="row">${kind}</th><td>at ${seconds(start_s)}</td><td>${seconds(length_s)}</td><td>${note}</td>
    </tr>`,
    )}
  </tbody></table>`;
}

/** Pieces with the gap before each as wide as it was long, as they came here: a piece may be several tokens. The pieces
 * are text nodes, whatever they hold. */
function OwnText({ own, request, cursor_s }) {
  const pieces = own.pieces.slice(0, MOST_SPACED);
  const first_s = request.tokenTimes[0]; // the engine's clock; the pieces have this browser's
  return html`
    <h3>Sent from this page</h3>
    <p class="prompt-text" tabindex="0">${own.prompt}</p>
    <h3>The answer, spaced as it arrived</h3>
    <p class="spaced" tabindex="0">
      ${pieces.map((piece, index) => {
        if (first_s + (piece.at_ms - pieces[0].at_ms) / 1000 > cursor_s) return null;
        const gap_s = index ? (piece.at_ms - pieces[index - 1].at_ms) / 1000 : 0;
        const marginLeft = `${Math.min(gap_s * PIXELS_A_SECOND, WIDEST_GAP)}px`;
        return html`<span style=${{ marginLeft }}>${piece.text}</span>`;
      })}
    </p>`;
}

export { RequestDetails };
