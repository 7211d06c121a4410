// Which moment of a history is looked at: the latest one, one that was scrubbed to, or one that moves at some pace.
// Every view draws the history as it was at `cursor_s()`.

const IDLE_SKIP_S = 1.5; // a replay does not wait through longer pauses
const IDLE_LEAD_S = 0.3;

class Player {
  constructor(history, { isLive = true } = {}) {
    this.history = history;
    this.isLive = isLive; // more may come: the end is not an end
    this.mode = isLive ? "live" : "held"; // live, held, playing
    this.rate = 1;
    this.at_s = history.oldest_s;
    this.revision = 0;
  }

  cursor_s() {
    return this.mode === "live" ? this.history.now_s() : this.at_s;
  }

  hold() {
    this.at_s = this.cursor_s();
    this.mode = "held";
    this.revision += 1;
  }

  goLive() {
    this.mode = this.isLive ? "live" : "held";
    if (!this.isLive) this.at_s = this.history.now_s();
    this.revision += 1;
  }

  seek(at_s) {
    this.at_s = Math.min(Math.max(at_s, this.history.oldest_s), this.history.now_s());
    if (this.mode === "live") this.mode = "held";
    this.revision += 1;
  }

  play(rate = this.rate) {
    if (this.isLive && rate === 1 && this.mode === "live") return;
    this.at_s = this.cursor_s();
    if (!this.isLive && this.at_s >= this.history.now_s()) this.at_s = this.history.oldest_s;
    this.rate = rate;
    this.mode = "playing";
    this.revision += 1;
  }

  setRate(rate) {
    this.rate = rate;
    if (this.mode === "live" && rate !== 1) this.play(rate);
    this.revision += 1;
  }

  /** By one step, forwards or backwards. */
  nudge(by) {
    const { steps } = this.history;
    if (!steps.length) return;
    const index = this.history.stepsUntil(this.cursor_s()) - 1 + by;
    const target = steps[Math.min(Math.max(index, 0), steps.length - 1)];
    this.at_s = target.done_s;
    this.mode = "held";
    this.revision += 1;
  }

  /** Called every frame with the seconds since the last one. */
  advance(elapsed_s) {
    if (this.mode !== "playing") return;
    const { history } = this;
    this.at_s = Math.max(this.at_s + elapsed_s * this.rate, history.oldest_s);
    if (!this.isLive) this.skipIdle();
    if (this.at_s < history.now_s()) return;
    this.at_s = history.now_s();
    this.mode = this.isLive ? "live" : "held";
    this.revision += 1;
  }

  skipIdle() {
    const next = this.history.steps[this.history.stepsUntil(this.at_s)];
    if (next && next.began_s - this.at_s > IDLE_SKIP_S) this.at_s = next.began_s - IDLE_LEAD_S;
  }
}

export { Player };
