// One chat: a conversation, what is typed next, and how tokens are drawn. Whatever the model writes is shown as text.

import { html, useEffect, useRef, useRevision, useState } from "./dom.js";
import { figuresOf } from "./run_figures.js";
import { sendChat } from "./sending.js";
import { seconds, tokens } from "./units.js";

const DEFAULTS = { maxTokens: 200, temperature: 0.7, topP: 1, seed: "", speculation: "auto" };
const TRY = { Left: "Why is the sky blue?", Right: "Tell me a story about a lighthouse." };
const MOST_SHOWN = 2000; // of a long prompt, letters

function ChatPane({ name, history, handle, onSend }) {
  const [turns, setTurns] = useState([]); // { prompt, run }
  const [typed, setTyped] = useState("");
  const [settings, setSettings] = useState(DEFAULTS);
  const stop = useRef(null);
  const end = useRef(null);
  const last = turns.at(-1)?.run;
  useRevision(() => `${turns.length} ${last?.revision}`, 20);
  const isBusy = Boolean(last && !last.done);
  const send = ({ text = typed, maxTokens = settings.maxTokens } = {}) => {
    const prompt = text.trim();
    if (!prompt || isBusy || !history.hello) return;
    const told = turns
      .filter(({ run }) => run.text)
      .flatMap(({ prompt: asked, run }) => [
        { role: "user", content: asked },
        { role: "assistant", content: run.text },
      ]);
    stop.current = new AbortController();
    const run = sendChat(history, {
      messages: [...told, { role: "user", content: prompt }],
      ...drawing(settings),
      maxTokens,
      signal: stop.current.signal,
    });
    setTurns([...turns, { prompt, run }]);
    setTyped("");
    onSend();
  };
  handle.current = { send };
  const onKeyDown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  };
  useEffect(() => {
    const log = end.current;
    if (log && log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
  });
  return html`<section class="pane" aria-label="${name} chat">
    <div class="log" ref=${end} tabindex="0" role="log" aria-label="${name} conversation" aria-live="off">
      ${!turns.length && html`<p class="note">Ask something. Try <em>${TRY[name]}</em></p>`}
      ${turns.map(({ prompt, run }, index) => html`<${Turn} key=${index} prompt=${prompt} run=${run} />`)}
    </div>
    <form class="ask" onSubmit=${(event) => {
      event.preventDefault();
      send();
    }}>
      <label><span class="unseen">${name} prompt</span>
        <textarea rows="3" value=${typed} placeholder="Your prompt. Enter sends it."
          onInput=${(event) => setTyped(event.target.value)} onKeyDown=${onKeyDown}></textarea></label>
      <div class="row">
        ${
          isBusy
            ? html`<button type="button" onClick=${() => stop.current.abort()}>Stop</button>`
            : html`<button type="submit" class="primary" disabled=${!typed.trim()}>Send</button>`
        }
        <button type="button" disabled=${isBusy || !turns.length} onClick=${() => setTurns([])}>Clear</button>
      </div>
      <${Settings} settings=${settings} change=${setSettings} methods=${history.hello?.draft_methods || []} />
    </form>
  </section>`;
}

function drawing(settings) {
  return {
    temperature: settings.temperature,
    topP: settings.topP,
    seed: settings.seed === "" ? null : Number(settings.seed),
    speculation: settings.speculation === "auto" ? null : settings.speculation,
  };
}

function Turn({ prompt, run }) {
  const figures = figuresOf(run);
  const asked = prompt.length > MOST_SHOWN ? `${prompt.slice(0, MOST_SHOWN)} …` : prompt;
  return html`
    <p class="asked"><span class="unseen">You: </span>${asked}</p>
    <p class="said"><span class="unseen">Model: </span>${run.text || (run.done ? "" : "…")}</p>
    ${run.trouble && html`<p class="trouble" role="alert">${run.trouble}</p>`}
    <p class="felt">
      <span class="of-prefill">TTFT <strong>${seconds(figures.ttft_s)}</strong></span>
      <span class="of-decode">TPOT <strong>${seconds(figures.tpot_s)}</strong></span>
      ${figures.promptTokens !== null && html`<span>${lengths(figures)}</span>`}
    </p>
    ${figures.verdict && html`<p class="note">${figures.verdict}</p>`}
  `;
}

function lengths({ promptTokens, cachedTokens, tokens: written }) {
  const cached = cachedTokens ? ` (${tokens(cachedTokens)} cached)` : "";
  return `${tokens(promptTokens)} in${cached}, ${tokens(written)} out`;
}

function Settings({ settings, change, methods }) {
  const set =
    (name, read = Number) =>
    (event) =>
      change({ ...settings, [name]: read(event.target.value) });
  return html`<details class="settings"><summary>How tokens are drawn</summary>
    <div class="fields">
      <label>Most tokens <input type="number" min="1" max="4096" value=${settings.maxTokens} onInput=${set("maxTokens")} /></label>
      <label>Temperature <input type="number" min="0" max="2" step="0.1" value=${settings.temperature}
        onInput=${set("temperature")} /></label>
      <label>Top p <input type="number" min="0.05" max="1" step="0.05" value=${settings.topP} onInput=${set("topP")} /></label>
      <label>Seed <input type="number" min="0" placeholder="any" value=${settings.seed} onInput=${set("seed", String)} /></label>
      ${
        methods.length > 0 &&
        html`<label>Speculation <select onChange=${set("speculation", String)}>
        ${["auto", "off", ...methods].map((method) => html`<option selected=${method === settings.speculation}>${method}</option>`)}
      </select></label>`
      }
    </div>
  </details>`;
}

export { ChatPane };
