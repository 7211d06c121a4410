// The API key: asked for when the server wants one, kept for this tab alone, sent in a header and never in an address.

const NAME = "twostroke-key";

const listeners = new Set();

let given = null; // where storage is forbidden it holds until the page is loaded again

/** What a header may hold: anything else could not even be sent. */
const isSendable = (value) => /^[!-~]+$/.test(value);

function key() {
  try {
    const value = sessionStorage.getItem(NAME);
    return value && isSendable(value) ? value : given;
  } catch {
    return given;
  }
}

function setKey(value) {
  given = value || null;
  try {
    if (value) sessionStorage.setItem(NAME, value);
    else sessionStorage.removeItem(NAME);
  } catch {
    return;
  }
}

function authorised(headers = {}) {
  const value = key();
  return value ? { ...headers, Authorization: `Bearer ${value}` } : headers;
}

/** Someone was refused: whoever shows the dialog is told. */
function askForKey() {
  for (const listener of listeners) listener();
}

function onKeyWanted(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export { askForKey, authorised, isSendable, key, onKeyWanted, setKey };
