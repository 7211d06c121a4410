// What a use is given (a server and a key), and how it tells what it did: parts, each by name, each may fail alone.

export const { ADDRESS, BASE_URL, API_KEY, MODEL } = process.env;

const parts = [];

export async function part(what, attempt) {
  let error = null;
  try {
    await attempt();
  } catch (fault) {
    console.error(fault);
    error = `${fault?.name}: ${String(fault?.message).split("\n")[0]}`;
  }
  parts.push({ what, error });
}

export function finish() {
  console.log(JSON.stringify({ parts }));
  process.exitCode = parts.some((entry) => entry.error) ? 1 : 0;
}
