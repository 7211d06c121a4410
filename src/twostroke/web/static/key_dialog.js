// Asks for the API key where the server wants one.

import { html, useEffect, useRef, useState } from "./dom.js";
import { isSendable, onKeyWanted, setKey } from "./key.js";

function KeyDialog({ feed }) {
  const dialog = useRef(null);
  const field = useRef(null);
  const [trouble, setTrouble] = useState("");
  useEffect(() => {
    const show = () => {
      if (dialog.current.open) return;
      dialog.current.showModal();
    };
    const stop = onKeyWanted(show);
    if (feed.state === "refused") show(); // it was refused before this was here
    return stop;
  }, [feed]);
  const take = (event) => {
    event.preventDefault();
    const typed = field.current.value.trim();
    if (!isSendable(typed)) {
      setTrouble("A key has letters, digits and signs of ASCII alone, and no spaces. ");
      return;
    }
    setKey(typed);
    field.current.value = "";
    setTrouble("That key was not taken. "); // seen only if it is asked for again
    dialog.current.close();
    feed.retry();
  };
  return html`<dialog ref=${dialog} class="key" aria-labelledby="key-title">
    <form onSubmit=${take}>
      <h2 id="key-title">This server asks for an API key</h2>
      <p>${trouble}The key stays in this tab, and is sent in a header alone.</p>
      <label>API key <input ref=${field} type="password" autocomplete="off" spellcheck="false" required /></label>
      <div class="row"><button type="submit" class="primary">Use this key</button></div>
    </form>
  </dialog>`;
}

export { KeyDialog };
