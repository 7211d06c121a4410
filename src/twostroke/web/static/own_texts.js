// Texts that were sent from this page, by the id of their call: the only texts that the page can show. They stay in this
// tab's memory, and only the latest of them.

const MAX_CALLS = 60;

const calls = new Map();

/** The runs of one call, in the order of their prompts. */
function remember(runs) {
  calls.set(runs[0].id, runs);
  while (calls.size > MAX_CALLS) calls.delete(calls.keys().next().value);
}

/** The run that a request of the engine is, or null: then someone else sent it. */
function textOf(request) {
  const runs = request.id ? calls.get(request.id) : undefined;
  return runs?.[request.place] ?? null;
}

export { remember, textOf };
