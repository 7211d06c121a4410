// What a run from this page took, as the server timed it; until it says so, as this browser saw it.

function figuresOf(run) {
  const { timing, usage } = run;
  const tokens = timing?.decode?.tokens ?? usage?.completion_tokens ?? null;
  return {
    ttft_s: timing?.ttft_s ?? (run.first_ms === null ? null : run.first_ms / 1000),
    tpot_s: timing?.decode?.tpot_s ?? (tokens > 1 ? (run.last_ms - run.first_ms) / 1000 / (tokens - 1) : null),
    promptTokens: timing ? timing.prefill.tokens + timing.prefill.cached_tokens : (usage?.prompt_tokens ?? null),
    cachedTokens: timing?.prefill?.cached_tokens ?? usage?.prompt_tokens_details?.cached_tokens ?? null,
    tokens,
    verdict: timing?.verdict ?? null,
    isTimed: Boolean(timing),
  };
}

export { figuresOf };
