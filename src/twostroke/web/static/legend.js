// What colours and patterns mean, in words.

import { html } from "./dom.js";

/** `rows`: pairs of the swatch's class and its words. */
function Legend({ rows }) {
  return html`<ul class="legend">
    ${rows.map(([name, words]) => html`<li><span class="swatch ${name}" aria-hidden="true"></span>${words}</li>`)}
  </ul>`;
}

export { Legend };
