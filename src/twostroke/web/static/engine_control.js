// Holding the engine itself, and letting it take one step at a time. Only where the server allows it, and only while
// nobody else's requests run; the server decides both, and its sentence is shown.

import { control } from "./api.js";
import { html, useRevision, useState } from "./dom.js";

function EngineControl({ source }) {
  const { history } = source;
  useRevision(() => `${history.control.paused} ${history.control.reason} ${history.hello?.viewer}`, 10);
  const [trouble, setTrouble] = useState("");
  const { hello, control: state } = history;
  const order = async (what) => {
    setTrouble("");
    try {
      const reply = await control({ viewer: hello.viewer, ...what });
      if ("paused" in what) history.apply({ t: "control", ...state, paused: reply.paused, reason: null });
    } catch (error) {
      setTrouble(error.message);
    }
  };
  const hold = () => {
    if (source.player.mode !== "live") source.player.goLive();
    order({ paused: !state.paused });
  };
  return html`<div class="engine" role="group" aria-label="The engine">
    <button type="button" aria-pressed=${state.paused} onClick=${hold} disabled=${!hello}>
      ${state.paused ? "Let the engine run" : "Hold the engine"}
    </button>
    <button type="button" class="primary" disabled=${!state.paused} onClick=${() => order({ step: 1 })}>One step</button>
    <span class="note" role="status">${trouble || state.reason || (state.paused ? "The engine waits for your clicks." : "")}</span>
  </div>`;
}

export { EngineControl };
