// What one step did, below the timeline: its time against the prediction, and each chunk and slot of it.

import { requestClass } from "./colours.js";
import { html } from "./dom.js";
import { againstPrediction, chunkTokens, drafts, slotTokens, stepSeconds } from "./step_words.js";
import { count, plural, seconds, tokens } from "./units.js";

const MOST_ROWS = 20;

function StepDetails({ step, history }) {
  if (!step) {
    return html`<aside class="details hint" aria-label="Details of a step">
      <p>Point at a column, or focus the timeline and press ← or →, to see what that step did.</p>
    </aside>`;
  }
  const { offered, held } = drafts(step);
  const rows = [...step.chunks.map(chunkRow), ...step.slots.map(slotRow)];
  return html`<aside class="details" aria-label="Details of a step" tabindex="0">
    <h3>Step ${count(step.id)}</h3>
    <dl class="pairs">
      <div><dt>measured</dt><dd>${seconds(stepSeconds(step))}</dd></div>
      <div><dt>predicted</dt><dd>${seconds(step.predicted_s)}</dd></div>
      <div><dt>prefill</dt><dd>${tokens(chunkTokens(step))}</dd></div>
      <div><dt>decode</dt><dd>${tokens(slotTokens(step))}</dd></div>
      ${offered > 0 && html`<div><dt>drafts</dt><dd>${count(held)} of ${count(offered)} accepted</dd></div>`}
      <div><dt>waiting</dt><dd>${plural(step.waiting ?? 0, "request")}</dd></div>
    </dl>
    ${step.predicted_s && html`<p class="note">${againstPrediction(step)}${itlNote(step, history)}</p>`}
    <ul class="work">
      ${rows.slice(0, MOST_ROWS)}
      ${rows.length > MOST_ROWS && html`<li class="note">and ${count(rows.length - MOST_ROWS)} more</li>`}
    </ul>
    ${
      step.preempted?.length > 0 &&
      html`<p class="note">preempted: ${step.preempted.map((number) => `#${number}`).join(", ")}</p>`
    }
  </aside>`;
}

function itlNote(step, history) {
  const target_s = history.hello?.itl_target_s;
  if (!target_s) return "";
  return stepSeconds(step) > target_s ? "; above the ITL target" : "; within the ITL target";
}

function chunkRow([request, start, number, total]) {
  return html`<li>
    <span class="chip ${requestClass(request)}">#${request}</span>
    <span class="phase prefill">prefill</span>
    <span>tokens ${count(start + 1)}–${count(start + number)} of ${count(total)}</span>
  </li>`;
}

function slotRow([request, context, offered, held]) {
  return html`<li>
    <span class="chip ${requestClass(request)}">#${request}</span>
    <span class="phase decode">decode</span>
    <span>at ${tokens(context)}${slotNote(offered, held)}</span>
  </li>`;
}

function slotNote(offered, held) {
  if (held < 0) return ", nothing came of it: the request had ended";
  return offered > 0 ? `, ${held} of ${offered} drafts accepted` : "";
}

export { StepDetails };
