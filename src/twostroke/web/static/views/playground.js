// Playground: two chats side by side, and buttons that cause the classic situations.

import { html, useRef, useRevision, useState } from "../dom.js";
import { ChatPane } from "../chat_pane.js";
import { figuresOf } from "../run_figures.js";
import { longPrompt } from "../sample_texts.js";
import { SITUATIONS, cause } from "../situations.js";
import { Timeline } from "../timeline.js";
import { seconds, tokens } from "../units.js";

const PRESETS = [
  { text: longPrompt(7, 1100), maxTokens: 8 },
  { text: "Tell me a story about a lighthouse.", maxTokens: 200 },
];

const MOST_SHOWN = 80; // of an answer, letters
const COLUMNS = ["Request", "TTFT", "TPOT", "Prompt", "From the cache", "Answer"];

function PlaygroundView({ source }) {
  const { history, player } = source;
  const panes = [useRef(null), useRef(null)];
  const onSend = () => player.goLive();
  const feel = () => panes.forEach((pane, index) => pane.current.send(PRESETS[index]));
  const both = () => panes.forEach((pane) => pane.current.send());
  return html`
    <${Situations} source=${source} />
    <div class="card">
      <h2>The engine meanwhile</h2>
      <p class="lead">Each column is a step. Hatched: prefill. Plain: decode. <a href="#steps">Steps</a> has the details.</p>
      <${Timeline} history=${history} player=${player} height=${200} columnWidth=${8} details=${false} />
    </div>
    <div class="card">
      <div class="card-head">
        <div>
          <h2>Two chats side by side</h2>
          <p class="lead">TTFT is the wait before the first word. TPOT is the pace after it. <em>Feel TTFT against TPOT</em>
            ${" "}lets the left read a long prompt and write little, and the right read little and write long.</p>
        </div>
        <div class="controls">
          <button type="button" onClick=${feel}>Feel TTFT against TPOT</button>
          <button type="button" onClick=${both}>Send both</button>
        </div>
      </div>
      <div class="panes">
        <${ChatPane} name="Left" onSend=${onSend} history=${history} handle=${panes[0]} />
        <${ChatPane} name="Right" onSend=${onSend} history=${history} handle=${panes[1]} />
      </div>
    </div>
  `;
}

function Situations({ source }) {
  const { history } = source;
  const [chosen, setChosen] = useState(null);
  const [rows, setRows] = useState([]);
  const stop = useRef(null);
  useRevision(() => rows.map(({ run }) => run.revision).join(" ") + history.hello?.draft_methods, 8);
  const start = (situation) => {
    stop.current?.abort();
    stop.current = new AbortController();
    source.player.goLive();
    setChosen(situation);
    setRows([]);
    const { signal } = stop.current;
    const onRun = (name, run) => {
      if (!signal.aborted) setRows((known) => [...known, { name, run }]);
    };
    cause(situation, history, signal, onRun);
  };
  const canDraft = (history.hello?.draft_methods || []).length > 0;
  return html`<div class="card">
    <h2>Situations</h2>
    <p class="lead">Each button sends real requests to this server.</p>
    <div class="situations">
      ${SITUATIONS.map(
        (situation) => html`<button type="button" data-situation=${situation.name}
        disabled=${!history.hello || (situation.needsDrafts && !canDraft)} aria-pressed=${situation === chosen}
        onClick=${() => start(situation)}>${situation.title}</button>`,
      )}
    </div>
    ${
      !canDraft &&
      history.hello &&
      html`<p class="note">Speculation is off here: start the server with <code>--speculate</code> to try it.</p>`
    }
    ${
      chosen &&
      html`<div class="situation">
      <p class="look"><strong>What to look at.</strong> ${chosen.look}</p>
      <${Runs} rows=${rows} />
      ${
        rows.some(({ run }) => !run.done) &&
        html`<p class="stop"><button type="button" onClick=${() => stop.current.abort()}>Stop these requests</button></p>`
      }
    </div>`
    }
  </div>`;
}

function Runs({ rows }) {
  return html`<table class="runs">
    <thead><tr>${COLUMNS.map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
    <tbody>${rows.map(({ name, run }) => {
      const figures = figuresOf(run);
      return html`<tr data-run=${name} data-done=${run.done}>
        <th scope="row">${name}</th>
        <td data-label="TTFT" data-value=${figures.ttft_s}>${seconds(figures.ttft_s)}</td>
        <td data-label="TPOT" data-value=${figures.tpot_s}>${seconds(figures.tpot_s)}</td>
        <td data-label="Prompt">${tokens(figures.promptTokens)}</td>
        <td data-label="Cached" data-value=${figures.cachedTokens}>${tokens(figures.cachedTokens)}</td>
        <td data-label="Answer" class="answer">${run.trouble || beginning(run.text)}</td>
      </tr>`;
    })}</tbody>
  </table>`;
}

function beginning(text) {
  return text.length > MOST_SHOWN ? `${text.slice(0, MOST_SHOWN)}…` : text;
}

export { PlaygroundView };
