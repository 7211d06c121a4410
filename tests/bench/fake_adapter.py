"""An engine that counts: token i of an answer is the prompt's sum plus i. Runs in the real adapter loop."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "peers" / "adapters"))

from adapter_loop import TokenTimes, serve


class FakeAdapter:
    def __init__(self, model, threads, fails=False):
        if fails:
            raise RuntimeError("no such model")
        print("a library that prints on stdout", flush=True)
        os.write(1, b"and one that writes to the descriptor\n")
        self._facts = {"model": model, "threads": threads}

    def facts(self):
        return self._facts

    def generate(self, prompts, max_tokens):
        if max_tokens == 999:
            os._exit(3)
        if max_tokens == 998:
            time.sleep(60)
        times = TokenTimes(len(prompts))
        for offset in range(max_tokens):
            for index, prompt in enumerate(prompts):
                times.add(index, sum(prompt) + offset)
        return times.outputs()

    def embed(self, texts):
        return [[float(len(text)), 0.0] for text in texts]


if __name__ == "__main__":
    serve(FakeAdapter)
