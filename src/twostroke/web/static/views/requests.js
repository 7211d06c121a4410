// Requests: each with its phases, its TTFT and TPOT, what came from the cache, and whether its promise was kept. Ids,
// lengths and times; a text only of what was sent from this page.

import { requestClass } from "../colours.js";
import { html, useEffect, useRef, useRevision, useState } from "../dom.js";
import { Empty } from "../empty.js";
import { Legend } from "../legend.js";
import { textOf } from "../own_texts.js";
import { PhaseBar } from "../phase_bar.js";
import { RequestDetails } from "../request_details.js";
import { STATE_WORDS, keptWords, promiseWords, requestAt } from "../request_state.js";
import { count, seconds, tokens } from "../units.js";

const MOST_ROWS = 40;
const LEGEND = [
  ["swatch-queue", "queue"],
  ["swatch-prefill-solid", "prefill: its prompt is read"],
  ["swatch-interference", "interference: others' prompts in between"],
  ["swatch-decode-solid", "decode: its answer is written"],
];

function RequestsView({ source, part, mayAct }) {
  const { history, player } = source;
  useRevision(() => `${history.revision} ${player.mode === "live" && !isBusy(history) ? "" : player.cursor_s()}`, 3);
  const [onlyMine, setOnlyMine] = useState(false);
  const opened = useRef("");
  useEffect(() => {
    if (!part && opened.current) document.querySelector(`table.requests a[href="#requests/${opened.current}"]`)?.focus();
    opened.current = part;
  }, [part]);
  const cursor_s = player.cursor_s();
  const chosen = part === "" ? null : history.requests.get(Number(part)) || null;
  const rows = [];
  for (const request of history.requests.values()) {
    const state = requestAt(request, cursor_s, history);
    if (state && (!onlyMine || textOf(request))) rows.push({ request, state });
  }
  const shown = rows.slice(-MOST_ROWS).reverse();
  const longest_s = roundedUp(Math.max(...shown.map((row) => row.state.total_s || 0), 1e-3));
  if (history.requests.size === 0) {
    return html`<div class="card"><h2>Requests</h2><${Empty} title="No request yet" mayAct=${mayAct}>
      Each request gets a row: how long it waited, how long its prompt was read, how long its answer was written, and
      one sentence on what held it up.
    <//></div>`;
  }
  return html`
    ${chosen && html`<${RequestDetails} request=${chosen} history=${history} cursor_s=${cursor_s} />`}
    <div class="card">
      <div class="card-head">
        <div>
          <h2>Requests</h2>
          <p class="lead">The latest first. Texts of other users are not in this page: it knows ids, lengths and times.</p>
        </div>
        ${
          source.kind === "live" &&
          mayAct &&
          html`<label class="check"><input type="checkbox" checked=${onlyMine}
          onChange=${(event) => setOnlyMine(event.target.checked)} /> only those sent from here</label>`
        }
      </div>
      <${Promises} levels=${history.hello?.levels || []} />
      <${Legend} rows=${LEGEND} />
      <table class="requests">
        <thead><tr>
          <th scope="col">Request</th><th scope="col">Tokens</th><th scope="col">Where its time went</th>
          <th scope="col">TTFT</th><th scope="col">TPOT</th><th scope="col">Cached</th><th scope="col">Promise</th>
        </tr></thead>
        <tbody>${shown.map((row) => keptRow(row, longest_s, row.request === chosen))}</tbody>
      </table>
      ${rows.length > MOST_ROWS && html`<p class="note">and ${count(rows.length - MOST_ROWS)} earlier ones</p>`}
    </div>
  `;
}

/** Someone waits or is served: bars grow with the clock. */
function isBusy(history) {
  for (const request of history.requests.values()) if (!request.ended) return true;
  return false;
}

/** Bars grow in a scale that changes seldom. */
function roundedUp(value_s) {
  const power = 10 ** Math.floor(Math.log10(value_s));
  return [1, 1.5, 2, 3, 5, 7, 10].map((factor) => factor * power).find((limit) => limit >= value_s) ?? value_s;
}

const rowsKept = new WeakMap();

/** A request that has ended looks as it did: its row is drawn again only where the scale of the bars has changed. */
function keptRow({ request, state }, longest_s, isChosen) {
  const kept = rowsKept.get(request);
  const looks = `${longest_s} ${isChosen}`;
  if (kept && state.state === "ended" && kept.looks === looks) return kept.row;
  const row = html`<${Row} key=${request.number} request=${request} state=${state} longest_s=${longest_s} isChosen=${isChosen} />`;
  if (state.state === "ended") rowsKept.set(request, { looks, row });
  return row;
}

function Row({ request, state, longest_s, isChosen }) {
  const answer = request.maxTokens && state.state !== "ended" ? ` of ${count(request.maxTokens)}` : "";
  return html`<tr class=${isChosen ? "chosen" : ""}>
    <th scope="row">
      <a class="chip ${requestClass(request.number)}" href="#requests/${request.number}">#${request.number}</a>
      <span class="note">${state.state === "ended" ? state.reason || "done" : STATE_WORDS[state.state]}</span>
    </th>
    <td data-label="Tokens">${count(request.promptTokens)} in, ${count(state.tokens)}${answer} out</td>
    <td data-label="Where its time went" class="wide">
      <${PhaseBar} state=${state} longest_s=${longest_s} />
      ${state.verdict && html`<span class="verdict" title=${state.verdict}>${state.verdict}</span>`}
    </td>
    <td data-label="TTFT">${seconds(state.ttft_s)}</td>
    <td data-label="TPOT">${seconds(state.tpot_s)}</td>
    <td data-label="Cached">${tokens(state.cachedTokens)}</td>
    <td data-label="Promise"><${Promised} request=${request} state=${state} /></td>
  </tr>`;
}

/** What each class of requests is promised, where there are such classes. */
function Promises({ levels }) {
  const promised = levels.filter((level) => level.ttft_s || level.itl_s || level.is_derived);
  if (!promised.length) return null;
  return html`<p class="note">Promised: ${promised.map(levelWords).join("; ")}.</p>`;
}

function levelWords({ name, ttft_s, itl_s, is_derived: isDerived }) {
  if (isDerived) return `${name}: what this machine can do, worked out for each request`;
  const parts = [];
  if (ttft_s) parts.push(`TTFT up to ${seconds(ttft_s)}`);
  if (itl_s) parts.push(`ITL up to ${seconds(itl_s)}`);
  return `${name}: ${parts.join(", ")}`;
}

function Promised({ request, state }) {
  if (!state.promises.length) return html`<span class="note">${request.level || "none"}</span>`;
  return html`<span class="promise">${request.level && html`<span class="note">${request.level}</span>`}
    ${state.promises.map((one) => html`<span class=${one.isKept ? "kept" : "broken"} title=${promiseWords(one)}>${keptWords(one)}</span>`)}
  </span>`;
}

export { RequestsView };
