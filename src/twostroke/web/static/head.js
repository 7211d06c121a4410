// The head of the page: what is watched, whether it is live, and how the page looks.

import { html, useRevision, useState } from "./dom.js";
import { askForKey } from "./key.js";
import { CHOICES, chooseTheme, saved } from "./theme_switch.js";
import { plural } from "./units.js";

const WORDS = { connecting: "connecting", live: "live", waiting: "no connection", refused: "key wanted" };

const ENGINE_WORDS = {
  starting: "the engine is starting",
  restarting: "the engine died and is being started again",
  stopped: "the engine has stopped",
};

function Head({ source, first, back }) {
  useRevision(() => `${source.history.hello?.model} ${source.feed?.revision} ${source.history.skipped} ${source.history.engineState}`, 4);
  const { hello, skipped } = source.history;
  return html`<header class="head">
    <div class="brand">
      <svg class="mark" viewBox="0 0 28 28" aria-hidden="true">
        <rect class="mark-prefill" x="3" y="3" width="9" height="22" rx="2" />
        <rect class="mark-decode" x="14" y="17" width="3" height="8" rx="1" />
        <rect class="mark-decode" x="18.5" y="17" width="3" height="8" rx="1" />
        <rect class="mark-decode" x="23" y="17" width="3" height="8" rx="1" />
      </svg>
      <h1>Twostroke</h1>
      ${hello && html`<p class="model">${hello.model}<span> on ${hello.backend}</span></p>`}
    </div>
    <div class="state">
      ${
        source.kind === "live"
          ? html`<${Connection} feed=${source.feed} engine=${source.history.engineState} />`
          : html`<${Recorded} hello=${hello} />`
      }
      ${source !== first && first.kind === "live" && html`<button type="button" onClick=${back}>Back to live</button>`}
      ${skipped > 0 && html`<span class="note">${plural(skipped, "event")} missed: this browser read too slowly</span>`}
      <${ThemeChoice} />
    </div>
  </header>`;
}

/** What the engine is matters only where the server says so now. */
function Connection({ feed, engine }) {
  if (feed.state === "live" && Object.hasOwn(ENGINE_WORDS, engine)) {
    return html`<span class="status waiting" role="status">
      <span class="words"><span class="dot" aria-hidden="true"></span>${engine}</span>
      <span class="note">${ENGINE_WORDS[engine]}</span>
    </span>`;
  }
  return html`<span class="status ${feed.state}" role="status">
    <span class="words"><span class="dot" aria-hidden="true"></span>${WORDS[feed.state]}</span>
    ${feed.state !== "live" && feed.detail && html`<span class="note">${feed.detail}</span>`}
    ${feed.state === "refused" && html`<button type="button" onClick=${askForKey}>Give a key</button>`}
  </span>`;
}

function Recorded({ hello }) {
  const { date, machine } = hello?.recorded || {};
  return html`<span class="status replay">
    <span class="words"><span class="dot" aria-hidden="true"></span>recorded run</span>
    ${(date || machine) && html`<span class="note">${[date && dateWords(date), machine].filter(Boolean).join(", ")}</span>`}
  </span>`;
}

/** As the record has it, in UTC: to the minute. */
function dateWords(date) {
  const found = /^(\d{4}-\d\d-\d\d)T(\d\d:\d\d).*(?:Z|[+]00:00)$/.exec(date);
  return found ? `${found[1]} ${found[2]} UTC` : date;
}

function ThemeChoice() {
  const [choice, setChoice] = useState(saved);
  const onChange = (event) => {
    chooseTheme(event.target.value);
    setChoice(event.target.value);
  };
  return html`<label class="theme"><span>Colours</span>
    <select value=${choice} onChange=${onChange}>
      ${CHOICES.map((name) => html`<option value=${name} selected=${name === choice}>${name}</option>`)}
    </select>
  </label>`;
}

export { Head };
