// Reads the server's stream of events (SSE) by fetch, since EventSource can send no key, and comes back when it breaks.

import { refusal } from "./api.js";
import { askForKey, authorised } from "./key.js";

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 8000;
const SLICE_MS = 12; // after so long other work gets its turn: a long history comes at once

class Feed {
  constructor(history) {
    this.history = history;
    this.state = "connecting"; // connecting, live, waiting, refused
    this.detail = "";
    this.revision = 0;
    this.stopped = false;
    this.wait_ms = FIRST_WAIT_MS;
    this.wake = null;
  }

  async run() {
    while (!this.stopped) {
      try {
        await this.readOnce();
      } catch (error) {
        this.say(this.state === "refused" ? "refused" : "waiting", sentence(error));
      }
      if (this.stopped) return;
      if (this.state !== "refused") this.say("waiting", this.detail || "the server closed the stream");
      await this.pause();
    }
  }

  say(state, detail = "") {
    this.state = state;
    this.detail = detail;
    this.revision += 1;
  }

  pause() {
    const wait_ms = this.state === "refused" ? 1e9 : this.wait_ms;
    this.wait_ms = Math.min(this.wait_ms * 2, LONGEST_WAIT_MS);
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, Math.min(wait_ms, 2 ** 30));
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  /** At once instead of after the wait: a key was given. */
  retry() {
    this.wait_ms = FIRST_WAIT_MS;
    this.say("connecting");
    if (this.wake) this.wake();
  }

  async readOnce() {
    this.detail = "";
    const response = await fetch("/watch", { headers: authorised({ Accept: "text/event-stream" }), cache: "no-store" });
    if (response.status === 401) {
      this.say("refused", "this server asks for an API key");
      askForKey();
      return;
    }
    if (!response.ok) throw await refusal(response);
    const reader = response.body.getReader();
    const decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest = await this.take(rest + decoder.decode(value, { stream: true }));
    }
  }

  /** Applies every whole event, and gives back what is left. */
  async take(text) {
    let start = 0;
    let began_ms = performance.now();
    for (;;) {
      const end = text.indexOf("\n\n", start);
      if (end < 0) return text.slice(start);
      const block = text.slice(start, end);
      start = end + 2;
      if (block.startsWith("data:")) {
        const event = JSON.parse(block.slice(5));
        this.history.apply(event);
        if (event.t === "hello") {
          this.wait_ms = FIRST_WAIT_MS;
          this.say("live");
        }
      }
      if (performance.now() - began_ms > SLICE_MS) {
        await new Promise((resolve) => setTimeout(resolve, 0));
        began_ms = performance.now();
      }
    }
  }
}

function sentence(error) {
  return error instanceof TypeError ? "the server cannot be reached" : String(error.message || error);
}

export { Feed };
