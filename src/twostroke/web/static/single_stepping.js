// The lesson of the two phases by hand: hold the engine, send a prompt, and let it step. The prompt's tokens are read in
// one shot; then every step writes one token.

import { EngineControl } from "./engine_control.js";
import { html, useRef, useRevision, useState } from "./dom.js";
import { sendChat } from "./sending.js";
import { requestAt } from "./request_state.js";
import { count, tokens } from "./units.js";

const PROMPT = "Explain in two sentences why the sky is blue.";
const ANSWER_TOKENS = 24;

function SingleStepping({ source }) {
  const { history } = source;
  const [run, setRun] = useState(null);
  const [prompt, setPrompt] = useState(PROMPT);
  const stop = useRef(null);
  const request = run && [...history.requests.values()].findLast((one) => one.id === run.id);
  useRevision(() => `${history.revision} ${run?.revision}`, 15);
  const send = () => {
    stop.current = new AbortController();
    // Without drafts: a step that accepts some writes several tokens, which is another lesson.
    const drawing = { maxTokens: ANSWER_TOKENS, temperature: 0, speculation: "off" };
    const next = sendChat(history, { prompt, ...drawing, signal: stop.current.signal });
    setRun(next);
  };
  const state = request && requestAt(request, history.latest_s, history);
  const isOver = !run || run.done;
  return html`<div class="card stepping">
    <h2>Step by step</h2>
    <p class="lead">Hold the engine, send a prompt, and press <em>One step</em>. The first step reads the whole prompt.
      Every step after it writes one token.</p>
    <${EngineControl} source=${source} />
    <div class="row">
      <label class="grow">Prompt <input type="text" value=${prompt} onInput=${(event) => setPrompt(event.target.value)} /></label>
      ${
        isOver
          ? html`<button type="button" onClick=${send}>Send it</button>`
          : html`<button type="button" onClick=${() => stop.current.abort()}>Stop it</button>`
      }
    </div>
    ${
      run &&
      html`<div class="lesson">
      <p class="tally" data-tokens=${state ? state.tokens : 0}>
        <span class="phase prefill">prefill</span> ${readSoFar(request)}
        <span class="phase decode">decode</span> ${state ? `${tokens(state.tokens)} written` : "nothing written"}
      </p>
      <p class="said" aria-label="Answer">${run.text || "…"}</p>
      ${run.trouble && html`<p class="trouble" role="alert">${run.trouble}</p>`}
    </div>`
    }
  </div>`;
}

function readSoFar(request) {
  if (!request) return "not arrived yet";
  const last = request.chunks.at(-1);
  if (!last) return `0 of ${tokens(request.promptTokens)} read`;
  return `${count(last.start + last.count)} of ${tokens(last.total)} read`;
}

export { SingleStepping };
