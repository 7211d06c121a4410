"""locust: this file is both what its users do and what reads its figures."""

import json
import sys
from pathlib import Path

from given import API_KEY, MODEL, finish, part, shell

ENOUGH = 6

if "locust" in sys.modules:
    # shown
    from locust import HttpUser, task

    class Asker(HttpUser):
        @task
        def ask(self):
            body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi!"}], "max_tokens": 16}
            self.client.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {API_KEY}"})

    # end
    import gevent
    from locust import events

    @events.init.add_listener
    def stop_when_enough(environment, **_):
        def count(**_):
            if environment.stats.total.num_requests >= ENOUGH:
                gevent.spawn(environment.runner.quit)  # it ends the users, and with them whoever asks

        environment.events.request.add_listener(count)

else:
    with part("load from two users, and its figures"):
        shell(f"locust -f {__file__} --headless --host $ADDRESS --users 2 --run-time 90s --json-file figures")
        (figures,) = json.loads(Path("figures.json").read_text(encoding="utf-8"))
        assert figures["num_requests"] >= ENOUGH and figures["num_failures"] == 0, figures

    finish()
