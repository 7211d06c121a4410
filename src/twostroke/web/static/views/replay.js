// Replay: opens a recorded run and plays it in every view, without any server.

import { html, useRef, useState } from "../dom.js";
import { linesOf, replayed } from "../recording.js";
import { Timeline } from "../timeline.js";
import { count, plural, seconds } from "../units.js";

function ReplayView({ source, open }) {
  const field = useRef(null);
  const [trouble, setTrouble] = useState("");
  const take = async (event) => {
    const [file] = event.target.files;
    if (!file) return;
    setTrouble("");
    try {
      const next = replayed(linesOf(await file.text()));
      next.player.play(1);
      open(next);
    } catch (error) {
      setTrouble(error.message);
    }
  };
  const { history } = source;
  return html`
    <div class="card">
      <h2>Replay</h2>
      <p class="lead">A recorded run plays here as it happened: pause it, scrub through it, slow it down. Every view shows it.</p>
      ${source.kind === "replay" && html`<${Facts} history=${history} />`}
      ${source.runs > 1 && html`<${WhichRun} source=${source} open=${open} />`}
      ${source.kind === "replay" && html`<${Timeline} history=${history} player=${source.player} height=${240} />`}
      <p><label class="button primary file">Open a recorded run
        <input ref=${field} type="file" accept=".jsonl,.json,.ndjson,.txt" onChange=${take} /></label></p>
      ${trouble && html`<p class="trouble" role="alert">${trouble}</p>`}
      <h3>How to record one</h3>
      <pre tabindex="0">twostroke serve smollm2 --record run.jsonl
twostroke replay run.jsonl --html run.html</pre>
      <p class="note">The file holds ids, lengths and times, and no text of any request. The second command makes one HTML
        file that plays anywhere, without a server: for a bug report, or a lesson.</p>
    </div>`;
}

/** A record in which the engine was started again holds several runs, each with a clock of its own. */
function WhichRun({ source, open }) {
  const choose = (event) => {
    const next = source.choose(Number(event.target.value));
    next.player.play(1);
    open(next);
  };
  return html`<p><label>The engine was started again while this was recorded. Shown is
    ${" "}<select onChange=${choose}>
      ${Array.from(
        { length: source.runs },
        (_, index) => html`<option value=${index} selected=${index === source.which}>
          run ${index + 1} of ${source.runs}
        </option>`,
      )}
    </select></label></p>`;
}

function Facts({ history }) {
  const span_s = history.latest_s - history.oldest_s;
  return html`<p class="lead">${history.hello.model}: ${plural(history.steps.length, "step")},
    ${" "}${plural(history.requests.size, "request")}, ${seconds(span_s)},
    version ${history.hello.version}${history.hello.recorded?.machine ? `, on ${history.hello.recorded.machine}` : ""};
    ${" "}${count(history.maps.length)} block maps.</p>`;
}

export { ReplayView };
