// What a view says while there is nothing to see: what to try.

import { html } from "./dom.js";
import { key } from "./key.js";

const AUTHORISED = '-H "Authorization: Bearer $API_KEY" \\\n  '; // its place: the key itself is not shown

function Empty({ title, mayAct, children }) {
  return html`<div class="empty">
    <h2>${title}</h2>
    <p>${children}</p>
    ${
      mayAct
        ? html`<p><a class="button primary" href="#playground">Open the playground</a></p>`
        : html`<p>Requests that reach this server's API show up here by themselves.</p>`
    }
    <p class="note">Or from a terminal:</p>
    <pre tabindex="0">curl ${address()}/v1/chat/completions ${key() && AUTHORISED}-H "Content-Type: application/json" \\
  -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64}'</pre>
  </div>`;
}

function address() {
  return location.origin.startsWith("http") ? location.origin : "SERVER";
}

export { Empty };
